"""Work in the background, in order: copies from and to a device, and reads and writes of files.

A stream does what it is given one after the other; a :class:`Mark` says when a piece of work is done, to the host or to
another stream. A GPU has streams of its own. Memory of the host, which stands for a device where there is none, and
files are served by a thread: the same orders, the same marks.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import dispatch, errors

Copy = tuple[Tensor, Tensor]
"""Destination and source, of one shape and dtype."""


class Mark(Protocol):
    """The end of something that a stream was given."""

    def wait(self) -> None:
        """Lets the host wait; raises what the work has raised."""

    def hold(self) -> None:
        """Lets what is launched on the device from now on wait."""

    def failed(self) -> BaseException | None:
        """Waits, and returns what the work has raised."""


class Stream(Protocol):
    """Something that does what it is given in order."""

    def copy(self, copies: Sequence[Copy], after: Sequence[Mark] = ()) -> Mark:
        """Copies after all that this stream was given before, and after ``after``."""


def move(destination: Tensor, source: Tensor) -> None:
    """One copy within the host's memory."""
    if destination.dtype == source.dtype and destination.is_contiguous() and source.is_contiguous():
        # torch would start a team of threads for each thread that copies.
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    else:
        with torch.no_grad():
            destination.copy_(source)


class HostMark:
    """The end of work of a :class:`HostStream`.

    An interrupt (Ctrl-C) of whoever waits may come at any place and leaves no lock taken that a thread needs, which
    cannot be said of what ``threading`` and ``concurrent.futures`` build of locks in Python.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self._done = False
        self._error: BaseException | None = None

    def set(self, error: BaseException | None) -> None:
        """The work is done, or has raised."""
        self._error, self._done = error, True
        self._gate.release()

    def failed(self) -> BaseException | None:
        while not self._done:  # a waiter that was interrupted may have left the gate closed
            if self._gate.acquire(timeout=0.1):
                self._gate.release()
        return self._error

    def wait(self) -> None:
        error = self.failed()
        if error is not None:
            raise error

    hold = wait


class HostStream:
    """A thread that works in order. It is started by the first work, and again in a forked child."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = 0
        self._work: SimpleQueue[_Work]

    def run(self, work: Callable[[], None], after: Sequence[Mark] = ()) -> HostMark:
        """Does ``work`` when its turn has come and ``after`` is over."""
        if self._process != os.getpid():
            queue: SimpleQueue[_Work] = SimpleQueue()
            self._work = queue
            # Not to be cut off in the middle of native code, as daemons are: see _finish_all.
            thread = threading.Thread(target=_work_off, args=(queue,), name=f"mo_fused-{self._name}_0", daemon=True)
            _finish_at_exit()
            thread.start()
            _threads[thread] = (self._name, queue)
            weakref.finalize(self, queue.put, None)
            self._process = os.getpid()
        mark = HostMark()
        self._work.put((work, after, mark))
        return mark

    def copy(self, copies: Sequence[Copy], after: Sequence[Mark] = ()) -> HostMark:
        def work() -> None:
            for destination, source in copies:
                move(destination, source)

        return self.run(work, after)


_Work = tuple[Callable[[], None], Sequence[Mark], HostMark] | None
_threads: weakref.WeakKeyDictionary[threading.Thread, tuple[str, SimpleQueue[_Work]]] = weakref.WeakKeyDictionary()
STEPS = "step"
"""The name of streams whose work gives work to others."""


def _work_off(queue: SimpleQueue[_Work]) -> None:
    while (item := queue.get()) is not None:
        work, after, mark = item
        try:
            for before in after:
                before.wait()
            work()
        except BaseException as error:
            mark.set(error)
        else:
            mark.set(None)
        del item, work, after, mark  # what they refer to must not live until the next work comes


@cache
def _finish_at_exit() -> None:
    """Registered last, which is run first: before finalizers close the file that a thread may still write to."""
    atexit.register(_finish_all)


def _finish_all() -> None:
    """At the end of the process: what was begun is finished, while threads can still run."""
    for steps in (True, False):  # the others still serve them
        ending = [(thread, queue) for thread, (name, queue) in list(_threads.items()) if (name == STEPS) == steps]
        for _, queue in ending:
            queue.put(None)
        for thread, _ in ending:
            thread.join()


class DeviceMark:
    """The end of work of a :class:`DeviceStream`."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def wait(self) -> None:
        self.event.synchronize()

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def failed(self) -> BaseException | None:
        try:
            self.wait()
        except Exception as error:  # of the device
            return error
        return None


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Whoever waits for it leaves the core to the kernels.
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class DeviceStream:
    """A stream of a GPU for copies in one direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, copies: Sequence[Copy], after: Sequence[Mark] = ()) -> DeviceMark:
        for mark in after:
            if isinstance(mark, DeviceMark):
                self._stream.wait_event(mark.event)
            else:
                mark.wait()
        with torch.cuda.stream(self._stream), torch.no_grad():
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
                # Whoever frees one of them gives its memory back to the stream that it was made on.
                for tensor in (destination, source):
                    if not dispatch.is_cpu(tensor):
                        tensor.record_stream(self._stream)
        return DeviceMark(_event(self._stream), self._device)


class Lanes:
    """The two directions of copies between the host and one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        host = dispatch.is_host(device)
        self.down: Stream = HostStream("down") if host else DeviceStream(device)
        """From the device to the host."""
        self.up: Stream = HostStream("up") if host else DeviceStream(device)
        self._host = host

    def now(self) -> Sequence[Mark]:
        """The end of what the caller has launched on the device so far."""
        if self._host:
            return ()
        return (DeviceMark(_event(torch.cuda.current_stream(self.device)), self.device),)

    def hold(self) -> None:
        """Lets what is launched on the device from now on wait for all copies to it."""
        self.up.copy(()).hold()


def host_memory(size: int, pinned: bool) -> Tensor:
    """Bytes of the host, of which a GPU copies without waiting where they are pinned.

    torch's own pinned memory comes in powers of two, up to twice what was asked for, so ordinary memory is registered.
    """
    if not pinned or not size:
        return torch.empty(size, dtype=torch.uint8)
    # Whole pages of its own: two registrations cannot have one in common.
    pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(pages, dtype=np.uint8)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if status := int(runtime.cudaHostRegister(memory.ctypes.data, memory.size, 0)):
        raise errors.offload_pinned(size, status)
    # Of the array, which goes before its pages do; the end of the process needs none of this.
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data).atexit = False
    return torch.from_numpy(memory)[:size]
