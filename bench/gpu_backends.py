"""Which backends the GPU checks, races and tests are about, and why one of them is left out.

Imports mo_fused, and so torch, no sooner than it has to look into it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources

BACKENDS = ("cuda", "triton")
"""Tested in this order: the first is what a GPU gets where it was built."""
CHOICE = "MO_FUSED_BACKEND"
SHIM = "MO_FUSED_TEST_NATIVE"
"""Names a library with the CUDA kernels compiled for the CPU (tests/cuda_shim_library.py), for a dry run with them."""

NO_CUDA = "NO CUDA KERNELS"
"""Begins the line that says so; the report repeats it at its top and at its end."""
NEEDS_A_GPU = "needs a GPU"


def why_not(backend: str, dry: bool) -> str:
    """Why this backend is not tested here; empty when it is."""
    asked = os.environ.get(CHOICE)
    if asked and asked not in BACKENDS:
        raise ValueError(f"{CHOICE}: expected one of {', '.join(BACKENDS)}, found {asked!r}; unset it to test both")
    if asked and asked != backend:
        return f"{CHOICE}={asked} asks for that backend alone"
    if backend != "cuda":
        return ""
    if dry and SHIM not in os.environ:
        return NEEDS_A_GPU
    from mo_fused import dispatch

    if dry:
        return "" if dispatch.cuda_shim() else NEEDS_A_GPU
    if dispatch.cuda_shim():
        return f"{NO_CUDA}: they were compiled for the CPU"
    problem = dispatch.cuda_problem()
    return f"{NO_CUDA}: {problem}{_of_the_build()}" if problem else ""


def _of_the_build() -> str:
    """What the build had to say about it, in brackets."""
    file = resources.files("mo_fused").joinpath("build_info.json")
    info = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    reason, remedy = info.get("cuda_reason"), info.get("cuda_remedy")
    return f" (when it was built: {reason}; {remedy})" if reason else ""


def under_test(dry: bool) -> list[str]:
    """The backends that are tested; says about each of the others why not."""
    found = []
    for backend in BACKENDS:
        reason = why_not(backend, dry)
        if not reason:
            found.append(backend)
        elif reason.startswith(NO_CUDA):
            print(f"{reason}. What follows is about triton alone.", flush=True)
        elif reason == NEEDS_A_GPU:
            print(f"{NEEDS_A_GPU}  {backend}: everything", flush=True)
        else:
            print(f"note: {backend} is left out: {reason}", flush=True)
    return found


@contextmanager
def by_environment(backend: str | None) -> Iterator[None]:
    """MO_FUSED_BACKEND, for what takes no ``backend=`` (the gradient utilities); None: unset."""
    before = os.environ.pop(CHOICE, None)
    try:
        if backend is not None:
            os.environ[CHOICE] = backend
        yield
    finally:
        os.environ.pop(CHOICE, None)
        if before is not None:
            os.environ[CHOICE] = before
