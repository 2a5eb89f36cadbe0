"""The eager backend: the rules of mo_fused/reference.py in plain torch, row by row, in the phases of csrc/cpu/step.cpp.

Works wherever torch does and needs no compiled library; element-wise results have the same bits as the kernels'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import masters, quantised, reference
from ..distributed import shards
from ..stats import StatsBuffer
from ..table import DEFERRED, FINISH, MEASURE, UPDATE, Table

if TYPE_CHECKING:
    from ..optim.planning import Row


class ScaledSum:
    """sumsq * 2**exponent, as rules/grad_stats.h."""

    def __init__(self) -> None:
        self.sumsq, self.exponent = 0.0, 0

    def add(self, sumsq: float, exponent: int) -> None:
        if exponent == self.exponent:
            self.sumsq += sumsq
        elif sumsq != 0.0 and self.sumsq == 0.0:
            self.sumsq, self.exponent = sumsq, exponent
        elif sumsq != 0.0 and self.exponent > exponent:
            self.sumsq += math.ldexp(sumsq, max(-4000, exponent - self.exponent))
        elif sumsq != 0.0:
            self.sumsq = math.ldexp(self.sumsq, max(-4000, self.exponent - exponent)) + sumsq
            self.exponent = exponent

    def norm(self) -> float:
        return norm_of(self.sumsq, self.exponent)


def norm_of(sumsq: float, exponent: int) -> float:
    """Square root of sumsq * 2**exponent; exponents are even."""
    root = math.sqrt(sumsq) if sumsq == sumsq and sumsq >= 0 else float("nan")
    try:
        return math.ldexp(root, exponent // 2)
    except OverflowError:
        return float("inf")


def larger(a: float, b: float) -> float:
    """Maximum in which a NaN stays."""
    return a if not b > a and b == b else (a if a != a else b)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)); NaN stays NaN."""
    coef = max_norm / (norm + 1e-6)
    return 1.0 if coef > 1.0 else coef


def run(table: Table, rows: Sequence[Row], grads: Sequence[Tensor | None], out: StatsBuffer) -> None:
    """Runs the phases that ``table.control`` asks for."""
    control = table.control[0]
    if control["phases"] & MEASURE:
        _measure(table, rows, grads, out)
    if control["phases"] & FINISH:
        _finish(table, out)
    if not control["phases"] & UPDATE or control["phases"] & DEFERRED or out["skipped"]:
        return
    if control["grad_stats_in_update"]:
        _measure(table, rows, grads, out)
    sums = [0.0, 0.0, 0.0]
    scales: dict[int, tuple[Tensor, float]] = {}  # a gradient that several parameters share is scaled once
    for i, (row, grad) in enumerate(zip(rows, grads, strict=True)):
        if grad is None and row.whole is not None:
            row.whole.take_part(row.local)
        if grad is None or row.home is not None:  # offloaded: see mo_fused/offload
            continue
        found, scale = update_row(table, row, i, grad, out)
        scales[id(grad)] = (grad, scale)
        sums = [a + b for a, b in zip(sums, found, strict=True)]
    for grad, scale in scales.values():
        if control["clip_in_place"] and scale != 1.0:
            reference.scale_gradient(grad, scale)
    if control["update_stats"]:
        out["update_norm"], out["stored_update_norm"], out["param_norm"] = (math.sqrt(s) for s in sums)
        out["updated"] = 1.0


def update_row(
    table: Table, row: Row, i: int, grad: Tensor, out: StatsBuffer
) -> tuple[tuple[float, float, float], float]:
    """Updates row ``i`` of the table: sums of squares of update, stored update and parameter; the gradient's factor."""
    control = table.control[0]
    hyper = {
        name: float(value) for name, value in zip(table.hyper.dtype.names or (), table.hyper[row.group], strict=True)
    }
    scale = (out["clip_coef"] if hyper["clip"] else 1.0) / float(control["grad_scale"])
    found = _update(row, grad, hyper, scale, bool(control["update_stats"]))
    if control["update_stats"]:
        update, stored, param = map(math.sqrt, found)
        out.set_row(i, update_norm=update, stored_update_norm=stored, param_norm=param)
    return found, scale


def sum_up(table: Table, out: StatsBuffer) -> None:
    """The norms over all rows, after an update in several parts."""
    if table.control["update_stats"][0]:
        for name in ("update_norm", "stored_update_norm", "param_norm"):
            out[name] = math.sqrt(sum(out.row(i, name) ** 2 for i in range(len(table.rows))))
        out["updated"] = 1.0


