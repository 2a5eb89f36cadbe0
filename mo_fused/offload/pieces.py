"""How the offloaded rows of a table are cut into pieces, each of which fits into a slot of the ring.

A piece is a run of chunks: a part of a large parameter, or many small ones. A parameter that cannot be cut is a piece
of its own: Adafactor's, whose sums are over all of it; one that does not lie as its gradient does; all of the eager
backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..table import CHUNK_ELEMENTS, Table
from ..team import useful_threads
from . import ring

if TYPE_CHECKING:
    from ..optim.planning import Row

_BATCHES = 64
"""Of a piece, so that threads that are late find work of others."""


@dataclass(frozen=True)
class Operand:
    """Something of a row that passes through the ring."""

    place: int
    """The Operand of csrc/abi.h, or the place of a scale."""
    key: str
    """ "param", "grad", or the slot of a state in a file."""
    size: int
    """Bytes of the whole."""
    elements: int

    def bytes_of(self, elements: int) -> int:
        """Bytes of the first elements of the row."""
        return elements * self.size // self.elements


@dataclass(frozen=True)
class OffloadedRow:
    """A row of the table whose state is offloaded."""

    index: int
    row: Row
    operands: tuple[Operand, ...]
    staged: bool
    """Parameter and gradient pass through the ring; otherwise kernels work on their own memory."""
    can_be_cut: bool
    """Pieces may be parts of it."""

    def span(self, operand: Operand, start: int, count: int) -> tuple[int, int]:
        """The bytes of an operand that belong to some elements; all of it where the row is not cut."""
        return (operand.bytes_of(start), operand.bytes_of(start + count)) if self.can_be_cut else (0, operand.size)


@dataclass(frozen=True)
class Segment:
    """A run of elements of a row, and where its operands are in the slot, in bytes."""

    of: OffloadedRow
    start: int
    count: int
    offsets: tuple[int, ...]


@dataclass
class Piece:
    """What one slot is filled with."""

    segments: list[Segment] = field(default_factory=list)
    size: int = 0
    first_chunk: int = 0
    last_chunk: int = 0
    batches: Any = None
    threads: int = 1
    """As many as it is worth."""


def cut(rows: Sequence[OffloadedRow], table: Table) -> list[Piece]:
    """The pieces of these rows, in the order of the table."""
    builder = _Builder()
    for of in rows:
        numel = of.row.param.numel()
        if not numel and of.row.backend != "eager":  # which counts its step
            continue
        builder.begin(of)
        if not of.can_be_cut:
            builder.add(of, 0, numel)
            continue
        start = 0
        while start < numel:
            start += builder.add(of, start, builder.room(of, numel - start))
    pieces = builder.end()
    first, chunks = table.rows["first_chunk"], table.rows["chunks"]
    length = table.chunks["length"].astype(np.int64)
    for piece in pieces:
        head, tail = piece.segments[0], piece.segments[-1]
        piece.first_chunk = int(first[head.of.index]) + head.start // CHUNK_ELEMENTS
        whole = tail.start + tail.count == tail.of.row.param.numel()
        ends = int(chunks[tail.of.index]) if whole else (tail.start + tail.count) // CHUNK_ELEMENTS
        piece.last_chunk = int(first[tail.of.index]) + ends
        sizes = length[piece.first_chunk : piece.last_chunk]
        elements = int(sizes.sum())
        batch = (np.cumsum(sizes) - sizes) // max(CHUNK_ELEMENTS, elements // _BATCHES)
        edges = piece.first_chunk + 1 + np.flatnonzero(np.diff(batch))
        piece.batches = np.concatenate([[piece.first_chunk], edges, [piece.last_chunk]]).astype(np.int32)
        piece.threads = useful_threads(elements, len(sizes))
    return pieces


class _Builder:
    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._open = Piece()

    def begin(self, of: OffloadedRow) -> None:
        """A row that does not go with those of the open piece, or cannot be cut and does not fit, gets a new one."""
        segments = self._open.segments
        if not segments:
            return
        other = segments[-1].of
        size = sum(_aligned(o.size) for o in of.operands)
        if of.row.measured_by != other.row.measured_by or (
            not of.can_be_cut and self._open.size + size > ring.SLOT_BYTES
        ):
            self._close()

    def room(self, of: OffloadedRow, most: int) -> int:
        """How many elements of a row the open piece takes, at least a chunk; a new one is opened where it is full."""
        for _ in range(2):
            left = ring.SLOT_BYTES - self._open.size - ring.ALIGNMENT * len(of.operands)
            numel, size = of.row.param.numel(), sum(o.size for o in of.operands)
            chunks = left * numel // size // CHUNK_ELEMENTS if size else most
            if size * most <= left * numel:
                return most
            if chunks > 0:
                return min(most, int(chunks) * CHUNK_ELEMENTS)
            if not self._open.segments:
                break
            self._close()
        return min(most, CHUNK_ELEMENTS)

    def add(self, of: OffloadedRow, start: int, count: int) -> int:
        """Adds a run of elements to the open piece; how many."""
        at, offsets = self._open.size, []
        for operand in of.operands:
            offsets.append(at)
            first, last = of.span(operand, start, count)
            at += _aligned(last - first)
        self._open.segments.append(Segment(of, start, count, tuple(offsets)))
        self._open.size = at
        return count

    def end(self) -> list[Piece]:
        self._close()
        return self._pieces

    def _close(self) -> None:
        if self._open.segments:
            self._pieces.append(self._open)
        self._open = Piece()


def _aligned(size: int) -> int:
    return -(-size // ring.ALIGNMENT) * ring.ALIGNMENT
