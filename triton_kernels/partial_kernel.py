"""What this device's gradients add to the norm, when other devices hold some too: five numbers for their finish.

Formula: _totals.py, gradient_totals.
Reference: tests/test_both_sides.py, host and device in one optimizer.
Bytes: per chunk of the gradients 48 read; 40 written.
Assumes of the table: the statistics of this step.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._totals import gradient_totals


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["stats", "n_chunks", "out"])
def partial_kernel(stats: tl.int64, n_chunks: tl.int32, out: tl.int64, TILE: tl.constexpr):
    total, exponent, amax, nonfinite, zeros = gradient_totals(stats, n_chunks, out, 0, TILE)
    to = t.doubles(out)
    tl.store(to, total)
    tl.store(to + 1, exponent.to(tl.float64))
    tl.store(to + 2, amax)
    tl.store(to + 3, nonfinite)
    tl.store(to + 4, zeros)
