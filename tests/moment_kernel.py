"""A kernel that only decodes one moment and encodes another: the twin of csrc/rules/quantised.h by itself."""

from __future__ import annotations

import triton
import triton.language as tl
from mo_fused.triton_kernels import _chunk as t
from mo_fused.triton_kernels import _masters as masters
from mo_fused.triton_kernels import _quantised as quantised


@triton.jit
def tile(
    at,
    scale_at,
    values,
    found,
    apart,
    start,
    first,
    length,
    key,
    T: tl.constexpr,
    QBLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    index = first + tl.arange(0, BLOCK)
    inside = index < length
    old = quantised.load_moment(at, scale_at, first, length, T, QBLOCK, WIDTH, BLOCK, MASKED)
    tl.store(found.to(tl.int64).to(tl.pointer_type(tl.float32)) + index, old, mask=inside)
    new = tl.load(values.to(tl.int64).to(tl.pointer_type(tl.float32)) + index, mask=inside, other=0.0)
    random = quantised.random_bits(start + first, key, BLOCK)
    one_by_one = masters.draw(index.to(tl.int64) + start, key)
    tl.store(t.words(apart) + index, (random ^ one_by_one).to(tl.int64), mask=inside)
    quantised.store_moment(at, scale_at, first, length, new, random >> 16, T, QBLOCK, WIDTH, MASKED)


@triton.jit
def moment_kernel(
    codes: tl.int64,
    scales: tl.int64,
    values: tl.int64,
    found: tl.int64,
    apart: tl.int64,
    start: tl.int64,
    key: tl.int64,
    length: tl.int32,
    T: tl.constexpr,
    QBLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes what the moment was to ``found`` and keeps ``values`` (float32 both). Random numbers are those of elements
    ``start`` and on; ``apart``: an int64 each, 0 where they are what one element alone draws."""
    start = start.to(tl.int64)
    key = key.to(tl.int64)
    at = quantised.state_operand(codes.to(tl.int64), start * 0, T, QBLOCK, False, False)
    scale_at = scales.to(tl.int64).to(tl.pointer_type(tl.float32))
    first = tl.program_id(0) * BLOCK
    if first + BLOCK <= length:
        tile(at, scale_at, values, found, apart, start, first, length, key, T, QBLOCK, WIDTH, BLOCK, False)
    else:
        tile(at, scale_at, values, found, apart, start, first, length, key, T, QBLOCK, WIDTH, BLOCK, True)
