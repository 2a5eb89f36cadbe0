"""Clip and update in one call, by our optimizer or by torch's, with the same measurements from both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mo_fused.training.config import TrainConfig
from mo_fused.training.groups import decay_groups

Measured = dict[str, Tensor]
"""0-dim tensors on the optimizer's device by their name in the metrics; what was not measured is left out."""


def build_stepper(config: TrainConfig, model: nn.Module) -> tuple[Optimizer, Callable[[], Measured]]:
    """AdamW for ``model`` and the function that clips and steps it; neither waits for the device."""
    groups = decay_groups(model, config.weight_decay)
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    builders = {"mo_fused": _fused, "torch": _torch}
    return builders[config.optimizer](groups, options, config.max_grad_norm)


def _fused(
    groups: list[dict[str, Any]], options: dict[str, Any], max_grad_norm: float
) -> tuple[Optimizer, Callable[[], Measured]]:
    import mo_fused

    optimizer = mo_fused.AdamW(groups, **options, max_grad_norm=max_grad_norm, skip_nonfinite=True, stats=True)

    def step() -> Measured:
        optimizer.step()
        last = optimizer.last_step
        names = ("grad_norm", "update_norm", "clip_coef", "skipped")
        return {name: value for name in names if (value := getattr(last, name)) is not None}

    return optimizer, step


def _torch(
    groups: list[dict[str, Any]], options: dict[str, Any], max_grad_norm: float
) -> tuple[Optimizer, Callable[[], Measured]]:
    optimizer = torch.optim.AdamW(groups, **options)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step() -> Measured:
        norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        # The same formula that clip_grad_norm_ applies and doesn't return.
        return {"grad_norm": norm, "clip_coef": (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)}

    return optimizer, step
