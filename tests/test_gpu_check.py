"""bench/gpu_check.sh on a machine without a GPU: its arithmetic, and that a dry run walks every step."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of bench/, which is no package and not on the path."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module(name)


# docs/design.md and torch's own sources: bytes for one element of a parameter.
BYTES = [
    ("AdamW", "step", 4, 28),
    ("AdamW", "step", 2, 14),
    ("AdamW", "clip inside", 4, 32),
    ("AdamW", "clip inside", 2, 16),
    ("AdamW", "clip before", 4, 40),
    ("AdamW", "clip before", 2, 20),
    ("AdamW", "own scaler, clip inside", 4, 32),
    ("AdamW", "torch's scaler, clip inside", 4, 40),
    ("AdamW", "torch's scaler, clip before", 4, 48),
    ("SGD", "step", 4, 20),
    ("SGD", "clip inside", 4, 24),
    ("SGD", "clip before", 4, 32),
]


@pytest.mark.parametrize(("rule", "how", "size", "expected"), BYTES)
def test_bytes_of_a_step(monkeypatch: pytest.MonkeyPatch, rule: str, how: str, size: int, expected: int) -> None:
    assert load("gpu_figures", monkeypatch).bytes_a_parameter(rule, how, size) == expected


def test_rates_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = load("gpu_figures", monkeypatch)
    rate = figures.gb_per_s(28 * 500_000_000, 0.0035)  # half a billion parameters in 3.5 ms
    assert rate == pytest.approx(4000.0)
    assert figures.share(rate, 4300.0) == pytest.approx(4000 / 4300)
    assert figures.gb_per_s(0.0, 0.0035) is None  # a workload whose bytes say nothing
    assert figures.share(None, 4300.0) is None and figures.share(rate, None) is None
    assert figures.quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert figures.quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_the_table_shows_what_a_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = load("gpu_figures", monkeypatch)
    goal = {"label": "ratio", "limit": 1.25, "at_most": False, "measured": 1.31, "reached": True}
    host = {"label": "host ms", "limit": 1.0, "at_most": True, "measured": 1.4, "reached": False}
    record = {
        "case": "a model, clip + step",
        "dtype": "fp32",
        "contender": "mo_fused",
        "median_ms": 12.34,
        "device_ms": 4.567,
        "host_ms": 0.1234,
        "gb_per_s": 3911.4,
        "share_of_copy": 0.914,
        "ratio_to_torch": 1.3149,
        "goals": [goal, host],
    }
    head, line = figures.table([record]).splitlines()
    assert re.split(" {2,}", head) == list(figures.HEAD)
    cells = ["a model, clip + step", "fp32", "mo_fused", "12.3", "4.57", "0.123", "3911", "91%", "1.31x"]
    assert re.split(" {2,}", line) == [*cells, "ratio >= 1.25 reached, host ms <= 1 MISSED"]
    assert "times say nothing" in figures.table([{**record, "quick": True}])
    assert "no benchmark" in figures.table([])


def test_a_dry_run_walks_every_step(tmp_path: Path) -> None:
    given = {"OUT": str(tmp_path), "PYTHON": sys.executable, "MO_FUSED_GPU_CHECK_PYTHON": sys.executable}
    # A process of its own decides on the interpreter, and on the backend that its few tests run with.
    unset = ("TRITON_INTERPRET", "MO_FUSED_BACKEND", "MO_FUSED_TEST_BACKEND", "MO_FUSED_TEST_DEVICE")
    env = {k: v for k, v in os.environ.items() if k not in unset}
    done = subprocess.run(
        ["bash", str(BENCH / "gpu_check.sh"), "--dry-run"],
        env={**env, **given},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    report = (tmp_path / "report.txt").read_text()
    for name in ("environment", "build", "verify", "bench", "tests"):
        assert f"::: {name} took" in done.stdout
    assert report.count("  ok\n") == 5, report
    for name in ("bits AdamW", "bits SGD momentum", "repeatable", "norms", "scalers"):
        assert f"\nok  {name} (" in report
    for name in ("graphs", "no sync", "streams", "memory", "beyond 32 bits"):
        assert f"\nneeds a GPU  {name}\n" in report
    records = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert {r["dtype"] for r in records} == {"fp32", "bf16"} and all(r["median_ms"] > 0 for r in records)
    (bare, by_torch) = (r for r in records if r["case"] == "GPT-2 tiny, step")
    assert bare["contender"] == "mo_fused" and by_torch["contender"] == "torch fused"
    assert bare["bytes"] == by_torch["bytes"] == 28 * bare["elements"]
    for r in records:
        assert f"{r['case']}  " in report and r["contender"] in report
    suite = ElementTree.parse(tmp_path / "tests.xml").getroot()[0].attrib
    assert int(suite["tests"]) >= 5 and suite["failures"] == suite["errors"] == "0"


def test_wrong_words_are_refused() -> None:
    done = subprocess.run(
        ["bash", str(BENCH / "gpu_check.sh"), "--dry"], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2 and "expected --prepare, --dry-run or nothing" in done.stderr
