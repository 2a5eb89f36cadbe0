"""SGD update of all chunks of one dtype signature, with or without a momentum buffer.

Formula: _rules.py, sgd_update; of weights finer than their parameter _masters.py, of quantised momentum _quantised.py.
  Reference: mo_fused/reference.py, mo_fused/masters.py and mo_fused/quantised.py, bit for bit.
Bytes per element, read + written: with momentum fp32 12 + 8, bf16 and fp16 6 + 4; without 8 + 4 and 4 + 2;
  with momentum of 8 bits fp32 9 + 5, bf16 and fp16 5 + 3, of 4 bits half a byte less each way, and 4 / block of scales;
  master weights add the rest's own size each way (fp32 4 + 4, and the parameter is not read).
Assumes of the table: row scalars prepared by the finish of this step; B is NONE for rows without momentum, and the
  contents of a buffer that the finish called fresh are ignored; the row's stream where random bits are drawn; where
  QBLOCK is not 0, rows and chunks of whole blocks, which are walked in the order of the shape.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._masters import NO_MASTER, load_weight, rest_operand, store_weight
from ._quantised import load_moment, random_bits, scale_operands, state_operand, store_moment
from ._rules import F64, NONE, narrow, sgd_update, widen
from ._update_sums import add_sums, no_sums, store_sums


@triton.jit
def sgd_tile(
    at,
    scales_at,
    layout,
    start,
    first,
    index,
    length,
    s,
    key,
    state_key,
    origin,
    sums,
    P: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    MODE: tl.constexpr,
    QBLOCK: tl.constexpr,
    STRIDED: tl.constexpr,
    SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    BLOCK: tl.constexpr = index.shape[0]
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
    if QBLOCK != 0:
        buf = load_moment(at[2], scales_at[0], first, length, B, QBLOCK, WIDTH, BLOCK, MASKED)
    elif B != NONE:
        b_off = t.place(layout, index, start, t.STATE0, STRIDED)
        buf = t.load_tile(at[2], b_off, inside, B, COMPUTE, MASKED)
    new_p, buf, update = sgd_update(p, g, buf, s[0], s[1], s[2], s[3], s[4], s[5], s[6], B != NONE)
    if MODE == NO_MASTER:
        t.store_tile(at[0], p_off, inside, new_p, P, MASKED)
        kept = widen(narrow(new_p, P), P, COMPUTE)
    else:
        element = index.to(tl.int64) + origin
        kept = store_weight(at[0], at[3], p_off, r_off, inside, new_p, element, key, P, MODE, MASKED)
    if QBLOCK != 0:
        random = random_bits(origin + first, state_key, BLOCK)
        store_moment(at[2], scales_at[0], first, length, buf, random >> 16, B, QBLOCK, WIDTH, MASKED)
    elif B != NONE:
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
    QBLOCK: tl.constexpr,
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
            state_key = key
            if QBLOCK != 0:
                state_key = tl.load(t.words(row_scalars) + row_index * t.SCALARS + t.STATE_KEY)
            origin = start + tl.load(row + t.OFFSET)  # the chunk's first element, in the whole tensor
            layout = tl.load(row + t.LAYOUT)
            at = (
                t.operand(tl.load(row + t.PARAM), start, P, ALIGNED, STRIDED),
                t.operand(tl.load(row + t.GRAD), start, G, ALIGNED, STRIDED),
                state_operand(tl.load(row + t.STATE0), start, B, QBLOCK, ALIGNED, STRIDED),
                rest_operand(tl.load(row + t.MASTER), start, P, MODE, ALIGNED, STRIDED),
            )
            scales_at = scale_operands(row, start, QBLOCK)
            if QBLOCK != 0:
                length = length // 32 * 32  # as it is: seen by the compiler, masked tiles have wide accesses too
            lane = tl.arange(0, BLOCK)
            whole = length // BLOCK * BLOCK
            for i in range(0, whole, BLOCK):
                sums = sgd_tile(
                    at,
                    scales_at,
                    layout,
                    start,
                    i,
                    i + lane,
                    length,
                    scalars,
                    key,
                    state_key,
                    origin,
                    sums,
                    P,
                    G,
                    B,
                    MODE,
                    QBLOCK,
                    STRIDED,
                    SUMS,
                    WIDTH,
                    False,
                )
            if whole < length:
                sums = sgd_tile(
                    at,
                    scales_at,
                    layout,
                    start,
                    whole,
                    whole + lane,
                    length,
                    scalars,
                    key,
                    state_key,
                    origin,
                    sums,
                    P,
                    G,
                    B,
                    MODE,
                    QBLOCK,
                    STRIDED,
                    SUMS,
                    WIDTH,
                    True,
                )
        if SUMS != 0:
            store_sums(stats, slot, n_chunks, sums, t.group_clips(settings, row), SUMS, P == F64)
