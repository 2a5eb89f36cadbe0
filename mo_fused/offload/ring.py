"""The bounded buffers that parameters, gradients and states of a file pass through on their way to a step and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .streams import Mark, host_memory

SLOTS = 3
"""One piece is worked on while others come and go."""
SLOT_BYTES = 32 << 20
"""Of a piece, unless a single tensor that cannot be cut is larger."""
ALIGNMENT = 64


class Slot:
    """Memory of the host for the operands of one piece."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = host_memory(0, False)
        self.busy: Sequence[Mark] = ()
        """What still reads the results of the piece that was here before."""

    def take(self, size: int) -> Tensor:
        """At least this many bytes. What is there may still be read: write after ``busy``."""
        if self._memory.numel() < size:
            for mark in self.busy:
                mark.wait()
            self._memory = host_memory(0, False)  # before the new one is there
            self._memory = host_memory(size, self._pinned)
        return self._memory


class Ring:
    """The slots, in turn."""

    def __init__(self, pinned: bool) -> None:
        self.slots = [Slot(pinned) for _ in range(SLOTS)]
        self._turn = -1

    def rewind(self) -> None:
        """All slots are free: the first ones are used again, and a short step needs no more than it did."""
        self._turn = -1

    def next(self) -> Slot:
        """The slot that was used longest ago."""
        self._turn = (self._turn + 1) % len(self.slots)
        return self.slots[self._turn]
