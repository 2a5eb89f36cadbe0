"""The pages of docs/ are true: they build without a warning, their code runs, what they name and quote is there."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from code_blocks import DOCS, ENVIRONMENT, ROOT, Block, blocks, pages, run_page, why_not_run

from mo_fused.cli import build_parser

pytestmark = pytest.mark.cpu_only(reason="pages and their examples speak of the machine that builds them")

PAGES = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in pages()}
BLOCKS = {name: blocks(text) for name, text in PAGES.items()}
RUN = ("python", "console")
OWN_PROCESS = {"distributed.md"}
"""Pages that make a process group, which no other test should find."""
REASONS = {"installs packages", "needs a script of yours", "needs several processes", "takes minutes"}
"""Why a block may stay unrun: no other reason, and each is used."""


def test_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "1", "-b", "html"]
    built = subprocess.run([*command, DOCS, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert built.returncode == 0, built.stderr
    menu = (tmp_path / "index.html").read_text(encoding="utf-8")
    for name in PAGES:
        page = tmp_path / Path(name).with_suffix(".html")
        assert page.is_file() and page.relative_to(tmp_path).as_posix() in menu, f"{name} is in no table of contents"


@pytest.mark.parametrize("name", [name for name, found in BLOCKS.items() if any(b.language in RUN for b in found)])
def test_code_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    for variable in ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    if name in OWN_PROCESS:
        here = Path(__file__).parent
        code = f"import sys; sys.path.append({str(here)!r}); import code_blocks; code_blocks.run_page({name!r})"
        found = run_python("-c", code, env={"CUDA_VISIBLE_DEVICES": ""})
        assert found.returncode == 0, found.stderr[-3000:]
    else:
        monkeypatch.chdir(tmp_path)
        run_page(name)


def test_every_block_is_run_or_says_why_not() -> None:
    """Languages that are run; ``sh`` and whatever else cannot be run carry a reason; ``text`` shows a message."""
    unrun: dict[str, str] = {}
    for name, found in BLOCKS.items():
        for block in found:
            if block.language.startswith("{") or block.language == "text":  # a directive; see test_messages
                continue
            why = why_not_run(block)
            assert block.language in RUN or why is not None, f"{name}, {block}: no reason why it is not run"
            if why is not None:
                unrun[f"{name}, {block}"] = why
    assert set(unrun.values()) == REASONS, unrun


def test_commands_that_are_not_run_are_valid() -> None:
    shell = [line for found in BLOCKS.values() for b in found if b.language == "sh" for line in b.code.splitlines()]
    commands = [shlex.split(line)[1:] for line in shell if line.startswith("mo-fused ")]
    assert commands
    for arguments in commands:
        assert build_parser().parse_args(arguments).program == f"mo-fused {arguments[0]}"


@cache
def strings() -> str:
    """All string literals of the sources (those of an f-string cut where values stand), with single spaces."""
    found = [(ROOT / "csrc" / "cpu" / "select.cpp").read_text(encoding="utf-8")]
    for file in [ROOT / "setup.py", *(ROOT / "mo_fused").rglob("*.py")]:
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        found += [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\0".join(" ".join(text.split()) for text in found)


def unsaid(part: str) -> str:
    """What is left of a message after as many pieces of the sources' strings as there are; "" if it is made of them."""
    while part := re.sub(r"^(?:expected|found)?[\s.;:,()]*", "", part):
        size = next((n for n in range(len(part), 7, -1) if part[:n] in strings()), 0)
        if size == 0 and part not in strings():
            return part
        part = part[size or len(part) :]
    return ""


QUOTED = [(name, b) for name, found in BLOCKS.items() for b in found if b.language == "text"]


@pytest.mark.parametrize(("name", "block"), QUOTED, ids=str)
def test_messages_are_those_of_the_sources(name: str, block: Block) -> None:
    """``...`` stands for what differs; everything else is made of strings in the sources."""
    parts = " ".join(block.code.split()).split("...")
    assert [rest for part in parts if (rest := unsaid(part))] == []


