"""Builds mo_fused._native with the CUDA kernels compiled for the CPU (csrc/cuda/tests/shim.h), for tests alone."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pybind11

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# Blocks of 64 threads: a fiber for each costs time, and nothing in the kernels depends on their number.
DEFINES = ["-DMO_HAVE_CUDA=1", "-DMO_CUDA_SHIM=1", "-DMO_THREADS=64"]


def _common_flags() -> list[str]:
    lines = (CSRC / "flags.txt").read_text(encoding="utf-8").splitlines()
    return next(line.split()[2:] for line in lines if line.startswith("* ") and line.split()[1] == "common")


def build(folder: Path) -> Path:
    """Compiles everything into ``folder``; the path of the library. Takes about 20 s on two cores."""
    cxx = shlex.split(os.environ.get("CXX", "g++"))
    paths = [pybind11.get_include(), sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    includes = [arg for path in dict.fromkeys(paths) for arg in ("-isystem", path)]
    base = [*cxx, *_common_flags(), "-O1", "-Wno-unknown-pragmas", "-I", str(CSRC), *DEFINES]
    sources: list[tuple[Path, list[str]]] = [(source, includes) for source in sorted(CSRC.glob("*.cpp"))]
    sources += [(source, ["-DMO_ISA=base"]) for source in sorted(CSRC.glob("cpu/*.cpp"))]
    sources += [(source, ["-DMO_ISA=device", "-x", "c++"]) for source in sorted(CSRC.glob("cuda/*.cu"))]
    sources += [(source, []) for source in sorted(CSRC.glob("cuda/tests/*.cpp"))]

    def compile_one(item: tuple[Path, list[str]]) -> str:
        source, extra = item
        out = folder / f"{source.parent.name}_{source.name}.o"
        _run([*base, *extra, "-c", str(source), "-o", str(out)])
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    library = folder / "_native.so"
    _run([*cxx, "-shared", "-pthread", *objects, "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"


def use(library: str) -> ModuleType:
    """Makes it the mo_fused._native of this process; to be called before mo_fused is imported."""
    assert "mo_fused" not in sys.modules
    spec = importlib.util.spec_from_file_location("mo_fused._native", library)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["mo_fused._native"] = module
    return module
