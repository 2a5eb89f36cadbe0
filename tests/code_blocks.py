"""The fenced code blocks of README.md and of docs/: what they are, and how those in Python are run."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mo_fused.cli import main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ENVIRONMENT = ("MO_FUSED_BACKEND", "MO_FUSED_NATIVE")
"""What a reader has not set, and a test that runs a block must not have set either."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the line of its first code line, and the code."""

    language: str
    line: int
    code: str
    before: str  # the last line with text before the fence
    prints: str | None  # the ``text`` block right after it

    def __str__(self) -> str:
        return f"line_{self.line}"

    def run(self, file: Path, namespace: dict[str, Any]) -> None:
        """Runs the code; a failure names the page and the line in it."""
        exec(compile("\n" * (self.line - 1) + self.code, str(file), "exec"), namespace)


def blocks(text: str) -> list[Block]:
    """The blocks of a page in their order. A ``text`` block right after one in Python is what that one prints."""
    found: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        end = lines.index("```", at + 1)
        before = next((line for line in reversed(lines[:at]) if line.strip()), "")
        block = Block(lines[at][3:], at + 2, "\n".join(lines[at + 1 : end]) + "\n", before, None)
        if block.language == "text" and before == "```" and found[-1].language != "text" and found[-1].prints is None:
            last = found.pop()
            block = Block(last.language, last.line, last.code, last.before, block.code)
        found.append(block)
        at = end + 1
    return found


_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


def why_not_run(block: Block) -> str | None:
    """The reason in the comment before a block of docs/ that is not run; None for those that are."""
    found = _NOT_RUN.fullmatch(block.before)
    return None if found is None else found[1]


def run_page(name: str) -> None:
    """Runs the blocks of a page of docs/ in their order, in one namespace and in the present folder.

    On one thread: the tensors are small, and further threads would only wait for each other.
    """
    namespace: dict[str, Any] = {"__name__": "docs"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for block in blocks((DOCS / name).read_text(encoding="utf-8")):
            if why_not_run(block) is None:
                _run(block, DOCS / name, namespace)
    finally:
        torch.set_num_threads(threads)


def _run(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    if block.language == "console":
        _run_console(block)
    elif block.language == "python":
        with redirect_stdout(io.StringIO()) as printed:
            block.run(page, namespace)
        assert block.prints in (None, printed.getvalue()), (block, printed.getvalue())


def _run_console(block: Block) -> None:
    """``$`` lines are commands. Lines below one are among those that it prints, in that order (``...`` is skipped)."""
    for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        program, *arguments = shlex.split(command)
        assert program == "mo-fused", f"{block}: {command}"
        with redirect_stdout(io.StringIO()) as printed:
            assert main(arguments) == 0, f"{block}: {command}"
        rest = iter(printed.getvalue().splitlines())
        missing = [line for line in shown if line != "..." and line not in rest]
        assert not missing, f"{block}: {command} does not print {missing} there, but {printed.getvalue()}"


def pages() -> list[Path]:
    """Every page of docs/, without what a build has left there."""
    return sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
