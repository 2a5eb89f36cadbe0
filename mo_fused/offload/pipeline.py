"""One part of a step after the other: fetched while the one before is worked on, sent back while the next one is.

A part is fetched into a slot of the ring, updated there, and sent back. A slot is used again when its results have been
sent: the fetch waits for that, not the host.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from .ring import Ring, Slot
from .streams import HostStream, Mark


class Part(Protocol):
    """What one slot of the ring is filled with."""

    def fetch(self, slot: Slot) -> Sequence[Mark]:
        """Starts to bring the operands into the slot."""

    def update(self, slot: Slot) -> None:
        """Updates them."""

    def send(self, slot: Slot) -> Sequence[Mark]:
        """Starts to bring the results back."""


class Parts:
    """Parts in the order in which they were put, as long as more may come."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self.over = False
        """No part will come any more."""

    def put(self, part: Part) -> None:
        self._queue.put(part)

    def close(self) -> None:
        self._queue.put(None)

    def get(self, block: bool) -> Part | None:
        """The next part; None where there is none yet, or no more."""
        try:
            part = self._queue.get(block)
        except queue.Empty:
            return None
        self.over = part is None
        return part


class Pipeline:
    """The ring and who works on it. One step runs at a time."""

    def __init__(self) -> None:
        self.reader = HostStream("read")
        """Reads of files."""
        self.writer = HostStream("write")
        self._ring: Ring | None = None

    def run(self, parts: Parts) -> None:
        """Works until no more parts come. Parts that have not come yet are waited for where there is nothing to do."""
        if self._ring is None:
            self._ring = Ring(pinned=torch.cuda.is_available())
        ring, ahead = self._ring, deque[tuple[Part, Slot, Sequence[Mark]]]()
        try:
            while True:
                while not parts.over and len(ahead) < len(ring.slots):
                    part = parts.get(block=not ahead)
                    if part is None:
                        break
                    slot = ring.next()
                    ahead.append((part, slot, part.fetch(slot)))
                if not ahead:
                    return
                part, slot, marks = ahead[0]
                for mark in marks:
                    mark.wait()
                part.update(slot)
                slot.busy = part.send(slot) or slot.busy
                ahead.popleft()
        finally:
            # Whatever has happened, nothing may still be written into slots when the caller goes on.
            for _, _, marks in ahead:
                for mark in marks:
                    mark.failed()

    def hold(self) -> None:
        """Lets devices wait until all results are there, and the host where memory is its own or a file's."""
        errors = [error for slot in self._slots() for mark in slot.busy if (error := _hold(mark)) is not None]
        for slot in self._slots():
            slot.busy = ()
        if errors:
            raise errors[0]

    def _slots(self) -> Sequence[Slot]:
        return () if self._ring is None else self._ring.slots


def _hold(mark: Mark) -> Exception | None:
    try:
        mark.hold()
    except Exception as error:
        return error
    return None
