"""How Adafactor sees parameters: as matrices, cut into tiles whose norms of rows and columns go to a scratch.

A parameter of two or more dimensions is ``batch`` matrices of its last two; any other is a vector. Tiles are a function
of the shapes alone, so no sum depends on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .distributed.factored import Whole

FACTORED = np.dtype(
    [(n, "i8") for n in ("batch", "rows", "cols", "factored")]
    + [("norms", "u8")]
    + [(n, "i8") for n in ("col_norms", "grid_rows", "grid_cols", "whole_rows", "whole_cols", "whole_numel")]
    + [("means", "u8"), ("whole", "u8"), ("reserved", "u8", (3,))]
)
TILE = np.dtype([(n, "i8") for n in ("rows", "cols", "row_norms", "col_norms")])

COLUMN_STEP = 16
"""Tiles begin at columns that are multiples of it."""


_FACTORS_OF_A_RUN = 2048


def _rounded_up(elements: int) -> int:
    """So that the norms of columns can be read 16 bytes at a time."""
    return -(-elements // COLUMN_STEP) * COLUMN_STEP


@dataclass(frozen=True)
class Limits:
    """The largest tiles of a backend."""

    rows: int
    cols: int
    together: int
    """Whole matrices share a tile of about this many elements; vectors are cut at it."""


HOST = Limits(rows=1024, cols=2048, together=1 << 18)


def device_limits(elements: int, chunk: int) -> Limits:
    """Tiles for a device: small enough for all of its multiprocessors, and not many more than 4096 in all.

    The norms of the smallest take 0.9 % of bf16 parameters.
    """
    rows = 384
    while elements > 4096 * rows * 512:
        rows *= 2
    return Limits(rows=rows, cols=512, together=chunk)


class Tiling:
    """Tiles of all rows of a table.

    Args:
        shapes: of the parameters.
        item_sizes: bytes of an element of each parameter's compute type.
        limits: of the backend that works on them.
        wholes: what each parameter is a part of, None where it is whole.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        item_sizes: Sequence[int],
        limits: Limits,
        wholes: Sequence[Whole | None] | None = None,
    ) -> None:
        n = len(shapes)
        self.wholes = [None] * n if wholes is None else list(wholes)
        self.item_sizes = item_sizes
        self.factored = np.zeros(n, dtype=FACTORED)
        starts: list[np.ndarray[Any, Any]] = []
        tiles: list[np.ndarray[Any, Any]] = []
        self.scratch_bytes = 0
        self.norms_at = np.zeros(n, dtype=np.int64)
        """Where the norms of each row are in the scratch, and """
        self.means_at, self.whole_at = np.full((2, n), -1, dtype=np.int64)
        """of parts of larger parameters what the whole's Factored says; -1: nothing. All in bytes."""
        for i, (shape, size) in enumerate(zip(shapes, item_sizes, strict=True)):
            start, tile = self._row(self.factored[i], shape, limits)
            starts.append(start)
            tiles.append(tile)
            self.norms_at[i] = self.scratch_bytes
            f = self.factored[i]
            norms = int(f["col_norms"] + f["grid_rows"] * f["batch"] * f["cols"]) if f["factored"] else 0
            self.scratch_bytes += -(-norms * size // 64) * 64
            self._of_whole(i, shape)
        self.counts = np.array([len(t) for t in tiles], dtype=np.int64)
        self.start = np.concatenate([*starts, np.zeros(0, dtype=np.int64)])
        self.tiles = np.concatenate([*tiles, np.zeros(0, dtype=TILE)])
        self.length = self.tiles["rows"] * self.tiles["cols"]

    def place(self, scratch: int) -> None:
        """Writes where the norms of each row go, in a scratch of ``scratch_bytes`` at this address."""
        self.factored["norms"] = self.norms_at + scratch
        for name, at in (("means", self.means_at), ("whole", self.whole_at)):
            self.factored[name] = np.where(at < 0, 0, at + scratch)

    def _of_whole(self, i: int, shape: tuple[int, ...]) -> None:
        f, whole = self.factored[i], self.wholes[i]
        full = shape if whole is None else whole.shape
        f["whole_numel"] = math.prod(full)
        f["whole_rows"], f["whole_cols"] = full[-2:] if f["factored"] else (1, f["whole_numel"])
        if whole is None:
            return
        self.whole_at[i] = self.scratch_bytes
        self.scratch_bytes += 64
        if whole.of_columns is not None:
            self.means_at[i] = self.scratch_bytes
            self.scratch_bytes += -(-16 * int(f["batch"]) // 64) * 64

    def runs_of_matrices(self) -> np.ndarray[Any, Any]:
        """Matrices whose factors are made together: (row, first matrix, number of matrices, 0), shape ``(n, 4)``."""
        runs: list[np.ndarray[Any, Any]] = [np.zeros((0, 4), dtype=np.int64)]
        for row, f in enumerate(self.factored):
            # A part without elements has means too, if the whole has.
            lines = f["rows"] + f["cols"]
            if not f["factored"] or f["batch"] * lines * f["whole_rows"] * f["whole_cols"] == 0:
                continue
            together = max(1, _FACTORS_OF_A_RUN // int(lines))
            first = np.arange(0, f["batch"], together, dtype=np.int64)
            count = np.minimum(together, f["batch"] - first)
            runs.append(np.stack([np.full_like(first, row), first, count, np.zeros_like(first)], axis=1))
        return np.concatenate(runs)

    @staticmethod
    def _row(f: Any, shape: tuple[int, ...], limits: Limits) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        if len(shape) < 2:
            numel = math.prod(shape)
            f["batch"], f["rows"], f["cols"], f["grid_rows"], f["grid_cols"] = 1, 1, numel, 1, 1
            start = np.arange(0, numel, limits.together, dtype=np.int64)
            tiles = np.zeros(len(start), dtype=TILE)
            tiles["rows"], tiles["cols"] = 1, np.minimum(limits.together, numel - start)
            return start, tiles
        *outer, rows, cols = shape
        batch = math.prod(outer)
        f["batch"], f["rows"], f["cols"], f["factored"] = batch, rows, cols, 1
        if batch * rows * cols == 0:
            f["grid_rows"] = f["grid_cols"] = 1
            f["col_norms"] = _rounded_up(batch * rows)
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=TILE)
        if rows <= limits.rows and cols <= limits.cols:
            f["grid_rows"] = f["grid_cols"] = 1
            f["col_norms"] = _rounded_up(batch * rows)
            whole = max(1, limits.together // (rows * cols))
            first = np.arange(0, batch, whole, dtype=np.int64)
            tiles = np.zeros(len(first), dtype=TILE)
            tiles["rows"], tiles["cols"] = np.minimum(whole, batch - first) * rows, cols
            tiles["row_norms"], tiles["col_norms"] = first * rows, f["col_norms"] + first * cols
            return first * rows * cols, tiles
        grid_cols = -(-cols // limits.cols)
        width = -(-cols // (grid_cols * COLUMN_STEP)) * COLUMN_STEP
        grid_cols = -(-cols // width)
        grid_rows = -(-rows // limits.rows)
        height = -(-rows // grid_rows)
        grid_rows = -(-rows // height)
        f["grid_rows"], f["grid_cols"] = grid_rows, grid_cols
        f["col_norms"] = _rounded_up(grid_cols * batch * rows)
        b, i, j = (x.reshape(-1) for x in np.mgrid[0:batch, 0:grid_rows, 0:grid_cols])
        tiles = np.zeros(len(b), dtype=TILE)
        tiles["rows"] = np.minimum(height, rows - i * height)
        tiles["cols"] = np.minimum(width, cols - j * width)
        tiles["row_norms"] = j * batch * rows + b * rows + i * height
        tiles["col_norms"] = f["col_norms"] + i * batch * cols + b * cols + j * width
        return (b * rows + i * height) * cols + j * width, tiles
