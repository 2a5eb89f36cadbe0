"""README.md's figures, from the files of results: every number in its blocks of figures is computed here.

    python bench/report.py            writes the blocks of README.md anew
    python bench/report.py --check    says what would change, and fails where something would
    python bench/report.py --plot DIR draws the races of each file of results: times over ours, a PNG for each bench

A block stands between ``<!-- figures:NAME -->`` and ``<!-- figures:end -->``, and is what bench/readme/NAME.md.j2 makes
of bench/results/*.csv. A template begins with ``{% set cpu = results("cpu-2-cores") %}``, which is a
:class:`figures.Figures`: the newest records of that file. Results are appended with ``--output`` of whatever measures.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import figures
import formats_table
import suite_tables
from figures import Figures, subject
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mo_fused.bench import results
from mo_fused.training.errors import InputError, bad_input

BENCH = Path(__file__).resolve().parent
README, TEMPLATES, RESULTS = BENCH.parent / "README.md", BENCH / "readme", BENCH / "results"
BLOCK = re.compile(r"<!-- figures:(?!end )(\S+) -->\n(.*?)<!-- figures:end -->", re.DOTALL)
ENDING, WIDTH = ".md.j2", 120
HELPERS = (
    figures.short,
    figures.times,
    figures.percent,
    figures.span,
    figures.one_in,
    formats_table.formats_table,
    formats_table.below_torch,
    suite_tables.scaling_table,
    suite_tables.threads_table,
)


def templates(folder: Path = TEMPLATES) -> dict[str, Path]:
    """By the name of their block."""
    return {path.name.removesuffix(ENDING): path for path in sorted(folder.glob(f"*{ENDING}"))}


def environment(folder: Path = TEMPLATES, files: Path = RESULTS) -> Environment:
    """What templates are rendered in; a file of results is read when it is first asked for."""
    read: dict[str, Figures] = {}

    def of(name: str) -> Figures:
        if name not in read:
            read[name] = Figures(files / f"{name}.csv")
        return read[name]

    made = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    made.globals |= {"results": of, **{helper.__name__: helper for helper in HELPERS}}
    return made


def rendered(text: str, made: Environment) -> str:
    """``text`` with its blocks of figures made anew.

    Raises:
        InputError: a block has no template, or a template asks for what was not measured.
    """
    there = made.list_templates()

    def block(found: re.Match[str]) -> str:
        name = found[1]
        if f"{name}{ENDING}" not in there:
            raise bad_input(
                f"README.md, block figures:{name}",
                expected=f"one of {', '.join(t.removesuffix(ENDING) for t in there)}",
                found=repr(name),
                remedy=f"write bench/readme/{name}{ENDING}, or correct the name",
            )
        content = filled(made.get_template(f"{name}{ENDING}").render())
        return f"<!-- figures:{name} -->\n{content}\n<!-- figures:end -->"

    return BLOCK.sub(block, text)


def filled(text: str) -> str:
    """Paragraphs filled to the width of a line, since numbers differ in length; tables are left alone."""
    parts = [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    return "\n\n".join(part if part.startswith("|") else _paragraph(part) for part in parts)


def _paragraph(text: str) -> str:
    """Code stays on one line, so that it can be copied and found."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    return textwrap.fill(whole, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def difference(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), "README.md", "from the results")
    return "".join(lines)


def plot(folder: Path, files: Path = RESULTS) -> list[Path]:
    """A PNG for each bench of each file that has races."""
    from mo_fused.bench.plot import draw

    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for file in sorted(files.glob("*.csv")):
        found = Figures(file)
        for bench in dict.fromkeys(r["bench"] for r in results.read(file)):
            # Ours first, as the bars are multiples of the first one's.
            cases = [found.race(bench, case) for case in found.cases(bench)] if found.has(bench) else []
            races = [r for race in cases for r in (subject(race), *(r for r in race if r is not subject(race)))]
            if sum(bool(r["median_ms"]) for r in races) > 1:
                drawn.append(folder / f"{file.stem}-{bench}.png")
                draw(races, drawn[-1])
    return drawn


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where README.md would change")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="draw the results into this folder; needs Matplotlib")
    given = parser.parse_args(words)
    try:
        if given.plot is not None:
            print("\n".join(str(path) for path in plot(given.plot)))
            return 0
        old = README.read_text(encoding="utf-8")
        new = rendered(old, environment())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if given.check:
        sys.stdout.write(difference(old, new))
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
