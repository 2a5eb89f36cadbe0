"""SGD update of all chunks of one dtype signature, with or without a momentum buffer.

Formula: _rules.py, sgd_update; of weights finer than their parameter _masters.py. Reference: mo_fused/reference.py
  and mo_fused/masters.py, bit for bit.
Bytes per element, read + written: with momentum fp32 12 + 8, bf16 and fp16 6 + 4; without 8 + 4 and 4 + 2;
  master weights add the rest's own size each way (fp32 4 + 4, and the parameter is not read).
Assumes of the table: row scalars prepared by the finish of this step; B is NONE for rows without momentum, and the
  contents of a buffer that the finish called fresh are ignored; the row's stream where random bits are drawn.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._masters import NO_MASTER, load_weight, rest_operand, store_weight
from ._rules import F64, NONE, narrow, sgd_update, widen
from ._update_sums import add_sums, no_sums, store_sums


@triton.jit
def sgd_tile(
    at,
    layout,
    start,
    index,
    length,
    s,
    key,
    sums,
    P: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    MODE: tl.constexpr,
    STRIDED: tl.constexpr,
    SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    inside = index < length
    p_off = t.place(layout, index, start, t.PARAM, STRIDED)
    r_off = p_off
    if MODE == NO_MASTER:
        p = t.load_tile(at[0], p_off, inside, P, COMPUTE, MASKED)
    else:
        r_off = t.place(layout, index, start, t.REST, STRIDED)
        p = load_weight(at[0], at[3], p_off, r_off, inside, P, MODE, MASKED)
    g = t.load_tile(at[1], t.place(layout, index, start, t.GRAD, STRIDED), inside, G, COMPUTE, MASKED)
    buf = g
    if B != NONE:
        b_off = t.place(layout, index, start, t.STATE0, STRIDED)
        buf = t.load_tile(at[2], b_off, inside, B, COMPUTE, MASKED)
    new_p, buf, update = sgd_update(p, g, buf, s[0], s[1], s[2], s[3], s[4], s[5], s[6], B != NONE)
    if MODE == NO_MASTER:
        t.store_tile(at[0], p_off, inside, new_p, P, MASKED)
        kept = widen(narrow(new_p, P), P, COMPUTE)
    else:
        element = index.to(tl.int64) + start
        kept = store_weight(at[0], at[3], p_off, r_off, inside, new_p, element, key, P, MODE, MASKED)
    if B != NONE:
        t.store_tile(at[2], b_off, inside, buf, B, MASKED)
    if SUMS != 0:
        sums = add_sums(sums, g, update, kept - p, kept, inside, SUMS, WIDTH)
    return sums


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["rows", "settings", "chunks", "programs", "row_scalars", "stats", "n_chunks"])
def sgd_kernel(
    rows: tl.int64,
    settings: tl.int64,
    chunks: tl.int64,
    programs: tl.int64,
    row_scalars: tl.int64,
    stats: tl.int64,
    n_chunks: tl.int32,
    P: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    MODE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    SUMS: tl.constexpr,
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
        sums = no_sums(BLOCK // WIDTH)
        if (t.flags_of(row) & t.ACTIVE) != 0:
            s = t.doubles(row_scalars) + row_index * t.SCALARS
            scalars = (
                tl.load(s).to(COMPUTE),
                tl.load(s + 2).to(COMPUTE),
                tl.load(s + 3).to(COMPUTE),
                tl.load(s + 4).to(COMPUTE),
                tl.load(s + 5).to(COMPUTE),
                tl.load(s + 6),
                tl.load(s + 7),
            )
            key = tl.load(t.words(row_scalars) + row_index * t.SCALARS + t.KEY)
            layout = tl.load(row + t.LAYOUT)
            at = (
                t.operand(tl.load(row + t.PARAM), start, P, ALIGNED, STRIDED),
                t.operand(tl.load(row + t.GRAD), start, G, ALIGNED, STRIDED),
                t.operand(tl.load(row + t.STATE0), start, B, ALIGNED, STRIDED),
                rest_operand(tl.load(row + t.MASTER), start, P, MODE, ALIGNED, STRIDED),
            )
            lane = tl.arange(0, BLOCK)
            whole = length // BLOCK * BLOCK
            for i in range(0, whole, BLOCK):
                sums = sgd_tile(
                    at, layout, start, i + lane, length, scalars, key, sums, P, G, B, MODE, STRIDED, SUMS, WIDTH, False
                )
            if whole < length:
                sums = sgd_tile(
                    at,
                    layout,
                    start,
                    whole + lane,
                    length,
                    scalars,
                    key,
                    sums,
                    P,
                    G,
                    B,
                    MODE,
                    STRIDED,
                    SUMS,
                    WIDTH,
                    True,
                )
        if SUMS != 0:
            store_sums(stats, slot, n_chunks, sums, t.group_clips(settings, row), SUMS, P == F64)
