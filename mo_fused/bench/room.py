"""Does a workload fit: free memory of a device."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from mo_fused import dispatch
from mo_fused.bench.case import Settings
from mo_fused.bench.workloads import Workload

OPERANDS = 10
"""Parameter, gradient, two moments, and room for a copy or two of each by peers that make temporaries."""


def free_bytes(device: torch.device) -> float:
    """Memory that can be had; infinite where the system does not say."""
    if dispatch.is_cuda(device):
        torch.cuda.empty_cache()  # what torch keeps for later can be had too
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return math.inf
    return next(
        (float(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable:")), math.inf
    )


def too_large(workload: Workload, settings: Settings) -> str:
    """Why a workload is not measured on this device; empty where it is."""
    if settings.quick:
        return ""
    if workload.cuda_only and not dispatch.is_cuda(settings.device):
        return "is for GPUs"
    needs = OPERANDS * sum(math.prod(s) for s in workload.shapes) * workload.dtype.itemsize
    free = free_bytes(settings.device)
    return f"needs about {needs / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free" if needs > free else ""
