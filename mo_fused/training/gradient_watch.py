"""The gradients of a trial run, seen right before each optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mo_fused.distributed import shards
from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.trial import Watch

if TYPE_CHECKING:
    from mo_fused.training.trainer import Trainer


class GradientWatch:
    """Notes the largest absolute value of each trained parameter's gradient in each step.

    Args:
        trainer: whose optimizer is watched; ``unseen`` says why where gradients are gone before the step.
        watch: the time that looking takes is not the step's.
    """

    def __init__(self, trainer: Trainer, watch: Watch) -> None:
        self._optimizer = trainer.optimizer
        self._watch = watch
        held = {id(one) for group in trainer.optimizer.param_groups for one in group["params"]}
        named = trainer._processes.module.named_parameters()
        self._parameters = {name: one for name, one in named if id(one) in held and one.requires_grad}
        self.left_out = sum(1 for one in trainer.model.parameters() if one.requires_grad and id(one) not in held)
        """Parameters that need a gradient and are in no group of the optimizer."""
        self.frozen = sum(1 for one in trainer.model.parameters() if not one.requires_grad)
        self.unseen = _why_unseen(trainer.optimizer)
        self._steps: list[tuple[int, list[str], list[Tensor]]] = []
        self._handle: Any = None

    def __enter__(self) -> GradientWatch:
        if self.unseen is None:
            self._handle = self._optimizer.register_step_pre_hook(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    @torch.no_grad()
    def _look(self, *_: object) -> None:
        begun = time.perf_counter()
        named = [(name, one.grad) for name, one in self._parameters.items() if one.grad is not None]
        values = [shards.local(_values(gradient)) for _, gradient in named]
        filled = [n for n, value in enumerate(values) if value.numel()]
        largest: Sequence[Tensor] = torch._foreach_norm([values[n] for n in filled], math.inf) if filled else []
        number = len(self._watch.infos) + 1  # a step that torch's scaler skips doesn't come here
        self._steps.append((number, [named[n][0] for n in filled], list(largest)))
        self._watch.aside += time.perf_counter() - begun

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """By the trial's step, from 1: the largest absolute value by the parameter's name."""
        return {
            number: dict(
                zip(names, torch.stack([one.double() for one in values]).tolist() if values else [], strict=True)
            )
            for number, names, values in self._steps
        }

    def names(self) -> list[str]:
        """The trained parameters that have elements, in the model's order."""
        return [name for name, one in self._parameters.items() if one.numel()]


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _why_unseen(optimizer: torch.optim.Optimizer) -> str | None:
    if not isinstance(optimizer, FusedOptimizer):
        return None
    if optimizer._release() is not None:
        return "gradient_release frees them during the backward"
    if optimizer.defaults["offload_gradients"]:
        return "offload_gradients takes them away during the backward"
    return None
