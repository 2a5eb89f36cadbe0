"""What can be trained: a task brings model, data, loss and metric to the loop in ``mo_fused.training.train``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mo_fused.training.errors import bad_input

if TYPE_CHECKING:
    from mo_fused.training.config import TrainConfig


@dataclass(frozen=True)
class Task:
    """One prepared task.

    Attributes:
        model: on the device.
        loader: training batches, CPU tensors in tuples or dicts, by epochs or endless. Where its position is more than
            the batches drawn in this epoch it has ``state_dict()`` and ``load_state_dict()``; iterating again goes on
            where the last iteration stopped.
        loss_fn: (model, batch on the model's device) to the mean loss over the batch's valid targets, 0-dim.
        validate: measures the same fixed data every time, as ``{"val_loss": ..., "val_metric": ...}``; leaves the
            model in train mode.
        metric: what ``val_metric`` is.
        higher_is_better: whether a larger ``val_metric`` is the better one.
        samples_per_batch: samples in each batch of the loader.
        tokens_per_batch: tokens in each, None where samples aren't sequences of tokens.
        summary: a line for the user.
        data: plain values for the run's config.
    """

    model: nn.Module
    loader: Iterable[Any]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    validate: Callable[[], dict[str, float]]
    metric: str
    higher_is_better: bool
    samples_per_batch: int
    tokens_per_batch: int | None
    summary: str
    data: dict[str, Any]


def build_task(config: TrainConfig, device: torch.device) -> Task:
    """The task that ``config.task`` names, its model on ``device``. Everything in it is drawn from ``config.seed``.

    Raises:
        InputError: the task's data cannot be used, or a package that it needs is missing.
    """
    from mo_fused.training.tasks import ctr, lm, vision

    builders: dict[str, tuple[Callable[..., Task], tuple[str, ...]]] = {
        "lm": (lm.build, ("text", "context", "layers", "heads", "width")),
        "vision": (vision.build, ("width",)),
        "ctr": (ctr.build, ("context", "width")),
    }
    build, names = builders[config.task]
    sizes = {name: getattr(config, name) for name in names}
    return build(device=device, seed=config.seed, batch_size=config.batch_size, **sizes)


def checked_position(state: Mapping[str, Any], *keys: str) -> None:
    """Refuses a loader's state that has other keys than ``keys``.

    Raises:
        InputError: the state is another loader's.
    """
    if set(state) != set(keys):
        raise bad_input(
            "checkpoint",
            expected=f"this task's position in its data ({', '.join(keys)})",
            found=", ".join(sorted(map(str, state))) or "nothing",
            remedy="resume with the task that has written it",
        )


def sklearn_module(name: str, task: str) -> Any:
    """The module ``sklearn.<name>``.

    Raises:
        InputError: scikit-learn is missing; the message names ``task`` and the command that installs it.
    """
    try:
        return import_module(f"sklearn.{name}")
    except ImportError as error:
        raise bad_input(
            f"--task {task}",
            expected="the package scikit-learn",
            found=str(error),
            remedy='run: pip install "mo_fused[train]"',
        ) from error
