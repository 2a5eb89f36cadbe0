"""Parameters that no kernel takes: torch's own single-tensor step, still counted in norm, skip and statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import reference
from ..distributed import shards
from ..stats import StatsBuffer
from ..table import Table
from .eager import ScaledSum, larger

if TYPE_CHECKING:
    from ..optim.planning import Row
    from ..optim.rules import Rule


def measure(table: Table, rows: Sequence[Row], first_row: int, out: StatsBuffer, settled: Mapping[int, Tensor]) -> None:
    """Adds these rows' gradients to the ``extra_*`` fields of the control and fills their rows of the buffer.

    Of DTensors, what is in this process. ``settled``: by id of the parameter, gradients that take the place of its own.
    """
    control = table.control
    scale = float(control["grad_scale"][0])
    total = ScaledSum()
    amax, nonfinite, zeros = 0.0, 0, 0
    for i, row in enumerate(rows, first_row):
        if row.param.grad is None:
            continue
        sumsq, exponent, row_max, bad, zero = reference.grad_sums(
            shards.present(settled.get(id(row.param), row.param.grad))
        )
        one = ScaledSum()
        one.add(sumsq, exponent)
        out.set_row(i, grad_norm=one.norm() / scale, grad_amax=row_max / scale, nonfinite=bad, zeros=zero, active=1.0)
        if table.hyper["clip"][row.group]:
            total.add(sumsq, exponent)
        amax, nonfinite, zeros = larger(amax, row_max), nonfinite + bad, zeros + zero
    control["extra_sumsq"], control["extra_exponent"] = total.sumsq, total.exponent
    control["extra_amax"], control["extra_nonfinite"], control["extra_zeros"] = amax, nonfinite, zeros


def update(
    table: Table,
    rows: Sequence[Row],
    first_row: int,
    out: StatsBuffer,
    rule: Rule,
    state: Any,
    groups: Sequence[dict[str, Any]],
) -> None:
    """Steps these rows one after the other."""
    control = table.control[0]
    sums = [out["update_norm"] ** 2, out["stored_update_norm"] ** 2, out["param_norm"] ** 2]
    for i, row in enumerate(rows, first_row):
        grad, param = row.param.grad, row.param
        if grad is None:
            continue
        scale = (out["clip_coef"] if table.hyper["clip"][row.group] else 1.0) / float(control["grad_scale"])
        before = param.detach().clone() if control["update_stats"] else None
        group = groups[row.group]
        entry = state[param] if rule.has_step or rule.slots(group, param) else {}
        rule.torch_step(param, grad if scale == 1.0 else grad * scale, entry, group)
        if control["clip_in_place"] and scale != 1.0:
            with torch.no_grad():
                grad.mul_(scale)
        if before is not None:
            change = reference.grad_sums(shards.present(param.detach() - before))[0]
            norm = reference.grad_sums(shards.present(param.detach()))[0]
            found = (change, change, norm)
            sums = [a + b for a, b in zip(sums, found, strict=True)]
            names = ("update_norm", "stored_update_norm", "param_norm")
            out.set_row(i, **{k: math.sqrt(v) for k, v in zip(names, found, strict=True)})
    if control["update_stats"]:
        out["update_norm"], out["stored_update_norm"], out["param_norm"] = (math.sqrt(s) for s in sums)
        out["updated"] = 1.0
