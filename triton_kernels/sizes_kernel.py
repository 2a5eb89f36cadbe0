"""Between Adafactor's second and third pass: the step size and the decay of every row.

Formula: _rules.py, size_adafactor; float64, tiles in an order that depends on their number alone.
Reference: csrc/cpu/adafactor_walk.cpp, AdafactorWalk::sized.
Bytes: per tile 16 read, per row 200 read and 16 written.
Assumes of the table: the sums of every tile of the active rows; one program a row.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import size_adafactor
from ._tile import WHOLE, WHOLE_NUMEL, matrices_of
from .finish_kernel import hyper


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["rows", "settings", "update_sums", "param_sums", "row_scalars", "stats"])
def sizes_kernel(
    rows: tl.int64,
    settings: tl.int64,
    update_sums: tl.int64,
    param_sums: tl.int64,
    row_scalars: tl.int64,
    stats: tl.int64,
    FROM_TENSORS: tl.constexpr,
    TILE: tl.constexpr,
):
    row_index = tl.program_id(0).to(tl.int64)
    row = t.row_at(rows, row_index)
    view = matrices_of(row)
    numel = tl.load(view + WHOLE_NUMEL)
    skipped = tl.load(t.doubles(stats) + t.SKIPPED) != 0.0
    if ((t.flags_of(row) & t.ACTIVE) != 0) & (numel != 0) & (skipped == 0):
        first = tl.load(row + t.FIRST_CHUNK)
        chunks = tl.load(row + t.CHUNKS).to(tl.int32)
        update = tl.zeros((TILE,), tl.float64)
        param = tl.zeros((TILE,), tl.float64)
        for i in range(0, chunks, TILE):
            index = i + tl.arange(0, TILE)
            here = index < chunks
            update += tl.load(t.doubles(update_sums) + first + index, mask=here, other=0.0)
            param += tl.load(t.doubles(param_sums) + first + index, mask=here, other=0.0)
        update_sum = tl.sum(update)
        param_sum = tl.sum(param)
        whole = tl.load(view + WHOLE)
        if whole != 0:
            update_sum = tl.load(t.doubles(whole))
            param_sum = tl.load(t.doubles(whole) + 1)
        group = t.doubles(settings) + (t.group_of(row) + 1) * t.SETTINGS_WORDS
        always = numel != 0
        s = t.doubles(row_scalars) + row_index * t.SCALARS
        size, decay = size_adafactor(
            tl.load(s + 2),
            tl.load(s + 9),
            tl.load(group + t.FACTOR_FLAGS).to(tl.int32),
            hyper(group, t.EPS2, always, FROM_TENSORS),
            hyper(group, t.THRESHOLD, always, FROM_TENSORS),
            numel.to(tl.float64),
            update_sum,
            param_sum,
        )
        tl.store(s + 8, size)
        tl.store(s + 9, decay)
