"""One part of a step after the other: fetched while the one before is worked on, sent back while the next one is.

A part is fetched into a slot of the ring, updated there, and sent back. A slot is used again when its results have been
sent: the fetch waits for that, not the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from .. import dispatch
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
    """Parts that wait for their turn. One thread adds, another one takes."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._parts = deque(parts)

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, parts: Iterable[Part]) -> None:
        self._parts.extend(parts)

    def take(self) -> Part:
        return self._parts.popleft()

    def clear(self) -> None:
        self._parts.clear()

    def wait(self, most: int) -> None:
        """Waits until at most so many are left. An interrupt must leave no lock taken, so it looks again and again."""
        while len(self._parts) > most:
            time.sleep(0.0005)


class Pipeline:
    """The ring and who works on it. One step runs at a time."""

    def __init__(self) -> None:
        self.reader = HostStream("read")
        """Reads of files."""
        self.writer = HostStream("write")
        self._ring: Ring | None = None

    def run(self, parts: Parts) -> None:
        """Works until there are no more parts. Somebody else may add some meanwhile."""
        if self._ring is None:
            self._ring = Ring(pinned=dispatch.has_gpu())
        ring, ahead = self._ring, deque[tuple[Part, Slot, Sequence[Mark]]]()
        try:
            while parts or ahead:
                while parts and len(ahead) < len(ring.slots):
                    part, slot = parts.take(), ring.next()
                    ahead.append((part, slot, part.fetch(slot)))
                part, slot, marks = ahead[0]
                for mark in marks:
                    mark.wait()
                part.update(slot)
                slot.busy = part.send(slot) or slot.busy
                ahead.popleft()
        except BaseException:
            # Nothing may still be written to slots or to parameters when the caller goes on.
            for marks in (*(marks for _, _, marks in ahead), *(slot.busy for slot in ring.slots)):
                for mark in marks:
                    mark.failed()
            for slot in ring.slots:
                slot.busy = ()
            raise

    def hold(self) -> None:
        """Lets devices wait until all results are there, and the host where memory is its own or a file's."""
        if self._ring is None:
            return
        slots = self._ring.slots
        errors = [error for slot in slots for mark in slot.busy if (error := _hold(mark)) is not None]
        for slot in slots:
            slot.busy = ()
        self._ring.rewind()
        if errors:
            raise errors[0]


def _hold(mark: Mark) -> Exception | None:
    try:
        mark.hold()
    except Exception as error:
        return error
    return None
