"""Moments in 8 or 4 bits: the twin of csrc/rules/quantised.h, tile by tile.

T: QuantType of csrc/abi.h; QBLOCK: elements of a block, which share a scale, or 0 for moments that are not quantised. A
tile is whole blocks, masked or not. Of aligned rows every thread holds a run of WIDTH consecutive elements, and what
belongs to a block is computed once a run. With four elements a thread a warp holds 128 (on AMD's GPUs 256): the largest
magnitude of a block of so many is found by shuffles, that of a longer one through 16 bytes of shared memory besides.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._masters import UPPER_STEP, bits_of, draw_at, of_upper, put, raw
from ._rules import divide, magnitude_bits, square_root

# Those of roots are odd.
Q8 = tl.constexpr(6)
Q8_ROOT = tl.constexpr(7)
Q4 = tl.constexpr(8)
Q4_ROOT = tl.constexpr(9)


@triton.jit
def state_operand(
    address, start, DTYPE: tl.constexpr, QBLOCK: tl.constexpr, ALIGNED: tl.constexpr, STRIDED: tl.constexpr
):
    """Pointer to element ``start`` of a moment, as :func:`_chunk.operand`; of a quantised one to its codes.

    Those are contiguous whatever the other operands are, and chunks begin at whole blocks.
    """
    if QBLOCK == 0:
        return t.operand(address, start, DTYPE, ALIGNED, STRIDED)
    else:
        if DTYPE >= Q4:
            start = start >> 1
        at = (address + start).to(tl.pointer_type(tl.uint8))
        if ALIGNED:
            at = tl.multiple_of(at, 16)
        return at


@triton.jit
def scale_operands(row, start, QBLOCK: tl.constexpr):
    """Pointers to the scales of the block that begins at element ``start``, of state 0, 1 and 2."""
    if QBLOCK == 0:
        return row, row, row
    else:
        offset = start // QBLOCK * 4
        return (
            (tl.load(row + t.SCALE0) + offset).to(tl.pointer_type(tl.float32)),
            (tl.load(row + t.SCALE1) + offset).to(tl.pointer_type(tl.float32)),
            (tl.load(row + t.SCALE2) + offset).to(tl.pointer_type(tl.float32)),
        )


@triton.jit
def random_bits(start, key, BLOCK: tl.constexpr):
    """32 for each element of the tile that begins at element ``start`` of the whole tensor: 16 for each of two moments.

    The upper half of the index may change within the tile; for indices of 64 bits there are not enough registers.
    """
    low = (start & 0xFFFFFFFF).to(tl.uint32)
    upper = of_upper(((start >> 32) & 0xFFFFFFFF).to(tl.uint32), key)
    index = low + tl.arange(0, BLOCK).to(tl.uint32)
    return draw_at(index, tl.where(index < low, upper + UPPER_STEP, upper), key)


@triton.jit
def spread(x, TIMES: tl.constexpr):
    """Each element of ``x`` this many times."""
    N: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(tl.expand_dims(x, 1), (N, TIMES)), (N * TIMES,))


@triton.jit
def decode(code, scale, T: tl.constexpr):
    """Values (roots, where the code is one). ``code``: int32, with its sign."""
    SHIFT: tl.constexpr = 18 if T == Q8 else 16 if T == Q8_ROOT else 21  # 23 - kMantissa
    x = (((tl.abs(code) << SHIFT) + 0x3F800000).to(tl.float32, bitcast=True) - 1.0) * scale
    if T % 2 == 0:
        sign = code.to(tl.uint32, bitcast=True) & 0x80000000
        x = (bits_of(x) ^ sign).to(tl.float32, bitcast=True)
    return x


@triton.jit
def magnitude_code(x, random, T: tl.constexpr):
    """Code (uint32) of x >= 0. ``random``: 16 bits, or 2**15 for rounding to nearest."""
    SHIFT: tl.constexpr = 18 if T == Q8 else 16 if T == Q8_ROOT else 21
    TOP: tl.constexpr = 127 if T == Q8 else 255 if T == Q8_ROOT else 7 if T == Q4 else 15
    steps = (bits_of(x + 1.0) - 0x3F800000 + (random << (SHIFT - 16))) >> SHIFT
    return tl.where(steps < TOP, steps, TOP)


@triton.jit
def encode(value, inverse, random, T: tl.constexpr):
    """Codes (uint32) of values, or of roots where the code is one; above their lowest 8 or 4 bits is the sign's."""
    if T % 2 == 1:
        code = magnitude_code(value * inverse, random, T)
        return tl.where((code == 0) & (bits_of(value) != 0), 1, code)
    else:
        x = tl.abs(value) * inverse
        code = magnitude_code(x, tl.where(x < 1.0, random, 0x8000), T)
        return tl.where(bits_of(value) >= 0x80000000, 0 - code, code)


