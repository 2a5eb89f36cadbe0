"""Weights that are finer than their 16-bit parameter: the twin of csrc/rules/master.h and random.h, tile by tile.

MODE: MasterMode of csrc/abi.h; ``at``: the parameter's pointer and that of the rest of its weights.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import BF16, F16, F32, NONE, narrow, widen

NO_MASTER = tl.constexpr(0)
MASTER32 = tl.constexpr(1)
SPLIT = tl.constexpr(2)
SPLIT8 = tl.constexpr(3)
KAHAN = tl.constexpr(4)
STOCHASTIC = tl.constexpr(5)
# Operands (kMaster and kState0 of csrc/abi.h), which random numbers are keyed by, times the constant of their step_key.
MASTER_SLOT = tl.constexpr(5 * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
STATE_SLOT = tl.constexpr(2 * 0x9E3779B97F4A7C15 & (1 << 64) - 1)


@triton.jit
def mix64(x):
    """splitmix64's finalizer, variant 13, of uint64."""
    x = x ^ (x >> 30)
    x = x * 0xBF58476D1CE4E5B9
    x = x ^ (x >> 27)
    x = x * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def step_key(stream, step, SLOT: tl.constexpr):
    """Key of one slot's random numbers of rows in one step. ``stream``: uint64; ``step``: int64."""
    of_slot = mix64(stream + SLOT)
    return mix64(of_slot + step.to(tl.uint64) * 0xD1342543DE82EF95)


@triton.jit
def draw(index, key):
    """32 random bits (uint32) for each element. ``index``: int64, in the whole tensor; ``key``: int64."""
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return draw_at(low, of_upper(high, key), key)


# The next upper half's number is this one's plus so much.
UPPER_STEP = tl.constexpr(0x85EBCA77)


@triton.jit
def of_upper(high, key):
    """What the upper half of an index (uint32) puts into its draw."""
    return (key & 0xFFFFFFFF).to(tl.uint32) + high * UPPER_STEP


@triton.jit
def draw_at(low, upper, key):
    """The same, of the lower half of the index and :func:`of_upper` of the upper."""
    key_high = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    x = low * 0x9E3779B1
    x = x ^ upper
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x + key_high
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def bits_of(x):
    return x.to(tl.float32).to(tl.uint32, bitcast=True)


