"""Between Adafactor's first and second pass: row and column means of runs of matrices, and their inverse roots.

Formula: csrc/cpu/factors_kernel.cpp; everything in float64, rounded once to the compute type.
Reference: mo_fused/reference.py, factored_roots.
Bytes per row or column of a matrix: 4 read a tile it lies in, 4 read and 8 written, and of rows 8 read once more
  (float64: twice as much).
Assumes of the table: the norms of every tile; row scalars prepared by the finish; one program a run.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import F64, toward
from ._tile import (
    BATCH,
    COL_NORMS,
    GRID_COLS,
    GRID_ROWS,
    MATRIX_COLS,
    MATRIX_ROWS,
    MEANS,
    NORMS,
    WHOLE_COLS,
    WHOLE_ROWS,
    matrices_of,
    numbers,
)

RUN_WORDS = tl.constexpr(4)
SMALL = tl.constexpr(32)  # of matrices of at most so many rows each has a lane


@triton.jit
def averages(mean, norms, index, here, grid, pitch, coef, length, added, rest):
    """New running means of the squares along rows (or columns), from what ``grid`` tiles found of each."""
    sums = tl.zeros(index.shape, tl.float64)
    for k in range(grid):
        norm = tl.load(norms + k * pitch + index, mask=here, other=0.0).to(tl.float64) * coef
        sums += norm * norm
    old = tl.load(mean + index, mask=here, other=0.0)
    return toward(old.to(tl.float64), sums / length + added, rest).to(old.dtype)


@triton.jit
def mean_of_rows(means, matrix, batch, known, own, coef, added, rest):
    """New mean of the row means of matrices: where ``known`` from the whole's old one and squares, else ``own``."""
    at = t.doubles(means) + matrix
    old = tl.load(at, mask=known, other=0.0)
    square = tl.load(at + batch, mask=known, other=0.0)
    return tl.where(known, toward(old, square * coef * coef + added, rest), own)


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["rows", "runs", "row_scalars", "stats"])
def factors_kernel(
    rows: tl.int64,
    runs: tl.int64,
    row_scalars: tl.int64,
    stats: tl.int64,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """WIDE: works on runs of float64 parameters, else on all others; a program of another kind does nothing."""
    COMPUTE: tl.constexpr = tl.float64 if WIDE else tl.float32
    run = t.words(runs) + tl.program_id(0).to(tl.int64) * RUN_WORDS
    row_index = tl.load(run)
    row = t.row_at(rows, row_index)
    mine = ((tl.load(row + t.DTYPES) & 0xFF) == F64) == WIDE
    skipped = tl.load(t.doubles(stats) + t.SKIPPED) != 0.0
    if mine & ((t.flags_of(row) & t.ACTIVE) != 0) & (skipped == 0):
        first = tl.load(run + 1)
        count = tl.load(run + 2).to(tl.int32)
        view = matrices_of(row)
        batch = tl.load(view + BATCH)
        stride = tl.load(view + MATRIX_ROWS)
        height = stride.to(tl.int32)
        width = tl.load(view + MATRIX_COLS).to(tl.int32)
        norms = numbers(tl.load(view + NORMS), COMPUTE)
        of_rows = norms + first * height
        of_cols = norms + tl.load(view + COL_NORMS) + first * width
        row_var = numbers(tl.load(row + t.STATE0), COMPUTE) + first * height
        col_var = numbers(tl.load(row + t.STATE1), COMPUTE) + first * width
        long = tl.load(view + WHOLE_ROWS).to(tl.float64)  # what is averaged
        wide = tl.load(view + WHOLE_COLS).to(tl.float64)
        means = tl.load(view + MEANS)
        s = t.doubles(row_scalars) + row_index * t.SCALARS
        coef = tl.load(s)
        rest = tl.load(s + 3)
        added = tl.load(s + 4)
        floor = tl.load(s + 5)
        lane = tl.arange(0, BLOCK)

        grid = tl.load(view + GRID_ROWS)
        for i in range(0, count * width, BLOCK):
            here = i + lane < count * width
            mean = averages(col_var, of_cols, i + lane, here, grid, batch * width, coef, long, added, rest)
            tl.store(col_var + i + lane, mean, mask=here)
            tl.store(of_cols + i + lane, (1.0 / tl.sqrt(mean.to(tl.float64))).to(COMPUTE), mask=here)

        grid = tl.load(view + GRID_COLS)
        if height <= SMALL:
            for i in range(0, count * height, BLOCK):
                here = i + lane < count * height
                mean = averages(row_var, of_rows, i + lane, here, grid, batch * height, coef, wide, added, rest)
                tl.store(row_var + i + lane, mean, mask=here)
            tl.debug_barrier()  # other threads of the block have written what is read now
            for i in range(0, count, BLOCK):
                here = i + lane < count
                sums = tl.zeros((BLOCK,), tl.float64)
                for k in range(height):
                    sums += tl.load(row_var + (i + lane) * height + k, mask=here, other=0.0).to(tl.float64)
                sums = sums / height.to(tl.float64)
                known = i + lane < tl.where(means != 0, count, 0)
                sums = mean_of_rows(means, first + i + lane, batch, known, sums, coef, added, rest)
                root = tl.sqrt(tl.where(sums < floor, floor, sums))
                for k in range(height):
                    at = (i + lane) * height + k
                    mean = tl.load(row_var + at, mask=here, other=1.0).to(tl.float64)
                    tl.store(of_rows + at, (root / tl.sqrt(mean)).to(COMPUTE), mask=here)
        else:
            for m in range(count):
                mean_at = row_var + m * stride
                norms_at = of_rows + m * stride
                sums = tl.zeros((BLOCK,), tl.float64)
                for i in range(0, height, BLOCK):
                    here = i + lane < height
                    mean = averages(mean_at, norms_at, i + lane, here, grid, batch * height, coef, wide, added, rest)
                    tl.store(mean_at + i + lane, mean, mask=here)
                    sums += tl.where(here, mean.to(tl.float64), 0.0)
                total = tl.sum(sums) / height.to(tl.float64)
                total = mean_of_rows(means, first + m, batch, means != 0, total, coef, added, rest)
                root = tl.sqrt(tl.where(total < floor, floor, total))
                tl.debug_barrier()
                for i in range(0, height, BLOCK):
                    here = i + lane < height
                    mean = tl.load(mean_at + i + lane, mask=here, other=1.0).to(tl.float64)
                    tl.store(norms_at + i + lane, (root / tl.sqrt(mean)).to(COMPUTE), mask=here)
