"""One step over rows that lie where they lie: on the host, on devices, and those that torch itself has to step.

While everything is on one device nothing waits for it. As soon as the host steps rows too, it has to know the decision
that the devices' gradients take part in, and waits for them once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..backends import cpu, eager, fallback
from ..backends.eager import norm_of
from ..distributed.exchange import added_up
from ..distributed.factored import CutMatrices
from ..request import Request
from ..stats import Buffer, StatsBuffer
from ..table import ACTIVE, DEFERRED, FACTORS, FINISH, MEASURE, MEASURED, PREPARED, SIZED, SUMS, UPDATE
from .rows import RowSet
from .rules import Rule

Groups = list[dict[str, Any]]


def host_step(rows: RowSet, grads: list[Tensor | None], ask: Request, rule: Rule, state: Any, groups: Groups) -> bool:
    """A step of rows on the host alone; whether it was skipped."""
    out = claim(rows)
    control = control_of(rows, ask)
    control["grad_stats_in_update"] = ask.stats and not ask.gated
    if rows.other and ask.measured:
        fallback.measure(rows.table, rows.other, len(rows.host), out, rows.settled)
    if rows.offloaded is not None and ask.measured:
        rows.offloaded.wait_for_taken(grads)
    finish_and_update(rows, grads, ask, groups, out, MEASURE if ask.gated else 0)
    return after_host(rows, ask, rule, state, groups, out)


def device_step(rows: RowSet, grads: list[Tensor | None], ask: Request, rule: Rule, state: Any, groups: Groups) -> bool:
    """A step in which devices take part; whether the host's rows skipped it (False where it has none)."""
    parts, offloaded = rows.devices, rows.offloaded
    if len(parts) == 1 and not rows.host and not rows.other:
        part = parts[0]
        first = part.measures_first(ask)
        part.begin(ask, first)
        if first or part.measures_always:
            part.measure()
        part.finish()
        part.update()
        return False
    for part in parts:
        part.begin(ask, first=ask.measured)
    partials: list[Tensor] = []
    for part in parts:
        if ask.measured or part.measures_always:
            part.measure()
    if ask.measured:
        partials = [part.partial() for part in parts]
        if offloaded is not None:
            partials += offloaded.measure_on_devices()
    on_host = None
    if rows.host or rows.other:
        out = claim(rows)
        control = control_of(rows, ask)
        on_host = measure_host(rows, grads, out) if ask.measured else None
    for i, part in enumerate(parts):
        elsewhere = [p for j, p in enumerate(partials) if j != i]
        if on_host is not None:
            elsewhere.append(torch.tensor(on_host, dtype=torch.float64))
        part.finish(elsewhere)
    # A gradient that they share with an offloaded parameter must not be scaled before that has read it.
    late = ask.clip_in_place and offloaded is not None
    for part in () if late else parts:
        part.update()
    if not (rows.host or rows.other):
        return False
    if on_host is not None:
        scale = float(control["grad_scale"][0])
        note_totals(out, [on_host, *(p.tolist() for p in partials)], scale)
        if offloaded is not None:
            offloaded.note_measured(out, scale)
    finish_and_update(rows, grads, ask, groups, out, 0)
    for part in parts if late else ():
        part.update()
    skipped = after_host(rows, ask, rule, state, groups, out)
    rows.settle(skipped, grads)
    return skipped


def buffers(rows: RowSet) -> list[Buffer]:
    """Where the statistics of the last step are: the devices' first, because theirs are on the optimizer's device."""
    devices: list[Buffer] = [part.stats for part in rows.devices]
    return [*devices, rows.ring[rows.turn]] if rows.host or rows.other or not devices else devices


def note_totals(out: StatsBuffer, records: Sequence[Sequence[float]], scale: float) -> None:
    """What the gradients of all places add up to. ``records``: as :func:`measure_host` returns; ``scale``: of the
    scaler."""
    sumsq, exponent, amax, nonfinite, zeros = added_up(records)
    out["grad_norm"], out["grad_amax"] = norm_of(sumsq, int(exponent)) / scale, amax / scale
    out["nonfinite"], out["zeros"], out["measured"] = nonfinite, zeros, 1.0


def claim(rows: RowSet) -> StatsBuffer:
    """The slot of the host's statistics for a new step."""
    rows.turn = (rows.turn + 1) % len(rows.ring)
    out = rows.ring[rows.turn]
    out.claim()
    rows.table.set_outputs(out.result_address, out.rows_address)
    return out


