"""Adafactor's third pass over every tile: the update itself, and the sum of squares of what it leaves of the parameter.

Formula: _rules.py, adafactor_update. Reference: mo_fused/reference.py, bit for bit.
Bytes per element, read + written: fp32 8 + 4, bf16 and fp16 4 + 2, fp64 16 + 8; a first moment its own size both ways,
  the second moment of a vector 4 (float64: 8) read.
Assumes of the table: inverse roots in the scratch of the norms; row scalars with this step's size; M is NONE for rows
  without a first moment; where ALIGNED, operands whose rows begin at multiples of 16 bytes.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._param_sums import add_param, no_param_sums, param_total
from ._rules import F32, F64, NONE, adafactor_update, finite_limit, inverse_root, narrow, widen
from ._tile import all_lanes, breadth, column_roots, lanes, roots_at, row_roots, there, tile_at
from ._update_sums import add_sums, no_sums, store_sums


@triton.jit
def adafactor_block(
    at,
    layout,
    start,
    index,
    inside,
    root,
    s,
    sums,
    param_sums,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    STRIDED: tl.constexpr,
    SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    FOLD: tl.constexpr,
    MASKED: tl.constexpr,
):
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    p_off = t.place(layout, index, start, t.PARAM, STRIDED)
    p = t.load_tile(at[0], p_off, inside, P, COMPUTE, MASKED)
    g = t.load_tile(at[1], t.place(layout, index, start, t.GRAD, STRIDED), inside, G, COMPUTE, MASKED)
    m = g
    if M != NONE:
        m_off = t.place(layout, index, start, t.STATE2, STRIDED)
        m = t.load_tile(at[2], m_off, inside, M, COMPUTE, MASKED)
    new_p, m, update = adafactor_update(p, g, root, m, s[0], s[1], s[2], s[3], s[4], s[5], M != NONE)
    t.store_tile(at[0], p_off, inside, new_p, P, MASKED)
    if M != NONE:
        t.store_tile(at[2], m_off, inside, m, M, MASKED)
    kept = widen(narrow(new_p, P), P, COMPUTE)
    param_sums = add_param(param_sums, kept, inside, FOLD)
    if SUMS != 0:
        sums = add_sums(sums, g, update, kept - p, kept, inside, SUMS, WIDTH)
    return sums, param_sums


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(
    do_not_specialize=[
        "rows",
        "settings",
        "chunks",
        "programs",
        "tiles",
        "param_sums",
        "row_scalars",
        "stats",
        "n_chunks",
    ]
)
def adafactor_kernel(
    rows: tl.int64,
    settings: tl.int64,
    chunks: tl.int64,
    programs: tl.int64,
    tiles: tl.int64,
    param_sums: tl.int64,
    row_scalars: tl.int64,
    stats: tl.int64,
    n_chunks: tl.int32,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    FACTORED: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """FOLD, BLOCK: of the parameter's sum, see _param_sums.py; the same as of factor_sums_kernel.py."""
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    V: tl.constexpr = F64 if P == F64 else F32
    first, last = t.work(programs)
    if tl.load(t.doubles(stats) + t.SKIPPED) != 0.0:
        last = first
    for chunk in range(first, last):
        start, row_index, length, slot = t.chunk_at(chunks, chunk)
        row = t.row_at(rows, row_index)
        sums = no_sums(BLOCK // WIDTH)
        if (t.flags_of(row) & t.ACTIVE) != 0:
            s = t.doubles(row_scalars) + row_index * t.SCALARS
            beta1 = tl.load(s + 7)
            scalars = (
                tl.load(s).to(COMPUTE),
                finite_limit(tl.load(s + 6), P),
                beta1.to(COMPUTE),
                (1.0 - beta1).to(COMPUTE),
                tl.load(s + 8).to(COMPUTE),
                tl.load(s + 9).to(COMPUTE),
            )
            layout = tl.load(row + t.LAYOUT)
            at = (
                t.operand(tl.load(row + t.PARAM), start, P, ALIGNED, STRIDED),
                t.operand(tl.load(row + t.GRAD), start, G, ALIGNED, STRIDED),
                t.operand(tl.load(row + t.STATE2), start, M, ALIGNED, STRIDED),
            )
            squares = no_param_sums(FOLD, BLOCK)
            if FACTORED:
                tile_rows, tile_cols, row_norms, col_norms = tile_at(tiles, slot)
                roots = roots_at(row, start, COMPUTE)
                several = tile_rows > roots[3]
                bits = breadth(tile_cols, True)
                r, c = lanes(0, bits, ALIGNED, WIDTH, BLOCK)
                of_columns = column_roots(roots, r * 0, c, c < tile_cols, ALIGNED, WIDTH)
                for i in range(0, tile_rows << bits, BLOCK):
                    r, c = lanes(i, bits, ALIGNED, WIDTH, BLOCK)
                    inside = there(r, c, tile_rows, tile_cols, ALIGNED, True, WIDTH)
                    if several:
                        of_columns = column_roots(roots, r, c, inside, ALIGNED, WIDTH)
                    sums, squares = adafactor_block(
                        at,
                        layout,
                        start,
                        all_lanes(r * roots[2] + c, ALIGNED, WIDTH),
                        inside,
                        row_roots(roots, r, inside) * of_columns,
                        scalars,
                        sums,
                        squares,
                        P,
                        G,
                        M,
                        STRIDED,
                        SUMS,
                        WIDTH,
                        FOLD,
                        True,
                    )
            else:
                moment = t.operand(tl.load(row + t.STATE0), start, V, ALIGNED, False)
                bits = breadth(length, False)
                whole = length // BLOCK * BLOCK
                for i in range(0, whole, BLOCK):
                    r, c = lanes(i, bits, ALIGNED, WIDTH, BLOCK)
                    inside = there(r, c, 1, length, ALIGNED, False, WIDTH)
                    index = all_lanes(c, ALIGNED, WIDTH)
                    v = t.load_tile(moment, index, inside, V, COMPUTE, False)
                    sums, squares = adafactor_block(
                        at,
                        layout,
                        start,
                        index,
                        inside,
                        inverse_root(v),
                        scalars,
                        sums,
                        squares,
                        P,
                        G,
                        M,
                        STRIDED,
                        SUMS,
                        WIDTH,
                        FOLD,
                        False,
                    )
                if whole < length:
                    r, c = lanes(whole, bits, ALIGNED, WIDTH, BLOCK)
                    inside = there(r, c, 1, length, ALIGNED, False, WIDTH)
                    index = all_lanes(c, ALIGNED, WIDTH)
                    v = t.load_tile(moment, index, inside, V, COMPUTE, True)
                    sums, squares = adafactor_block(
                        at,
                        layout,
                        start,
                        index,
                        inside,
                        inverse_root(v),
                        scalars,
                        sums,
                        squares,
                        P,
                        G,
                        M,
                        STRIDED,
                        SUMS,
                        WIDTH,
                        FOLD,
                        True,
                    )
            tl.store(t.doubles(param_sums) + slot, param_total(squares))
        if SUMS != 0:
            store_sums(stats, slot, n_chunks, sums, t.group_clips(settings, row), SUMS, P == F64)
