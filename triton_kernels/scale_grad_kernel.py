"""Multiplies every chunk of a gradient by its row's factor, in place, where that is not 1.

Formula: g = g * scale in the compute type (float64 for float64, else float32), rounded once.
Reference: torch.nn.utils.clip_grads_with_norm_.
Bytes per element, read + written: fp32 4 + 4, bf16 and fp16 2 + 2, fp64 8 + 8; nothing where the factor is 1.
Assumes of the table: row scalars prepared by the finish; of rows that share a gradient one is marked to scale it.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import F64


@triton.jit
def scale_tile(at, layout, start, index, length, factor, G: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr):
    COMPUTE: tl.constexpr = tl.float64 if G == F64 else tl.float32
    inside = index < length
    offsets = t.place(layout, index, start, t.GRAD, STRIDED)
    x = t.load_tile(at, offsets, inside, G, COMPUTE, MASKED)
    t.store_tile(at, offsets, inside, x * factor, G, MASKED)


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["rows", "chunks", "programs", "row_scalars", "stats"])
def scale_grad_kernel(
    rows: tl.int64,
    chunks: tl.int64,
    programs: tl.int64,
    row_scalars: tl.int64,
    stats: tl.int64,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    COMPUTE: tl.constexpr = tl.float64 if G == F64 else tl.float32
    first, last = t.work(programs)
    if tl.load(t.doubles(stats) + t.SKIPPED) != 0.0:
        last = first
    for c in range(first, last):
        start, row_index, length, slot = t.chunk_at(chunks, c)
        row = t.row_at(rows, row_index)
        flags = t.flags_of(row)
        scale = tl.load(t.doubles(row_scalars) + row_index * t.SCALARS + 1)
        mine = ((flags & t.GRAD_SHARED) == 0) | ((flags & t.SCALES_SHARED) != 0)
        if ((flags & t.ACTIVE) != 0) & mine & (scale != 1.0):
            layout = tl.load(row + t.LAYOUT)
            at = t.operand(tl.load(row + t.GRAD), start, G, ALIGNED, STRIDED)
            factor = scale.to(COMPUTE)
            lane = tl.arange(0, BLOCK)
            whole = length // BLOCK * BLOCK
            for i in range(0, whole, BLOCK):
                scale_tile(at, layout, start, i + lane, length, factor, G, STRIDED, False)
            if whole < length:
                scale_tile(at, layout, start, whole + lane, length, factor, G, STRIDED, True)
