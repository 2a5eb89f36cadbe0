"""Interleaved measurement: all contenders take turns in one run, so that whatever the machine does meanwhile, it does
to all of them. Prints medians, quartiles and bytes per second; appends results to a file as JSON lines."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import mo_fused
from mo_fused import dispatch
from mo_fused.backends import cpu

COPY = "copy"
"""Name of the contender that copies memory: the yardstick for bytes per second."""


@dataclass(frozen=True)
class Settings:
    quick: bool = False
    json: str | None = None
    rounds: int | None = None
    only: str = ""

    @property
    def slot_s(self) -> float:
        """A contender is called until this long has passed: far above the clock's and the scheduler's grain."""
        return 0.001 if self.quick else 0.02


@dataclass(frozen=True)
class Contender:
    name: str
    call: Callable[[], Any]
    bytes: float = 0.0
    """What one call has to read and write by its own algorithm; 0 where that says nothing."""


@dataclass(frozen=True)
class Sample:
    """Seconds a call."""

    median: float
    low: float
    high: float
    """First and third quartile."""
    rounds: int
    calls: int


class Race:
    """Contenders that take turns; the order rotates, so that none always follows the same one."""

    def __init__(self, contenders: Sequence[Contender], slot_s: float, pause_s: float = 0.01) -> None:
        self.contenders = list(contenders)
        self._slot_s, self._pause_s = slot_s, pause_s
        self._calls: dict[str, int] = {}
        self.times: dict[str, list[float]] = {c.name: [] for c in self.contenders}

    def warm_up(self) -> None:
        """Two calls each (state, code, caches), then how many calls fill a slot."""
        for c in self.contenders:
            c.call()
            c.call()
        for c in self.contenders:
            start = time.perf_counter()
            c.call()
            self._calls[c.name] = max(1, int(self._slot_s / max(1e-7, time.perf_counter() - start)))

    def round(self) -> None:
        """One slot for every contender."""
        gc.collect()
        gc.disable()
        try:
            for c in self.contenders:
                # OpenMP's threads spin for some milliseconds after their work: not into the next contender's.
                time.sleep(self._pause_s)
                calls, call = self._calls[c.name], c.call
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                self.times[c.name].append((time.perf_counter() - start) / calls)
        finally:
            gc.enable()
        self.contenders.append(self.contenders.pop(0))

    def samples(self) -> dict[str, Sample]:
        out = {}
        for name, times in self.times.items():
            quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
            out[name] = Sample(quartiles[1], quartiles[0], quartiles[2], len(times), self._calls[name])
        return out


def copy_contender(quick: bool) -> Contender:
    """torch's copy between two buffers far larger than the caches; bytes read and written both count."""
    numel = (1 << 18) if quick else (1 << 26)
    source, target = torch.ones(numel), torch.zeros(numel)
    return Contender(COPY, lambda: target.copy_(source), 8.0 * numel)


@dataclass(frozen=True)
class Goal:
    """`subject` is at least `ratio` times as fast as `reference`; `at_most`: takes at most `ratio` times as long."""

    subject: str
    reference: str
    ratio: float
    at_most: bool = False

    def measured(self, samples: dict[str, Sample]) -> float:
        """The ratio of medians that the goal speaks of."""
        quotient = samples[self.reference].median / samples[self.subject].median
        return 1.0 / quotient if self.at_most else quotient

    def reached(self, samples: dict[str, Sample]) -> bool:
        return self.measured(samples) <= self.ratio if self.at_most else self.measured(samples) >= self.ratio

    def text(self, samples: dict[str, Sample]) -> str:
        words = "costs" if self.at_most else "runs at"
        bound = "at most" if self.at_most else "at least"
        verdict = "reached" if self.reached(samples) else "MISSED"
        return (
            f"{self.subject} {words} {self.measured(samples):.2f}x {self.reference}; "
            f"goal {bound} {self.ratio:.2f}x: {verdict}"
        )


