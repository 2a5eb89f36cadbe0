"""``mo-fused bench``: chooses the races, holds them with a bar of progress, says what they mean."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mo_fused import dispatch
from mo_fused.bench import facts, peers, plot, results, verdict
from mo_fused.bench.case import MAX_SPREAD, Case, More, Outcome, Settings
from mo_fused.bench.picture import new_figure
from mo_fused.bench.results import Record
from mo_fused.training.errors import bad_input

TOO_NOISY = 3
"""Exit status where the machine was too noisy for a verdict."""
SUITES = {
    "step": ("steps", "STEPS"),
    "clip": ("steps", "CLIPS"),
    "amp": ("steps", "AMPS"),
    "adafactor": ("steps", "ADAFACTORS"),
    "memory": ("memory", "MEMORY"),
    "overhead": ("host", "OVERHEAD"),
    "offload": ("offload", "OFFLOAD"),
    "scaling": ("scaling", "SCALING"),
    "threads": ("threads", "THREADS"),
}
"""Module and the name of its cases in it."""
DEFAULT = ("step", "clip")


@dataclass(frozen=True)
class Options:
    """What the command line says; see its help."""

    suites: Sequence[str] = ()
    device: str | None = None
    """None: a GPU where there is one."""
    peers: str | None = None
    quick: bool = False
    only: str = ""
    rounds: int | None = None
    threads: int | None = None
    cold: bool = False
    output: str | None = None
    plot: str | None = None
    max_spread: float = MAX_SPREAD
    compare: Sequence[str] | None = None


def bench(options: Options, say: Callable[[str], Any] = print) -> int:
    """Run the suites, or compare two files of results.

    Returns:
        0, or 3 where a spread was too large for a verdict.

    Raises:
        InputError: an option cannot be honoured; nothing has been measured then.
    """
    if options.compare and _two_files(options.compare):
        return _compare_files(options, say)
    settings = _settings(options)
    if options.plot:
        new_figure("--plot")  # before minutes of measurement, not after
        results.check_folder(options.plot)
    chosen = _chosen(options)
    before = torch.get_num_threads()
    try:
        if options.threads:
            torch.set_num_threads(options.threads)
        return _run(options, settings, chosen, say)
    finally:
        torch.set_num_threads(before)


def _settings(options: Options) -> Settings:
    device = _device(options.device)
    wanted: list[str] | None = None
    if options.compare:
        wanted = peers.wanted_peers("--compare", (n for n in options.compare if not n.lower().startswith(peers.OURS)))
    elif options.peers not in (None, "all"):
        wanted = peers.wanted_peers("--peers", [] if options.peers == "none" else str(options.peers).split(","))
    for name, value, least in (("--rounds", options.rounds, 2), ("--threads", options.threads, 1)):
        if value is not None and value < least:
            raise bad_input(name, expected=f"at least {least}", found=str(value), remedy="give a larger number")
    if not options.max_spread > 0:
        found = str(options.max_spread)
        raise bad_input("--max-spread", expected="a share above 0, such as 0.25", found=found, remedy="give one")
    if options.output:
        results.check(options.output)
    return Settings(
        quick=options.quick,
        output=options.output,
        rounds=options.rounds,
        only=options.only,
        device=device,
        peers=wanted,
        cold=options.cold,
        max_spread=options.max_spread,
    )


def _device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if dispatch.is_cuda(device) and torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count():
        return torch.device("cuda", device.index or 0)
    if dispatch.is_host(device):
        return torch.device("cpu")
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    raise bad_input("--device", expected=f"one of {', '.join(there)}", found=repr(name), remedy="give one of these")


def _suite(name: str) -> Mapping[str, Case | More]:
    """What a suite consists of; its module is loaded when it is asked for."""
    module, attribute = SUITES[name]
    found: Mapping[str, Case | More] = getattr(importlib.import_module(f"mo_fused.bench.{module}"), attribute)
    return found


def _chosen(options: Options) -> dict[str, Case | More]:
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        raise bad_input("SUITE", expected=f"one of {', '.join(SUITES)}", found=unknown[0], remedy="correct the name")
    every = {name: case for suite in options.suites or DEFAULT for name, case in _suite(suite).items()}
    chosen = {name: case for name, case in every.items() if options.only in name}
    if not chosen:
        raise bad_input(
            "--only", expected=f"a part of one of {', '.join(every)}", found=repr(options.only), remedy="correct it"
        )
    return chosen


class _NoBar:
    """Where tqdm is not installed."""

    def __init__(self, say: Callable[[str], Any]) -> None:
        self._say = say

    def update(self) -> None: ...

    def set_description_str(self, text: str) -> None: ...

    def write(self, text: str) -> None:
        self._say(text)


@contextmanager
def _bar(total: int, say: Callable[[str], Any]) -> Iterator[Any]:
    try:
        from tqdm import tqdm
    except ImportError:
        yield _NoBar(say)
        return
    with tqdm(total=total, unit="round", leave=False, disable=None) as bar:
        yield bar


def _run(options: Options, settings: Settings, chosen: dict[str, Case | More], say: Callable[[str], Any]) -> int:
    found = facts.circumstances(settings.device)
    say(facts.heading(found))
    outcomes: list[Outcome] = []
    records: list[Record] = []
    noisy: list[str] = []
    told: set[str] = set()
    total = sum(settings.rounds_of(case.rounds) if isinstance(case, Case) else 1 for case in chosen.values())
    with _concluded(options, outcomes, say), _bar(total, say) as bar:

        def tell(text: str) -> None:
            if text not in told:  # once for all cases
                told.add(text)
                bar.write(text)

        said = replace(settings, says=tell)
        for name, case in chosen.items():
            bar.set_description_str(name)
            if isinstance(case, Case):
                if settings.quick:
                    done = case.run(said, bar.update)
                else:
                    done, notes = alone(case, settings)
                    for note in notes:
                        tell(note)
                    for _ in range(settings.rounds_of(case.rounds)):
                        bar.update()
                if done is None:
                    continue
                outcomes.append(done)
                noisy += [f"{done.case}: {who} ({done.samples[who].spread:.0%})" for who in done.noisy]
                text, rows = done.text(), done.records()
            else:
                text, rows = case(said)
                bar.update()
                noisy += [f"{r['case']}: {r['contender']}" for r in rows if r.get("noisy_points")]
            bar.write(f"\n[{name}] {text}")
            results.append(settings.output, rows, found)
            records += rows
            gc.collect()
    if options.plot and records:
        plot.draw(records, options.plot)
    if noisy:
        say("\n" + _too_noisy(noisy, settings.max_spread))
        return TOO_NOISY
    return 0


def alone(case: Case, settings: Settings) -> tuple[Outcome | None, list[str]]:
    """The race in a process of its own, and what it said.

    Where objects lie in memory decides how fast thousands of small tensors are looked at, and a process that has held
    other races, and compiled for them, has its memory in pieces: there a step took several times as long.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        return child.submit(_in_a_child, case, settings, torch.get_num_threads()).result()


