"""One check of a diagnosis, and what all of them need of the curves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mo_fused.training.report.reading import Run

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

FIRST_STEPS = 500
"""Steps in which gradients show whether a model is set up well."""
_PEAK = 0.99  # share of the highest rate at which the warm-up is over
_NAMED = 5  # names in one line


@dataclass
class Check:
    """What one question about a run has given.

    Attributes:
        check: the question.
        state: "ok", "fault", "follows" (a fault that another one explains) or "not judged".
        seen: what was found, with numbers, or why it could not be judged.
        fault: a short name of the fault, "" if there is none.
        means: what it usually means.
        do: the one thing to change first.
    """

    check: str
    state: str
    seen: str
    fault: str = ""
    means: str = ""
    do: str = ""

    def __str__(self) -> str:
        named = f" ({self.fault})" if self.fault else ""
        lines = [f"{self.check}: {self.state}{named}", f"  seen: {self.seen}"]
        lines += [f"  {title}: {text}" for title, text in (("means", self.means), ("change first", self.do)) if text]
        return "\n".join(lines)


def ok(check: str, seen: str) -> Check:
    return Check(check, "ok", seen)


def not_judged(check: str, why: str) -> Check:
    return Check(check, "not judged", why)


def fault(check: str, name: str, seen: str, means: str, do: str) -> Check:
    return Check(check, "fault", seen, name, means, do)


def curve(run: Run, key: str) -> tuple[Steps, Floats]:
    """Steps and values of what was recorded under ``key``, finite ones alone; both empty if there are none."""
    values = run.numbers.get(key)
    if values is None:
        return run.steps[:0], np.zeros(0)
    there = np.isfinite(values)
    return run.steps[there], values[there]


def warm_up_end(run: Run) -> int | None:
    """The first step at the peak rate; None if no rate was recorded."""
    steps, rates = curve(run, "lr")
    if not len(rates) or rates.max() <= 0.0:
        return None
    return int(steps[np.flatnonzero(rates >= _PEAK * rates.max())[0]])


def from_the_start(run: Run) -> bool:
    """Whether the log begins with the run."""
    return bool(len(run.steps)) and int(run.steps[0]) <= 1


def setting(run: Run, *path: str) -> Any:
    """A value of ``config.yaml``; None if it is not there."""
    value: Any = run.config
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def some(names: Iterable[object]) -> str:
    """The first names, and how many more there are."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more
