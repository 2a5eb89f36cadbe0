"""One race of a benchmark from its contenders to a table and records."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mo_fused import dispatch
from mo_fused.bench import facts, results
from mo_fused.bench.race import Contender, Race, Sample, clock_of, sample
from mo_fused.bench.results import Record

COPY = "copy"
"""Name of the contender that copies memory: the yardstick for bytes per second."""
SMALL = " (tiny sizes: says nothing)"
MAX_SPREAD = 0.25
"""Beyond it a median is not worth comparing."""


def _silent(_: str) -> None:
    """For those who do not want to hear."""


@dataclass(frozen=True)
class Settings:
    """What all cases of a run have in common.

    Attributes:
        quick: tiny sizes and two rounds: does it run, not how fast is it.
        output: file that the results are appended to.
        rounds: of a race; None: each case's own number.
        only: part of the names of the cases to run.
        device: where the tensors are.
        peers: parts of the names of those who take part beside ours; None: all.
        cold: the caches are emptied before each call.
        max_spread: interquartile range over the median, above which nothing is concluded.
        says: told what is left out, and why.
    """

    quick: bool = False
    output: str | None = None
    rounds: int | None = None
    only: str = ""
    device: torch.device = torch.device("cpu")
    peers: Sequence[str] | None = None
    cold: bool = False
    max_spread: float = MAX_SPREAD
    says: Callable[[str], Any] = _silent

    @property
    def slot_s(self) -> float:
        """A contender is called until this long has passed: far above the clock's and the scheduler's grain."""
        return 0.001 if self.quick else 0.02

    def rounds_of(self, usual: int) -> int:
        return 2 if self.quick else self.rounds or usual


def copy_contender(quick: bool, device: torch.device | str = "cpu") -> Contender:
    """torch's copy between two buffers far larger than the caches; bytes read and written both count."""
    numel = (1 << 18) if quick else (1 << 26)
    source, target = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    return Contender(COPY, lambda: target.copy_(source), 8.0 * numel)


@dataclass(frozen=True)
class Goal:
    """`subject` is at least `ratio` times as fast as `reference`; `at_most`: takes at most `ratio` times as long."""

    subject: str
    reference: str
    ratio: float
    at_most: bool = False

    def measured(self, samples: Mapping[str, Sample]) -> float:
        """The ratio of medians that the goal speaks of."""
        quotient = samples[self.reference].median / samples[self.subject].median
        return 1.0 / quotient if self.at_most else quotient

    def reached(self, samples: Mapping[str, Sample]) -> bool:
        return self.measured(samples) <= self.ratio if self.at_most else self.measured(samples) >= self.ratio

    def text(self, samples: Mapping[str, Sample]) -> str:
        words = "costs" if self.at_most else "runs at"
        bound = "at most" if self.at_most else "at least"
        verdict = "reached" if self.reached(samples) else "MISSED"
        return (
            f"{self.subject} {words} {self.measured(samples):.2f}x {self.reference}; "
            f"goal {bound} {self.ratio:.2f}x: {verdict}"
        )


@dataclass
class Outcome:
    """One race with its result, ready to be printed and appended.

    Attributes:
        samples: by contender, the first being the one that the others are compared with.
        bytes: what one call moves, by contender; 0 where that says nothing.
        extra: further columns of the file, by contender.
        noisy: contenders whose rounds differ too much for a verdict.
    """

    bench: str
    case: str
    samples: dict[str, Sample]
    bytes: dict[str, float]
    goals: Sequence[Goal] = ()
    quick: bool = False
    notes: list[str] = field(default_factory=list)
    extra: Mapping[str, Record] = field(default_factory=dict)
    max_spread: float = MAX_SPREAD

    @property
    def noisy(self) -> list[str]:
        return [] if self.quick else [n for n, s in self.samples.items() if s.spread > self.max_spread and n != COPY]

    def rate(self, name: str) -> float | None:
        """GB/s by counted bytes, on a GPU by the device's own time."""
        counted = self.bytes.get(name, 0.0)
        device_ms = self.extra.get(name, {}).get("device_ms")
        seconds = device_ms / 1e3 if device_ms else self.samples[name].median
        return counted / seconds / 1e9 if counted else None

    def share(self, name: str) -> float | None:
        """Of the copy bandwidth in the same run."""
        rate, copy = self.rate(name), self.rate(COPY) if COPY in self.samples else None
        return rate / copy if rate and copy else None

    def text(self) -> str:
        first = next(iter(self.samples.values())).median
        noisy = self.noisy
        errors = {name: row["error"] for name, row in self.extra.items() if row.get("error") is not None}
        head = f"  {'':<31} {'median':>10} {'quartiles':>19} {'ratio':>7} {'GB/s':>6} {'of copy':>7}"
        lines = [self.case, head + (f" {'error':>8}" if errors else "")]
        for name, s in self.samples.items():
            # Of tiny sizes bytes per second say nothing.
            rate, share = (None, None) if self.quick else (self.rate(name), self.share(name))
            unit, factor = ("ms", 1e3) if s.median >= 1e-3 else ("us", 1e6)
            line = f"  {name:<31} {s.median * factor:>7.2f} {unit} {s.low * factor:>8.2f} - {s.high * factor:>8.2f} "
            line += f"{s.median / first:>6.2f}x {f'{rate:.1f}' if rate else '':>6} {f'{share:.0%}' if share else '':>7}"
            line += f" {errors[name]:>8.1e}" if name in errors else ""
            lines.append(line.rstrip() + ("  noisy" if name in noisy else ""))
        lines += [
            f"  {g.text(self.samples)}{SMALL if self.quick else ''}"
            for g in self.goals
            if not {g.subject, g.reference} & set(noisy)
        ]
        if noisy:
            lines.append(f"  no verdict: {', '.join(noisy)} spread by more than {self.max_spread:.0%} of the median")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def records(self) -> list[Record]:
        out = []
        for name, s in self.samples.items():
            goals = [
                asdict(g) | {"measured": g.measured(self.samples), "reached": g.reached(self.samples)}
                for g in self.goals
                if g.subject == name
            ]
            record: Record = {
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
                **self.extra.get(name, {}),
            }
            out.append(record | ({"goals": goals} if goals else {}))
        return out


