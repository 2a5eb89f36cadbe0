"""Running builds of the package from tests: in a copy of the checkout, without the caller's steering variables."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_VARIABLES = (
    "CXX", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "MAX_JOBS", "MO_FUSED_NATIVE", "MO_FUSED_CUDA", "MO_FUSED_CUDA_ARCHS",
    "NVCC", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS",
)  # fmt: skip
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "*.so", "*.pyc", "build_info.json"
)


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
