"""A loss scale that keeps falling."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from mo_fused.training.watchers.base import Action, Watcher, above, number, whole


class ScaleCollapse(Watcher):
    """The loss scale has been halved ``halvings`` times, net, within ``steps`` steps, or is below ``floor``.

    A scaler that starts at torch's 65536 settles within some steps and then meets about one overflow in 2000 steps
    (its growth interval); settling by 7 halvings, to 512, is no finding. A scale below 1 is none of a healthy fp16 run:
    gradients overflow without any scaling, and small ones are lost. Found once, until the scale has doubled again.

    The event has ``loss_scale``, ``highest`` (within the steps) and ``halvings``.

    Args:
        halvings: how many, 1 or more.
        steps: within how many steps.
        floor: scale, above 0.
        action: see :class:`Watcher`.

    Reads ``step`` and ``loss_scale``.
    """

    def __init__(self, halvings: int = 8, steps: int = 200, floor: float = 1.0, *, action: Action = "warn") -> None:
        super().__init__(action=action)
        self.halvings, self.steps = whole("halvings", halvings, 1), whole("steps", steps, 1)
        self.floor = above("floor", floor, 0.0)
        self._scales: deque[float] = deque(maxlen=steps + 1)
        self._lowest: float | None = None  # since the finding

    def on_record(self, record: Mapping[str, Any]) -> None:
        scale = number(record, "loss_scale")
        if scale is None:
            return
        self._scales.append(scale)
        if self._lowest is not None:
            self._lowest = min(self._lowest, scale)
            if scale < 2.0 * self._lowest or scale < self.floor:
                return
            self._lowest = None
            self._scales.clear()
            self._scales.append(scale)
        highest = max(self._scales)
        fallen = math.log2(highest / scale) if scale > 0.0 else math.inf
        if fallen < self.halvings - 1e-9 and scale >= self.floor:
            return
        self._lowest = scale
        seen = f"the loss scale fell from {highest:g} to {scale:g} within {len(self._scales) - 1} steps"
        if scale < self.floor:
            seen += f", below {self.floor:g}"
        advice = "gradients overflow again and again: see which are not finite, or train in bf16"
        self.emit(int(record["step"]), f"{seen}: {advice}", loss_scale=scale, highest=highest, halvings=fallen)
