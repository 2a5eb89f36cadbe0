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
import torch

from mo_fused import dispatch

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


def test_which_backends_are_tested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    backends = load("gpu_backends", monkeypatch)
    for name in ("MO_FUSED_BACKEND", "MO_FUSED_TEST_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch, "cuda_shim", lambda: False)
    monkeypatch.setattr(dispatch, "cuda_problem", lambda: "")
    assert backends.under_test(dry=False) == ["cuda", "triton"]
    assert capsys.readouterr().out == ""
    assert backends.under_test(dry=True) == ["triton"]
    assert capsys.readouterr().out == "needs a GPU  cuda: everything\n"
    monkeypatch.setattr(dispatch, "cuda_problem", lambda: "no kernels were packed")
    assert backends.under_test(dry=False) == ["triton"]
    said = capsys.readouterr().out
    assert said.startswith("NO CUDA KERNELS: no kernels were packed") and "triton alone" in said
    monkeypatch.setenv("MO_FUSED_BACKEND", "triton")  # asked for: nothing to be loud about
    assert backends.under_test(dry=False) == ["triton"]
    assert capsys.readouterr().out == "note: cuda is left out: MO_FUSED_BACKEND=triton asks for that backend alone\n"
    monkeypatch.setenv("MO_FUSED_BACKEND", "cuda")
    assert backends.under_test(dry=False) == []
    monkeypatch.setenv("MO_FUSED_BACKEND", "eager")
    with pytest.raises(ValueError, match="expected one of cuda, triton, found 'eager'"):
        backends.under_test(dry=False)
    with backends.by_environment("triton"):
        assert os.environ["MO_FUSED_BACKEND"] == "triton"
        with backends.by_environment(None):
            assert "MO_FUSED_BACKEND" not in os.environ
    assert os.environ["MO_FUSED_BACKEND"] == "eager"


def test_a_dry_run_with_the_kernels_compiled_for_the_cpu_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = load("gpu_backends", monkeypatch)
    monkeypatch.delenv("MO_FUSED_BACKEND", raising=False)
    monkeypatch.setenv("MO_FUSED_TEST_NATIVE", "a library")
    monkeypatch.setattr(dispatch, "cuda_shim", lambda: True)
    assert backends.under_test(dry=True) == ["cuda", "triton"]
    # For a GPU they are of no use.
    assert backends.why_not("cuda", dry=False).startswith("NO CUDA KERNELS: they were compiled for the CPU")


def test_the_report_is_loud_about_missing_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = load("gpu_check", monkeypatch)
    lacking = "NO CUDA KERNELS: no nvcc. What follows is about triton alone."
    record = {"case": "a model, step", "dtype": "fp32", "contender": "mo_fused triton", "median_ms": 1.0}
    logs = {
        "verify.log": f"{lacking}\nok  triton: norms (1.0 s): fine\nsome warning\n",
        "bench.log": f"{lacking}\nnote: a copy\n",
        "bench.jsonl": json.dumps(record) + "\n",
        "tests-cuda.log": "not run: NO CUDA KERNELS: no nvcc\n",
        "tests-triton.log": "...\n3 failed, 12 passed in 1.0s\nbye\n",
        "environment.log": "python: 3\n",
    }
    for name, text in logs.items():
        (tmp_path / name).write_text(text)
    assert check.report(tmp_path, ["verify|12|ok", "tests-cuda|1|not run"]) == 0
    text = (tmp_path / "report.txt").read_text()
    lines = text.splitlines()
    assert lines[1] == lines[-2] == lacking and set(lines[0]) == set(lines[-1]) == {"!"}
    assert "\nok  triton: norms" in text and "some warning" not in text
    assert "\ntests with cuda: not run: NO CUDA KERNELS: no nvcc\n" in text
    assert "\ntests with triton: 3 failed, 12 passed in 1.0s\n" in text
    assert text in capsys.readouterr().out


def test_a_race_shows_both_backends_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("gpu_bench", monkeypatch)
    # Two backends of the CPU stand for those of a GPU.
    stage = bench.Stage(torch.device("cpu"), True, ["cpu", "eager"])
    for how, scalers in (("step", [""]), ("clip", [""]), ("scaler", [", its scaler", ", torch's scaler"])):
        case = bench.Case("a model", [(5, 3), (7,)], "fp32", how)
        assert bench.able(case, stage) == ["cpu", "eager"]
        rows = bench.records(case, bench.hold(case, stage, bench.HostClock(), 0.1), 1.0, stage)
        theirs = bench.THEIRS[how]
        assert [r["contender"] for r in rows] == [
            *(f"mo_fused {b}{s}" for b in ("cpu", "eager") for s in scalers),
            theirs,
        ]
        assert [r["backend"] for r in rows] == [*(b for b in ("cpu", "eager") for _ in scalers), None]
        *ours, by_torch = rows
        for r in ours:
            assert r["ratio_to_torch"] == pytest.approx(by_torch["median_ms"] / r["median_ms"])
            assert [g["label"] for g in r["goals"]][0] == "ratio" and r["bytes"] <= by_torch["bytes"]
        assert by_torch["ratio_to_torch"] is None and by_torch["goals"] == []


def test_a_backend_that_does_something_else_does_not_race(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load("gpu_bench", monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = bench.Case("a model", [(5, 3)], "fp32", "step")
    # Without the interpreter the CPU's tensors go to the native kernels, whatever is asked.
    assert bench.able(case, bench.Stage(torch.device("cpu"), True, ["triton", "eager"])) == ["eager"]
    assert "FAILED  a model, step fp32, mo_fused triton: " in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="no backend does what torch's optimizer does"):
        bench.able(case, bench.Stage(torch.device("cpu"), True, ["triton"]))


def test_a_dry_run_walks_every_step(tmp_path: Path) -> None:
    given = {"OUT": str(tmp_path), "PYTHON": sys.executable, "MO_FUSED_GPU_CHECK_PYTHON": sys.executable}
    # A process of its own decides on the interpreter, and on the backend that its few tests run with.
    of_tests = ("MO_FUSED_TEST_BACKEND", "MO_FUSED_TEST_DEVICE", "MO_FUSED_TEST_NATIVE")
    unset = ("TRITON_INTERPRET", "MO_FUSED_BACKEND", *of_tests)
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
    for name in ("environment", "build", "verify", "bench", "tests-cuda", "tests-triton"):
        assert f"::: {name} took" in done.stdout
    assert report.count("  ok\n") == 5, report
    assert re.search(r"\ntests-cuda +\d+ s  not run\ntests-triton +\d+ s  ok\n", report)
    assert "\ntests with cuda: not run: needs a GPU\n" in report
    for name in ("bits AdamW", "bits SGD momentum", "repeatable", "norms", "scalers", "offload"):
        assert f"\nok  triton: {name} (" in report
    for name in ("graphs", "graph with clip", "no sync", "streams", "memory", "beyond 32 bits"):
        assert f"\nneeds a GPU  triton: {name}\n" in report
    for name in ("cuda: everything", "choice"):
        assert f"\nneeds a GPU  {name}\n" in report
    assert "NO CUDA KERNELS" not in report  # of which a dry run has no use
    records = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert {r["dtype"] for r in records} == {"fp32", "bf16"} and all(r["median_ms"] > 0 for r in records)
    (bare, by_torch) = (r for r in records if r["case"] == "GPT-2 tiny, step")
    assert bare["contender"] == "mo_fused triton" and by_torch["contender"] == "torch fused"
    assert bare["bytes"] == by_torch["bytes"] == 28 * bare["elements"]
    for r in records:
        assert f"{r['case']}  " in report and r["contender"] in report
    suite = ElementTree.parse(tmp_path / "tests-triton.xml").getroot()[0].attrib
    assert int(suite["tests"]) >= 5 and suite["failures"] == suite["errors"] == "0"


def test_wrong_words_are_refused() -> None:
    done = subprocess.run(
        ["bash", str(BENCH / "gpu_check.sh"), "--dry"], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2 and "expected --prepare, --dry-run or nothing" in done.stderr
