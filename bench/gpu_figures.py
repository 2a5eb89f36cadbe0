"""Arithmetic and layout of the GPU figures: bytes of a step, bytes per second, share of the copy bandwidth, the table.

Needs nothing but the standard library, so that a table can be made of whatever a run has left behind.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OPERANDS = {"AdamW": 7, "SGD": 5}
"""Elements that a step itself reads or writes for every element of a parameter: parameter, gradient and slots are read,
all but the gradient are written. AdamW has two slots, SGD with momentum one."""

EXTRA = {
    "step": 0,
    # The gradient is read once more for the norm.
    "clip inside": 1,
    # clip_grad_norm_ reads the gradient for the norm, then reads and writes it to scale it.
    "clip before": 3,
    # torch's scaler reads and writes every gradient to look for infinities; ours takes the answer from the step.
    "own scaler, clip inside": 1,
    "torch's scaler, clip inside": 3,
    "torch's scaler, clip before": 5,
}
"""What stands around the step, in elements read or written for every element of a parameter."""


def bytes_a_parameter(rule: str, how: str, element_size: int) -> int:
    """Bytes that a step has to move for one element of a parameter, by its contender's own algorithm.

    Args:
        rule: a key of OPERANDS.
        how: a key of EXTRA.
        element_size: bytes of an element of the parameter, its gradient and its state alike.
    """
    return (OPERANDS[rule] + EXTRA[how]) * element_size


def gb_per_s(moved: float, seconds: float) -> float | None:
    """10^9 bytes a second; None where bytes say nothing (``moved`` 0)."""
    return moved / seconds / 1e9 if moved and seconds else None


def share(rate: float | None, copy_rate: float | None) -> float | None:
    """A rate as a fraction of the copy bandwidth; None when one of them is not known."""
    return rate / copy_rate if rate and copy_rate else None


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(first quartile, median, third quartile)."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _number(value: float | None, digits: int = 3) -> str:
    """Three digits that count, without an exponent."""
    if value is None:
        return ""
    size = abs(value)
    decimals = next((d for d, limit in ((3, 1), (2, 10), (1, 100)) if size < limit), 0)
    return f"{value:.{min(decimals, digits)}f}"


HEAD = ("workload", "dtype", "contender", "ms", "gpu ms", "host ms", "GB/s", "copy", "ratio", "goal")


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    copied, ratio = record.get("share_of_copy"), record.get("ratio_to_torch")
    goals = []
    for goal in record.get("goals", ()):
        sign = "<=" if goal["at_most"] else ">="
        said = "" if record.get("quick") else " reached" if goal["reached"] else " MISSED"
        goals.append(f"{goal['label']} {sign} {goal['limit']:g}{said}")
    return (
        str(record["case"]),
        str(record["dtype"]),
        str(record["contender"]),
        _number(record.get("median_ms")),
        _number(record.get("device_ms")),
        _number(record.get("host_ms")),
        _number(record.get("gb_per_s")),
        f"{copied:.0%}" if copied else "",
        f"{ratio:.2f}x" if ratio else "",
        ", ".join(goals),
    )


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """One line a record of the benchmark's file, aligned; says so where sizes are tiny."""
    if not records:
        return "no benchmark has left a record"
    rows = [HEAD, *map(_row, records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(w) if i < 3 or i == len(HEAD) - 1 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    if any(r.get("quick") for r in records):
        lines.append("(dry run: tiny sizes, times say nothing)")
    return "\n".join(lines)


LEGEND = """\
ms: steps one after the other on an idle device, the host's work included; gpu ms: with the host ahead, so that only the
device counts; host ms: until the call returns. Medians. GB/s: bytes that this contender has to move by its own
algorithm, divided by gpu ms; copy: that as a share of a plain copy's bandwidth; ratio: torch's ms divided by ours."""
