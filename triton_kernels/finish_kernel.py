"""Between the two passes: total norm, clip coefficient, skip decision, `step` counters and the scalars of every row.

Formula: csrc/cpu/step.cpp, reduce_gradients, finish and prepare_rows; everything in float64. A skipped step writes its
  result and nothing else.
Reference: tests/test_clip.py, tests/test_amp.py.
Bytes: per chunk of the gradients 48 read, per row 280 read and 128 written.
Assumes of the table: one program for ROWS rows; each of them adds up all chunks by itself, in the same order, so that
  no program has to wait for another.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._masters import MASTER_SLOT, STATE_SLOT, step_key
from ._rules import clip_coefficient, prepare_adafactor, prepare_adamw, scaled_root
from ._totals import gradient_totals

ADAM = tl.constexpr(0)
SGD = tl.constexpr(1)
ADAFACTOR = tl.constexpr(3)
SOURCE_F64 = tl.constexpr(1 << 60)  # in the address word of a tensor that stands for a hyper-parameter


@triton.jit
def scalar_or(address, otherwise):
    """The float32 at an address, as float64; ``otherwise`` where the address is 0."""
    at = address.to(tl.int64).to(tl.pointer_type(tl.float32))
    there = address.to(tl.int64) != 0
    return tl.where(there, tl.load(at, mask=there, other=0.0).to(tl.float64), otherwise)


@triton.jit
def hyper(group, NAME, here, FROM_TENSORS: tl.constexpr):
    """A hyper-parameter of each row's group: a number, or what a tensor on the device holds now."""
    value = tl.load(group + NAME, mask=here, other=0.0)
    if FROM_TENSORS:
        source = tl.load((group + t.SOURCES + NAME).to(tl.pointer_type(tl.int64)), mask=here, other=0)
        wide = (source & SOURCE_F64) != 0
        address = source & (SOURCE_F64 - 1)
        single = tl.load(address.to(tl.pointer_type(tl.float32)), mask=here & (address != 0) & (wide == 0), other=0.0)
        double = tl.load(address.to(tl.pointer_type(tl.float64)), mask=here & (address != 0) & wide, other=0.0)
        value = tl.where(address == 0, value, tl.where(wide, double, single.to(tl.float64)))
    return value


@triton.jit
def advance(address, flags, counts):
    """Adds 1 to the step counters at these addresses, float32 or float64, and returns them as integers."""
    wide = (flags & t.STEP_F64) != 0
    at32 = address.to(tl.pointer_type(tl.float32))
    at64 = address.to(tl.pointer_type(tl.float64))
    step32 = tl.load(at32, mask=counts & (wide == 0), other=0.0) + 1.0
    step64 = tl.load(at64, mask=counts & wide, other=0.0) + 1.0
    tl.store(at32, step32, mask=counts & (wide == 0))
    tl.store(at64, step64, mask=counts & wide)
    return tl.where(counts, tl.where(wide, step64, step32.to(tl.float64)), 0.0).to(tl.int64)


@triton.jit
def store_key(to, NAME, stream, step, SLOT: tl.constexpr, here):
    """The key of a slot's random numbers in this step, as an integer among the rows' scalars."""
    key = step_key(stream, step, SLOT)
    tl.store((to + NAME).to(tl.pointer_type(tl.int64)), key.to(tl.int64, bitcast=True), mask=here)


