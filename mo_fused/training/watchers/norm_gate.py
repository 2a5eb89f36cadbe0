"""Steps with too large a gradient, left out on the device before they are made."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mo_fused.distributed import shards
from mo_fused.grad import get_total_norm
from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.errors import InputError, bad_input


class NormGate:
    """Skips every step of ``optimizer`` whose gradient norm is above ``limit``; nothing waits for the device.

    Right before the step the norm is measured (:func:`mo_fused.get_total_norm`: one more read of the gradients, which
    is what this costs) and compared where it is; the answer goes into ``optimizer.found_inf``, as a gradient scaler
    hands over its own, and the step changes nothing where that is set. ``last_step.skipped`` tells. A scaler's answer
    stays its own: the loss scale does not fall for a step that was left out here. Groups with ``"clip": False`` don't
    count, as in ``grad_norm``. A step with a closure is let through, because its gradients don't exist before it.

    Args:
        optimizer: of this package.
        limit: norm of the unscaled gradients; inf lets all steps through. May be set at any time.

    Raises:
        InputError: an optimizer of another package, one whose gradients are gone before the step
            (``gradient_release``, ``offload_gradients``), or one that holds a part of the parameters (ZeRO), whose norm
            no process knows before the step.
    """

    def __init__(self, optimizer: Optimizer, limit: float = math.inf) -> None:
        self.limit = limit
        self._optimizer = _checked(optimizer)
        self._set = False
        self._before: Any = None  # what a scaler has set
        self._report: Tensor | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._look),
            optimizer.register_step_post_hook(self._put_back),
        ]

    def remove(self) -> None:
        """Lets every step through from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forget()

    @torch.no_grad()
    def _look(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer = self._optimizer
        self._forget()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None or not math.isfinite(self.limit):
            return
        groups = [group for group in optimizer.param_groups if group.get("clip", True)]
        gradients = [one.grad for group in groups for one in group["params"] if one.grad is not None]
        if not gradients:
            return
        norm = shards.present(get_total_norm(gradients))
        scale = shards.present(getattr(optimizer, "grad_scale", None))
        if scale is not None:
            norm = norm / torch.as_tensor(scale, device=norm.device)
        over = (norm > self.limit).float()
        self._before = optimizer.__dict__.get("found_inf")
        if (known := shards.present(self._before)) is not None:
            known = torch.as_tensor(known, device=over.device)
            over = torch.maximum(over, (known != 0).float())
        self._report = optimizer.__dict__.get("_found_inf_report")
        optimizer.found_inf = over
        self._set = True

    @torch.no_grad()
    def _put_back(self, *_: object) -> None:
        report, last = self._report, self._optimizer.last_step
        if report is not None and last is not None and (nonfinite := last.nonfinite) is not None:
            found = (nonfinite > 0).to(report)
            if (known := shards.present(self._before)) is not None:
                found = torch.maximum(found, (torch.as_tensor(known, device=found.device) != 0).to(found))
            report.copy_(found)
        self._forget()

    def _forget(self) -> None:
        """Also after a step that raised, behind which no hook is called."""
        if self._set:
            if self._before is None:
                self._optimizer.__dict__.pop("found_inf", None)
            elif "found_inf" in self._optimizer.__dict__:
                self._optimizer.found_inf = self._before
        self._set, self._before, self._report = False, None, None


def _checked(optimizer: Optimizer) -> FusedOptimizer:
    if not isinstance(optimizer, FusedOptimizer):
        raise _refused(
            f"torch's {type(optimizer).__name__}", "use mo_fused's, or leave skip out: outliers are still reported"
        )
    optimizer = optimizer._bare()
    remedy = "leave skip out: outliers are still reported"
    if optimizer._release() is not None:
        raise _refused("one with gradient_release, whose gradients are gone before the step", remedy)
    if optimizer.defaults["offload_gradients"]:
        raise _refused("one with offload_gradients, whose gradients are gone before the step", remedy)
    if optimizer.__dict__.get("_partition") is not None:
        raise _refused("one of a part of the parameters (ZeroRedundancyOptimizer)", remedy)
    return optimizer


def _refused(found: str, remedy: str) -> InputError:
    expected = "an optimizer of mo_fused that steps whole gradients at once"
    return bad_input("NormOutlier(skip=True)", expected=expected, found=found, remedy=remedy)