@triton.jit
def block_scale(largest, T: tl.constexpr):
    """(scale, inverse, whether it is valid) of blocks whose largest magnitude has these bits (int32)."""
    REACH: tl.constexpr = 14.75 if T == Q8 else 2.984375 if T == Q8_ROOT else 2.5 if T == Q4 else 13.0
    LIMIT: tl.constexpr = 0x7F7FFFFF if T % 2 == 0 else 0x5F7FFFFF
    valid = largest <= 0x7F800000
    size = tl.where(largest < 0x0D800000, 0x0D800000, tl.where(largest > LIMIT, LIMIT, largest))
    size = size.to(tl.float32, bitcast=True)
    reach = tl.full(size.shape, REACH, tl.float32)
    scale = tl.where(valid, bits_of(divide(size, reach)), 0x7FC00000).to(tl.float32, bitcast=True)
    return scale, divide(reach, size), valid


@triton.jit
def load_moment(
    at,
    scale_at,
    first,
    length,
    T: tl.constexpr,
    QBLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile of a moment in float32, from element ``first`` of the chunk on; where it is not inside, 0."""
    if T >= Q4:
        index = first // 2 + tl.arange(0, BLOCK // 2)
        pair = raw(at, index, index < length // 2, MASKED).to(tl.int32)
        code = tl.reshape(tl.join(pair & 15, pair >> 4), (BLOCK,))
        if T == Q4:
            code = (code ^ 8) - 8
    else:
        index = first + tl.arange(0, BLOCK)
        code = raw(at, index, index < length, MASKED)
        if T == Q8:
            code = code.to(tl.int8, bitcast=True)
        code = code.to(tl.int32)
    run = first + tl.arange(0, BLOCK // WIDTH) * WIDTH
    scale = raw(scale_at, run // QBLOCK, run < length, MASKED)
    x = decode(code, spread(scale, WIDTH), T)
    if T % 2 == 1:
        x = x * x
    return x


@triton.jit
def store_moment(
    at,
    scale_at,
    first,
    length,
    x,
    random,
    T: tl.constexpr,
    QBLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stores a tile of a moment: codes, and a scale for each block. ``random``: 16 bits for each element."""
    BLOCK: tl.constexpr = x.shape[0]
    RUNS: tl.constexpr = BLOCK // WIDTH
    BLOCKS: tl.constexpr = BLOCK // QBLOCK
    if T % 2 == 1:
        x = square_root(x)
    largest = tl.max(tl.reshape(magnitude_bits(x), (RUNS, WIDTH)), axis=1)
    largest = spread(tl.max(tl.reshape(largest, (BLOCKS, RUNS // BLOCKS)), axis=1), RUNS // BLOCKS)
    scale, inverse, valid = block_scale(largest, T)
    run = first + tl.arange(0, RUNS) * WIDTH
    begins = run % QBLOCK == 0
    tl.store(scale_at + run // QBLOCK, scale, mask=begins & (run < length) if MASKED else begins)
    code = encode(x, spread(inverse, WIDTH), random, T)
    code = tl.where(spread(valid, WIDTH), code, 0)
    if T >= Q4:
        low, high = tl.split(tl.reshape(code & 15, (BLOCK // 2, 2)))
        index = first // 2 + tl.arange(0, BLOCK // 2)
        put(at, index, index < length // 2, (low | (high << 4)).to(tl.uint8), MASKED)
    else:
        index = first + tl.arange(0, BLOCK)
        put(at, index, index < length, code.to(tl.uint8), MASKED)
