"""Races by the clock of a device: three times of a call, taken in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gpu_figures
import torch
from measure import Contender, Race

CYCLES_A_SECOND = 2e9
"""At most; torch.cuda._sleep counts the clock of the multiprocessors."""
MIN_ROUNDS = 3


@dataclass(frozen=True)
class Slot:
    """Seconds a call."""

    alone: float
    """On a device that was idle before the first call."""
    ahead: float
    """With the host ahead of the device."""
    host: float
    """Until the call returned, on an idle device."""


class HostClock:
    """For the dry run: the CPU's time, of which there is only one."""

    def slot(self, call: Callable[[], Any], calls: int, host_s: float) -> Slot:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        took = (time.perf_counter() - start) / calls
        return Slot(took, took, took)


class DeviceClock:
    """CUDA events around the calls."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def slot(self, call: Callable[[], Any], calls: int, host_s: float) -> Slot:
        """``host_s``: about what one call takes the host."""
        alone, host = self._calls(call, calls, 0.0)
        # Half as long again as the host will take: then no call waits for it on the device.
        ahead, _ = self._calls(call, calls, 1.5 * calls * host_s + 2e-4)
        return Slot(alone, ahead, host)

    def _calls(self, call: Callable[[], Any], calls: int, busy_s: float) -> tuple[float, float]:
        torch.cuda.synchronize()
        if busy_s:
            torch.cuda._sleep(int(busy_s * CYCLES_A_SECOND))
        self._start.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - start
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3 / calls, host / calls


class DeviceRace(Race):
    """A race by a clock of the device; ``times`` are those on an idle device."""

    def __init__(self, contenders: Sequence[Contender], slot_s: float, clock: HostClock | DeviceClock) -> None:
        super().__init__(contenders, slot_s, pause_s=0.0)
        self._clock = clock
        self._host_s: dict[str, float] = {}
        self.host_times: dict[str, list[float]] = {c.name: [] for c in contenders}
        self.device_times: dict[str, list[float]] = {c.name: [] for c in contenders}

    def warm_up(self) -> None:
        for c in self.contenders:
            c.call()
            seen = self._clock.slot(c.call, 1, 0.0)
            self._calls[c.name] = max(1, min(50, int(self._slot_s / max(1e-6, seen.alone))))
            self._host_s[c.name] = seen.host

    def round(self) -> None:
        gc.collect()
        gc.disable()
        try:
            for c in self.contenders:
                seen = self._clock.slot(c.call, self._calls[c.name], self._host_s[c.name])
                self.times[c.name].append(seen.alone)
                self.device_times[c.name].append(seen.ahead)
                self.host_times[c.name].append(seen.host)
        finally:
            gc.enable()
        self.contenders.append(self.contenders.pop(0))

    def run(self, budget_s: float, most: int) -> None:
        """As many rounds as the time allows, between three and ``most``."""
        start, rounds = time.perf_counter(), 0
        while rounds < most and (rounds < min(most, MIN_ROUNDS) or time.perf_counter() - start < budget_s):
            self.round()
            rounds += 1


def copy_rate(device: torch.device, clock: HostClock | DeviceClock, dry: bool) -> float:
    """GB/s of a large copy on the device, bytes read and written both counted."""
    numel = (1 << 12) if dry else (1 << 29)  # 2 GiB: far larger than the caches
    source, target = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    times = [clock.slot(lambda: target.copy_(source), 2, 1e-4).ahead for _ in range(3 if dry else 12)]
    rate = gpu_figures.gb_per_s(8.0 * numel, gpu_figures.quartiles(times[2:])[1])
    assert rate is not None
    return rate
