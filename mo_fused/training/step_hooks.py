"""What a monitor notes when the optimizer's step begins and ends, whoever calls it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.details import Details

_LAST_STEP = ("grad_norm", "clip_coef", "update_norm", "param_norm", "skipped")


class StepHooks:
    """Hooks on an optimizer's step: the rates and the loss scale that it has, and details of the steps that ask.

    Args:
        optimizer: any torch optimizer. It does not keep this object alive.
        model: names its parameters, if it has no names of its own.
        scaler: whose scale is noted.
        histograms: see :class:`mo_fused.training.details.Details`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        scaler: torch.amp.GradScaler | None,
        histograms: Iterable[str],
    ) -> None:
        self.optimizer, self.model, self.scaler, self.histograms = optimizer, model, scaler, tuple(histograms)
        self.details_next = False
        """Whether the next step has details."""
        self._details: Details | None = None
        self._failed = False
        self._stepped = False
        self._rates: list[float | Tensor] = []
        self._found_inf: Tensor | None = None
        self._scale_then: Tensor | float | None = None  # when the step began
        self._scale_after = self._scale()  # the step before
        hooks = [
            optimizer.register_step_pre_hook(weak(self._before)),
            optimizer.register_step_post_hook(weak(self._after)),
        ]
        self.remove: Callable[[], object] = weakref.finalize(self, _remove, hooks)

    def take(self) -> tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]:
        """What the step that was just made has (keys as in :class:`mo_fused.training.record.Waiting`), and its details.

        Nothing waits: tensors are where they are.
        """
        stepped, self._stepped = self._stepped, False
        rates = self._rates if stepped else self._rates_now()
        found: dict[str, Any] = {"lr": rates[0]}
        if len(rates) > 1 and (any(isinstance(rate, Tensor) for rate in rates) or len(set(rates)) > 1):
            found.update((f"lr/{group}", rate) for group, rate in enumerate(rates))
        if self.scaler is not None:
            # A scaler that leaves the step out calls no hook: its scale was that which the step before has left.
            found["loss_scale"] = self._scale_then if stepped else self._scale_after
            self._scale_after = self._scale()
            found["skipped"] = not stepped
        if stepped and isinstance(self.optimizer, FusedOptimizer):
            last = self.optimizer.last_step
            if last is not None:
                numbers = last.on_host()
                found.update(numbers or {name: getattr(last, name) for name in _LAST_STEP})
        elif stepped:
            found["skipped"] = False if self._found_inf is None else self._found_inf
        details, self._details = self._details, None
        if details is None or not stepped:
            return found, None
        self.details_next = False
        return found, details.read

    def _before(self, *_: object) -> None:
        self._stepped = True
        # A schedule may have changed them, even in place, when the monitor is told.
        self._rates = self._rates_now()
        self._scale_then = self._scale()
        found_inf = getattr(self.optimizer, "found_inf", None)  # of one that leaves the step out by itself
        self._found_inf = found_inf.detach() != 0 if isinstance(found_inf, Tensor) else None
        if self.details_next and not self._failed:
            self._details = self._try(Details(self.optimizer, self.model, self.histograms), "before")

    def _after(self, *_: object) -> None:
        if self._details is not None:
            self._details = self._try(self._details, "after")

    def _try(self, details: Details, method: str) -> Details | None:
        """Looking at parameters takes memory, and must not end the training where there is too little."""
        try:
            getattr(details, method)()
        except Exception as error:
            self._failed = True
            found = f"{type(error).__name__}: {error}"
            warnings.warn(f"no detailed records from now on: {found}; training goes on", RuntimeWarning, stacklevel=2)
            return None
        return details

    def _rates_now(self) -> list[float | Tensor]:
        rates = (group["lr"] for group in self.optimizer.param_groups)
        return [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def _scale(self) -> Tensor | float | None:
        """The scaler's scale, without waiting for it. It changes in place."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        scale: Tensor | None = self.scaler._scale
        return float(self.scaler.get_scale()) if scale is None else scale.detach().clone()


def weak(method: Callable[..., Any], *first: Any) -> Callable[..., None]:
    """Calls ``method`` as long as its object lives, which this does not keep alive."""
    reference = weakref.WeakMethod(method)

    def call(*values: Any) -> None:
        if (found := reference()) is not None:
            found(*first, *values)

    return call


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()