def test_quoted_words_are_those_of_the_sources() -> None:
    """The messages in the table of troubleshooting.md, and the faults in that of monitoring.md."""
    quoted = re.findall(r'^\| "(.+?)" \|', PAGES["troubleshooting.md"], re.MULTILINE)
    assert len(quoted) >= 7
    assert [rest for text in quoted for part in text.split("…") if (rest := unsaid(part))] == []
    faults = re.findall(r"`([a-z0-9]+ [a-z0-9 ]+|diverged|over-fitting)`", PAGES["monitoring.md"])
    assert len(faults) >= 15 and [fault for fault in faults if f"\0{fault}\0" not in strings()] == []


def test_places_of_a_new_optimizer() -> None:
    """In the tables of new_optimizer.md: the first cell names files, the second what stands in them."""
    rows = re.findall(r"^\| `([\w.]+/[\w./]+)` \| (.+?) \|", PAGES["new_optimizer.md"], re.MULTILINE)
    assert len(rows) >= 20
    for file, names in rows:
        text = (ROOT / file).read_text(encoding="utf-8")
        found = re.findall(r"`([\w.]+)`", names)
        assert found and [one for one in found if one not in text] == [], (file, names)


MOMENTS = {"None": 4, '"fp32"': 8, '"bf16"': 4, '"int8"': 2 + 8 / 256, '"int4"': 1 + 8 / 128}
RESTS = {"None": 0, '"stochastic"': 0, '"split8"': 1, '"split"': 2, '"kahan"': 2, '"fp32"': 4}
"""Bytes of an element of a bf16 weight; the pages' own code holds the same numbers against real states."""


def test_tables_of_bytes() -> None:
    rows = re.findall(r"^\| `(\S+?)` \| `(\S+?)` \| ([\d.]+) \| ([\d.]+) \|", PAGES["memory.md"], re.MULTILINE)
    assert len(rows) == 9
    for rest, moments, total, released in rows:
        expected = round(4 + RESTS[rest] + MOMENTS[moments], 2)
        assert (float(total), float(released)) == (expected, round(expected - 2, 2)), (rest, moments)
    for page, share in (("adamw", 1.0), ("sgd", 0.5)):
        text = PAGES[f"optimizers/{page}.md"]
        rows = re.findall(r"^\| (`\S+`(?:, `\S+`)*) \| ((?:[\d.]+ \| ?)+)$", text, re.MULTILINE)
        assert len(rows) == 4
        for rests, cells in rows:
            found = [float(cell) for cell in cells.split("|")[:4]]
            for rest in re.findall(r"`(\S+?)`", rests):
                kept = [MOMENTS[name] * share + RESTS[rest] for name in ("None", '"fp32"', '"int8"', '"int4"')]
                assert found == [round(value, 2) for value in kept], (page, rest)


def test_the_hosted_build_installs_the_extra() -> None:
    """.readthedocs.yaml names the packages by itself, because installing the extra would bring torch along."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = re.findall(r'"(.+?)"', re.findall(r"^docs = \[(.+)\]$", pyproject, re.MULTILINE)[0])
    hosted = (ROOT / ".readthedocs.yaml").read_text(encoding="utf-8")
    assert f"pip install {' '.join(packages)}\n" in hosted
    assert all(part in hosted for part in ("configuration: docs/conf.py", "fail_on_warning: true"))


def test_sections_of_other_files_exist() -> None:
    """Sphinx checks the links between pages; these lead to headings of README.md and of other files beside docs/."""
    links = [(n, *m) for n, text in PAGES.items() for m in re.findall(r"\]\((\.\./[^)#]+\.md)#([\w-]+)\)", text)]
    outside = [(n, f, a) for n, f, a in links if not (DOCS / n).parent.joinpath(f).resolve().is_relative_to(DOCS)]
    assert outside
    for name, file, anchor in outside:
        text = (DOCS / name).parent.joinpath(file).read_text(encoding="utf-8")
        heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, (name, anchor)
