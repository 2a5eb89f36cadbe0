"""How the time of clip + step grows: with the number of parameters, and with the number of tensors.

Both should be straight lines, time = intercept + slope * x. Fitted by least squares of the *relative* error, so that a
small point counts as much as a large one; judged by the largest relative departure of a point from the line.

Every call finds cold caches. With warm ones the slope below the size of the caches is another one than above, which
bends any line, and says something about the processor and not about the optimizer: parameters of a few MB are stepped
from the caches several times as fast, and so are the Python objects of a thousand tensors. A step of a training finds
its operands, and its tensors, after a forward and a backward pass that have used the caches for other things.

Small work is stepped by few threads (mo_fused/team.py), so the time per parameter of sizes below what all threads are
woken for is another one too. Those points are shown, but are not part of the line. The time by tensors has the same
number of parameters, and so of threads, everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mo_fused import dispatch, team
from mo_fused.bench import peers
from mo_fused.bench.case import MAX_SPREAD
from mo_fused.bench.peers import FUSED, OURS
from mo_fused.bench.picture import picture
from mo_fused.bench.race import Contender, Race, Sample, clock_of
from mo_fused.bench.results import Record
from mo_fused.bench.room import free_bytes
from mo_fused.bench.workloads import DTYPES, MAX_NORM, Workload

BENCH, TOTAL, TENSORS = "scaling", "total parameters", "number of tensors"
TOLERANCE = 0.3
"""A line is straight where no point is further from it. From 1e5 to 1e9, time growing with the power 1.1 instead of 1
would be off by more than a factor of 1.5 somewhere."""
NOISY = MAX_SPREAD
"""A point whose rounds spread more (Sample.spread) proves nothing."""
ELEMENTS_A_TENSOR = 100_000
TOTALS = (10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9)
FIXED_TOTAL = 10**7
COUNTS = (1, 10, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
QUICK = 1000
"""So many times smaller are quick runs: does it run, not how fast is it."""
OPERANDS = 4
"""Parameter, gradient and two moments, which all contenders share."""
RESERVE_BYTES = 1.5e9
"""Left free: the tensors' own records, the buffer that empties the caches, and everybody else."""
SECONDS_A_POINT, LEAST_ROUNDS, MOST_ROUNDS = 8.0, 5, 21
UNITS = {TOTAL: ("ns per parameter", 1e6), TENSORS: ("us per tensor", 1e3)}
"""In which the slope is printed, and how many of them are a millisecond."""


@dataclass(frozen=True)
class Line:
    """time = intercept + slope * x, in the unit of the times."""

    intercept: float
    slope: float
    departure: float
    """The largest |time - line| / line of its points."""

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit(xs: Sequence[float], times: Sequence[float]) -> Line:
    """The line with the smallest sum of squares of (line - time) / time.

    Raises:
        ValueError: fewer than two different x.
    """
    if len(set(xs)) < 2:
        raise ValueError(f"a line needs at least two different x, not {sorted(set(xs))}")
    x, t = np.asarray(xs, dtype=np.float64), np.asarray(times, dtype=np.float64)
    scale = float(x.max())
    (intercept, slope), *_ = np.linalg.lstsq(np.stack([1.0 / t, x / scale / t], axis=1), np.ones(len(t)), rcond=None)
    line = intercept + slope * x / scale
    # A line that falls below zero somewhere is as wrong as can be.
    departure = float((np.abs(t - line) / line).max()) if (line > 0).all() else math.inf
    return Line(float(intercept), float(slope) / scale, departure)


