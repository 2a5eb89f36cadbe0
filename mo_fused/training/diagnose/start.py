"""The first loss against that of a model that knows nothing yet."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mo_fused.training.diagnose.check import Check, fault, from_the_start, not_judged, ok, setting
from mo_fused.training.report.reading import Run

CHECK = "first loss"
_CLASSES = {"lm": 256, "vision": 10}  # bytes, digits
_NEAR = 0.15  # share of the expected loss, as in preflight


@dataclass(frozen=True)
class Expected:
    """Mean cross-entropy (nats) of a model that knows nothing: ``low`` if it knows how frequent each class is."""

    low: float
    high: float
    text: str

    @property
    def learned(self) -> float:
        """A loss below which something has been learned: 5 % less; 1 % less of two classes, where even that is much."""
        return self.low * (0.99 if self.high < 0.7 else 0.95)


def expected_loss(run: Run, classes: int | None = None) -> Expected | None:
    """From ``classes``, or else the run's config (``data.classes``, ``classes``, or a task of ``mo-fused train``)."""
    for given in (classes, setting(run, "data", "classes"), setting(run, "classes"), _CLASSES.get(_task(run))):
        if isinstance(given, int) and not isinstance(given, bool) and given >= 2:
            return Expected(math.log(given), math.log(given), f"ln({given}) = {math.log(given):.4g}")
    if _task(run) != "ctr":
        return None
    high = math.log(2)
    rate = setting(run, "data", "click_rate")
    if isinstance(rate, float) and 0.0 < rate < 1.0:
        low = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        return Expected(low, high, f"{low:.4g} (entropy of the click rate {rate:.3g}) to ln(2) = {high:.4g}")
    return Expected(high, high, f"ln(2) = {high:.4g}")


def first_loss(run: Run, expected: Expected | None) -> Check:
    """Whether it is within 15 % of the expected one."""
    if not len(run.steps):
        return not_judged(CHECK, "no step was recorded")
    if not from_the_start(run):
        return not_judged(CHECK, f"the log begins with step {run.steps[0]}")
    if run.steps[0] in run.nonfinite.get("loss", ()):
        means = "inputs that are not finite, log or division at 0, or a forward pass beyond the range of fp16"
        return fault(
            CHECK,
            "loss not finite",
            f"not finite in step {run.steps[0]}",
            means,
            "look at the first batch and its outputs",
        )
    losses = run.numbers.get("loss")
    if losses is None or np.isnan(losses[0]):
        return not_judged(CHECK, f"no loss was recorded in step {run.steps[0]}")
    loss = float(losses[0])
    if expected is None:
        why = "no number of classes is known (give --classes N for a mean cross-entropy over N classes)"
        return not_judged(CHECK, f"{loss:.4g}; {why}")
    seen = f"{loss:.4g}, where knowing nothing costs {expected.text}"
    if loss > (1 + _NEAR) * expected.high:
        means = (
            "first outputs that are far from even, or a loss that is no mean per target, or another number of classes"
        )
        do = "scale the initial weights of the last layer down (and look whether inputs are normalised)"
        return fault(CHECK, "first loss too high", f"{seen}: {loss / expected.high - 1:.0%} above", means, do)
    if loss < (1 - _NEAR) * expected.low:
        means = "targets that leak into the inputs, labels of too few classes, padding that counts, or a trained model"
        do = "print a batch's inputs and targets as the loss sees them, and compare them by eye"
        return fault(CHECK, "first loss too low", f"{seen}: {1 - loss / expected.low:.0%} below", means, do)
    return ok(CHECK, seen)


def _task(run: Run) -> str:
    task = setting(run, "task")
    return task if isinstance(task, str) else ""
