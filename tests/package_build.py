"""Running builds of the package from tests: in a copy of the checkout, without the caller's steering variables."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
BUILD_VARIABLES = (
    "CXX", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "MAX_JOBS", "MO_FUSED_NATIVE", "MO_FUSED_CUDA", "MO_FUSED_CUDA_ARCHS",
    "NVCC", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS",
)  # fmt: skip
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "*.so", "*.pyc", "build_info.json"
)


NO_NVCC = "no nvcc of CUDA 12.4 or newer here"


@cache
def setup_functions() -> ModuleType:
    """setup.py as a module: it runs setup() only as a program."""
    spec = importlib.util.spec_from_file_location("mo_fused_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def machine_nvcc() -> list[str] | None:
    """The machine's own nvcc, if it is new enough; whether it works is for the tests to see."""
    setup = setup_functions()
    for candidate in setup.nvcc_candidates():
        release = setup.nvcc_release(setup.attempt([*candidate, "--version"])[1])
        if release and release[1] >= (12, 4):
            return list(candidate)
    return None


def copy_of_checkout(folder: Path) -> Path:
    """A tree to build in, so that nothing is written into the checkout."""
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=NOT_SOURCE))


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with none of the variables that steer a build, except those given; without CUDA unless asked for.

    CUDA kernels take longest to compile, so only tests whose subject they are build them.
    """
    kept = {name: value for name, value in os.environ.items() if name not in BUILD_VARIABLES}
    return subprocess.run(
        command,
        cwd=folder,
        env={**kept, "MO_FUSED_CUDA": "0", **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
