"""A loss that no longer falls."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from mo_fused.training.watchers.base import Action, Watcher, above, number, whole


class Plateau(Watcher):
    """The mean of the last ``window`` values is not below that of the ``window`` before by ``min_improvement``.

    ``min_improvement`` is a part of the earlier mean. The improvement has to be less than that by two standard errors
    of the difference (taken from the spread of both halves), so that noise that hides an improvement is no finding;
    neither is a plateau that noise hides: a longer window sees it. Looked at every tenth of a window. After a finding
    the next one needs an improvement in between, or ``window`` further values.

    A healthy loss that improves by exactly ``min_improvement`` a window, with independent noise, is reported at 2.3 %
    of the looks, one that improves by 4 standard errors more at about 1 in 1e9.

    The event has ``before``, ``after``, ``improvement`` (relative) and ``error`` (its standard error).

    Args:
        window: values in each half.
        min_improvement: relative, above 0.
        key: of the record: ``"loss"``, ``"val_loss"`` (then ``window`` counts validations) ...
        higher_is_better: of the value at ``key``.
        action: see :class:`Watcher`.

    Reads ``step``, ``skipped`` and ``key``.
    """

    def __init__(
        self,
        window: int = 1000,
        min_improvement: float = 0.005,
        *,
        key: str = "loss",
        higher_is_better: bool = False,
        action: Action = "warn",
    ) -> None:
        super().__init__(action=action)
        self.window, self.min_improvement = whole("window", window, 3), above("min_improvement", min_improvement, 0.0)
        self.key, self.higher_is_better = key, higher_is_better
        self._values: deque[float] = deque(maxlen=2 * window)
        self._until_look = 0

    def on_record(self, record: Mapping[str, Any]) -> None:
        value = number(record, self.key)
        if value is None or not math.isfinite(value) or (record.get("skipped") and self.key == "loss"):
            return
        self._values.append(value)
        self._until_look -= 1
        if self._until_look <= 0 and len(self._values) == 2 * self.window:
            self._until_look = max(1, self.window // 10)
            self._look(int(record["step"]))

    def _look(self, step: int) -> None:
        values, n = list(self._values), self.window
        earlier, later = values[:n], values[n:]
        before, after = math.fsum(earlier) / n, math.fsum(later) / n
        change = after - before if self.higher_is_better else before - after
        size = max(abs(before), 1e-30)
        # About a straight line, or the trend that is looked for would count as noise.
        error = math.hypot(_scatter(earlier), _scatter(later)) / math.sqrt(n)
        if change + 2.0 * error >= self.min_improvement * size:
            return
        self._until_look = n
        message = (
            f"mean {self.key} {after:.6g} over the last {n}, {before:.6g} over the {n} before: "
            f"improved by {change / size:.2%}, less than {self.min_improvement:.2%}"
        )
        self.emit(step, message, before=before, after=after, improvement=change / size, error=error / size)


def _scatter(values: list[float]) -> float:
    """Standard deviation about the straight line through ``values``."""
    n = len(values)
    middle, mean = (n - 1) / 2.0, math.fsum(values) / n
    spread = n * (n * n - 1) / 12.0
    slope = math.fsum((i - middle) * v for i, v in enumerate(values)) / spread
    return math.sqrt(math.fsum((v - mean - slope * (i - middle)) ** 2 for i, v in enumerate(values)) / n)
