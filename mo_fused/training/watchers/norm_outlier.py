"""Gradient norms far outside of what was usual."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from mo_fused.training.watchers.base import Action, Observed, Watcher, above, number, whole
from mo_fused.training.watchers.norm_gate import NormGate

_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation of a normal distribution (Rousseeuw and Croux 1993)."""
_LEAST = 0.02
"""The least deviation of ln(norm) that is believed, so that a constant norm doesn't make every change an outlier."""


class NormOutlier(Watcher):
    """A ``grad_norm`` more than ``k`` robust deviations above the median of the ``window`` steps before.

    Norms spread by factors, so the deviation is that of their logarithms: with m = median(ln norm) and
    s = max(0.02, 1.4826 median |ln norm - m|) of the window, the limit is exp(m + k s). Nothing is said before
    ``window`` norms are there. Norms that are 0 or not finite neither count nor are found (:class:`NonFinite`); an
    outlier does enter the window, so that a lasting change is taken for usual after half of one.

    False alarms on a healthy norm (1e8 simulated steps, default arguments): one in 4 million steps where ln(norm) is
    normally distributed, one in 1200 where its tails are heavy (Student's t with 5 degrees of freedom): take a larger
    ``k`` there.

    With ``skip`` the steps themselves are left out, on the device and without waiting for it, while the norm is above
    the limit: the limit of the newest record, one or more steps old. This costs one more read of the gradients a step
    (4 bytes beside the 32 that AdamW's own step moves for an fp32 parameter); see
    :class:`~mo_fused.training.watchers.norm_gate.NormGate`. At most half of a window is skipped in a row, because
    skipped norms enter the window too.

    The event has ``grad_norm``, ``median``, ``limit``, ``deviations`` (how many above the median) and ``skipped``.

    Args:
        k: robust deviations, above 0.
        window: steps.
        skip: leave such steps out.
        optimizer: whose steps ``skip`` leaves out; None for the monitor's.
        action: see :class:`Watcher`.

    Raises:
        InputError: ``skip`` for an optimizer that can't: see ``NormGate``.

    Reads ``step``, ``grad_norm``, ``skipped``.
    """

    def __init__(
        self,
        k: float = 6.0,
        window: int = 100,
        *,
        skip: bool = False,
        optimizer: Optimizer | None = None,
        action: Action = "warn",
    ) -> None:
        super().__init__(action=action)
        self.k, self.window, self.skip = above("k", k, 0.0), whole("window", window, 8), skip
        self._logs: deque[float] = deque(maxlen=window)
        self._place: tuple[float, float] | None = None  # median and deviation of the window
        self._gate = NormGate(optimizer) if skip and optimizer is not None else None

    def attach(self, monitor: Observed) -> None:
        super().attach(monitor)
        if self.skip and self._gate is None:
            self._gate = NormGate(monitor.optimizer)

    @property
    def limit(self) -> float:
        """Norm above which the next step is an outlier; inf while too few are known."""
        if self._place is None:
            return math.inf
        return math.exp(min(700.0, self._place[0] + self.k * self._place[1]))

    def on_record(self, record: Mapping[str, Any]) -> None:
        norm = number(record, "grad_norm")
        if norm is None or not math.isfinite(norm) or norm <= 0.0:
            return
        if self._place is not None and norm > self.limit:
            self._found(record, norm, *self._place)
        self._logs.append(math.log(norm))
        if len(self._logs) == self.window:
            ordered = sorted(self._logs)
            middle = _middle(ordered)
            self._place = middle, max(_LEAST, _TO_DEVIATION * _middle(sorted(abs(x - middle) for x in ordered)))
            if self._gate is not None:
                self._gate.limit = self.limit

    def close(self) -> None:
        if self._gate is not None:
            self._gate.remove()

    def _found(self, record: Mapping[str, Any], norm: float, middle: float, deviation: float) -> None:
        median, skipped = math.exp(middle), bool(record.get("skipped"))
        deviations = (math.log(norm) - middle) / deviation
        message = (
            f"gradient norm {norm:.4g}, {deviations:.1f} robust deviations above the median {median:.4g} of "
            f"{self.window} steps (limit {self.limit:.4g}){'; the step was skipped' if skipped else ''}"
        )
        numbers: dict[str, Any] = {"grad_norm": norm, "median": median, "limit": self.limit, "deviations": deviations}
        self.emit(int(record["step"]), message, **numbers, skipped=skipped)


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])
