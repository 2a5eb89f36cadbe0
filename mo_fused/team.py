"""How many threads share a step on the host.

Waking a thread costs some 10 us on a quiet machine, and 100 us on a busy or a virtual one, whatever it then finds to
do. So one is woken for each :data:`ELEMENTS_PER_THREAD` of work beyond those that the calling thread does itself; never
more than torch's number of threads, than the cores that this process may use, and than there are batches.
"""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

import torch

ELEMENTS_PER_THREAD = 1 << 17
"""At least so many for each thread, the calling one included: in fp32 2 MB of operands, from the caches some 30 us of
AdamW with clipping, from memory some 200 us."""
CHUNK_COST = 128
"""What a chunk costs on top of its elements, in elements: it matters where tensors are tiny."""
BATCHES_PER_THREAD = 8
"""At least, where there is so much work: threads that end at different times wait for at most an eighth of theirs."""


def useful_threads(elements: int, chunks: int) -> int:
    """How many threads are worth waking for this work, the calling one included."""
    return max(1, (elements + CHUNK_COST * chunks) // ELEMENTS_PER_THREAD)


def team_size(useful: int, batches: int, threads: int | None = None) -> int:
    """How many threads take part in a step now.

    Args:
        useful: by :func:`useful_threads`.
        batches: runs of chunks, which a thread takes one at a time.
        threads: at most; by default torch's number, which is one of the calling thread.
    """
    most = min(useful, batches, torch.get_num_threads() if threads is None else threads)
    return 1 if most <= 1 else min(most, allowed_cores())


def allowed_cores() -> int:
    """Cores that this process may use, at least 1: by its affinity, and by the CPU quota of its control groups.

    torch counts neither what ``set_num_threads`` asks for beyond the affinity, nor a quota: a container with two of 64
    cores has 64 threads by default, which use up the quota of a period at once and stand still for the rest of it.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, _quota()))


@cache
def _quota() -> int:
    return cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


def cpu_quota(membership: Path, groups: Path) -> int:
    """The smallest CPU quota of a process's control groups in whole cores, rounded up; a large number for none.

    Args:
        membership: as ``/proc/self/cgroup`` (cgroups(7)), lines of hierarchy, controllers and path.
        groups: where the hierarchies are mounted. Of version 2 the files ``cpu.max``, of version 1
            ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` below ``cpu``.
    """
    found = [float(1 << 20)]
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / "cpu" if controllers else groups
        inner = root / path.strip("/")
        # A path from outside of the container is not there; the container's own group is the root then.
        for folder in (inner, *inner.parents):
            found += _quota_of(folder)
            if folder == root:
                break
    return max(1, math.ceil(min(found)))


def _quota_of(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        return [float(quota) / float(period)] if quota not in ("max", "-1") else []
    except (OSError, ValueError, ZeroDivisionError):
        return []
