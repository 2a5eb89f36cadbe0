"""What the templates of README.md's figures may ask of a file of results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mo_fused.bench import results
from mo_fused.bench.results import Record
from mo_fused.training.errors import InputError, bad_input

OURS, COPY = "mo_fused", "copy"
SUITES = "mo-fused bench "
COMMANDS = (
    ("offload", "train on disk", "python bench/train_on_disk.py"),
    ("offload", "disk, *", "python bench/bench_offload.py --only disk"),
    ("offload", "limit on memory", "python bench/bench_offload.py --limit"),
    ("formats", "*", "python bench/bench_formats.py"),
    ("train_formats", "*, lr 0.0001", "python bench/train_formats.py --lr 1e-4 --seeds 0"),
    ("train_formats", "*", "python bench/train_formats.py --processes 2"),
    ("state_formats", "*", "python bench/state_formats.py"),
    ("distributed", "*", "python bench/bench_distributed.py"),
    ("monitor", "*", "python bench/bench_monitor.py"),
    ("false_alarms", "*", "python bench/false_alarms.py"),
)
"""What measures a bench and those of its cases that fit; what is not here is a suite of ``mo-fused bench``."""


def command_of(bench: str, case: str = "") -> str:
    for name, pattern, command in COMMANDS:
        if name == bench and fnmatchcase(case, pattern):
            return command
    return SUITES + bench


def when(record: Record) -> datetime:
    """When the command was started that made the record; one command's records have one time."""
    return datetime.strptime(record["time"], "%Y-%m-%dT%H:%M:%S%z")


def short(number: float, digits: int = 3) -> str:
    """So many significant digits, and all of those before the point."""
    return f"{number:.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:#.{digits}g}".rstrip(".")


def times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{short(ratio)}x"


def percent(share: float, digits: int = 2) -> str:
    return f"{short(100.0 * share, digits)} %"


def one_in(events: float, steps: float) -> str:
    """How rare something is, to two digits, as that many of a few events mean something."""
    if not events:
        return f"none in {_round(steps)} steps"
    return f"one in {_round(steps / events)} steps"


def _round(number: float) -> str:
    rounded = float(f"{number:.2g}")
    return f"{rounded / 1e6:g} million" if rounded >= 1e6 else f"{rounded:,.0f}"


def span(numbers: Sequence[float], digits: int = 2) -> str:
    """The smallest and the largest, or the one that both are."""
    low, high = short(min(numbers), digits), short(max(numbers), digits)
    return low if low == high else f"{low} to {high}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def subject(race: Sequence[Record]) -> Record:
    """Whom the others are compared with: ours, or its first variant where none is called just that."""
    ours = [r for r in race if r["contender"].split(",")[0] == OURS]
    return next((r for r in ours if r["contender"] == OURS), (ours or list(race))[0])


def is_faster(peer: Record, ours: Record) -> bool:
    """A peer whose median is smaller, as far as two digits show it: 0.996 of our time is a draw, as 1.004 is."""
    return not peer["contender"].startswith(OURS) and round(peer["median_ms"] / ours["median_ms"], 2) < 1.0


