"""What a step costs beside its arithmetic: host time and its parts, parameter groups, resident memory.

    python bench/bench_overhead.py [--quick] [--json FILE] [--rounds N] [--threads N] [--only TEXT]
    pytest bench/bench_overhead.py [--quick]

The parts are called by themselves on an optimizer that has stepped, so they are what a step calls when nothing but the
values has changed since the last one: the usual case.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Case, Contender, Goal, Sample, Settings, run_all
from workloads import DTYPES, FOREACH, FUSED, GROUPS, OURS, WORKLOADS, in_groups, ours, torch_foreach, torch_fused

from mo_fused import dispatch
from mo_fused.backends import cpu
from mo_fused.optim import FusedOptimizer

# -- groups -----------------------------------------------------------------------------------------------------------

ONE, MANY = f"{OURS}, 1 group", f"{OURS}, {GROUPS} groups"


def grouped(settings: Settings, **options: Any) -> list[Contender]:
    params = WORKLOADS["small-fp32"].parameters(settings.quick)
    racing = []
    for who, make, extra in ((OURS, ours, options), (FUSED, torch_fused, {}), (FOREACH, torch_foreach, {})):
        racing.append(Contender(f"{who}, 1 group", make(params, **extra).step))
        racing.append(Contender(f"{who}, {GROUPS} groups", make(in_groups(params, GROUPS), **extra).step))
    return racing


# -- parts of the host time -------------------------------------------------------------------------------------------

STEP, REFRESH, SCAN, HYPER = "whole step", "rows.refresh", "- address scan", "- hyper-parameters"
NATIVE, VERSIONS = "native call", "version counters"


def parts(groups: int, max_grad_norm: float | None, settings: Settings) -> list[Contender]:
    if dispatch.native() is None:
        raise SystemExit(f"the parts of a native step need the native kernels, and {dispatch.native_problem()}")
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


# -- resident memory --------------------------------------------------------------------------------------------------

MAKERS = {OURS: ours, FUSED: torch_fused, FOREACH: torch_foreach}
CLIPPING = f"{OURS}, clipping"
MEMORY_GOAL = 0.01


def _kilobytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status: expected a line {field}, found none; this measurement needs Linux")


def growth(call: Any) -> int:
    """Bytes by which resident memory rises, at its highest, above what it was before the call."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc: memory that was freed before must not serve the call unseen
        libc.malloc_trim(0)
    # Sets VmHWM back to VmRSS. ru_maxrss would not do: it cannot be set back, and it starts at the parent's.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _kilobytes("VmRSS")
    call()
    return max(0, _kilobytes("VmHWM") - before) * 1024


def memory_of(who: str, dtype: str, quick: bool) -> dict[str, float]:
    """In a process of its own: growth by the first step beyond the state it makes, and by the three steps after it,
    as fractions of the parameters' size."""

    def make(params: Any) -> torch.optim.Optimizer:
        return ours(params, max_grad_norm=1.0) if who == CLIPPING else MAKERS[who](params)

    # Code pages, thread stacks and allocator arenas that come with the first use of anything.
    warm = [torch.nn.Parameter(torch.zeros(1 << 18, dtype=DTYPES[dtype])) for _ in range(4)]
    for p in warm:
        p.grad = torch.ones_like(p)
    warm_optimizer = make(warm)
    for _ in range(3):
        warm_optimizer.step()

    params = WORKLOADS[f"gpt2-{dtype}"].parameters(quick)
    size = sum(p.numel() * p.element_size() for p in params)
    optimizer = make(params)
    first = growth(optimizer.step)
    states = (v for entry in optimizer.state.values() for v in entry.values())
    state_size = sum(v.numel() * v.element_size() for v in states if isinstance(v, torch.Tensor))
    later = max(growth(optimizer.step) for _ in range(3))
    return {"first_beyond_state": max(0, first - state_size) / size, "later": later / size, "parameters": size}


def memory(dtype: str, settings: Settings) -> dict[str, dict[str, float]]:
    """One child process for each contender, so that no freed memory of another one is at hand."""
    out = {}
    for who in (OURS, CLIPPING, FUSED, FOREACH):
        words = [sys.executable, __file__, "--memory-of", who, dtype, str(int(settings.quick))]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"measuring the memory of {who} failed:\n{done.stderr}")
        out[who] = json.loads(done.stdout.splitlines()[-1])
    return out


def memory_lines(dtype: str, found: dict[str, dict[str, float]], quick: bool) -> list[str]:
    lines = [f"[memory-{dtype}] GPT-2 124M {dtype}: resident memory of a step, in shares of the parameters' size"]
    lines.append(f"  {'':<34} {'first step, beyond its state':>29} {'later steps':>12}")
    for who, growth in found.items():
        lines.append(f"  {who:<34} {growth['first_beyond_state']:>29.3%} {growth['later']:>12.3%}")
    small = " (tiny sizes: says nothing)" if quick else ""
    for who in (OURS, CLIPPING):
        worst = max(found[who]["first_beyond_state"], found[who]["later"])
        verdict = "reached" if worst < MEMORY_GOAL else "MISSED"
        lines.append(f"  {who} grows by {worst:.3%}; goal below {MEMORY_GOAL:.0%}: {verdict}{small}")
    return lines


def memory_records(dtype: str, found: dict[str, dict[str, float]], quick: bool) -> list[dict[str, Any]]:
    case = f"GPT-2 124M {dtype}, resident memory"
    return [
        {"bench": "overhead", "case": case, "contender": who, "quick": quick, **growth} for who, growth in found.items()
    ]


# -- the cases --------------------------------------------------------------------------------------------------------

CASES = {
    "groups": Case("overhead", "1000 x 64 float32 in groups, step", grouped, [Goal(MANY, ONE, 1.1, at_most=True)], 40),
    "parts": Case("overhead", "1000 x 64 float32, parts of a step", partial(parts, 1, None), (), 40, shares),
    "parts-groups": Case(
        "overhead",
        f"1000 x 64 float32 in {GROUPS} groups, parts of a step",
        partial(parts, GROUPS, None),
        (),
        40,
        shares,
    ),
    "parts-clip": Case("overhead", "1000 x 64 float32, parts of clip + step", partial(parts, 1, 1.0), (), 40, shares),
}


@pytest.mark.parametrize("name", CASES)
def test_overhead(name: str, settings: Settings, benchmark: Any) -> None:
    done = CASES[name].run(settings, benchmark)
    print(f"\n{done.text()}")
    assert all(s.median > 0 for s in done.samples.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory(dtype: str, settings: Settings) -> None:
    found = memory(dtype, settings)
    print("\n" + "\n".join(memory_lines(dtype, found, settings.quick)))
    # Not a time: it does not depend on what else the machine does. At tiny sizes a page is more than 1 %.
    assert settings.quick or max(found[OURS]["first_beyond_state"], found[OURS]["later"]) < MEMORY_GOAL


def memory_case(dtype: str, settings: Settings) -> tuple[str, list[dict[str, Any]]]:
    found = memory(dtype, settings)
    return "\n".join(memory_lines(dtype, found, settings.quick)), memory_records(dtype, found, settings.quick)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory-of"]:
        print(json.dumps(memory_of(sys.argv[2], sys.argv[3], sys.argv[4] == "1")))
    else:
        more = {f"memory-{dtype}": partial(memory_case, dtype) for dtype in DTYPES}
        run_all(CASES, __doc__, more)
