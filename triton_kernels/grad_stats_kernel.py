"""Sum of squares, largest magnitude, non-finite and zero elements of every chunk of a gradient.

Formula: sum g^2, fp32 within one 16-byte load and float64 across; a chunk whose fp32 sum overflows or nearly vanishes
  is summed again in float64, a float64 chunk that does so with a power of two taken out.
Reference: tests/test_clip.py and tests/test_grad_utilities.py, against float64.
Bytes read per element: the gradient once (fp32 4, bf16 and fp16 2, fp64 8), a chunk that is summed again or has
  non-finite elements twice; 48 written per chunk.
Assumes of the table: the row's gradient, its layout, and, where ALIGNED, a gradient at a multiple of 16 bytes.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import F64, infinity_bits, magnitude_bits, power_of_two


@triton.jit
def grad_tile(at, layout, start, index, length, G: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr):
    COMPUTE: tl.constexpr = tl.float64 if G == F64 else tl.float32
    return t.load_tile(at, t.place(layout, index, start, t.GRAD, STRIDED), index < length, G, COMPUTE, MASKED)


@triton.jit
def add_tile(x, sums, largest, zeros, COUNT_ZEROS: tl.constexpr, WIDTH: tl.constexpr):
    """Adds a tile; elements that lie outside are 0."""
    sums += t.by_thread(x * x, WIDTH).to(tl.float64)
    largest = tl.maximum(largest, magnitude_bits(x))
    if COUNT_ZEROS:
        zeros += t.by_thread((x == 0.0).to(tl.int32), WIDTH)
    return sums, largest, zeros


@triton.jit
def count_nonfinite(
    at, layout, start, length, G: tl.constexpr, STRIDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    count = tl.zeros((BLOCK // WIDTH,), tl.int32)
    for i in range(0, length, BLOCK):
        x = grad_tile(at, layout, start, i + tl.arange(0, BLOCK), length, G, STRIDED, True)
        count += t.by_thread((magnitude_bits(x) >= infinity_bits(x)).to(tl.int32), WIDTH)
    return tl.sum(count).to(tl.float64)


@triton.jit
def careful_sum(
    at, layout, start, length, k, G: tl.constexpr, STRIDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum of (x * 2**-k)**2 in float64."""
    scale = power_of_two(-k)
    sums = tl.zeros((BLOCK // WIDTH,), tl.float64)
    for i in range(0, length, BLOCK):
        x = grad_tile(at, layout, start, i + tl.arange(0, BLOCK), length, G, STRIDED, True).to(tl.float64) * scale
        sums += t.by_thread(x * x, WIDTH)
    return tl.sum(sums)


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["rows", "settings", "chunks", "programs", "stats", "n_chunks"])
def grad_stats_kernel(
    rows: tl.int64,
    settings: tl.int64,
    chunks: tl.int64,
    programs: tl.int64,
    stats: tl.int64,
    n_chunks: tl.int32,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    COUNT_ZEROS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Below LOW the squares may have lost bits to denormal numbers.
    LOW: tl.constexpr = 1e-280 if G == F64 else 1e-30
    first, last = t.work(programs)
    for c in range(first, last):
        start, row_index, length, slot = t.chunk_at(chunks, c)
        row = t.row_at(rows, row_index)
        total = tl.full([], 0.0, tl.float64)
        exponent = tl.full([], 0, tl.int64)
        amax = tl.full([], 0.0, tl.float64)
        nonfinite = tl.full([], 0.0, tl.float64)
        zero_count = tl.full([], 0.0, tl.float64)
        if (t.flags_of(row) & t.ACTIVE) != 0:
            layout = tl.load(row + t.LAYOUT)
            at = t.operand(tl.load(row + t.GRAD), start, G, ALIGNED, STRIDED)
            sums = tl.zeros((BLOCK // WIDTH,), tl.float64)
            zeros = tl.zeros((BLOCK // WIDTH,), tl.int32)
            largest = tl.zeros((BLOCK,), tl.int64 if G == F64 else tl.int32)
            lane = tl.arange(0, BLOCK)
            whole = length // BLOCK * BLOCK
            for i in range(0, whole, BLOCK):
                x = grad_tile(at, layout, start, i + lane, length, G, STRIDED, False)
                sums, largest, zeros = add_tile(x, sums, largest, zeros, COUNT_ZEROS, WIDTH)
            if whole < length:
                x = grad_tile(at, layout, start, whole + lane, length, G, STRIDED, True)
                sums, largest, zeros = add_tile(x, sums, largest, zeros, COUNT_ZEROS, WIDTH)
                zero_count -= (BLOCK - (length - whole)).to(tl.float64)
            total = tl.sum(sums)
            bits = tl.max(largest)
            zero_count += tl.sum(zeros).to(tl.float64)
            infinity = infinity_bits(largest.to(tl.float64 if G == F64 else tl.float32, bitcast=True))
            if bits >= infinity:
                nonfinite = count_nonfinite(at, layout, start, length, G, STRIDED, WIDTH, BLOCK)
            elif (bits != 0) & ((total < LOW) | (total == float("inf"))):
                if G == F64:
                    exponent = tl.minimum(tl.maximum((bits >> 52) - 1023, -1022), 1022)
                total = careful_sum(at, layout, start, length, exponent, G, STRIDED, WIDTH, BLOCK)
                exponent = exponent * 2
            if G == F64:
                amax = bits.to(tl.float64, bitcast=True)
            else:
                amax = bits.to(tl.float32, bitcast=True).to(tl.float64)
        tl.store(t.column(stats, t.SUMSQ, n_chunks) + slot, total)
        tl.store(t.column(stats, t.EXPONENT, n_chunks) + slot, exponent.to(tl.float64))
        tl.store(t.column(stats, t.AMAX, n_chunks) + slot, amax)
        tl.store(t.column(stats, t.NONFINITES, n_chunks) + slot, nonfinite)
        if COUNT_ZEROS:
            tl.store(t.column(stats, t.ZERO_COUNT, n_chunks) + slot, zero_count)
        else:
            tl.store(t.column(stats, t.ZERO_COUNT, n_chunks) + slot, 0.0)
        tl.store(t.column(stats, t.CLIPS, n_chunks) + slot, t.group_clips(settings, row))
