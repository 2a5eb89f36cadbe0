"""The tests of the optimizers once more, with the CUDA kernels compiled for the CPU (csrc/cuda/tests/shim.h).

The library takes the place of the installed mo_fused._native, so it runs in processes of its own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda_shim_library
import pytest
from shards import SHARDS
from test_triton_suite import outcomes

TESTS = Path(__file__).resolve().parent
# Fewer tests than this in a shard mean that something was deselected, or never collected, that should have run.
AT_LEAST = (1750, 1480)


@pytest.mark.cpu_only(reason="starts the processes that run with the other backend")
def test_the_suite_passes_with_the_cuda_kernels_on_the_cpu(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    library = cuda_shim_library.build(tmp_path)
    env = {"MO_FUSED_TEST_NATIVE": str(library), "MO_FUSED_TEST_BACKEND": "cuda", "OMP_NUM_THREADS": "1"}

    def run(modules: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(TESTS.parent)]
        options += ["-c", str(TESTS.parent / "pyproject.toml")]
        return run_python("-m", "pytest", *options, *(str(TESTS / f"{m}.py") for m in modules), env=env, timeout=900)

    with ThreadPoolExecutor(len(SHARDS)) as pool:
        shards = list(pool.map(run, SHARDS))
    for modules, done, least in zip(SHARDS, shards, AT_LEAST, strict=True):
        end = f"{', '.join(modules)}:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
        counts = outcomes(done.stdout)
        assert done.returncode == 0, end
        assert set(counts) <= {"passed", "deselected", "warnings", "warning"}, end
        assert counts.get("passed", 0) >= least, f"{counts}; expected at least {least} passed in {end}"
