"""The suite overhead: what a step costs beside its arithmetic, by parameter groups and by its parts.

The parts are called by themselves on an optimizer that has stepped, so they are what a step calls when nothing but the
values has changed since the last one: the usual case.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mo_fused import dispatch
from mo_fused.backends import cpu
from mo_fused.bench import peers
from mo_fused.bench.case import Case, Settings
from mo_fused.bench.peers import OURS, ours
from mo_fused.bench.race import Contender, Sample
from mo_fused.bench.workloads import GROUPS, WORKLOADS, in_groups
from mo_fused.optim import FusedOptimizer

ONE, MANY = f"{OURS}, 1 group", f"{OURS}, {GROUPS} groups"
STEP, REFRESH, SCAN, HYPER = "whole step", "rows.refresh", "- address scan", "- hyper-parameters"
NATIVE, VERSIONS = "native call", "version counters"


def grouped(settings: Settings) -> list[Contender]:
    """Every peer with one parameter group and with many."""
    params = WORKLOADS["small-fp32"].parameters(settings.quick, settings.device)
    racing = []
    for peer in peers.available(peers.ADAMW, settings.device, settings.peers, settings.says):
        if peer.why_not(params) or peer.wrap is not None:
            continue
        racing.append(Contender(f"{peer.name}, 1 group", peer.make(params).step))
        racing.append(Contender(f"{peer.name}, {GROUPS} groups", peer.make(in_groups(params, GROUPS)).step))
    return racing


def parts(groups: int, max_grad_norm: float | None, settings: Settings) -> list[Contender]:
    """The whole step of the native CPU kernels and what it consists of; nothing where there are none."""
    if dispatch.native() is None or not dispatch.is_host(settings.device):
        settings.says(f"the parts of a step are left out: {dispatch.native_problem() or 'they are those of the CPU'}")
        return []
    params = WORKLOADS["small-fp32"].parameters(settings.quick)
    optimizer = ours(in_groups(params, groups) if groups > 1 else params, max_grad_norm=max_grad_norm)
    assert isinstance(optimizer, FusedOptimizer)
    optimizer.step()
    rows = optimizer._rows()
    grads, read = rows.refresh(optimizer), optimizer._rule.values
    return [
        Contender(STEP, optimizer.step),
        Contender(REFRESH, lambda: rows.refresh(optimizer)),
        Contender(SCAN, lambda: rows._update_addresses()),
        Contender(HYPER, lambda: [read(g) for g in optimizer.param_groups] != rows._values),
        Contender(NATIVE, lambda: cpu.run(rows.table)),  # the phases of the step before
        Contender(VERSIONS, lambda: torch.autograd.graph.increment_version(rows.active_params(grads))),
    ]


def shares(samples: dict[str, Sample]) -> list[str]:
    """What the parts leave over, and what share of the step each of them is."""
    share = {name: s.median / samples[STEP].median for name, s in samples.items()}
    rest_of_refresh = share[REFRESH] - share[SCAN] - share[HYPER]
    rest = 1.0 - share[REFRESH] - share[NATIVE] - share[VERSIONS]
    return [
        f"refresh {share[REFRESH]:.0%} (address scan {share[SCAN]:.0%}, hyper-parameters {share[HYPER]:.0%}, lists and "
        f"identities {rest_of_refresh:.0%}), native call {share[NATIVE]:.0%}, version counters {share[VERSIONS]:.0%}, "
        f"all else (torch's wrapper, control, statistics) {rest:.0%}"
    ]


def _versions(settings: Settings, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    by_name = {peer.name: peer.version for peer in peers.ADAMW}
    return {name: {"version": by_name[name.rsplit(", ", 1)[0]]} for name in names}


_PARTS = partial(Case, "overhead", rounds=40, notes=shares)
OVERHEAD = {
    "overhead-groups": Case("overhead", "1000 x 64 float32 in groups, step", grouped, rounds=25, extra=_versions),
    "overhead-parts": _PARTS("1000 x 64 float32, parts of a step", partial(parts, 1, None)),
    "overhead-parts-groups": _PARTS(
        f"1000 x 64 float32 in {GROUPS} groups, parts of a step", partial(parts, GROUPS, None)
    ),
    "overhead-parts-clip": _PARTS("1000 x 64 float32, parts of clip + step", partial(parts, 1, 1.0)),
}