class Figures:
    """The newest records of one file, bench by bench and case by case, without those of ``--quick``.

    ``pattern`` is that of cases: ``*, step`` is all that end so, and the part of the star is what a table shows.
    """

    def __init__(self, path: str | Path, records: Sequence[Record] | None = None) -> None:
        self.path = Path(path)
        found = results.read(path) if records is None else records
        self._all = [r for r in found if not r["quick"]]
        self._newest: dict[tuple[str, str], list[Record]] = {}
        for r in self._all:
            race = self._newest.setdefault((r["bench"], r["case"]), [])
            if race and when(r) > when(race[0]):
                race.clear()
            if not race or when(r) == when(race[0]):
                race.append(r)

    # -- one figure ---------------------------------------------------------------------------------------------------

    def value(self, bench: str, case: str, contender: str, name: str) -> Any:
        """What stands in one column.

        Raises:
            InputError: nothing does; it says what to run.
        """
        for r in self.race(bench, case):
            if r["contender"] == contender:
                if r.get(name) is None:
                    raise self._missing(f"{name} of {contender} in the case {case!r}", bench, case)
                return r[name]
        raise self._missing(f"{contender} in the case {case!r}", bench, case)

    def ms(self, bench: str, case: str, contender: str = OURS) -> float:
        return float(self.value(bench, case, contender, "median_ms"))

    def ratio(self, bench: str, case: str, contender: str, to: str = OURS) -> float:
        """How many times as long as ``to`` the contender takes."""
        return self.ms(bench, case, contender) / self.ms(bench, case, to)

    # -- races --------------------------------------------------------------------------------------------------------

    def has(self, bench: str, pattern: str = "*", column: str = "case") -> bool:
        return any(r.get(column) is not None for case in self._cases(bench, pattern) for r in self.race(bench, case))

    def cases(self, bench: str, pattern: str = "*") -> list[str]:
        """Those that were measured, in the order of the file.

        Raises:
            InputError: none was.
        """
        found = self._cases(bench, pattern)
        if not found:
            raise self._missing(f"a case {pattern!r}", bench, pattern)
        return found

    def _cases(self, bench: str, pattern: str) -> list[str]:
        return [case for name, case in self._newest if name == bench and fnmatchcase(case, pattern)]

    def race(self, bench: str, case: str) -> list[Record]:
        """All contenders of a case."""
        if (bench, case) not in self._newest:
            raise self._missing(f"the case {case!r}", bench, case)
        return self._newest[bench, case]

    def table(self, bench: str, pattern: str, row: str = "Case") -> str:
        """A row for each race, a column for each contender; in brackets its time over ours, bold where it is faster."""
        races = self._races(bench, pattern)
        others = list(dict.fromkeys(r["contender"] for race in races.values() for r in race if r is not subject(race)))
        rates = any(subject(race)["gb_per_s"] for race in races.values())
        rows = []
        for label, race in races.items():
            ours = subject(race)
            cells = {r["contender"]: _cell(r, ours) for r in race if r is not ours}
            rows.append([label, short(ours["median_ms"]), *(cells.get(name, "") for name in others)])
            if rates:
                rate, share = ours["gb_per_s"], ours["share_of_copy"]
                rows[-1] += [short(rate, 2) if rate else "", percent(share) if share else ""]
        return markdown([row, OURS, *others, *(["GB/s", "of copy"] if rates else [])], rows)

    def faster(self, bench: str, pattern: str) -> str:
        """The sentence that says where a peer is faster, and which; nothing where there are no peers."""
        races = self._races(bench, pattern)
        if all(r["contender"].startswith(OURS) for race in races.values() for r in race):
            return ""
        found = []
        for label, race in races.items():
            ours = subject(race)
            names = [f"{r['contender']} ({_ratio(r, ours)})" for r in race if is_faster(r, ours)]
            found += [f"{label}: {', '.join(names)}"] if names else []
        return f"Faster than mo_fused: {'; '.join(found) or 'none of these'}."

    def _races(self, bench: str, pattern: str) -> dict[str, list[Record]]:
        """Contenders with their times, without the copy, by what the case is called in a table.

        Where the contenders are those of different numbers of groups, those of a number are a race.
        """
        out: dict[str, list[Record]] = {}
        for case in self.cases(bench, pattern):
            timed = [r for r in self.race(bench, case) if r["contender"] != COPY and r["median_ms"]]
            if not timed:
                raise self._missing(f"times of the case {case!r}", bench, case)
            for r in timed:
                grouped = re.fullmatch(r"(.+), (\d+ groups?)", r["contender"])
                label = grouped[2] if grouped else _starred(case, pattern)
                out.setdefault(label, []).append({**r, "contender": grouped[1]} if grouped else r)
        return out

    def shares(self, bench: str, names: Sequence[str], ending: str = "") -> str:
        """A row for each contender, a column for each case, and in it some columns of the file as percentages."""
        cases = self.cases(bench, f"*{ending}")
        of = {case: {r["contender"]: r for r in self.race(bench, case)} for case in cases}
        rows = []
        for contender in dict.fromkeys(name for race in of.values() for name in race):
            found = [of[case].get(contender) for case in cases]
            rows.append([contender, *(", ".join(percent(r[n]) for n in names) if r else "" for r in found)])
        return markdown(["", *(case.removesuffix(ending) for case in cases)], rows)

    def runs(self, bench: str, pattern: str, contender: str) -> str:
        """The contender's times over ours in every run, oldest first, of cases that were measured more than once."""
        rows = []
        for case in self.cases(bench, pattern):
            found: dict[datetime, list[Record]] = {}
            for r in self._all:
                if (r["bench"], r["case"]) == (bench, case) and r["median_ms"]:
                    found.setdefault(when(r), []).append(r)
            ratios = [
                peer["median_ms"] / subject(found[time])["median_ms"]
                for time in sorted(found)
                for peer in found[time]
                if peer["contender"] == contender
            ]
            if len(ratios) > 1:
                rows.append(f"{_starred(case, pattern)} {', '.join(times(r) for r in ratios)}")
        return "; ".join(rows) or "one run so far"

    # -- where it was measured ----------------------------------------------------------------------------------------

    def machine(self, *benches: str, pattern: str = "*") -> str:
        """Processor, versions, days and commands of the newest records of some benches."""
        pairs = [(bench, case) for bench in benches for case in self.cases(bench, pattern)]
        records = [r for pair in pairs for r in self._newest[pair]]
        machines = list(dict.fromkeys(_hardware(r) for r in records))
        softwares = list(
            dict.fromkeys(f"torch {r['torch']}, mo_fused {r['mo_fused']}, Python {r['python']}" for r in records)
        )
        days = sorted({f"{when(r):%Y-%m-%d}" for r in records})
        return "; ".join([*machines, *softwares, " and ".join(days), _commands([command_of(*pair) for pair in pairs])])

    def versions(self, *benches: str) -> str:
        """Peers and their versions, without torch's own; empty where there are none."""
        found = {
            f"{r['contender']} {r['version']}": None
            for (bench, _), race in self._newest.items()
            for r in race
            if bench in benches and r["version"] and r["version"] != r["torch"] and not r["contender"].startswith(OURS)
        }
        return ", ".join(found)

    def _missing(self, what: str, bench: str, case: str) -> InputError:
        return bad_input(
            str(self.path),
            expected=f"a record of bench {bench!r}: {what}",
            found="none that is not --quick",
            remedy=f"run `{command_of(bench, case)} --output {self.path}`, or correct the template",
        )


