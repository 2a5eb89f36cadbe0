"""Losses and gradients that are inf or NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mo_fused.training.watchers.base import Action, Observed, Watcher, number
from mo_fused.training.watchers.recent_steps import RecentSteps


class NonFinite(Watcher):
    """A loss or a gradient that is not finite: names the first parameter, in the optimizer's order.

    The event has ``loss``, ``grad_norm``, ``skipped``, ``loss_scale`` and, with an optimizer of this package that
    measures gradients (``stats=True``, ``max_grad_norm``, ``skip_nonfinite`` or :class:`mo_fused.GradScaler`),
    ``parameter`` (the first with such an element), ``nonfinite`` (how many it has), ``nonfinite_total`` and
    ``nonfinite_parameters`` (how many there are over all). Of consecutive steps the first alone is reported.

    With a loss scale above 1, steps skipped with a finite loss are how the scale is found, about one in 2000:
    such an overflow is an event with ``"overflow": True``, and no action follows (:class:`ScaleCollapse` looks at
    those). The parameters are read, which waits for the device, only after a step that was skipped or not finite.

    Reads ``step``, ``loss``, ``grad_norm``, ``skipped``, ``loss_scale``.
    """

    def __init__(self, *, action: Action = "warn") -> None:
        super().__init__(action=action)
        self._recent = RecentSteps()
        self._in_a_row = False

    def on_step(self, monitor: Observed, loss: Tensor | float, batch_info: Mapping[str, Any]) -> None:
        self._recent.note(monitor, batch_info["step"])

    def on_record(self, record: Mapping[str, Any]) -> None:
        loss, norm = number(record, "loss"), number(record, "grad_norm")
        bad_loss = loss is not None and not math.isfinite(loss)
        bad_norm = norm is not None and not math.isfinite(norm)
        skipped, scale = bool(record.get("skipped")), number(record, "loss_scale")
        if not (bad_loss or bad_norm or skipped):
            self._in_a_row = False
            return
        if self._in_a_row:
            return
        step = int(record["step"])
        parameters = self._recent.per_parameter(step) or {}
        counts = {name: one.nonfinite for name, one in parameters.items() if one.nonfinite}
        if not (bad_loss or bad_norm or counts or (scale is not None and norm is None)):
            return  # skipped for another reason
        self._in_a_row = True
        seen = [f"the loss is {loss}"] if bad_loss else []
        numbers: dict[str, Any] = {"loss": loss, "grad_norm": norm, "skipped": skipped, "loss_scale": scale}
        if counts:
            name, count = next(iter(counts.items()))
            total = sum(counts.values())
            numbers.update(parameter=name, nonfinite=count, nonfinite_total=total, nonfinite_parameters=len(counts))
            seen.append(f"{count} elements of the gradient of {name} are not finite")
            if len(counts) > 1:
                seen.append(f"in all {total} of {len(counts)} parameters")
        elif bad_norm or not bad_loss:
            seen.append("the gradient is not finite (which parameter's, this optimizer doesn't tell)")
        overflow = skipped and not bad_loss and scale is not None and scale > 1.0
        if overflow:
            numbers["overflow"] = True
            seen.append(f"overflow at loss scale {scale:g}")
        if skipped:
            seen.append("the step was skipped")
        self.emit(step, "; ".join(seen), quiet=overflow, **numbers)
