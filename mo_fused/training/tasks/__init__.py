"""What can be trained: a task brings model, data, loss and metric to the loop in ``mo_fused.training.train``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mo_fused.training.config import TrainConfig


@dataclass(frozen=True)
class Task:
    """One prepared task.

    ``training_loss()`` draws the next batch and returns its mean loss, a 0-dim tensor to call ``backward`` on;
    ``validation_loss()`` measures the same fixed data every time; ``tokens_per_step`` is what one batch holds.
    ``summary`` is a line for the user, ``data`` plain values for the run's config.
    """

    model: nn.Module
    training_loss: Callable[[], Tensor]
    validation_loss: Callable[[], float]
    tokens_per_step: int
    summary: str
    data: dict[str, Any]


def build_task(config: TrainConfig, device: torch.device) -> Task:
    """The task that ``config.task`` names, its model on ``device``.

    Raises:
        InputError: the task's data cannot be used.
    """
    from mo_fused.training.tasks import lm

    builders = {"lm": lm.build}
    return builders[config.task](config, device)
