"""What is installed, what was built, which backend each device gets, and what to do about the rest."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from typing import Any

import torch

from . import __version__, dispatch
from .backends import cpu


def collect() -> dict[str, Any]:
    """Everything ``mo-fused doctor`` prints, as one dictionary of plain values."""
    native = dispatch.native()
    advice: list[str] = []
    build = dispatch.build_info() or None
    kernels: dict[str, Any] = {"built": native is not None, "problem": dispatch.native_problem() or None}
    if native is not None:
        isa, problem = cpu.instruction_set()
        kernels |= {"instruction_set": isa, "file": native.__file__}
        if problem:
            advice.append(f"{problem}; using {isa}. Unset MO_FUSED_ISA, or set it to base, avx2 or avx512.")
    else:
        known = build if build and not build.get("native", True) else {}
        reason, remedy = known.get("reason", dispatch.native_problem()), known.get("remedy", dispatch.REMEDY)
        advice.append(f"No native kernels: {reason}. To get them, {remedy}.")
    if dispatch.cuda_problem() and dispatch.is_nvidia():
        advice.append(f"No CUDA kernels: {dispatch.cuda_problem()}. For an NVIDIA GPU, {dispatch.cuda_remedy()}.")
    if dispatch.triton_problem():
        advice.append(f"No Triton kernels: {dispatch.triton_problem()}. For a GPU, {dispatch.TRITON_REMEDY}.")
    try:
        dispatch.requested(None)
    except (ValueError, RuntimeError) as error:
        advice.append(f"MO_FUSED_BACKEND={os.environ.get('MO_FUSED_BACKEND')}: {error}")
        devices = []
    else:
        devices = [dict(zip(("device", "backend", "why"), row, strict=True)) for row in dispatch.device_report()]
    for row in devices:
        if row["backend"] == "torch":
            advice.append(f"{row['device']}: {row['why']}; its parameters are stepped by torch's own optimizer.")
    return {
        "mo_fused": __version__,
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "executable": sys.executable,
        "kernels": kernels,
        "build": build,
        "threads": torch.get_num_threads(),
        "extras": {name: _version(name) for name in ("triton", "tqdm", "PyYAML", "tensorboard", "matplotlib")},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("MO_FUSED_")},
        "devices": devices,
        "advice": advice,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def report(as_json: bool = False) -> str:
    """The text of ``mo-fused doctor``; with ``as_json`` the dictionary of :func:`collect` as JSON."""
    found = collect()
    if as_json:
        return json.dumps(found, indent=2)
    kernels = found["kernels"]
    lines = [
        f"mo_fused {found['mo_fused']}, torch {found['torch']}, numpy {found['numpy']}, Python {found['python']}, "
        f"{found['platform']}",
        f"native kernels: {kernels['instruction_set']} ({kernels['file']})"
        if kernels["built"]
        else f"native kernels: none ({kernels['problem']})",
    ]
    if found["build"]:
        lines.append("build: " + ", ".join(f"{k} {_flat(v)}" for k, v in found["build"].items()))
    lines.append(f"threads: {found['threads']} (torch.get_num_threads())")
    lines.append("extras: " + ", ".join(f"{k} {v or 'not installed'}" for k, v in found["extras"].items()))
    if found["environment"]:
        lines.append("environment: " + ", ".join(f"{k}={v}" for k, v in found["environment"].items()))
    lines += [f"{row['device']}: {row['backend']} ({row['why']})" for row in found["devices"]]
    lines += [f"advice: {line}" for line in found["advice"]] or ["advice: nothing to do"]
    return "\n".join(lines)


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