@triton.jit
def prepare_rows(
    rows,
    settings,
    row_scalars,
    n_rows,
    clip_coef,
    grad_scale,
    RULE: tl.constexpr,
    FROM_TENSORS: tl.constexpr,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = index < n_rows
    row = t.words(rows) + index.to(tl.int64) * t.ROW_WORDS
    packed = tl.load(row + t.GROUP_AND_FLAGS, mask=here, other=0)
    flags = packed >> 32
    here = here & ((flags & t.ACTIVE) != 0)
    group = t.doubles(settings) + ((packed & 0x7FFFFFFF) + 1) * t.SETTINGS_WORDS
    clips = tl.load(group + t.CLIP, mask=here, other=0.0)
    maximize = tl.load(group + t.MAXIMIZE, mask=here, other=0.0)
    scale = tl.where(clips != 0.0, clip_coef, 1.0) / grad_scale
    to = t.doubles(row_scalars) + index.to(tl.int64) * t.SCALARS
    tl.store(to, tl.where(maximize != 0.0, -scale, scale), mask=here)
    tl.store(to + 1, scale, mask=here)
    counter = tl.load(row + t.STEP, mask=here, other=0)
    step = advance(counter, flags, here & (counter != 0))
    stream = tl.load(row + t.STREAM, mask=here, other=0).to(tl.uint64, bitcast=True)
    store_key(to, t.KEY, stream, step, MASTER_SLOT, here)
    if RULE == ADAM:
        store_key(to, t.STATE_KEY, stream, step, STATE_SLOT, here)
        beta1 = hyper(group, t.BETA1, here, FROM_TENSORS)
        beta2 = hyper(group, t.BETA2, here, FROM_TENSORS)
        inv_sqrt_bc2, step_size, decay, l2 = prepare_adamw(
            hyper(group, t.LR, here, FROM_TENSORS),
            beta1,
            beta2,
            hyper(group, t.WEIGHT_DECAY, here, FROM_TENSORS),
            tl.load(group + t.DECOUPLED, mask=here, other=0.0),
            step,
        )
        tl.store(to + 2, beta1, mask=here)
        tl.store(to + 3, 1.0 - beta1, mask=here)
        tl.store(to + 4, beta2, mask=here)
        tl.store(to + 5, 1.0 - beta2, mask=here)
        tl.store(to + 6, hyper(group, t.EPS, here, FROM_TENSORS), mask=here)
        tl.store(to + 7, inv_sqrt_bc2, mask=here)
        tl.store(to + 8, step_size, mask=here)
        tl.store(to + 9, decay, mask=here)
        tl.store(to + 10, l2, mask=here)
    elif RULE == SGD:
        store_key(to, t.STATE_KEY, stream, step, STATE_SLOT, here)
        # Whether a momentum buffer holds a value is known here alone: a skipped first step leaves it fresh.
        address = tl.load(row + t.FRESH, mask=here, other=0)
        at = address.to(tl.pointer_type(tl.int32))
        fresh = tl.load(at, mask=here & (address != 0), other=0)
        tl.store(at, fresh * 0, mask=here & (address != 0))
        tl.store(to + 2, hyper(group, t.LR, here, FROM_TENSORS), mask=here)
        tl.store(to + 3, hyper(group, t.MOMENTUM, here, FROM_TENSORS), mask=here)
        tl.store(to + 4, 1.0 - hyper(group, t.DAMPENING, here, FROM_TENSORS), mask=here)
        tl.store(to + 5, hyper(group, t.WEIGHT_DECAY, here, FROM_TENSORS), mask=here)
        tl.store(to + 6, tl.load(group + t.NESTEROV, mask=here, other=0.0), mask=here)
        tl.store(to + 7, fresh.to(tl.float64), mask=here)
    elif RULE == ADAFACTOR:
        relative, rest, added, floor, limit, decay = prepare_adafactor(
            hyper(group, t.LR, here, FROM_TENSORS),
            hyper(group, t.BETA2, here, FROM_TENSORS),
            hyper(group, t.EPS, here, FROM_TENSORS),
            hyper(group, t.WEIGHT_DECAY, here, FROM_TENSORS),
            tl.load(group + t.STEP_KIND, mask=here, other=0.0).to(tl.int32),
            tl.load(group + t.FACTOR_FLAGS, mask=here, other=0.0).to(tl.int32),
            tl.where(here, step, 1),
            tl.load(row + t.DTYPES, mask=here, other=0) & 0xFF,
        )
        tl.store(to + 2, relative, mask=here)
        tl.store(to + 3, rest, mask=here)
        tl.store(to + 4, added, mask=here)
        tl.store(to + 5, floor, mask=here)
        tl.store(to + 6, limit, mask=here)
        tl.store(to + 7, hyper(group, t.BETA1, here, FROM_TENSORS), mask=here)
        tl.store(to + 8, 0.0, mask=here)  # the step size, which sizes_kernel.py finds
        tl.store(to + 9, decay, mask=here)


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(
    do_not_specialize=[
        "rows",
        "settings",
        "row_scalars",
        "stats",
        "n_rows",
        "n_chunks",
        "grad_scale_at",
        "found_inf_at",
        "report_at",
        "extras",
        "n_extras",
    ]
)
def finish_kernel(
    rows: tl.int64,
    settings: tl.int64,
    row_scalars: tl.int64,
    stats: tl.int64,
    n_rows: tl.int32,
    n_chunks: tl.int32,
    grad_scale_at: tl.int64,
    found_inf_at: tl.int64,
    report_at: tl.int64,
    extras: tl.int64,
    n_extras: tl.int32,
    RULE: tl.constexpr,
    MEASURED: tl.constexpr,
    NORM_GIVEN: tl.constexpr,
    CLIPPING: tl.constexpr,
    SKIP_NONFINITE: tl.constexpr,
    FROM_TENSORS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """``grad_scale_at``, ``found_inf_at``: addresses of float32 scalars, or 0. ``report_at``: receives found_inf.

    ``n_chunks``: 0 where ``extras`` contain the gradients of these chunks already.

    NORM_GIVEN: ``extras`` is the address of the total norm (float64), which is not measured here.
    """
    grad_scale = scalar_or(grad_scale_at, 1.0)
    found = scalar_or(found_inf_at, 0.0) != 0.0
    norm = tl.full([], 0.0, tl.float64)
    amax = norm
    nonfinite = norm
    zeros = norm
    if MEASURED:
        total, exponent, amax, nonfinite, zeros = gradient_totals(stats, n_chunks, extras, n_extras, TILE)
        norm = scaled_root(total, exponent) / grad_scale
    if NORM_GIVEN:
        norm = tl.load(t.doubles(extras))
    clip_coef = tl.full([], 1.0, tl.float64)
    if CLIPPING:
        clip_coef = clip_coefficient(norm, tl.load(t.doubles(settings)))
    bad = nonfinite != 0.0
    skipped = found
    if SKIP_NONFINITE:
        skipped = found | bad
    if tl.program_id(0) == 0:
        out = t.doubles(stats)
        found_value = (found | bad).to(tl.float64)
        tl.store(out + t.GRAD_NORM, norm)
        tl.store(out + t.CLIP_COEF, clip_coef)
        tl.store(out + t.SKIPPED, skipped.to(tl.float64))
        tl.store(out + t.NONFINITE, nonfinite)
        tl.store(out + t.ZEROS, zeros)
        tl.store(out + t.GRAD_AMAX, amax / grad_scale)
        tl.store(out + t.FOUND_INF, found_value)
        tl.store(out + t.GRAD_SCALE, grad_scale)
        report = report_at.to(tl.int64)
        tl.store(report.to(tl.pointer_type(tl.float32)), found_value.to(tl.float32), mask=report != 0)
    if skipped == 0:
        prepare_rows(rows, settings, row_scalars, n_rows, clip_coef, grad_scale, RULE, FROM_TENSORS, ROWS)