def _measure(table: Table, rows: Sequence[Row], grads: Sequence[Tensor | None], out: StatsBuffer) -> None:
    control = table.control[0]
    scale = float(control["grad_scale"])
    total = ScaledSum()
    total.add(float(control["extra_sumsq"]), int(control["extra_exponent"]))
    amax = float(control["extra_amax"])
    nonfinite, zeros = float(control["extra_nonfinite"]), float(control["extra_zeros"])
    for i, (row, grad) in enumerate(zip(rows, grads, strict=True)):
        if grad is None:
            continue
        sumsq, exponent, row_max, bad, zero = reference.grad_sums(grad)
        one = ScaledSum()
        one.add(sumsq, exponent)
        out.set_row(i, grad_norm=one.norm() / scale, grad_amax=row_max / scale, nonfinite=bad, zeros=zero, active=1.0)
        amax = larger(amax, row_max)
        nonfinite += bad
        zeros += zero
        if table.hyper["clip"][row.group]:
            total.add(sumsq, exponent)
    out["grad_norm"], out["grad_amax"] = total.norm() / scale, amax / scale
    out["nonfinite"], out["zeros"], out["measured"] = nonfinite, zeros, 1.0


def _finish(table: Table, out: StatsBuffer) -> None:
    control = table.control[0]
    coef = 1.0
    if out["measured"] and not math.isnan(control["max_grad_norm"]):
        coef = clip_coefficient(out["grad_norm"], float(control["max_grad_norm"]))
    out["clip_coef"] = coef
    bad = out["nonfinite"] != 0
    out["found_inf"] = float(bool(control["found_inf"]) or bad)
    out["skipped"] = float(bool(control["found_inf"]) or (bool(control["skip_nonfinite"]) and bad))


def _update(
    row: Row, grad: Tensor, hyper: dict[str, float], scale: float, want_sums: bool
) -> tuple[float, float, float]:
    param, entry = row.local, {key: shards.local(value) for key, value in row.state.items()}
    if row.factored:
        old, kept, update = reference.adafactor_step(param, grad, entry, row.slots, hyper, scale, row.whole)
        return _sums(update, kept - old, kept) if want_sums else (0.0, 0.0, 0.0)
    compute = reference.compute_type(param)
    mode = row.master_mode
    rest = entry.get(masters.SLOTS.get(mode, "")) if mode else None
    p = masters.load(param, rest, mode) if mode else reference.widen(param.detach(), compute)
    g = reference.widen(grad.detach(), compute)
    moments = list(dict.fromkeys(quantised.slot_of(k) for k in row.slots if k not in masters.ALL_SLOTS))
    codes = [quantised.find(entry, k) if row.plan is not None and row.plan.block else None for k in moments]
    slots: list[Any] = [
        reference.widen(entry[k], compute) if code is None else quantised.load(entry, k, code, param.shape)
        for k, code in zip(moments, codes, strict=True)
    ]
    coef = -scale if hyper["maximize"] else scale
    if row.has_step:
        entry["step"] += 1
    if "exp_avg" in moments:
        scalars = reference.AdamScalars.prepare(
            int(entry["step"]),
            coef,
            hyper["lr"],
            hyper["beta1"],
            hyper["beta2"],
            hyper["eps"],
            hyper["weight_decay"],
            bool(hyper["decoupled"]),
        )
        w = slots[2] if len(slots) > 2 else None
        new_p, m, v, w, update = reference.adamw_update(p, g, slots[0], slots[1], w, scalars)
        new_slots = [m, v, w]
    else:
        sgd = reference.SGDScalars(
            coef,
            hyper["lr"],
            hyper["momentum"],
            hyper["dampening"],
            hyper["weight_decay"],
            bool(hyper["nesterov"]),
        )
        new_p, buf, update = reference.sgd_update(p, g, slots[0] if slots else None, sgd, row.fresh)
        new_slots = [buf]
    if mode:
        old = p.clone()
        random = masters.step_key(row.stream, int(entry["step"])) if row.has_step else 0
        kept = masters.store(new_p, param, rest, mode, random, row.offset)
        sums = _sums(update, kept - old, kept) if want_sums else (0.0, 0.0, 0.0)
    else:
        stored = reference.narrow(new_p, param.dtype)
        kept = reference.widen(stored, compute)
        # Before the write: p may be the parameter's own memory.
        sums = _sums(update, kept - p, kept) if want_sums else (0.0, 0.0, 0.0)
        param.detach().copy_(stored)
    for key, code, value in zip(moments, codes, new_slots, strict=False):
        assert value is not None
        if code is None:
            entry[key].copy_(reference.narrow(value, entry[key].dtype))
        else:
            quantised.store(entry, key, code, value, _rounding_bits(key, row, int(entry["step"])))
    return sums


def _rounding_bits(key: str, row: Row, step: int) -> Tensor | None:
    """16 random bits for each element: half of a draw for each of the two moments, none for a running maximum."""
    if key == "max_exp_avg_sq":
        return None
    of_step = masters.step_key(row.stream, step, quantised.STATE_SLOT)
    drawn = masters.draw(row.local.shape, of_step, row.local.device, row.offset)
    return drawn & 0xFFFF if key == "exp_avg_sq" else drawn >> 16


def _sums(update: Tensor, stored: Tensor, param: Tensor) -> tuple[float, float, float]:
    return reference.sum_of_squares(update), reference.sum_of_squares(stored), reference.sum_of_squares(param)
