"""One step whose gradients DDP's communication hook has measured: no first pass over them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ..distributed.ddp_norms import NormHook
from ..distributed.exchange import record_of
from ..request import Request
from ..stats import ROW
from . import execute
from .execute import Groups
from .rows import RowSet
from .rules import Rule


def usable(rows: RowSet, hook: NormHook, ask: Request) -> bool:
    """Whether this step would measure what the hook has measured, and nothing else."""
    alone = bool(rows.host) != bool(rows.devices) and len(rows.devices) < 2 and not rows.other
    if not ask.gated or not alone or rows.offloaded is not None or rows.rule.factored:
        return False
    # Of gradients on a device the hook keeps totals alone.
    return not (rows.devices and ask.stats) and hook.holds(rows.row_params)


def hooked_step(
    rows: RowSet, hook: NormHook, grads: list[Tensor | None], ask: Request, rule: Rule, state: Any, groups: Groups
) -> bool:
    """A step; whether the host's rows skipped it (False where it has none)."""
    hook.hits += 1
    if rows.devices:
        (part,) = rows.devices
        part.begin(ask, first=True)
        part.finish(hook.records(), elsewhere=True)
        part.update()
        return False
    out = execute.claim(rows)
    scale = float(execute.control_of(rows, ask)["grad_scale"][0])
    there = np.flatnonzero([g is not None for g in grads])
    values = np.array([hook.values(rows.row_params[i]) for i in there], dtype=np.float64).reshape(len(there), 4)
    clips = rows.table.hyper["clip"][[rows.host[i].group for i in there]] != 0.0
    sumsq, exponent = record_of(values[clips, 0], 1.0)
    amax = float(values[:, 1].max(initial=0.0))
    counts = values[:, 2:].sum(axis=0).tolist()
    execute.note_totals(out, [[sumsq, exponent, amax, *counts]], scale)
    values[:, :2] /= scale
    out.rows[there, :4] = values
    out.rows[there, ROW.index("active")] = 1.0
    execute.finish_and_update(rows, grads, ask, groups, out, 0)
    return execute.after_host(rows, ask, rule, state, groups, out)
