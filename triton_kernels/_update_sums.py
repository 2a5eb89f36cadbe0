"""What falls out of registers during an update: sums of squares of the update, of what storage kept, of the parameter.

With SUMS = 2 also the gradient's own sums, when no pass before the update has read it. All in float64: a square of a
float32 neither overflows nor vanishes there. The sums of a thread stay in it until the chunk's end.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import infinity_bits, magnitude_bits


@triton.jit
def squares(x, inside, WIDTH: tl.constexpr):
    x = tl.where(inside, x, 0.0).to(tl.float64)
    return t.by_thread(x * x, WIDTH)


@triton.jit
def no_sums(LANES: tl.constexpr):
    """(update, stored, parameter, gradient: float64; largest gradient bits, non-finite gradients) of nothing."""
    zero = tl.zeros((LANES,), tl.float64)
    return zero, zero, zero, zero, tl.zeros((LANES,), tl.int64), tl.zeros((LANES,), tl.int64)


@triton.jit
def add_sums(sums, g, update, stored, p, inside, SUMS: tl.constexpr, WIDTH: tl.constexpr):
    new_update = sums[0] + squares(update, inside, WIDTH)
    new_stored = sums[1] + squares(stored, inside, WIDTH)
    new_p = sums[2] + squares(p, inside, WIDTH)
    g_sum, g_max, g_bad = sums[3], sums[4], sums[5]
    if SUMS == 2:
        g_sum += squares(g, inside, WIDTH)
        bits = tl.where(inside, magnitude_bits(g), 0)
        tile = tl.reshape(bits, (bits.shape[0] // WIDTH, WIDTH))
        g_max = tl.maximum(g_max, tl.max(tile, axis=1).to(tl.int64))
        g_bad += tl.sum((tile >= infinity_bits(g)).to(tl.int32), axis=1).to(tl.int64)
    return new_update, new_stored, new_p, g_sum, g_max, g_bad


@triton.jit
def store_sums(stats, slot, n_chunks, sums, clips, SUMS: tl.constexpr, WIDE: tl.constexpr):
    """Writes a chunk's sums to its place in the statistics. WIDE: the gradient was computed in float64."""
    tl.store(t.column(stats, t.UPDATE_SUMSQ, n_chunks) + slot, tl.sum(sums[0]))
    tl.store(t.column(stats, t.STORED_SUMSQ, n_chunks) + slot, tl.sum(sums[1]))
    tl.store(t.column(stats, t.PARAM_SUMSQ, n_chunks) + slot, tl.sum(sums[2]))
    if SUMS == 2:
        bits = tl.max(sums[4])
        if WIDE:
            amax = bits.to(tl.float64, bitcast=True)
        else:
            amax = bits.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
        tl.store(t.column(stats, t.SUMSQ, n_chunks) + slot, tl.sum(sums[3]))
        tl.store(t.column(stats, t.EXPONENT, n_chunks) + slot, 0.0)
        tl.store(t.column(stats, t.AMAX, n_chunks) + slot, amax)
        tl.store(t.column(stats, t.NONFINITES, n_chunks) + slot, tl.sum(sums[5]).to(tl.float64))
        tl.store(t.column(stats, t.ZERO_COUNT, n_chunks) + slot, 0.0)
        tl.store(t.column(stats, t.CLIPS, n_chunks) + slot, clips)
