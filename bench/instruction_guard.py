"""Counted instructions of a step against the committed figures: more than 3 % more is an error.

    python bench/instruction_guard.py                  # --check: counts and compares; status 1 if a workload has grown
    python bench/instruction_guard.py --update "why"   # writes the counts to instructions.json and CHANGELOG.md

Instructions are counted by valgrind's callgrind, not timed: load, clock and neighbours of the machine don't matter, and
two runs differ by 0.1 % at most. A count says nothing about memory bandwidth, caches, waiting, or several threads.
Valgrind has no AVX-512, so on x86-64 the kernels for AVX2 are counted; those of GPUs are not.

Counts of the same sources differ with compiler, Python, torch and machine. Those of the committed figures stand beside
them; where they are others here, nothing is compared, which is an error too, unless ``--lenient`` is given. What is
counted is in bench/instruction_workloads.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent
FIGURES, CHANGELOG = BENCH / "instructions.json", BENCH.parent / "CHANGELOG.md"
LIMIT = 0.03
"""Relative growth of one workload that is still accepted; some thirty times what two runs differ by."""
UPDATE = 'python bench/instruction_guard.py --update "why"'
REQUESTS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(void) { CALLGRIND_STOP_INSTRUMENTATION; }
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
void dump(const char* name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


class NotComparable(Exception):
    """Nothing could be counted here, or not what the committed figures are."""


@dataclass(frozen=True)
class Figures:
    fingerprint: dict[str, str]
    """What the counts depend on, beside the sources."""
    instructions: dict[str, int]
    """Of one step, by workload."""

    def sums(self) -> str:
        """As CHANGELOG.md names them."""
        kinds = {"native kernels": "native: ", "host side": "host: "}
        totals = {kind: sum(n for w, n in self.instructions.items() if w.startswith(p)) for kind, p in kinds.items()}
        return ", ".join(f"{kind} {total:,}" for kind, total in totals.items())


def read() -> Figures:
    return Figures(**json.loads(FIGURES.read_text()))


# -- counting ---------------------------------------------------------------------------------------------------------


def run(command: list[str], what: str, cwd: str | None = None, env: dict[str, str] | None = None) -> str:
    """The command's output. ``what`` is what was expected of it.

    Raises:
        NotComparable: it is not there or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    except FileNotFoundError:
        raise NotComparable(f"expected {what}; found no {command[0]}; install it or put it on PATH") from None
    if done.returncode != 0:
        raise NotComparable(f"expected {what}; found status {done.returncode}:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def parse(dump: str) -> tuple[str, int] | None:
    """(workload, instructions) of one of callgrind's dumps; None of the one at the end of the program.

    Not its ``summary``, which is the difference to the dump before and wrong where counting was switched off between.
    """
    name = re.search(r"^desc: Trigger: Client Request: (.*)$", dump, re.MULTILINE)
    total = re.search(r"^totals: (\d+)$", dump, re.MULTILINE)
    return (name[1], int(total[1])) if name and total else None


def count() -> Figures:
    """Runs the workloads under callgrind.

    Raises:
        NotComparable: they cannot be run here.
    """
    if shutil.which("valgrind") is None:
        raise NotComparable(
            "expected valgrind, which counts instructions; found none on PATH; "
            "install it (Debian, Ubuntu: apt-get install valgrind; Fedora: dnf install valgrind-devel)"
        )
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "requests.so")
        Path(folder, "requests.c").write_text(REQUESTS)
        compiler = os.environ.get("CC", "cc").split()
        command = [*compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(Path(folder, "requests.c"))]
        run(command, "a C compiler and valgrind/callgrind.h, which is in valgrind's package or in its -devel")
        # Nothing of the user's settings; the loader's path is what some Pythons need to start.
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        callgrind = ["--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        callgrind += [f"--callgrind-out-file={folder}/dump"]
        printed = run(
            ["valgrind", "-q", *callgrind, sys.executable, str(BENCH / "instruction_workloads.py"), str(library)],
            "the workloads to run under valgrind",
            cwd=folder,
            env={**kept, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )
        found = [parse(file.read_text()) for file in Path(folder).glob("dump.*")]
    told = json.loads(printed.splitlines()[-1])
    totals = dict(entry for entry in found if entry)
    if sorted(totals) != sorted(told["workloads"]) or not all(totals.values()):
        raise NotComparable(f"expected a count of each of {told['workloads']}; found {totals}; see callgrind's manual")
    valgrind = run(["valgrind", "--version"], "valgrind").strip()
    return Figures(
        {**told["fingerprint"], "valgrind": valgrind},
        {name: totals[name] // told["steps"] for name in told["workloads"]},
    )


# -- comparing --------------------------------------------------------------------------------------------------------


def table(committed: Figures, now: Figures) -> str:
    lines = [f"{'instructions of a step':<42} {'committed':>12} {'now':>12} {'change':>9}"]
    for name in {**committed.instructions, **now.instructions}:
        old, new = committed.instructions.get(name), now.instructions.get(name)
        change = f"{new / old - 1:+9.2%}" if old and new else f"{'-':>9}"
        lines.append(f"{name:<42} {old or '-':>12} {new or '-':>12} {change}")
    return "\n".join(lines)


def comparable(committed: Figures, now: Figures) -> None:
    """Raises NotComparable where the figures are of other compilers, versions or machines."""
    old, new = committed.fingerprint, now.fingerprint
    different = [
        f"{key} {old.get(key)!r} (here {new.get(key)!r})" for key in {**old, **new} if old.get(key) != new.get(key)
    ]
    if different:
        raise NotComparable(
            f"expected what the committed figures were counted with; found another: {'; '.join(different)}; "
            "on a machine that is not CI's pass --lenient (INSTRUCTIONS=lenient bash .ci/run); where CI's own have "
            f"changed, commit new figures by {UPDATE}, in a commit that changes nothing else"
        )


def verdict(committed: Figures, now: Figures) -> tuple[list[str], bool]:
    """(what is to be said, whether the guard holds)."""
    old, new = committed.instructions, now.instructions
    if old.keys() != new.keys():
        names = sorted(old.keys() ^ new.keys())
        return [f"expected a committed figure for each workload; found {names} on one side alone; run {UPDATE}"], False
    changes = {name: new[name] / old[name] - 1 for name in old}
    grown = [name for name in old if changes[name] > LIMIT]
    lines = []
    if fewer := [name for name in old if changes[name] < -LIMIT]:
        lines.append(f"fewer instructions than committed: {', '.join(fewer)}; keep what was won by {UPDATE}")
    if grown:
        worst = max(grown, key=changes.__getitem__)
        lines.append(
            f"expected at most {LIMIT:.0%} more instructions than committed; found {changes[worst]:+.2%} in {worst!r}"
            f" ({len(grown)} of {len(old)} workloads are above); find what was added (CONTRIBUTING.md, Instruction "
            f"counts), or, if it is worth that, commit the new figures by {UPDATE}"
        )
    return lines, not grown


# -- committing -------------------------------------------------------------------------------------------------------

ENTRY = re.compile(r"^- Instructions of a step .*\n(?:  .*\n)*", re.MULTILINE)


def with_entry(changelog: str, figures: Figures, why: str) -> str:
    """The changelog with the figures' line at the end of its newest section, in place of the one that is there."""
    text = f"- Instructions of a step (bench/instructions.json): {figures.sums()}; {why}."
    entry = textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) + "\n"
    head, newest, *older = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    newest = ENTRY.sub("", newest).rstrip("\n") + "\n" + entry
    return head + newest + ("\n" if older else "") + "".join(older)


def update(now: Figures, why: str) -> None:
    FIGURES.write_text(json.dumps(asdict(now), indent=1) + "\n")
    CHANGELOG.write_text(with_entry(CHANGELOG.read_text(), now, why.strip().rstrip(".")))
    print(f"written: {FIGURES.name} and in {CHANGELOG.name} {now.sums()}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare with the committed figures (default)")
    action.add_argument("--update", metavar="WHY", help="commit the counts, with the reason for CHANGELOG.md")
    parser.add_argument("--lenient", action="store_true", help="status 0 where counts cannot be compared")
    args = parser.parse_args(arguments)
    if args.update is not None and not args.update.strip():
        parser.error("--update expects the reason for the new figures; found none")
    try:
        now = count()
        committed = read() if FIGURES.exists() else Figures(now.fingerprint, {})
        print(table(committed, now))
        if args.update is not None:
            update(now, args.update)
            if now.fingerprint != committed.fingerprint:
                print("note: they were counted with something else than the figures before; CI has to have the same")
            return 0
        comparable(committed, now)
    except NotComparable as problem:
        print(f"instruction counts cannot be compared: {problem}", file=sys.stderr)
        return 0 if args.lenient else 1
    lines, holds = verdict(committed, now)
    lines = lines or [f"every workload is within {LIMIT:.0%} of its committed figure"]
    print("\n".join(lines), file=sys.stdout if holds else sys.stderr)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
