"""Adafactor's second pass over every tile: sum of squares of the update before it is limited. Of a vector the second
moment, which is kept element by element, is brought up to date as well.

Formula: _rules.py, factored_update and vector_moment. Reference: mo_fused/reference.py, bit for bit.
Bytes per element: matrices read the gradient (fp32 4, 16 bits 2, fp64 8); vectors also read and write the moment, 4 + 4
  (float64: 8 + 8).
Assumes of the table: inverse roots in the scratch of the norms; row scalars prepared by the finish; where ALIGNED,
  operands whose rows begin at multiples of 16 bytes.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import F32, F64, factored_update, finite_limit, inverse_root, vector_moment
from ._tile import all_lanes, breadth, column_roots, lanes, roots_at, row_roots, there, tile_at


@triton.jit
def rms_of_matrices(
    at,
    layout,
    start,
    rows,
    cols,
    roots,
    coef,
    limit,
    P: tl.constexpr,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    bits = breadth(cols, True)
    several = rows > roots[3]
    row, col = lanes(0, bits, ALIGNED, WIDTH, BLOCK)
    c = column_roots(roots, row * 0, col, col < cols, ALIGNED, WIDTH)
    sums = tl.zeros((BLOCK // WIDTH,), tl.float64)
    for i in range(0, rows << bits, BLOCK):
        row, col = lanes(i, bits, ALIGNED, WIDTH, BLOCK)
        inside = there(row, col, rows, cols, ALIGNED, True, WIDTH)
        index = all_lanes(row * roots[2] + col, ALIGNED, WIDTH)
        g = t.load_tile(at, t.place(layout, index, start, t.GRAD, STRIDED), inside, G, COMPUTE, True)
        if several:
            c = column_roots(roots, row, col, inside, ALIGNED, WIDTH)
        u = tl.where(inside, factored_update(g, row_roots(roots, row, inside) * c, coef, limit), 0.0)
        sums += t.by_thread(u * u, WIDTH).to(tl.float64)
    return tl.sum(sums)


@triton.jit
def rms_of_vector(
    at,
    layout,
    start,
    i,
    length,
    s,
    P: tl.constexpr,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """``s``: coefficient, largest inverse root, 1 - ``keep``, ``keep``, what is added, which end is nearer."""
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    V: tl.constexpr = F64 if P == F64 else F32
    row, col = lanes(i, breadth(length, False), ALIGNED, WIDTH, BLOCK)
    inside = there(row, col, 1, length, ALIGNED, False, WIDTH)
    index = all_lanes(col, ALIGNED, WIDTH)
    g = t.load_tile(at[0], t.place(layout, index, start, t.GRAD, STRIDED), inside, G, COMPUTE, MASKED)
    v = t.load_tile(at[1], index, inside, V, COMPUTE, MASKED)
    v = vector_moment(g, v, s[0], s[2], s[3], s[4], s[5])
    t.store_tile(at[1], index, inside, v, V, MASKED)
    u = factored_update(g, inverse_root(v), s[0], s[1])
    if MASKED:
        u = tl.where(inside, u, 0.0)
    return t.by_thread(u * u, WIDTH).to(tl.float64)


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["rows", "chunks", "programs", "tiles", "update_sums", "row_scalars", "stats"])
def factored_rms_kernel(
    rows: tl.int64,
    chunks: tl.int64,
    programs: tl.int64,
    tiles: tl.int64,
    update_sums: tl.int64,
    row_scalars: tl.int64,
    stats: tl.int64,
    P: tl.constexpr,
    G: tl.constexpr,
    FACTORED: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    first, last = t.work(programs)
    if tl.load(t.doubles(stats) + t.SKIPPED) != 0.0:
        last = first
    for c in range(first, last):
        start, row_index, length, slot = t.chunk_at(chunks, c)
        row = t.row_at(rows, row_index)
        if (t.flags_of(row) & t.ACTIVE) != 0:
            s = t.doubles(row_scalars) + row_index * t.SCALARS
            coef = tl.load(s).to(COMPUTE)
            limit = finite_limit(tl.load(s + 6), P)
            layout = tl.load(row + t.LAYOUT)
            at = t.operand(tl.load(row + t.GRAD), start, G, ALIGNED, STRIDED)
            if FACTORED:
                tile_rows, tile_cols, row_norms, col_norms = tile_at(tiles, slot)
                roots = roots_at(row, start, COMPUTE)
                total = rms_of_matrices(
                    at, layout, start, tile_rows, tile_cols, roots, coef, limit, P, G, ALIGNED, STRIDED, WIDTH, BLOCK
                )
            else:
                V: tl.constexpr = F64 if P == F64 else F32
                both = (at, t.operand(tl.load(row + t.STATE0), start, V, ALIGNED, False))
                rest = tl.load(s + 3)
                scalars = (
                    coef,
                    limit,
                    rest.to(COMPUTE),
                    (1.0 - rest).to(COMPUTE),
                    tl.load(s + 4).to(COMPUTE),
                    rest < 0.5,
                )
                sums = tl.zeros((BLOCK // WIDTH,), tl.float64)
                whole = length // BLOCK * BLOCK
                for i in range(0, whole, BLOCK):
                    sums += rms_of_vector(
                        both, layout, start, i, length, scalars, P, G, ALIGNED, STRIDED, WIDTH, BLOCK, False
                    )
                if whole < length:
                    sums += rms_of_vector(
                        both, layout, start, whole, length, scalars, P, G, ALIGNED, STRIDED, WIDTH, BLOCK, True
                    )
                total = tl.sum(sums)
            tl.store(t.doubles(update_sums) + slot, total)
