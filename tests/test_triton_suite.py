"""The tests of the optimizers once more, with the Triton backend, in Triton's interpreter.

The interpreter has to be chosen before Triton is imported, so each shard of modules (tests/shards.py) has a process.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shards import SHARDS

TESTS = Path(__file__).resolve().parent
# Fewer tests than this in a shard mean that something was deselected, or never collected, that should have run.
AT_LEAST = (1500, 1260)


def outcomes(output: str) -> dict[str, int]:
    """Counts of the last line of a quiet run: {"passed": 12, "deselected": 3, ...}."""
    lines = output.strip().splitlines()
    if not lines or " in " not in lines[-1]:
        return {}
    words = [word.split(" ") for word in lines[-1].strip("= ").split(" in ")[0].split(", ")]
    return {word[1]: int(word[0]) for word in words if len(word) == 2 and word[0].isdigit()}


@pytest.mark.cpu_only(reason="starts the processes that run with the other backend")
def test_the_suite_passes_in_tritons_interpreter(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    def run(modules: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return run_python(
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(TESTS.parent),
            "-c",
            str(TESTS.parent / "pyproject.toml"),
            *(str(TESTS / f"{name}.py") for name in modules),
            env={"TRITON_INTERPRET": "1", "MO_FUSED_TEST_BACKEND": "triton", "OMP_NUM_THREADS": "1"},
            timeout=1200,
        )

    with ThreadPoolExecutor(len(SHARDS)) as pool:
        shards = list(pool.map(run, SHARDS))
    for modules, done, least in zip(SHARDS, shards, AT_LEAST, strict=True):
        end = f"{', '.join(modules)}:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
        counts = outcomes(done.stdout)
        assert done.returncode == 0, end
        assert set(counts) <= {"passed", "deselected", "warnings", "warning"}, end
        assert counts.get("passed", 0) >= least, f"{counts}; expected at least {least} passed in {end}"


def test_outcomes_are_read_from_the_last_line() -> None:
    text = "....\nslow\n3 failed, 12 passed, 1 deselected, 2 warnings in 83.40s (0:01:23)\n"
    assert outcomes(text) == {"failed": 3, "passed": 12, "deselected": 1, "warnings": 2}
    assert outcomes("") == {} and outcomes("no summary") == {}
