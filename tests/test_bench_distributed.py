"""The benchmark of norms over DTensors runs and writes what it found."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mo_fused.bench import results

pytestmark = pytest.mark.cpu_only(reason="a benchmark of the CPU's backends, in processes of its own")

BENCH = Path(__file__).resolve().parent.parent / "bench" / "bench_distributed.py"


def test_quick_run(tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    file = tmp_path / "results.csv"
    done = run_python(str(BENCH), "--quick", "--only", "clip_grad_norm_", "--output", str(file))
    assert done.returncode == 0, done.stderr[-3000:]
    records = results.read(file)
    assert [r["contender"] for r in records] == ["torch", "mo_fused", "all-reduce"] * 2
    assert all(r["median_ms"] > 0 and r["quick"] for r in records)
    assert "goal at least 5.00x" in done.stdout