@triton.jit
def is_nan(u):
    return (u & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def is_special(u):
    return (u & 0x7F800000) == 0x7F800000


@triton.jit
def rounded_away(u):
    """bf16 bits (uint32) of a weight's bits, ties away from zero; NaN stays NaN."""
    return tl.where(is_nan(u), (u >> 16) | 0x40, (u + 0x8000) >> 16)


@triton.jit
def split_low(u, upper):
    """The remainder of a weight's bits, in two's complement (uint32)."""
    return tl.where(is_nan(u), u ^ u, u - (upper << 16))


@triton.jit
def split_join(upper, low):
    """A weight of a parameter's bits (uint32) and a remainder (int32), unless no weight has left that one beside it."""
    magnitude = upper & 0x7FFF
    impossible = ((magnitude == 0) & (low < 0)) | ((magnitude == 0x7F80) & (low > 0))
    low = tl.where(impossible, 0, low).to(tl.uint32, bitcast=True)
    return ((upper << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def kahan_join(p, lost, P: tl.constexpr):
    """p + lost where that is at most half of p's spacing; else somebody else has written p."""
    if P == BF16:
        reach = tl.abs(p) * 0.00390625 + 4.591774807899561e-41
    else:
        reach = tl.abs(p) * 0.00048828125 + 2.9802322387695312e-08
    return tl.where(tl.abs(lost) <= reach, p + lost, p)


@triton.jit
def rounded_24(u, random):
    """The 24 bits that split8 keeps, the last of them rounded stochastically."""
    down = u & 0xFFFFFF00
    kept = (u + (random >> 24)) & 0xFFFFFF00
    return tl.where(is_special(kept), down, kept)


@triton.jit
def stochastic_bf16(u, random):
    up = tl.where(is_special(u), random ^ random, random >> 16)
    return tl.where(is_nan(u), (u >> 16) | 0x40, (u + up) >> 16)


@triton.jit
def stochastic_f16(x, random):
    """float32 that fp16 holds exactly, up or down by chance."""
    u = bits_of(x)
    sign = u & 0x80000000
    magnitude = u & 0x7FFFFFFF
    normal = sign | ((magnitude + (random >> 19)) & 0xFFFFE000)
    units = tl.minimum(magnitude.to(tl.float32, bitcast=True) * 16777216.0, 2048.0)
    down = units.to(tl.int32).to(tl.float32)
    up = tl.where((units - down) * 16777216.0 > (random >> 8).to(tl.float32), 1.0, 0.0)
    small = sign | bits_of((down + up) * 5.9604644775390625e-08)
    chosen = tl.where(magnitude >= 0x477FE000, u, tl.where(magnitude >= 0x38800000, normal, small))
    return chosen.to(tl.float32, bitcast=True)


@triton.jit
def rest_operand(
    address,
    start,
    P: tl.constexpr,
    MODE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
):
    """Pointer to the rest of the weights, as :func:`_chunk.operand` gives those of the other operands."""
    if MODE == MASTER32:
        return t.operand(address, start, F32, ALIGNED, STRIDED)
    elif MODE == KAHAN:
        return t.operand(address, start, P, ALIGNED, STRIDED)
    elif MODE == SPLIT:
        at = t.operand(address, start, BF16, ALIGNED, STRIDED)
        return at.to(tl.pointer_type(tl.int16))
    elif MODE == SPLIT8:
        if STRIDED:
            start = start * 0
        at = (address + start).to(tl.pointer_type(tl.int8))
        if ALIGNED:
            at = tl.multiple_of(at, 16)
        return at
    else:
        return t.operand(address, start, NONE, ALIGNED, STRIDED)


@triton.jit
def raw(at, offsets, inside, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at + offsets, mask=inside, other=0)
    else:
        return tl.load(at + offsets)


@triton.jit
def put(at, offsets, inside, x, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at + offsets, x, mask=inside)
    else:
        tl.store(at + offsets, x)


@triton.jit
def load_weight(p_at, rest_at, p_off, rest_off, inside, P: tl.constexpr, MODE: tl.constexpr, MASKED: tl.constexpr):
    """Weights in float32; those that are not inside are 0."""
    if MODE == MASTER32:
        # Unless somebody else has written the parameter, it is the master's rounded copy.
        master = t.load_tile(rest_at, rest_off, inside, F32, tl.float32, MASKED)
        p = t.load_tile(p_at, p_off, inside, P, tl.float32, MASKED)
        if P == BF16:
            copy = (rounded_away(bits_of(master)) << 16).to(tl.float32, bitcast=True)
        else:
            copy = widen(narrow(master, P), P, tl.float32)
        return tl.where(bits_of(copy) == bits_of(p), master, p)
    elif MODE == SPLIT:
        upper = raw(p_at, p_off, inside, MASKED).to(tl.uint32)
        return split_join(upper, raw(rest_at, rest_off, inside, MASKED).to(tl.int32))
    elif MODE == SPLIT8:
        upper = raw(p_at, p_off, inside, MASKED).to(tl.uint32)
        return split_join(upper, raw(rest_at, rest_off, inside, MASKED).to(tl.int32) * 256)
    elif MODE == KAHAN:
        p = t.load_tile(p_at, p_off, inside, P, tl.float32, MASKED)
        return kahan_join(p, t.load_tile(rest_at, rest_off, inside, P, tl.float32, MASKED), P)
    else:
        return t.load_tile(p_at, p_off, inside, P, tl.float32, MASKED)


@triton.jit
def store_weight(
    p_at,
    rest_at,
    p_off,
    rest_off,
    inside,
    x,
    index,
    key,
    P: tl.constexpr,
    MODE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stores weights and returns what storage keeps of them. ``index``: of the elements in the whole tensor, int64."""
    u = bits_of(x)
    kept = x
    if MODE == MASTER32:
        put(rest_at, rest_off, inside, x, MASKED)
        if P == BF16:
            put(p_at, p_off, inside, rounded_away(u).to(tl.uint16), MASKED)
        else:
            t.store_tile(p_at, p_off, inside, x, P, MASKED)
    elif MODE == SPLIT:
        upper = rounded_away(u)
        put(p_at, p_off, inside, upper.to(tl.uint16), MASKED)
        low = split_low(u, upper).to(tl.int32, bitcast=True)
        put(rest_at, rest_off, inside, low.to(tl.int16), MASKED)
    elif MODE == SPLIT8:
        u = rounded_24(u, draw(index, key))
        upper = rounded_away(u)
        put(p_at, p_off, inside, upper.to(tl.uint16), MASKED)
        low = split_low(u, upper).to(tl.int32, bitcast=True) >> 8
        put(rest_at, rest_off, inside, low.to(tl.int8), MASKED)
        kept = u.to(tl.float32, bitcast=True)
    elif MODE == KAHAN:
        t.store_tile(p_at, p_off, inside, x, P, MASKED)
        stored = widen(narrow(x, P), P, tl.float32)
        lost = x - stored
        lost = tl.where(lost - lost == 0.0, lost, 0.0)  # an infinite parameter has lost nothing
        t.store_tile(rest_at, rest_off, inside, lost, P, MASKED)
        kept = kahan_join(stored, widen(narrow(lost, P), P, tl.float32), P)
    else:
        if P == F16:
            kept = stochastic_f16(x, draw(index, key))
            t.store_tile(p_at, p_off, inside, kept, P, MASKED)
        else:
            upper = stochastic_bf16(u, draw(index, key))
            put(p_at, p_off, inside, upper.to(tl.uint16), MASKED)
            kept = (upper << 16).to(tl.float32, bitcast=True)
    return kept
