"""A GradScaler that does not read and write every gradient once more to look for infinities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import errors
from .optim.base import FusedOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, except that found_inf comes from the fused step's own pass over the gradients.

    Arguments, state_dict and results are torch's. For optimizers of this package (with ``amp="fused"``) the extra pass
    that torch's scaler makes before the step, which reads and writes every gradient, falls away; for any other
    optimizer, and after an explicit ``unscale_()``, it behaves as torch's.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch.amp.GradScaler.step."""
        self._refuse_release(optimizer)
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            # A hook or a closure raised before the step: nothing may stay behind that would gate or scale a later one.
            for name in ("_found_inf_report", "grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)
            raise

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch.amp.GradScaler.unscale_.

        Raises:
            RuntimeError: ``offload_gradients`` or gradient release leaves no gradients to unscale; torch's own reasons.
        """
        self._refuse_release(optimizer)
        if self.is_enabled() and isinstance(optimizer, FusedOptimizer) and (offload := optimizer._offload) is not None:
            if offload.takes_gradients and optimizer._step_supports_amp_scaling:
                raise errors.offload_scaler("scaler.unscale_(opt)")
            offload.forget_copies()
        super().unscale_(optimizer)

    def _refuse_release(self, optimizer: torch.optim.Optimizer) -> None:
        if self.is_enabled() and isinstance(optimizer, FusedOptimizer) and optimizer._release() is not None:
            raise errors.release_with_scaler("a mo_fused.GradScaler")

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        if not isinstance(optimizer, FusedOptimizer):
            return super()._check_inf_per_device(optimizer)
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        # The step fills this in before update() reads it.
        report: Tensor = torch.zeros((), dtype=torch.float32, device=scale.device)
        found = {scale.device: report}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        optimizer.__dict__["_found_inf_report"] = report
        return found