def _in_a_child(case: Case, settings: Settings, threads: int) -> tuple[Outcome | None, list[str]]:
    torch.set_num_threads(threads)
    said: list[str] = []
    return case.run(replace(settings, says=said.append)), said


@contextmanager
def _concluded(options: Options, outcomes: Sequence[Outcome], say: Callable[[str], Any]) -> Iterator[None]:
    """Says at the end what the races mean that were held until then, also after Ctrl-C."""
    try:
        yield
    finally:
        _conclude(options, outcomes, say)


def _conclude(options: Options, outcomes: Sequence[Outcome], say: Callable[[str], Any]) -> None:
    if options.compare:
        lines = [verdict.pair(done, *options.compare) for done in outcomes]
        text = "\n".join(line for line in lines if line)
    else:
        text = verdict.summary(outcomes)
    if text:
        say(f"\n{text}")


def _too_noisy(noisy: Sequence[str], max_spread: float) -> str:
    listed = "\n".join(f"  {line}" for line in noisy)
    return (
        "This machine is too noisy to tell (the middle half of the rounds spreads by more than "
        f"{max_spread:.0%} of the median):\n{listed}\n"
        "Close other programs and run it again, with more --rounds, or accept more with --max-spread."
    )


def _two_files(names: Sequence[str]) -> bool:
    """Whether two files are meant, and not two contenders."""
    files = [name for name in names if Path(name).is_file() or name.endswith(".csv")]
    if len(files) == 1:
        raise bad_input(
            "--compare",
            expected="two files of results, or two contenders",
            found=f"one file, {files[0]}",
            remedy="give two of a kind",
        )
    return bool(files)


def _compare_files(options: Options, say: Callable[[str], Any]) -> int:
    a, b = (results.read(name) for name in options.compare or ())
    found = verdict.compare(a, b, options.max_spread)
    if not found.rows:
        raise bad_input(
            "--compare",
            expected="files that have a case and a contender in common, measured in full",
            found="none",
            remedy="measure the same suites for both",
        )
    say(found.text())
    for note in found.machines:
        say(f"not of one machine: {note}")
    if found.noisy:
        say("\n" + _too_noisy(found.noisy, options.max_spread))
        return TOO_NOISY
    return 0