Extra = Callable[[Settings, Sequence[str]], Mapping[str, Record]]
"""Further columns of a case, by contender, for those that took part."""


@dataclass(frozen=True)
class Case:
    """One race of a benchmark.

    Attributes:
        contenders: makes them; the first is the one that the others are compared with. None take part where there is
            nothing to be done, and then the case is left out.
        notes: lines under the table, made of the samples.
    """

    bench: str
    title: str
    contenders: Callable[[Settings], list[Contender]]
    goals: Sequence[Goal] = ()
    rounds: int = 15
    notes: Callable[[dict[str, Sample]], list[str]] | None = None
    extra: Extra | None = None

    def run(self, settings: Settings, tick: Callable[[], Any] | None = None) -> Outcome | None:
        """Holds the race; ``tick`` is called after each round. None where the case is left out."""
        contenders = self.contenders(settings)
        if not contenders:
            return None
        device = settings.device
        on_gpu = dispatch.is_cuda(device)
        race = Race(
            contenders,
            settings.slot_s,
            clock_of(device),
            pause_s=0.0 if on_gpu else 0.01,
            most=50 if on_gpu else 1_000_000,
            cold=device if settings.cold else None,
            says=lambda text: settings.says(f"{self.title}: {text}"),
        )
        race.warm_up()
        for _ in range(settings.rounds_of(self.rounds)):
            race.round()
            if tick is not None:
                tick()
        samples = race.samples()
        notes = self.notes(samples) if self.notes else []
        extra = {name: dict(row) for name, row in (self.extra(settings, list(samples)) if self.extra else {}).items()}
        if on_gpu:
            for name in samples:
                seen = extra.setdefault(name, {})
                seen["device_ms"] = sample(race.device_times[name], 1).median * 1e3
                seen["host_ms"] = sample(race.host_times[name], 1).median * 1e3
        return Outcome(
            self.bench,
            self.title + (", cold caches" if settings.cold else ""),
            samples,
            {c.name: c.bytes for c in contenders},
            self.goals,
            settings.quick,
            notes,
            extra,
            settings.max_spread,
        )


More = Callable[[Settings], tuple[str, list[Record]]]
"""A measurement that is not a race: what to print, and records to append."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that the scripts under ``bench/`` share; :func:`settings_of` reads them."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="tiny sizes, few rounds: does it run, not how fast is it")
    made.add_argument("--output", metavar="FILE", help="append the results to FILE, a CSV file")
    made.add_argument("--rounds", type=int, help="rounds of a race (default: set by each case)")
    made.add_argument("--threads", type=int, help="torch.set_num_threads")
    made.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    return made


def settings_of(given: argparse.Namespace) -> Settings:
    """What :func:`parser` has parsed; sets torch's number of threads."""
    if given.threads:
        torch.set_num_threads(given.threads)
    return Settings(given.quick, given.output, given.rounds, given.only)


def arguments(description: str | None, words: Sequence[str] | None = None) -> Settings:
    """The settings of a script that has no options of its own."""
    return settings_of(parser(description).parse_args(words))


def run_all(cases: Mapping[str, Case], description: str | None, more: Mapping[str, More] | None = None) -> None:
    """The main program of a script: every case in turn, printed at once and appended at once."""
    settings = arguments(description)
    run(cases, more or {}, settings)


def run(cases: Mapping[str, Case], others: Mapping[str, More], settings: Settings) -> None:
    """What :func:`run_all` does, for a script that has read its command line itself."""
    found = facts.circumstances(settings.device)
    print(facts.heading(found), flush=True)
    names = [name for name in (*cases, *others) if settings.only in name]
    if not names:
        raise SystemExit(
            f"--only {settings.only}: no case has that in its name; there are {', '.join((*cases, *others))}"
        )
    for name in names:
        if name in cases:
            done = cases[name].run(settings)
            text, records = (f"[{name}] {done.text()}", done.records()) if done else (f"[{name}] left out", [])
        else:
            text, records = others[name](settings)
        print(f"\n{text}", flush=True)
        results.append(settings.output, records, found)
        gc.collect()
