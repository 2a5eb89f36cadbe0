"""A picture of results: bars of every contender's time, as a multiple of the first one's, for every case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mo_fused.bench.case import COPY
from mo_fused.bench.picture import new_figure
from mo_fused.bench.results import Record
from mo_fused.training.errors import bad_input

WIDE = 10.0
"""Bars end there, with their number beside them: one slow contender would make all others invisible."""


def draw(records: Sequence[Record], path: str | Path) -> None:
    """A PNG of the races among the records; each case's contenders in the order of the file.

    Raises:
        InputError: there is nothing to draw, or no Matplotlib.
    """
    races: dict[str, list[Record]] = {}
    for r in records:
        if r.get("median_ms") and r["contender"] != COPY and r["bench"] not in ("scaling", "threads"):
            races.setdefault(r["case"], []).append(r)
    if not races:
        raise bad_input(
            "--plot", expected="a race to draw", found="none", remedy="choose a suite of races, such as step"
        )
    bars = sum(len(rows) for rows in races.values())
    figure = new_figure("--plot", figsize=(9, 0.24 * bars + 0.75 * len(races)), layout="constrained")
    heights = [len(rows) + 1 for rows in races.values()]
    axes = figure.subplots(len(races), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (case, rows) in zip(axes, races.items(), strict=True):
        first = rows[0]["median_ms"]
        names = [r["contender"] for r in rows]
        ratios = [r["median_ms"] / first for r in rows]
        colours = ["tab:blue" if name.startswith("mo_fused") else "tab:gray" for name in names]
        axis.barh(names, [min(r, WIDE) for r in ratios], color=colours)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.15 * min(WIDE, max(ratios)))
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{case} ({first:.3g} ms = 1)", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        for i, ratio in enumerate(ratios):
            axis.text(min(ratio, WIDE), i, f" {ratio:.2f}", va="center", fontsize=7)
    figure.savefig(path, dpi=120, format="png")
