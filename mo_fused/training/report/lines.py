"""Reads files of JSON lines as far as they can be read, and says what could not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST_STEP = 2**53
"""Larger whole numbers are not exact as floats."""


class Lines:
    """The JSON objects in a file, a line each, in order.

    A line that is no JSON object (cut off by a crash, or damaged) is passed over and counted. A file of any length is
    read without holding more than a line of it.

    Args:
        path: the file. If it is missing, there are no objects, and a note says so.

    Attributes:
        notes: what was not read, in words; complete when the iteration has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.count = 0
        self._damaged: list[int] = []
        self._cut: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        name = self.path.name
        try:
            with open(self.path, "rb") as file:
                for line in file:
                    self.count += 1
                    if (row := _parsed(line)) is not None:
                        yield row
                    elif line.strip() or not line.endswith(b"\n"):
                        if line.endswith(b"\n"):
                            self._damaged.append(self.count)
                        else:
                            self._cut = self.count
        except FileNotFoundError:
            self.notes.append(f"{name}: no such file in this run")
        except OSError as error:
            self.notes.append(f"{name}: not read after line {self.count} ({error.strerror})")
        if self._damaged:
            self.notes.append(
                f"{name}: {counted(len(self._damaged), 'line')} not read, no JSON ({_some(self._damaged)})"
            )
        if self._cut is not None:
            self.notes.append(f"{name}: the last line is cut off and was not read (line {self._cut})")


def step_of(row: dict[str, Any]) -> int | None:
    """The record's step; ``None`` if it has none that can be one."""
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < LARGEST_STEP:
        return None
    return step


def number(value: object) -> float | None:
    """A JSON value as a float: truth values are 0 and 1, ``null`` is nan; ``None`` if it is no number."""
    if value is None:
        return math.nan
    if isinstance(value, (int, float)):  # a bool is an int
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return None


def last_of_each(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which records stay where a log goes back to an earlier step (a run gone on with): of each step the last one.

    Args:
        steps: ``(n,)``, in the order of the file.

    Returns:
        ``(n,)``; the steps that stay rise strictly.
    """
    later = np.full(len(steps), LARGEST_STEP, dtype=np.int64)
    if len(steps) > 1:
        later[:-1] = np.minimum.accumulate(steps[:0:-1])[::-1]
    return steps < later


def counted(count: int, what: str) -> str:
    """``1 line``, ``2 lines``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _some(numbers: list[int], shown: int = 5) -> str:
    text = ", ".join(map(str, numbers[:shown]))
    return f"line {text}" if len(numbers) == 1 else f"lines {text}{', ...' if len(numbers) > shown else ''}"
