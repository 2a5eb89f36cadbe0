"""Interleaved measurement: all contenders take turns in one run, so that whatever the machine does meanwhile, it does
to all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mo_fused import dispatch

CYCLES_A_SECOND = 2e9
"""At most; torch.cuda._sleep counts the clock of the multiprocessors."""
EVICTED_BYTES = 1 << 28
"""Written before each call of a race with cold caches: more than the last-level cache of any processor of today."""


@dataclass(frozen=True)
class Contender:
    name: str
    call: Callable[[], Any]
    bytes: float = 0.0
    """What one call has to read and write by its own algorithm; 0 where that says nothing."""


@dataclass(frozen=True)
class Sample:
    """Seconds a call."""

    median: float
    low: float
    high: float
    """First and third quartile."""
    rounds: int
    calls: int

    @property
    def spread(self) -> float:
        """The middle half of the rounds, as a share of the median."""
        return (self.high - self.low) / self.median


def sample(times: Sequence[float], calls: int) -> Sample:
    """Median and quartiles of seconds a call, one entry a round."""
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return Sample(quartiles[1], quartiles[0], quartiles[2], len(times), calls)


@dataclass(frozen=True)
class Slot:
    """Seconds a call."""

    alone: float
    """On a device that was idle before the first call."""
    ahead: float
    """With the host ahead of the device."""
    host: float
    """Until the call returned, on an idle device."""


class Clock(Protocol):
    def slot(self, call: Callable[[], Any], calls: int, host_s: float) -> Slot: ...


class HostClock:
    """The CPU's time, of which there is only one."""

    def slot(self, call: Callable[[], Any], calls: int, host_s: float) -> Slot:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        took = (time.perf_counter() - start) / calls
        return Slot(took, took, took)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DeviceClock:
    """CUDA events around the calls."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._start, self._end = (_event() for _ in range(2))

    def slot(self, call: Callable[[], Any], calls: int, host_s: float) -> Slot:
        """``host_s``: about what one call takes the host."""
        with torch.cuda.device(self._device):
            alone, host = self._calls(call, calls, 0.0)
            # Half as long again as the host will take: then no call waits for it on the device.
            ahead, _ = self._calls(call, calls, 1.5 * calls * host_s + 2e-4)
        return Slot(alone, ahead, host)

    def _calls(self, call: Callable[[], Any], calls: int, busy_s: float) -> tuple[float, float]:
        torch.cuda.synchronize()
        if busy_s:
            torch.cuda._sleep(int(busy_s * CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
        self._start.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - start
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3 / calls, host / calls


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if dispatch.is_cuda(device) else HostClock()


class Race:
    """Contenders that take turns; the order rotates, so that none always follows the same one.

    Args:
        slot_s: a contender is called until this long has passed: far above the clock's and the scheduler's grain.
        clock: of the device that the contenders work on.
        pause_s: before each slot: OpenMP's threads spin for some milliseconds after their work, and shall not do so
            in the next contender's.
        most: calls in a slot, at most.
        cold: the caches are emptied before each call, which is then the only one of its slot.
        says: told of a contender that raises, which is then out of the race; None: its error is raised, as that of the
            first contender is in any case.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        slot_s: float,
        clock: Clock | None = None,
        pause_s: float = 0.01,
        most: int = 1_000_000,
        cold: torch.device | None = None,
        says: Callable[[str], Any] | None = None,
    ) -> None:
        self.contenders = list(contenders)
        self._first, self._says = self.contenders[0], says
        self._slot_s, self._pause_s, self._most = slot_s, pause_s, most
        self._clock: Clock = clock or HostClock()
        self._calls: dict[str, int] = {}
        self._host_s: dict[str, float] = {}
        self._evicted = None if cold is None else torch.zeros(EVICTED_BYTES // 4, device=cold)
        names = [c.name for c in self.contenders]
        self.times: dict[str, list[float]] = {name: [] for name in names}
        """Seconds a call on an idle device, one entry a round."""
        self.device_times: dict[str, list[float]] = {name: [] for name in names}
        self.host_times: dict[str, list[float]] = {name: [] for name in names}

    def warm_up(self) -> None:
        """Two calls each (state, code, caches), then how many calls fill a slot."""
        for c in list(self.contenders):
            with self._dropped_if_it_raises(c):
                c.call()
                c.call()
        for c in list(self.contenders):
            with self._dropped_if_it_raises(c):
                seen = self._clock.slot(c.call, 1, 0.0)
                fill = int(self._slot_s / max(1e-7, seen.alone))
                self._calls[c.name] = 1 if self._evicted is not None else max(1, min(self._most, fill))
                self._host_s[c.name] = seen.host

    @contextmanager
    def _dropped_if_it_raises(self, c: Contender) -> Iterator[None]:
        """One that fails, in its compiler say, costs the others' results nothing."""
        try:
            yield
        except Exception as error:
            if self._says is None or c is self._first:
                raise
            line = (str(error).strip().splitlines() or [""])[0][:200]
            self._says(f"{c.name} is out of the race: {type(error).__name__}: {line}")
            self.contenders.remove(c)
            for times in (self.times, self.device_times, self.host_times):
                times.pop(c.name)

    def round(self) -> None:
        """One slot for every contender."""
        gc.collect()
        gc.disable()
        try:
            for c in list(self.contenders):
                if self._evicted is not None:
                    self._evicted.add_(1.0)
                time.sleep(self._pause_s)
                with self._dropped_if_it_raises(c):
                    seen = self._clock.slot(c.call, self._calls[c.name], self._host_s[c.name])
                    self.times[c.name].append(seen.alone)
                    # The second pass of a slot finds what the first has left in the caches.
                    self.device_times[c.name].append(seen.ahead if self._evicted is None else seen.alone)
                    self.host_times[c.name].append(seen.host)
        finally:
            gc.enable()
        self.contenders.append(self.contenders.pop(0))

    def samples(self) -> dict[str, Sample]:
        return {name: sample(times, self._calls[name]) for name, times in self.times.items()}


class DeviceRace(Race):
    """With as many rounds as a time allows, at least three."""

    def __init__(self, contenders: Sequence[Contender], slot_s: float, clock: Clock) -> None:
        super().__init__(contenders, slot_s, clock, pause_s=0.0, most=50)

    def run(self, budget_s: float, most: int) -> None:
        start, rounds = time.perf_counter(), 0
        while rounds < most and (rounds < min(most, 3) or time.perf_counter() - start < budget_s):
            self.round()
            rounds += 1