def control_of(rows: RowSet, ask: Request) -> Any:
    """The Control record of the host's table, with what this step asks for."""
    rows.table.reset_control()
    control = rows.table.control
    control["rule"] = ask.rule
    control["max_grad_norm"] = math.nan if ask.max_grad_norm is None else ask.max_grad_norm
    control["grad_scale"] = 1.0 if ask.grad_scale is None else float(ask.grad_scale)
    control["found_inf"] = 0.0 if ask.found_inf is None else float(ask.found_inf)
    control["skip_nonfinite"] = ask.skips_nonfinite
    control["update_stats"] = ask.stats
    control["clip_in_place"] = ask.clip_in_place
    return control


def finish_and_update(
    rows: RowSet, grads: list[Tensor | None], ask: Request, groups: Groups, out: StatsBuffer, first: int
) -> None:
    """The decision and pass 2 of the host's rows. ``first``: phases that come before."""
    control, offloaded = rows.table.control, rows.offloaded
    control["phases"] = first | FINISH | UPDATE | (0 if offloaded is None and rows.cut is None else DEFERRED)
    _run_host(rows, grads, out)
    if out["skipped"]:
        return
    if offloaded is None:
        if rows.cut is not None:
            _update_parts(rows, rows.cut, out, SUMS)
        return

    def update_the_others() -> None:
        with _without(rows, offloaded.indices):
            if rows.cut is not None:
                _update_parts(rows, rows.cut, out, 0)
            elif (rows.table.rows["flags"] & ACTIVE).any() or rows.eager:
                control["phases"] = UPDATE | PREPARED | (MEASURED if out["measured"] else 0)
                _run_host(rows, grads, out)

    offloaded.step(grads, ask, out, groups, update_the_others)


def _update_parts(rows: RowSet, cut: CutMatrices, out: StatsBuffer, last: int) -> None:
    """The update of the host's rows where some are parts of larger parameters. ``last``: a phase of the last call."""

    def call(phases: int) -> None:
        rows.table.control["phases"] = phases
        cpu.run(rows.table)

    if not out["measured"]:
        call(MEASURE | PREPARED)
    cut.exchange_sums()
    call(UPDATE | PREPARED | MEASURED | FACTORS)
    cut.exchange_updates()
    call(UPDATE | PREPARED | MEASURED | SIZED | last)


@contextmanager
def _without(rows: RowSet, index: Any) -> Iterator[None]:
    """These rows of the host's table take no part."""
    flags = rows.table.rows["flags"]
    before = flags[index].copy()
    flags[index] &= ~ACTIVE
    try:
        yield
    finally:
        flags[index] = before


def _run_host(rows: RowSet, grads: list[Tensor | None], out: StatsBuffer) -> None:
    if rows.eager or dispatch.native() is None:
        eager.run(rows.table, rows.host, grads[: len(rows.host)], out)
    else:
        cpu.run(rows.table)


def measure_host(rows: RowSet, grads: list[Tensor | None], out: StatsBuffer) -> list[float]:
    """Pass 1 of the host's rows and torch's: (sum of squares, its exponent, largest magnitude, non-finite, zeros)."""
    control = rows.table.control
    scale = float(control["grad_scale"][0])
    if rows.other:
        fallback.measure(rows.table, rows.other, len(rows.host), out, rows.settled)
    control["phases"] = MEASURE
    elsewhere: Any = [] if rows.offloaded is None else rows.offloaded.elsewhere
    here = list(grads)
    for i in elsewhere:
        here[i] = None
    if rows.offloaded is not None:
        rows.offloaded.wait_for_taken(grads)
    with _without(rows, elsewhere):
        _run_host(rows, here, out)
    norm = out["grad_norm"] * scale
    fraction, exponent = math.frexp(norm)
    if not math.isfinite(norm):
        fraction, exponent = norm, 0
    return [fraction * fraction, 2.0 * exponent, out["grad_amax"] * scale, out["nonfinite"], out["zeros"]]


def after_host(rows: RowSet, ask: Request, rule: Rule, state: Any, groups: Groups, out: StatsBuffer) -> bool:
    """What follows the host's update; whether there was none."""
    skipped = bool(out["skipped"])
    if not skipped:
        if rows.other:
            fallback.update(rows.table, rows.other, len(rows.host), out, rule, state, groups)
    elif ask.stats:
        out.keep_param_norms(rows.ring[rows.turn - 1])
    if ask.report is not None:
        ask.report.fill_(out["found_inf"])
    return skipped
