"""Adam / AdamW / AMSGrad update of all chunks of one dtype signature.

Formula: _rules.py, adamw_update; of weights finer than their parameter _masters.py, of quantised moments _quantised.py.
  Reference: mo_fused/reference.py, mo_fused/masters.py and mo_fused/quantised.py, bit for bit.
Bytes per element, read + written: fp32 16 + 12, bf16 and fp16 8 + 6, bf16 with fp32 moments 12 + 10, fp64 32 + 24;
  AMSGrad adds one moment each way, master weights the rest's own size (fp32 4 + 4, and the parameter is not read). With
  moments of 8 bits fp32 10 + 6, bf16 and fp16 6 + 4, of 4 bits one less each way, and each moment's scales, 4 / block.
  The gradient is read once and never written.
Assumes of the table: row scalars prepared by the finish of this step, no two rows share written memory, and, where
  ALIGNED, every operand but scales at a multiple of 16 bytes; the row's stream where random bits are drawn; where
  QBLOCK is not 0, rows and chunks of whole blocks, which are walked in the order of the shape.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._masters import NO_MASTER, load_weight, rest_operand, store_weight
from ._quantised import load_moment, random_bits, scale_operands, state_operand, store_moment
from ._rules import F64, NONE, adamw_update, narrow, widen
from ._update_sums import add_sums, no_sums, store_sums


@triton.jit
def adamw_tile(
    at,
    scales_at,
    layout,
    start,
    first,
    index,
    length,
    scalars,
    key,
    state_key,
    origin,
    sums,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
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
    if QBLOCK == 0:
        m_off = t.place(layout, index, start, t.STATE0, STRIDED)
        v_off = t.place(layout, index, start, t.STATE1, STRIDED)
    r_off = p_off
    if MODE == NO_MASTER:
        p = t.load_tile(at[0], p_off, inside, P, COMPUTE, MASKED)
    else:
        r_off = t.place(layout, index, start, t.REST, STRIDED)
        p = load_weight(at[0], at[5], p_off, r_off, inside, P, MODE, MASKED)
    g = t.load_tile(at[1], t.place(layout, index, start, t.GRAD, STRIDED), inside, G, COMPUTE, MASKED)
    if QBLOCK == 0:
        m = t.load_tile(at[2], m_off, inside, M, COMPUTE, MASKED)
        v = t.load_tile(at[3], v_off, inside, V, COMPUTE, MASKED)
        w = v
        if W != NONE:
            w_off = t.place(layout, index, start, t.STATE2, STRIDED)
            w = t.load_tile(at[4], w_off, inside, W, COMPUTE, MASKED)
    else:
        m = load_moment(at[2], scales_at[0], first, length, M, QBLOCK, WIDTH, BLOCK, MASKED)
        v = load_moment(at[3], scales_at[1], first, length, V, QBLOCK, WIDTH, BLOCK, MASKED)
        w = v
        if W != NONE:
            w = load_moment(at[4], scales_at[2], first, length, W, QBLOCK, WIDTH, BLOCK, MASKED)
    new_p, m, v, w, update = adamw_update(
        p,
        g,
        m,
        v,
        w,
        scalars[0],
        scalars[1],
        scalars[2],
        scalars[3],
        scalars[4],
        scalars[5],
        scalars[6],
        scalars[7],
        scalars[8],
        scalars[9],
        W != NONE,
    )
    if MODE == NO_MASTER:
        t.store_tile(at[0], p_off, inside, new_p, P, MASKED)
        kept = widen(narrow(new_p, P), P, COMPUTE)
    else:
        element = index.to(tl.int64) + origin
        kept = store_weight(at[0], at[5], p_off, r_off, inside, new_p, element, key, P, MODE, MASKED)
    if QBLOCK == 0:
        t.store_tile(at[2], m_off, inside, m, M, MASKED)
        t.store_tile(at[3], v_off, inside, v, V, MASKED)
        if W != NONE:
            t.store_tile(at[4], w_off, inside, w, W, MASKED)
    else:
        random = random_bits(origin + first, state_key, BLOCK)
        store_moment(at[2], scales_at[0], first, length, m, random >> 16, M, QBLOCK, WIDTH, MASKED)
        store_moment(at[3], scales_at[1], first, length, v, random & 0xFFFF, V, QBLOCK, WIDTH, MASKED)
        if W != NONE:
            nearest = tl.full((BLOCK,), 0x8000, tl.uint32)
            store_moment(at[4], scales_at[2], first, length, w, nearest, W, QBLOCK, WIDTH, MASKED)
    if SUMS != 0:
        sums = add_sums(sums, g, update, kept - p, kept, inside, SUMS, WIDTH)
    return sums


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["rows", "settings", "chunks", "programs", "row_scalars", "stats", "n_chunks"])
def adamw_kernel(
    rows: tl.int64,
    settings: tl.int64,
    chunks: tl.int64,
    programs: tl.int64,
    row_scalars: tl.int64,
    stats: tl.int64,
    n_chunks: tl.int32,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
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
            coef = tl.load(s).to(COMPUTE)
            beta1 = tl.load(s + 2).to(COMPUTE)
            rest1 = tl.load(s + 3).to(COMPUTE)
            beta2 = tl.load(s + 4).to(COMPUTE)
            rest2 = tl.load(s + 5).to(COMPUTE)
            eps = tl.load(s + 6).to(COMPUTE)
            inv_sqrt_bc2 = tl.load(s + 7).to(COMPUTE)
            step_size = tl.load(s + 8).to(COMPUTE)
            decay = tl.load(s + 9).to(COMPUTE)
            l2 = tl.load(s + 10).to(COMPUTE)
            scalars = (coef, beta1, rest1, beta2, rest2, eps, inv_sqrt_bc2, step_size, decay, l2)
            key = tl.load(t.words(row_scalars) + row_index * t.SCALARS + t.KEY)
            state_key = key
            if QBLOCK != 0:
                state_key = tl.load(t.words(row_scalars) + row_index * t.SCALARS + t.STATE_KEY)
            origin = start + tl.load(row + t.OFFSET)  # the chunk's first element, in the whole tensor
            layout = tl.load(row + t.LAYOUT)
            at = (
                t.operand(tl.load(row + t.PARAM), start, P, ALIGNED, STRIDED),
                t.operand(tl.load(row + t.GRAD), start, G, ALIGNED, STRIDED),
                state_operand(tl.load(row + t.STATE0), start, M, QBLOCK, ALIGNED, STRIDED),
                state_operand(tl.load(row + t.STATE1), start, V, QBLOCK, ALIGNED, STRIDED),
                state_operand(tl.load(row + t.STATE2), start, W, QBLOCK, ALIGNED, STRIDED),
                rest_operand(tl.load(row + t.MASTER), start, P, MODE, ALIGNED, STRIDED),
            )
            scales_at = scale_operands(row, start, QBLOCK)
            if QBLOCK != 0:
                length = length // 32 * 32  # as it is: seen by the compiler, masked tiles have wide accesses too
            lane = tl.arange(0, BLOCK)
            whole = length // BLOCK * BLOCK
            for i in range(0, whole, BLOCK):
                sums = adamw_tile(
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
                    M,
                    V,
                    W,
                    MODE,
                    QBLOCK,
                    STRIDED,
                    SUMS,
                    WIDTH,
                    False,
                )
            if whole < length:
                sums = adamw_tile(
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
                    M,
                    V,
                    W,
                    MODE,
                    QBLOCK,
                    STRIDED,
                    SUMS,
                    WIDTH,
                    True,
                )
        if SUMS != 0:
            store_sums(stats, slot, n_chunks, sums, t.group_clips(settings, row), SUMS, P == F64)
