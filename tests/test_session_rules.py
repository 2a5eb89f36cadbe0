"""The rules of tests/conftest.py: a skip for a reason that is not listed fails, and so does an expected failure."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

SUITE = """
import pytest

def test_runs():
    assert 1 + 1 == 2

def test_listed():
    pytest.skip("needs the listed device, number 7")

def test_listed_exactly():
    pytest.skip("needs exactly this")

def test_not_listed():
    pytest.skip("needs exactly this and more")

@pytest.mark.{mark}(reason="known")
def test_expected_to_fail():
    assert 1 + 1 == 3

@pytest.mark.{mark}(reason="known", strict=False)
def test_expected_to_fail_but_passes():
    assert 1 + 1 == 2
"""


def run_suite(
    folder: Path, run_python: Callable[..., subprocess.CompletedProcess[str]], *more: str
) -> tuple[int, dict[str, int], str]:
    """Runs the suite above under a copy of our conftest; (exit status, outcome counts, output)."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "skip_reasons.txt").write_text("# comment\n\nneeds the listed device*\nneeds exactly this\n")
    (folder / "test_suite.py").write_text(SUITE.format(mark="x" + "fail"))
    done = run_python("-m", "pytest", "-p", "no:cacheprovider", str(folder), *more)
    words = done.stdout.strip().splitlines()[-1].strip("= ").split(" in ")[0].split(", ")
    counts = {name: int(number) for number, name in (word.split(" ") for word in words)}
    return done.returncode, counts, done.stdout


def test_unlisted_skips_and_expected_failures_fail(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    status, counts, text = run_suite(tmp_path, run_python)
    assert status == 1, text
    assert counts == {"failed": 3, "passed": 1, "skipped": 2}, text
    assert "does not list: needs exactly this and more" in text
    assert text.count("expected failures are not allowed here") >= 2


def test_listed_skips_pass(tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    status, counts, text = run_suite(tmp_path, run_python, "-k", "listed and not not_listed")
    assert status == 0, text
    assert counts == {"skipped": 2, "deselected": 4}, text
