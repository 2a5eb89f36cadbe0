"""What a setting may be: its kind, its range, and the words that an error says it with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Allowed:
    """``expected`` completes "expected ...", ``kind`` is the value's type, ``test`` never raises."""

    expected: str
    kind: type
    test: Callable[[Any], bool]


def whole(low: int, high: int | None = None) -> Allowed:
    """A whole number from ``low`` to ``high``, both included. True and False are none."""
    span = f"of {low} or more" if high is None else f"from {low} to {high if high < 2**62 else '2**63 - 1'}"
    return Allowed(f"a whole number {span}", int, lambda v: type(v) is int and low <= v and (high is None or v <= high))


def choice(*names: str) -> Allowed:
    """One of ``names``."""
    return Allowed(f"one of {', '.join(names)}", str, lambda v: isinstance(v, str) and v in names)


def _number(expected: str, test: Callable[[float], bool]) -> Allowed:
    return Allowed(expected, float, lambda v: (type(v) is float or type(v) is int and abs(v) < 2**1023) and test(v))


POSITIVE = _number("a finite number above 0", lambda v: 0 < v < math.inf)
NOT_NEGATIVE = _number("a finite number of 0 or more", lambda v: 0 <= v < math.inf)
SHARE = _number("a number from 0 to 1", lambda v: 0 <= v <= 1)
BELOW_ONE = _number("a number from 0 to below 1", lambda v: 0 <= v < 1)
FLAG = Allowed("true or false", bool, lambda v: isinstance(v, bool))
TEXT = Allowed("a text that is not empty", str, lambda v: isinstance(v, str) and v != "" and "\0" not in v)
