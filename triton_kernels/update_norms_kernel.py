"""After the update, with statistics on: norms of the update, of what storage kept of it, and of the parameters.

Formula: sqrt(sum over chunks), float64, fixed order. A skipped step has update 0 and the parameters of the step before.
Reference: tests/test_clip.py, tests/test_device_step.py.
Bytes: per chunk 24 read (72 when the gradient was measured during the update).
Assumes of the table: the statistics of this step, and those of the step before or 0.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import scaled_root
from ._totals import column_tile, gradient_totals


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["stats", "before", "n_chunks"])
def update_norms_kernel(
    stats: tl.int64, before: tl.int64, n_chunks: tl.int32, GRADIENTS: tl.constexpr, TILE: tl.constexpr
):
    """``before``: address of the statistics of the previous step over the same chunks, or 0."""
    out = t.doubles(stats)
    skipped = tl.load(out + t.SKIPPED) != 0.0
    known = before.to(tl.int64) != 0
    earlier = t.doubles(before)
    if skipped:
        known = known & (tl.load(earlier + t.UPDATED, mask=known, other=0.0) != 0.0)
        limit = n_chunks * known.to(tl.int32)
        for i in range(0, n_chunks, TILE):
            index = i + tl.arange(0, TILE)
            here = index < n_chunks
            kept = tl.load(t.column(before, t.PARAM_SUMSQ, n_chunks) + index, mask=index < limit, other=float("nan"))
            tl.store(t.column(stats, t.UPDATE_SUMSQ, n_chunks) + index, tl.zeros((TILE,), tl.float64), mask=here)
            tl.store(t.column(stats, t.STORED_SUMSQ, n_chunks) + index, tl.zeros((TILE,), tl.float64), mask=here)
            tl.store(t.column(stats, t.PARAM_SUMSQ, n_chunks) + index, kept, mask=here)
            if GRADIENTS:  # the update that would have read them did not run
                lost = tl.full((TILE,), float("nan"), tl.float64)
                tl.store(t.column(stats, t.SUMSQ, n_chunks) + index, lost, mask=here)
                tl.store(t.column(stats, t.AMAX, n_chunks) + index, lost, mask=here)
                tl.store(t.column(stats, t.NONFINITES, n_chunks) + index, tl.zeros((TILE,), tl.float64), mask=here)
        tl.store(out + t.UPDATE_NORM, 0.0)
        tl.store(out + t.STORED_NORM, 0.0)
        tl.store(out + t.PARAM_NORM, tl.load(earlier + t.PARAM_NORM, mask=known, other=float("nan")))
        if GRADIENTS:
            tl.store(out + t.GRAD_NORM, float("nan"))
            tl.store(out + t.GRAD_AMAX, float("nan"))
            tl.store(out + t.NONFINITE, float("nan"))
    else:
        update = tl.zeros((TILE,), tl.float64)
        stored = tl.zeros((TILE,), tl.float64)
        param = tl.zeros((TILE,), tl.float64)
        for i in range(0, n_chunks, TILE):
            index = i + tl.arange(0, TILE)
            update += column_tile(stats, t.UPDATE_SUMSQ, n_chunks, index)
            stored += column_tile(stats, t.STORED_SUMSQ, n_chunks, index)
            param += column_tile(stats, t.PARAM_SUMSQ, n_chunks, index)
        tl.store(out + t.UPDATE_NORM, tl.sqrt(tl.sum(update)))
        tl.store(out + t.STORED_NORM, tl.sqrt(tl.sum(stored)))
        tl.store(out + t.PARAM_NORM, tl.sqrt(tl.sum(param)))
        if GRADIENTS:
            total, exponent, amax, nonfinite, zeros = gradient_totals(stats, n_chunks, stats, 0, TILE)
            grad_scale = tl.load(out + t.GRAD_SCALE)
            tl.store(out + t.GRAD_NORM, scaled_root(total, exponent) / grad_scale)
            tl.store(out + t.GRAD_AMAX, amax / grad_scale)
            tl.store(out + t.NONFINITE, nonfinite)
    tl.store(out + t.UPDATED, 1.0)