def _hardware(r: Record) -> str:
    memory = f", {r['memory_gb']:.0f} GB of memory" if r["memory_gb"] else ""
    gpu = f", {r['gpu']}" if r["gpu"] else ""
    threads = f"{r['threads']} thread" + ("s" if r["threads"] != 1 else "")
    kernels = r["instruction_set"] or "no native kernels"
    return f"{r['processor']}, {r['cores']} cores{memory}{gpu}, {threads}, {kernels}"


def _commands(commands: Sequence[str]) -> str:
    """Each once; several suites of ``mo-fused bench`` are one command."""
    suites = [c.removeprefix(SUITES) for c in commands if c.startswith(SUITES)]
    one = [SUITES + " ".join(dict.fromkeys(suites))] if suites else []
    return ", ".join(f"`{c}`" for c in [*one, *dict.fromkeys(c for c in commands if not c.startswith(SUITES))])


def _cell(r: Record, ours: Record) -> str:
    text = f"{short(r['median_ms'])} ({_ratio(r, ours)})"
    return f"**{text}**" if is_faster(r, ours) else text


def _ratio(r: Record, ours: Record) -> str:
    return times(r["median_ms"] / ours["median_ms"])


def _starred(case: str, pattern: str) -> str:
    """What the stars of the pattern stand for."""
    parts = re.fullmatch("(.*)".join(re.escape(part) for part in pattern.split("*")), case)
    return ", ".join(parts.groups()) if parts and parts.groups() else case
