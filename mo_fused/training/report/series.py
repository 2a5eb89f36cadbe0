"""Thins out long series without losing their extremes, and marks without losing count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BUCKETS = 2000
"""Parts of the steps' range; a series has up to two points in each, more than a screen has pixels."""
MARKS = 2000

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


def thin(steps: Steps, values: Floats, buckets: int = BUCKETS) -> tuple[Steps, Floats]:
    """The points to draw: of each bucket of consecutive points the smallest and the largest, and both ends.

    Args:
        steps: ``(n,)``, rising.
        values: ``(n,)``; points that are nan are left out.
        buckets: how many; up to ``2 * buckets`` points are all kept.

    Returns:
        Steps and values, both of the same length, at most ``2 * buckets + 2``.
    """
    measured = ~np.isnan(values)
    steps, values = steps[measured], values[measured]
    if len(steps) <= 2 * buckets:
        return steps, values
    starts = np.linspace(0, len(steps), buckets + 1).astype(np.int64)
    chosen = [0, len(steps) - 1]
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        part = values[start:end]
        chosen += [start + int(part.argmin()), start + int(part.argmax())]
    index = np.unique(np.array(chosen))
    return steps[index], values[index]


@dataclass(frozen=True)
class Mark:
    """A place on a curve; ``count`` of them from ``step`` to ``last`` where they are too many to be drawn apart."""

    step: int
    last: int
    count: int
    value: float
    text: str


def marks(places: Steps, texts: list[str], steps: Steps, values: Floats, limit: int = MARKS) -> list[Mark]:
    """Marks at ``places`` on the curve of ``values``.

    Above ``limit`` of them, consecutive ones are drawn as one, at the largest value among them, which says how many.
    A place without a finite value is marked at the nearest one before it, or else after it.

    Args:
        places: ``(m,)``, steps in any order.
        texts: ``m`` of them.
        steps: ``(n,)``, rising.
        values: ``(n,)``, nan where there is no value.

    Returns:
        At most ``limit`` marks; none where the curve has no point.
    """
    measured = ~np.isnan(values)
    known, heights = steps[measured], values[measured]
    if not len(known) or not len(places):
        return []
    order = np.argsort(places, kind="stable")
    at = places[order]
    height = heights[np.clip(np.searchsorted(known, at, side="right") - 1, 0, None)]
    result = []
    for part in np.array_split(np.arange(len(at)), min(limit, len(at))):
        top = int(part[height[part].argmax()])
        result.append(
            Mark(int(at[part[0]]), int(at[part[-1]]), len(part), float(height[top]), texts[int(order[top])])
            if len(part) > 1
            else Mark(int(at[top]), int(at[top]), 1, float(height[top]), texts[int(order[top])])
        )
    return result
