"""Machine, versions and commit: what a number means nothing without."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import mo_fused
from mo_fused import dispatch, team
from mo_fused.backends import cpu


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model", "CPU part")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _git(*words: str) -> str:
    """Of the checkout that the package lies in; nothing where it is an installed one."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit() -> str | None:
    # A repository that the package merely lies in, such as one with a virtual environment, is another project's.
    if not _git("ls-files", "facts.py"):
        return None
    commit = _git("rev-parse", "HEAD")
    return commit + ("-dirty" if commit and _git("status", "--porcelain", "--untracked-files=no") else "") or None


def circumstances(device: torch.device | None = None) -> dict[str, Any]:
    """One value for each of :data:`mo_fused.bench.results.FACTS`."""
    native = dispatch.native()
    gpu = torch.cuda.get_device_name(device) if device is not None and dispatch.is_cuda(device) else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": _processor(),
        "cores": team.allowed_cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "gpu": gpu,
        "load": round(os.getloadavg()[0], 2),
        "instruction_set": cpu.instruction_set()[0] if native is not None else None,
        "native_problem": dispatch.native_problem() or None,
        "torch": torch.__version__,
        "mo_fused": mo_fused.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def heading(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, load {facts['load']}, "
        f"kernels: {facts['instruction_set'] or facts['native_problem']}"
        + (f", {facts['gpu']}" if facts["gpu"] else ""),
        f"torch {facts['torch']}, mo_fused {facts['mo_fused']}, Python {facts['python']}, commit {facts['commit']}",
    ]
    if facts["load"] > 0.5:
        lines.append("warning: the machine is busy; medians are only worth something on a quiet one")
    return "\n".join(lines)
