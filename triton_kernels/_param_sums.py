"""A parameter's sum of squares over a tile: read before the first step, and of what the update has just stored after.

Both must have the same bits, so that a run that goes on from a checkpoint does so as if it had never ended: squares in
the compute type, FOLD neighbouring lanes of a block added in it, blocks in float64 lane by lane. Lanes are added as
integers, for which the order does not count: that of ``tl.sum`` follows from how a kernel deals out lanes to threads.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import F64, magnitude_bits, power_of_two
from ._tile import all_lanes, breadth, lanes, there


@triton.jit
def no_param_sums(FOLD: tl.constexpr, BLOCK: tl.constexpr):
    return tl.zeros((BLOCK // FOLD,), tl.float64)


@triton.jit
def neighbours(x, COUNT: tl.constexpr):
    """Sums of COUNT (2 or 4) neighbouring lanes, in pairs; flat."""
    SIZE: tl.constexpr = x.numel
    a, b = tl.split(tl.reshape(x, (SIZE // 2, 2)))
    x = a + b
    if COUNT == 4:
        a, b = tl.split(tl.reshape(x, (SIZE // 4, 2)))
        x = a + b
    return x


@triton.jit
def add_param(sums, p, inside, FOLD: tl.constexpr):
    """Adds a block of lanes: what storage holds of the parameter, in the compute type."""
    p = tl.where(inside, p, 0.0)
    return sums + neighbours(p * p, FOLD).to(tl.float64)


@triton.jit
def param_total(sums):
    """Sum of at most 512 numbers >= 0 in units of 2**-53 of the largest's power of two; inf and NaN stay."""
    bits = tl.max(magnitude_bits(sums))
    finite = bits < 0x7FF0000000000000
    exponent = tl.maximum((bits >> 52) - 1023, -900)
    units = tl.where(finite, sums, 0.0) * power_of_two(53 - exponent)
    total = tl.sum(units.to(tl.int64)).to(tl.float64) * power_of_two(exponent - 53)
    return tl.where(finite, total, bits.to(tl.float64, bitcast=True))


@triton.jit
def param_sum(
    row,
    start,
    rows,
    cols,
    pitch,
    P: tl.constexpr,
    FACTORED: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum over a tile of a parameter that is read for it alone. ``pitch``: columns of the matrix."""
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    at = t.operand(tl.load(row + t.PARAM), start, P, ALIGNED, STRIDED)
    layout = tl.load(row + t.LAYOUT)
    bits = breadth(cols, FACTORED)
    end = cols
    if FACTORED:
        end = rows << bits
    sums = no_param_sums(FOLD, BLOCK)
    for i in range(0, end, BLOCK):
        r, c = lanes(i, bits, ALIGNED, FOLD, BLOCK)
        inside = there(r, c, rows, cols, ALIGNED, FACTORED, FOLD)
        index = all_lanes(r * pitch + c, ALIGNED, FOLD)
        p = t.load_tile(at, t.place(layout, index, start, t.PARAM, STRIDED), inside, P, COMPUTE, True)
        sums = add_param(sums, p, inside, FOLD)
    return param_total(sums)
