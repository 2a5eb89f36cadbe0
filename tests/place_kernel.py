"""A kernel that only says where it would read: the address arithmetic of the chunks, for any start and layout."""

from __future__ import annotations

import triton
import triton.language as tl
from mo_fused.triton_kernels import _chunk as t


@triton.jit
def place_kernel(
    base: tl.int64,
    start: tl.int64,
    layout: tl.int64,
    out: tl.int64,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the byte addresses of elements ``start`` to ``start + BLOCK`` of a tensor at ``base`` as int64."""
    index = tl.arange(0, BLOCK)
    at = t.operand(base.to(tl.int64), start.to(tl.int64), DTYPE, False, STRIDED)
    offsets = t.place(layout, index, start.to(tl.int64), OPERAND, STRIDED)
    tl.store(t.words(out) + index, (at + offsets).to(tl.int64))
