"""One step of parameters that ranks share: what they tell each other before the decision, and after the update.

Each rank steps its own parts. One small all-reduce for each mesh (one a dimension where it is not the whole world)
makes norm, counts and skip the same on all of them; with ``stats=True`` two more tell norms of whole parameters.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..distributed.exchange import ROW_SUMS, Exchange, Partial, record_of
from ..distributed.ranks import Share
from ..request import Request
from ..stats import ROW, StatsBuffer
from . import execute
from .execute import Groups
from .rows import RowSet
from .rules import Rule

_COLUMNS = [ROW.index(name) for name in ROW_SUMS]
_AMAX = ROW.index("grad_amax")
_UPDATES = slice(3, 6)  # of ROW_SUMS


def needed(rows: RowSet, ask: Request) -> bool:
    """Whether ranks have something to tell each other in this step: the same answer on all of them."""
    return bool(rows.exchange) and (ask.measured or ask.found_inf is not None)


def shared_step(rows: RowSet, grads: list[Tensor | None], ask: Request, rule: Rule, state: Any, groups: Groups) -> bool:
    """A step; whether the host's rows skipped it (False where it has none)."""
    parts, exchange = rows.devices, rows.exchange
    for part in parts:
        part.begin(ask, first=ask.measured)
    for part in parts:
        if ask.measured or part.measures_always:
            part.measure()
    out = execute.claim(rows) if rows.host or rows.other or not parts else None
    control = execute.control_of(rows, ask) if out is not None else None
    partials = _partials(rows, grads, ask, out)
    given: Tensor | float
    if parts or any(isinstance(x, Tensor) for records in partials.values() for x in records):
        device = parts[0].device if parts else torch.device("cpu")
        totals, given = exchange.totals(partials, ask.found_inf, device)
        found = None if ask.found_inf is None else given
        for part in parts:
            part.finish(totals if ask.measured else (), elsewhere=ask.measured, found_inf=found)
        records = totals.tolist() if out is not None else []  # which waits for the devices
    else:
        records, given = exchange.totals_on_host(partials, float(ask.found_inf or 0.0))  # type: ignore[arg-type]
    # A gradient that they share with an offloaded parameter must not be scaled before that has read it.
    late = ask.clip_in_place and rows.offloaded is not None
    for part in () if late else parts:
        part.update()
    skipped = False
    if out is not None:
        assert control is not None
        if ask.measured:
            execute.note_totals(out, records, float(control["grad_scale"][0]))
            if rows.offloaded is not None:
                rows.offloaded.note_measured(out, float(control["grad_scale"][0]))
        control["found_inf"] = float(given)
        execute.finish_and_update(rows, grads, ask, groups, out, 0)
    for part in parts if late else ():
        part.update()
    if out is not None:
        skipped = execute.after_host(rows, ask, rule, state, groups, out)
    if ask.stats:
        if rows.offloaded is not None:
            rows.offloaded.offload.join()
        _tell_norms(rows, exchange, out, skipped)
    if parts and out is not None:
        rows.settle(skipped, grads)
    return skipped


def _partials(
    rows: RowSet, grads: list[Tensor | None], ask: Request, out: StatsBuffer | None
) -> dict[Share | None, list[Partial]]:
    """What this process's gradients add to the totals, by the share of their parameters."""
    found: dict[Share | None, list[Partial]] = {}
    if not ask.measured:
        return found
    for part in rows.devices:
        found.setdefault(part.share, []).append(part.partial())
    if rows.offloaded is not None:  # plain parameters
        found.setdefault(None, []).extend(rows.offloaded.measure_on_devices())
    if out is None:
        return found
    execute.measure_host(rows, grads, out)
    control = rows.table.control[0]
    mine = [*rows.host, *rows.other]
    clips = rows.table.hyper["clip"][[r.group for r in mine]] != 0.0 if mine else np.zeros(0, dtype=bool)
    for share, index in rows.host_shares:
        values = out.rows[index]
        sumsq, exponent = record_of(values[clips[index], 0], float(control["grad_scale"]))
        amax = float(values[:, _AMAX].max(initial=0.0)) * float(control["grad_scale"])
        nonfinite, zeros = values[:, 2:4].sum(axis=0).tolist()
        found.setdefault(share, []).append([sumsq, exponent, amax, nonfinite, zeros])
    return found


def _tell_norms(rows: RowSet, exchange: Exchange, out: StatsBuffer | None, skipped: bool) -> None:
    """Norms over whole parameters take the place of those over what of them is here."""
    parts = rows.devices
    device = parts[0].device if parts else torch.device("cpu")
    found, largest, counts = [], [], []
    for part in parts:
        of_part, tops = part.stats.row_sums()
        found.append(of_part.to(device))
        largest.append(tops.to(device))
        counts.append(len(of_part))
    if out is not None:
        values = torch.from_numpy(out.rows.copy())
        found.append(values[:, _COLUMNS].to(device))
        largest.append(values[:, _AMAX].to(device))
        counts.append(len(values))
    # In the order of the buffers: rows.all.
    table, tops, total = exchange.whole_rows([r.position for r in rows.all], torch.cat(found), torch.cat(largest))
    plain = torch.tensor([r.share is None for r in rows.all], dtype=torch.float64).reshape(-1, 1).to(device)
    squares = table[:, _UPDATES].square() * plain
    buffers = [slice(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]
    known = torch.stack([squares[b].sum(0) for b in buffers])
    known[0] += total  # of all shared parameters; a field of a StepStats is the sum over its buffers
    if exchange.partitioned:  # of the same shape on all ranks, whatever buffers each has
        every = exchange.partition_sums(known.sum(0))
        known.zero_()
        known[0] = every
    for part, b, norms in zip(parts, buffers, known.sqrt(), strict=False):
        part.stats.tell(table[b], tops[b], norms)
    if out is not None:
        b = buffers[-1]
        _write_host(out, table[b].cpu().numpy(), tops[b].cpu().numpy(), known[-1].sqrt().tolist(), skipped)


def _write_host(
    out: StatsBuffer, table: np.ndarray[Any, Any], largest: np.ndarray[Any, Any], norms: list[float], skipped: bool
) -> None:
    keep = 3 if skipped else len(ROW_SUMS)  # the norms of before were told before
    out.rows[:, _COLUMNS[:keep]] = table[:, :keep]
    out.rows[:, _AMAX] = largest
    if not skipped:
        for name, value in zip(ROW_SUMS[_UPDATES], norms, strict=True):
            out[name] = value