def run(device: torch.device, quick: bool, says: Callable[[str], Any]) -> tuple[str, list[Record]]:
    """Measures both, against torch's fused step after its clipping.

    Args:
        device: where the tensors are.
        quick: tiny sizes and two rounds.
        says: told each point when it is measured, and what does not fit into memory.

    Returns:
        (table with verdicts, a record for each point and one for each line).
    """
    records: list[Record] = []
    for name in _dtypes(device, quick, says):
        sizes = [(n // ELEMENTS_A_TENSOR, ELEMENTS_A_TENSOR) for n in TOTALS if _fits(n, name, device)]
        records += _series(TOTAL, name, _smaller(sizes, quick), device, quick, says)
    by_count = [(n, FIXED_TOTAL // n) for n in COUNTS]
    records += _series(TENSORS, "fp32", _smaller(by_count, quick), device, quick, says)
    lines = _lines(records)
    return _text(records, lines), records + lines


SCALING: dict[str, Callable[[Any], tuple[str, list[Record]]]] = {
    BENCH: lambda settings: run(settings.device, settings.quick, settings.says)
}


def _smaller(sizes: Sequence[tuple[int, int]], quick: bool) -> list[tuple[int, int]]:
    if not quick:
        return list(sizes)
    return [(count, max(1, each // QUICK)) for count, each in sizes if count <= QUICK][:6]


def _dtypes(device: torch.device, quick: bool, says: Callable[[str], Any]) -> list[str]:
    """fp32, and where not all of it fits into memory bf16 as well."""
    if quick:
        return ["fp32"]
    names = ["fp32"] if _fits(TOTALS[-1], "fp32", device) else ["fp32", "bf16"]
    for name in names:
        there = [n for n in TOTALS if _fits(n, name, device)]
        says(f"{TOTAL}, {name}: up to {max(there, default=0):.0e}, by {free_bytes(device) / 1e9:.0f} GB of free memory")
    return names


def _fits(elements: int, name: str, device: torch.device) -> bool:
    # 1.1: what memory is lost to.
    return 1.1 * OPERANDS * elements * DTYPES[name].itemsize + RESERVE_BYTES < free_bytes(device)


def _series(
    case: str,
    name: str,
    sizes: Sequence[tuple[int, int]],
    device: torch.device,
    quick: bool,
    says: Callable[[str], Any],
) -> list[Record]:
    """One point after the other; of each, its contenders in turns."""
    # On a device all of it is always at work.
    threads = min(torch.get_num_threads(), team.allowed_cores()) if dispatch.is_host(device) else 1
    records: list[Record] = []
    for count, each in sizes:
        x = count * each if case == TOTAL else count
        whole = quick or case == TENSORS or threads == 1 or x >= threads * team.ELEMENTS_PER_THREAD
        for who, s in _point([(each,)] * count, name, device, quick).items():
            records.append(
                {
                    "bench": BENCH,
                    "case": case,
                    "contender": who,
                    "quick": quick,
                    "median_ms": s.median * 1e3,
                    "low_ms": s.low * 1e3,
                    "high_ms": s.high * 1e3,
                    "rounds": s.rounds,
                    "calls_a_round": s.calls,
                    "x": x,
                    "dtype": name,
                    "tensors": count,
                    "parameters": count * each,
                    "on_line": whole,
                }
            )
            says(f"{case} {x:,} {name}, {who}: {s.median * 1e3:.3f} ms ({s.low * 1e3:.3f} - {s.high * 1e3:.3f})")
    return records


def _point(shapes: list[tuple[int, ...]], name: str, device: torch.device, quick: bool) -> dict[str, Sample]:
    params = Workload(name, shapes, shapes, DTYPES[name], True).parameters(quick, device)
    ours, fused = peers.ours(params, max_grad_norm=MAX_NORM), peers.torch_fused(params)
    peers.share_state([ours, fused])

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        fused.step()

    racing = [Contender(OURS, ours.step), Contender(FUSED, clip_and_step)]
    race = Race(racing, 0.0, clock_of(device), cold=None if quick else device)
    race.warm_up()
    race.round()
    took = sum(times[0] for times in race.times.values())
    rounds = 2 if quick else int(min(MOST_ROUNDS, max(LEAST_ROUNDS, SECONDS_A_POINT / max(took, 1e-3))))
    for _ in range(rounds - 1):
        race.round()
    return race.samples()


def _spread(r: Record) -> float:
    return float((r["high_ms"] - r["low_ms"]) / r["median_ms"])


def _of_lines(records: Iterable[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """The points of each line by case, dtype and contender, in order; of a point that was measured again, the last."""
    found: dict[tuple[str, str, str], dict[float, Record]] = {}
    for r in records:
        if r["bench"] == BENCH and r.get("x"):
            found.setdefault((r["case"], r["dtype"], r["contender"]), {})[r["x"]] = r
    return {key: [points[x] for x in sorted(points)] for key, points in found.items()}


def _on_line(points: Sequence[Record]) -> list[Record]:
    """Those that a line is fitted to; all, where too few are large enough for all threads."""
    there = [p for p in points if p["on_line"]]
    return there if len(there) >= 3 else list(points)


def _line(points: Sequence[Record]) -> Line:
    there = _on_line(points)
    return fit([p["x"] for p in there], [p["median_ms"] for p in there])


def _lines(records: Sequence[Record]) -> list[Record]:
    """A record for each line, in milliseconds and milliseconds for each x."""
    made: list[Record] = []
    for (case, dtype, who), points in _of_lines(records).items():
        if len(points) < 2:
            continue
        line, there = _line(points), _on_line(points)
        noisy = [p["x"] for p in there if _spread(p) > NOISY]
        made.append(
            {
                "bench": BENCH,
                "case": case,
                "contender": who,
                "quick": points[0]["quick"],
                "dtype": dtype,
                "points": len(there),
                "intercept_ms": line.intercept,
                "slope_ms": line.slope,
                "departure": line.departure if math.isfinite(line.departure) else None,
                "tolerance": TOLERANCE,
                "straight": line.departure <= TOLERANCE,
                "noisy_points": len(noisy),
            }
        )
    return made


def verdict(line: Record) -> str:
    """What a record of a line says, in words."""
    off = math.inf if line["departure"] is None else line["departure"]
    words = f"{'straight' if line['straight'] else 'NOT STRAIGHT'} within {TOLERANCE:.0%} (departure {off:.0%})"
    if line["noisy_points"]:
        noise = f"{line['noisy_points']} of {line['points']} points spread by more than {NOISY:.0%}"
        # Noise adds departures; it does not take them away.
        words = f"{words}, although {noise}" if line["straight"] else f"no verdict: departure {off:.0%}, but {noise}"
    return words + (" (tiny sizes: says nothing)" if line["quick"] else "")


def _text(records: Sequence[Record], lines: Sequence[Record]) -> str:
    out = []
    by_line = _of_lines(records)
    for case, dtype in dict.fromkeys((case, dtype) for case, dtype, _ in by_line):
        of = {who: points for (c, d, who), points in by_line.items() if (c, d) == (case, dtype)}
        fixed = (
            "of equal size" if case == TOTAL else f"of {next(iter(of.values()))[0]['parameters']:,} parameters in all"
        )
        out.append(f"clip + step by {case}, {dtype}, tensors {fixed}, cold caches")
        out.append(f"  {case:>20}" + "".join(f" {who + ', ms':>18} {'spread':>6}" for who in of))
        for row in zip(*of.values(), strict=True):
            cells = "".join(f" {p['median_ms']:>18.3f} {_spread(p):>6.0%}" for p in row)
            out.append(f"  {row[0]['x']:>20,}{cells}" + ("" if row[0]["on_line"] else "  (fewer threads)"))
        unit, factor = UNITS[case]
        for line in lines:
            if (line["case"], line["dtype"]) == (case, dtype):
                out.append(
                    f"  {line['contender']}: {line['slope_ms'] * factor:.3g} {unit} + "
                    f"{line['intercept_ms'] * 1e3:.0f} us; {verdict(line)}"
                )
    return "\n".join(out)


def plot(records: Sequence[Record], path: str | Path) -> None:
    """Points with their quartiles and the fitted lines, both axes logarithmic, as a PNG file.

    Args:
        records: of :func:`run`, or of a file of results, where the last measurement of a point counts.

    Raises:
        InputError: Matplotlib is missing.
    """
    by_line = {key: points for key, points in _of_lines(records).items() if len(points) > 1}
    charts = list(dict.fromkeys((case, dtype) for case, dtype, _ in by_line))
    with picture(path, max(1, len(charts))) as axes:
        for axis, (case, dtype) in zip(axes, charts):
            of = {who: points for (c, d, who), points in by_line.items() if (c, d) == (case, dtype)}
            for colour, (who, points) in enumerate(of.items()):
                xs, times = [p["x"] for p in points], [p["median_ms"] for p in points]
                bars = [[p["median_ms"] - p["low_ms"] for p in points], [p["high_ms"] - p["median_ms"] for p in points]]
                axis.errorbar(xs, times, yerr=bars, fmt="o", color=f"C{colour}", capsize=2)
                line, grid = _line(points), np.geomspace(xs[0], xs[-1], 200)
                unit, factor = UNITS[case]
                label = f"{who}: {line.slope * factor:.3g} {unit} + {line.intercept * 1e3:.0f} us"
                axis.plot(grid, [line.at(x) for x in grid], color=f"C{colour}", label=label)
            axis.set(xscale="log", yscale="log", xlabel=case, ylabel="clip + step, ms", title=f"{dtype}, cold caches")
            axis.legend(fontsize=8)
            axis.grid(True, which="major", alpha=0.3)