@dataclass
class Outcome:
    """One race with its result, ready to be printed and appended."""

    bench: str
    case: str
    samples: dict[str, Sample]
    bytes: dict[str, float]
    goals: Sequence[Goal] = ()
    quick: bool = False
    notes: list[str] = field(default_factory=list)

    def rate(self, name: str) -> float | None:
        """GB/s by counted bytes."""
        counted = self.bytes.get(name, 0.0)
        return counted / self.samples[name].median / 1e9 if counted else None

    def share(self, name: str) -> float | None:
        """Of the copy bandwidth in the same run."""
        rate, copy = self.rate(name), self.rate(COPY) if COPY in self.samples else None
        return rate / copy if rate and copy else None

    def text(self) -> str:
        first = next(iter(self.samples.values())).median
        lines = [self.case, f"  {'':<31} {'median':>10} {'quartiles':>19} {'ratio':>7} {'GB/s':>6} {'of copy':>7}"]
        for name, s in self.samples.items():
            rate, share = self.rate(name), self.share(name)
            unit, factor = ("ms", 1e3) if first >= 1e-3 else ("us", 1e6)
            lines.append(
                f"  {name:<31} {s.median * factor:>7.2f} {unit} {s.low * factor:>8.2f} - {s.high * factor:>8.2f} "
                f"{s.median / first:>6.2f}x {f'{rate:.1f}' if rate else '':>6} {f'{share:.0%}' if share else '':>7}"
            )
        small = " (tiny sizes: says nothing)" if self.quick else ""
        lines += [f"  {g.text(self.samples)}{small}" for g in self.goals]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def records(self) -> list[dict[str, Any]]:
        out = []
        for name, s in self.samples.items():
            out.append(
                {
                    "bench": self.bench,
                    "case": self.case,
                    "contender": name,
                    "quick": self.quick,
                    "median_ms": s.median * 1e3,
                    "low_ms": s.low * 1e3,
                    "high_ms": s.high * 1e3,
                    "rounds": s.rounds,
                    "calls_a_round": s.calls,
                    "bytes": self.bytes.get(name) or None,
                    "gb_per_s": self.rate(name),
                    "share_of_copy": self.share(name),
                    "goals": [
                        asdict(g) | {"measured": g.measured(self.samples), "reached": g.reached(self.samples)}
                        for g in self.goals
                        if g.subject == name
                    ],
                }
            )
        return out


@dataclass(frozen=True)
class Case:
    """One race of a benchmark."""

    bench: str
    title: str
    contenders: Callable[[Settings], list[Contender]]
    goals: Sequence[Goal] = ()
    rounds: int = 15
    notes: Callable[[dict[str, Sample]], list[str]] | None = None

    def run(self, settings: Settings, benchmark: Any = None) -> Outcome:
        """Holds the race; ``benchmark``: pytest-benchmark's fixture, for which one round of the race is one round."""
        contenders = self.contenders(settings)
        rounds = 2 if settings.quick else settings.rounds or self.rounds
        race = Race(contenders, settings.slot_s)
        race.warm_up()
        if benchmark is None:
            for _ in range(rounds):
                race.round()
        else:
            benchmark.pedantic(race.round, rounds=rounds, iterations=1)
        samples = race.samples()
        notes = self.notes(samples) if self.notes else []
        counted = {c.name: c.bytes for c in contenders}
        done = Outcome(self.bench, self.title, samples, counted, self.goals, settings.quick, notes)
        if benchmark is not None:
            benchmark.extra_info.update(contenders=done.records(), notes=notes)
        return done


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model", "CPU part")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def circumstances() -> dict[str, Any]:
    """Machine, versions and commit: what a number means nothing without."""
    native = dispatch.native()
    commit = _git("rev-parse", "HEAD")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "instruction_set": cpu.instruction_set()[0] if native is not None else None,
        "native_problem": dispatch.native_problem() or None,
        "torch": torch.__version__,
        "mo_fused": mo_fused.__version__,
        "python": platform.python_version(),
        "commit": commit + ("-dirty" if commit and _git("status", "--porcelain") else "") or None,
    }


def heading(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, load {facts['load']}, "
        f"kernels: {facts['instruction_set'] or facts['native_problem']}",
        f"torch {facts['torch']}, mo_fused {facts['mo_fused']}, Python {facts['python']}, commit {facts['commit']}",
    ]
    if facts["load"] > 0.5:
        lines.append("warning: the machine is busy; medians are only worth something on a quiet one")
    return "\n".join(lines)


def append(path: str | None, records: Iterable[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Adds one JSON object a line; what is in the file stays."""
    if path is None:
        return
    with open(path, "a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({**record, **facts}) + "\n")


def arguments(description: str | None, words: Sequence[str] | None = None) -> Settings:
    """The command line that the scripts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes and few rounds: does it run, not how fast is it"
    )
    parser.add_argument("--json", metavar="FILE", help="append the results to FILE as JSON lines")
    parser.add_argument("--rounds", type=int, help="rounds of a race (default: set by each case)")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    given = parser.parse_args(words)
    if given.threads:
        torch.set_num_threads(given.threads)
    return Settings(given.quick, given.json, given.rounds, given.only)


More = Callable[[Settings], tuple[str, list[dict[str, Any]]]]
"""A measurement that is not a race: what to print, and records to append."""


def run_all(cases: dict[str, Case], description: str | None, more: Mapping[str, More] | None = None) -> None:
    """The main program of a script: every case in turn, printed at once and appended at once."""
    settings = arguments(description)
    facts = circumstances()
    print(heading(facts), flush=True)
    others = more or {}
    names = [name for name in (*cases, *others) if settings.only in name]
    if not names:
        raise SystemExit(
            f"--only {settings.only}: no case has that in its name; there are {', '.join((*cases, *others))}"
        )
    for name in names:
        if name in cases:
            done = cases[name].run(settings)
            text, records = f"[{name}] {done.text()}", done.records()
        else:
            text, records = others[name](settings)
        print(f"\n{text}", flush=True)
        append(settings.json, records, facts)
        gc.collect()
