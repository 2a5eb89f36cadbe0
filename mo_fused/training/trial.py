"""What a trial run is watched with: losses, times, peak memory."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mo_fused.dispatch import is_cuda
from mo_fused.training.deferred import Deferred

WARM_UP = 3
"""First steps that times leave out: memory is allocated in them, kernels are chosen and workers start."""


class Watch:
    """A monitor that notes every step's loss and the time from one step to the next.

    Losses are read one step late, so the host is never ahead of the device by more than a step and the times are the
    device's too.

    Args:
        inner: the monitor that is told besides; if it raises, training goes on and ``error`` says what it was.
    """

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner
        self.told = 0
        """Steps that the inner monitor has taken."""
        self.error: str | None = None
        self.infos: list[Mapping[str, Any]] = []
        self.aside = 0.0
        """Seconds since the last step that are not the step's; whoever spends them adds them."""
        self._losses: list[Deferred] = []
        self._ends: list[float] = []
        self._asides: list[float] = []

    def step(self, loss: Tensor, batch_info: Mapping[str, Any]) -> None:
        self._losses.append(Deferred({"loss": loss}))
        if len(self._losses) > 1:
            self._losses[-2].read()
        self.infos.append(batch_info)
        now = time.perf_counter()
        self._ends.append(now)
        self._asides.append(self.aside)
        self.aside = 0.0
        if self.inner is None:
            return
        try:
            self.inner.step(loss, {**batch_info, "trial": True})
            self.told += 1
        except Exception as error:
            where = f"step {batch_info['step']}: {type(error).__name__}: {error}"
            self.error = where if self.error is None else self.error

    def flush(self) -> None:
        """Passed on, as the trainer does before a checkpoint."""
        if self.inner is not None and hasattr(self.inner, "flush"):
            try:
                self.inner.flush()
            except Exception as error:
                self.error = f"flush: {type(error).__name__}: {error}" if self.error is None else self.error

    @property
    def losses(self) -> list[float]:
        return [loss.read()["loss"] for loss in self._losses]

    def seconds(self) -> list[float]:
        """Seconds of each step after the first few (of all but the first where there are no more)."""
        steps = zip(self._ends, self._ends[1:], self._asides[1:], strict=False)
        times = [end - begin - aside for begin, end, aside in steps]
        return times[WARM_UP - 1 :] or times

    def samples_per_second(self) -> float | None:
        """The median over the steps that :meth:`seconds` counts."""
        times = self.seconds()
        if not times:
            return None
        samples = [int(info["samples"]) for info in self.infos[-len(times) :]]
        return statistics.median(n / max(t, 1e-9) for n, t in zip(samples, times, strict=True))


def peak_rate(group: Mapping[str, Any]) -> float:
    """The highest rate that a parameter group is to have, as far as its schedule has written it down."""
    return max(float(group[key]) for key in ("lr", "initial_lr", "max_lr") if key in group)


def reset_peak(device: torch.device) -> None:
    """Begin to measure peak memory anew: of the device, or of this process on the host where Linux allows it."""
    if is_cuda(device):
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # then the peak is that of the process's whole life
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes: what tensors on the CUDA device took at most, or what this process had in memory at most (VmHWM)."""
    return int(torch.cuda.max_memory_allocated(device)) if is_cuda(device) else host_peak()


def host_peak() -> int:
    """Bytes that this process had in memory at most."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; the CPU's allocator reports it as any RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def readable_bytes(count: float) -> str:
    """With a unit, to three digits or so."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def readable_seconds(seconds: float) -> str:
    """From milliseconds to hours."""
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
