"""What one step asks of the backends: options of the optimizer and what a GradScaler has attached to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One step. Tensors are 0-dim, on any device."""

    rule: int
    """A Rule of csrc/abi.h."""
    max_grad_norm: float | None
    skip_nonfinite: bool
    stats: bool
    clip_in_place: bool
    grad_scale: Tensor | float | None
    """Gradients are divided by it."""
    found_inf: Tensor | float | None
    """Not zero: the caller knows already that the step has to be skipped."""
    report: Tensor | None
    """Receives 1 when a gradient element is not finite, else 0."""

    @property
    def gated(self) -> bool:
        """Something about the gradients decides on the update, so they are measured before it."""
        return self.max_grad_norm is not None or self.skip_nonfinite or self.report is not None

    @property
    def measured(self) -> bool:
        return self.gated or self.stats

    @property
    def skips_nonfinite(self) -> bool:
        return self.skip_nonfinite or self.report is not None
