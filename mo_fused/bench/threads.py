"""The time of a step by the number of threads, and the number that mo_fused chooses (mo_fused/team.py) beside the best.

For work far above the caches, of a few MB, and of many small tensors, each step by step and with clipping. All counts
take turns in one race, so that whatever the machine does meanwhile, it does to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mo_fused import dispatch, team
from mo_fused.bench import peers
from mo_fused.bench.case import MAX_SPREAD
from mo_fused.bench.picture import picture
from mo_fused.bench.race import Contender, Race, Sample
from mo_fused.bench.results import Record
from mo_fused.bench.workloads import MAX_NORM, WORKLOADS, Workload
from mo_fused.optim import FusedOptimizer

BENCH, STEP, CLIPPED = "threads", "step", "clip + step"
WELL = 1.15
"""The chosen number is well chosen where no other one is faster by more than this."""
NOISY = MAX_SPREAD
MEDIUM = Workload("6 layers of 256", [(256, 256), (256,)] * 6, [(16, 16), (16,)] * 6, torch.float32, False)
"""395 thousand parameters: 6 MB of operands."""
LOADS = (WORKLOADS["gpt2-fp32"], MEDIUM, WORKLOADS["small-fp32"])
SLOT_S, ROUNDS = 0.02, 21


def run(device: torch.device, quick: bool, says: Callable[[str], Any]) -> tuple[str, list[Record]]:
    """Measures 1, 2, 4, ... threads up to the cores that this process may use; torch's number is the same afterwards.

    Args:
        device: the CPU; of others there is nothing to measure.
        quick: tiny sizes and two rounds.
        says: told why nothing is measured, and which workload is under way.

    Returns:
        (table with verdicts, a record for each number of threads).
    """
    problem = "" if dispatch.is_host(device) else f"the step on {device.type} has no threads of the host"
    if dispatch.native() is None:
        problem = f"only the native kernels have threads of their own: {dispatch.native_problem()}"
    if problem:
        says(f"{BENCH} is left out: {problem}")
        return f"{BENCH}: left out: {problem}", []
    before = torch.get_num_threads()
    records: list[Record] = []
    try:
        for load in LOADS:
            says(f"{BENCH}: {load.name}")
            records += _load(load, quick)
            torch.set_num_threads(before)
    finally:
        torch.set_num_threads(before)
    return _text(records), records


THREADS: dict[str, Callable[[Any], tuple[str, list[Record]]]] = {
    BENCH: lambda settings: run(settings.device, settings.quick, settings.says)
}


def counts(cores: int, *further: int) -> list[int]:
    """1, 2, 4, ... up to the cores, the cores themselves, and further ones."""
    return sorted({1, cores, *further, *(1 << i for i in range(cores.bit_length()))} - {0})


@contextmanager
def exactly(threads: int) -> Iterator[None]:
    """Steps have so many threads, whatever they are worth (at most as many as there are batches)."""
    rule = team.team_size
    team.team_size = lambda *_, **__: threads
    try:
        yield
    finally:
        team.team_size = rule


def _load(load: Workload, quick: bool) -> list[Record]:
    params = load.parameters(quick)
    plain, clipping = peers.ours(params), peers.ours(params, max_grad_norm=MAX_NORM)
    peers.share_state([plain, clipping])
    records: list[Record] = []
    for name, optimizer in ((STEP, plain), (CLIPPED, clipping)):
        assert isinstance(optimizer, FusedOptimizer)
        optimizer.step()
        chosen = int(optimizer._rows().table.control["threads"][0])

        def on(threads: int, step: Callable[[], Any]) -> None:
            torch.set_num_threads(threads)
            with exactly(threads):
                step()

        numbers = counts(team.allowed_cores(), chosen)
        racing = [Contender(str(k), partial(on, k, optimizer.step)) for k in numbers]
        race = Race(racing, 0.0 if quick else SLOT_S)
        race.warm_up()
        for _ in range(2 if quick else ROUNDS):
            race.round()
        for k, s in zip(numbers, (race.samples()[str(k)] for k in numbers), strict=True):
            records.append(_record(f"{load.name}, {name}", k, k == chosen, s, quick))
    return records


def _record(case: str, threads: int, chosen: bool, s: Sample, quick: bool) -> Record:
    return {
        "bench": BENCH,
        "case": case,
        "contender": f"{threads} thread{'s' if threads > 1 else ''}",
        "quick": quick,
        "median_ms": s.median * 1e3,
        "low_ms": s.low * 1e3,
        "high_ms": s.high * 1e3,
        "rounds": s.rounds,
        "calls_a_round": s.calls,
        "x": threads,
        "chosen": chosen,
    }


def _by_case(records: Iterable[Record]) -> dict[str, list[Record]]:
    """In the order of the threads; of what was measured again, the last."""
    found: dict[str, dict[int, Record]] = {}
    for r in records:
        if r["bench"] == BENCH and r.get("x"):
            found.setdefault(r["case"], {})[r["x"]] = r
    return {case: [of[x] for x in sorted(of)] for case, of in found.items()}


def verdict(rows: Sequence[Record]) -> str:
    """How the chosen number of threads compares with the fastest one of these records."""
    best = min(rows, key=lambda r: float(r["median_ms"]))
    chosen = next(r for r in rows if r["chosen"])
    ratio = float(chosen["median_ms"] / best["median_ms"])
    words = f"chosen: {chosen['contender']}, {ratio:.2f}x the time of the best ({best['contender']})"
    if rows[0]["quick"]:
        return words + " (tiny sizes: says nothing)"
    noisy = [r["contender"] for r in (chosen, best) if (r["high_ms"] - r["low_ms"]) / r["median_ms"] > NOISY]
    if ratio <= WELL:
        return words + ": chosen well"
    return words + (f": no verdict, {' and '.join(noisy)} spread by more than {NOISY:.0%}" if noisy else ": NOT WELL")


def _text(records: Sequence[Record]) -> str:
    out = []
    for case, rows in _by_case(records).items():
        out += [case, f"  {'':<14} {'median, ms':>11} {'quartiles':>19} {'to 1 thread':>12}"]
        for r in rows:
            quartiles = f"{r['low_ms']:.3f} - {r['high_ms']:.3f}"
            line = f"  {r['contender']:<14} {r['median_ms']:>11.3f} {quartiles:>19} "
            out.append(line + f"{rows[0]['median_ms'] / r['median_ms']:>11.2f}x" + ("  chosen" if r["chosen"] else ""))
        out.append(f"  {verdict(rows)}")
    return "\n".join(out)


def plot(records: Sequence[Record], path: str | Path) -> None:
    """Times by threads, both axes logarithmic, the chosen number in a circle, as a PNG file.

    Args:
        records: of :func:`run`, or of a file of results, where the last measurement of a number counts.

    Raises:
        InputError: Matplotlib is missing.
    """
    with picture(path, 1) as (axis,):
        for at, (case, rows) in enumerate(_by_case(records).items()):
            xs, times = [r["x"] for r in rows], [r["median_ms"] for r in rows]
            bars = [[r["median_ms"] - r["low_ms"] for r in rows], [r["high_ms"] - r["median_ms"] for r in rows]]
            axis.errorbar(xs, times, yerr=bars, fmt=".-", color=f"C{at}", capsize=2, label=case)
            marked = [r for r in rows if r["chosen"]]
            axis.plot(
                [r["x"] for r in marked], [r["median_ms"] for r in marked], "o", color=f"C{at}", ms=11, mfc="none"
            )
        axis.set(xscale="log", yscale="log", xlabel="threads (circle: chosen)", ylabel="ms")
        axis.set_xticks(ticks := sorted({r["x"] for r in records if r["bench"] == BENCH and r.get("x")}), ticks)
        axis.minorticks_off()
        axis.legend(fontsize=7)
        axis.grid(True, which="major", alpha=0.3)
