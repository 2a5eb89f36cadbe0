"""The Adafactor step, bare and with clipping: GPT-2's 124 M parameters, and 500 matrices of 64 x 64.

    python bench/bench_adafactor.py [--quick] [--json FILE] [--rounds N] [--threads N] [--only TEXT]
    pytest bench/bench_adafactor.py [--quick]

Bytes counted, in elements read or written: ours reads the gradient three times and the parameter once, and writes the
parameter: 5, with or without clipping. The others make temporaries of a parameter's size and are counted the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from bench_overhead import MEMORY_GOAL, growth
from measure import Case, Contender, Goal, Settings, copy_contender, run_all
from torch import Tensor
from workloads import DTYPES, MAX_NORM, OURS, Make, Workload, gpt2

import mo_fused

TORCH, FOREACH, TRANSFORMERS, OURS_LIKE = (
    "torch for-loop",
    "torch foreach",
    "transformers",
    "mo_fused, transformers' form",
)
LR, DECAY = 1e-2, 0.1
WORKLOADS = {f"gpt2-{name}": gpt2(dtype) for name, dtype in DTYPES.items()}
WORKLOADS |= {
    f"small-{name}": Workload(f"500 x 64x64 {name}", [(64, 64)] * 500, [(64, 64)] * 20, dtype, False)
    for name, dtype in DTYPES.items()
}
GOALS = {"gpt2-fp32": 20.0, "small-fp32": 10.0}


def ours(params: Any, **options: Any) -> torch.optim.Optimizer:
    return mo_fused.Adafactor(params, lr=LR, weight_decay=DECAY, **options)


def ours_like(params: Any, **options: Any) -> torch.optim.Optimizer:
    return mo_fused.Adafactor.like_transformers(params, weight_decay=DECAY, **options)


def of_torch(foreach: bool, params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=LR, weight_decay=DECAY, foreach=foreach)


@cache
def of_transformers() -> Make | None:
    """The class of the transformers library, or None after saying why not."""
    try:
        from transformers.optimization import Adafactor
    except ImportError as error:
        print(f"{TRANSFORMERS} is left out: {error}")
        return None
    kind: Any = Adafactor
    return lambda params, **options: kind(params, weight_decay=DECAY, **options)


def makers() -> dict[str, Make]:
    there: dict[str, Make] = {OURS: ours, TORCH: partial(of_torch, False), FOREACH: partial(of_torch, True)}
    other = of_transformers()
    return {**there, OURS_LIKE: ours_like, TRANSFORMERS: other} if other else there


def agree(one: Make, other: Make) -> None:
    """Refuses to time two optimizers that do not do the same: three steps on small tensors, compared."""
    workload = Workload("agreement", [(33, 7), (129,), (2, 3, 5)], [], torch.float32, False)
    first, second = workload.parameters(False), workload.parameters(False)
    a, b = one(first), other(second)
    for step in range(3):
        for i, (p, q) in enumerate(zip(first, second, strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(first, second, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


def after_clipping(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> Callable[[], None]:
    def call() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return call


def contenders(name: str, clip: bool, settings: Settings) -> list[Contender]:
    workload, kinds = WORKLOADS[name], makers()
    agree(kinds[OURS], kinds[TORCH])
    if TRANSFORMERS in kinds:
        agree(kinds[OURS_LIKE], kinds[TRANSFORMERS])
    params = workload.parameters(settings.quick)
    counted = 5.0 * workload.counted_bytes(params)
    racing = []
    for who, make in kinds.items():
        own = who in (OURS, OURS_LIKE)
        optimizer = make(params, max_grad_norm=MAX_NORM) if clip and own else make(params)
        racing.append(
            Contender(who, after_clipping(optimizer, params) if clip and not own else optimizer.step, counted)
        )
    return [*racing, copy_contender(settings.quick)] if workload.in_memory else racing


CASES = {
    f"{what}-{name}": Case(
        "adafactor",
        f"{workload.name}, Adafactor, {what}",
        partial(contenders, name, what != "step"),
        [Goal(OURS, peer, GOALS[name]) for peer in (TORCH, FOREACH)] if name in GOALS else (),
        rounds=7 if workload.in_memory else 30,
    )
    for name, workload in WORKLOADS.items()
    for what in ("step", "clip + step")
}


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_of(who: str, dtype: str, quick: bool) -> dict[str, float]:
    """Growth of resident memory in a step, in shares of the parameters' size, and the state as a share of AdamW's."""
    # Code pages, thread stacks and allocator arenas that come with the first use of anything.
    warm = [torch.nn.Parameter(torch.zeros(512, 512, dtype=DTYPES[dtype])) for _ in range(4)]
    for p in warm:
        p.grad = torch.ones_like(p)
    warm_optimizer = makers()[who](warm)
    for _ in range(3):
        warm_optimizer.step()
    params = WORKLOADS[f"gpt2-{dtype}"].parameters(quick)
    size = sum(p.numel() * p.element_size() for p in params)
    optimizer = makers()[who](params)
    first = growth(optimizer.step)
    states = (v for entry in optimizer.state.values() for v in entry.values())
    state_size = sum(v.numel() * v.element_size() for v in states if isinstance(v, Tensor))
    later = max(growth(optimizer.step) for _ in range(3))
    return {
        "first_beyond_state": max(0, first - state_size) / size,
        "later": later / size,
        "state_of_adamw": state_size / (8 * sum(p.numel() for p in params)),
    }


def memory(dtype: str, settings: Settings) -> tuple[str, list[dict[str, Any]]]:
    """One child process for each contender, so that no freed memory of another one is at hand."""
    lines = [f"[memory-{dtype}] GPT-2 124M {dtype}, Adafactor: resident memory of a step, in shares of the parameters'"]
    lines.append(f"  {'':<34} {'first step, beyond its state':>29} {'later steps':>12} {'state / fp32 AdamW':>19}")
    records: list[dict[str, Any]] = []
    for who in (OURS, TORCH, FOREACH):
        words = [sys.executable, __file__, "--memory-of", who, dtype, str(int(settings.quick))]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"measuring the memory of {who} failed:\n{done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        case = f"GPT-2 124M {dtype}, Adafactor, resident memory"
        records.append({"bench": "adafactor", "case": case, "contender": who, "quick": settings.quick, **found})
        shares = f"{found['first_beyond_state']:>29.3%} {found['later']:>12.3%} {found['state_of_adamw']:>19.3%}"
        lines.append(f"  {who:<34} {shares}")
    worst = max(records[0]["first_beyond_state"], records[0]["later"])
    lines.append(
        f"  {OURS} grows by {worst:.3%}; goal below {MEMORY_GOAL:.0%}: {'reached' if worst < MEMORY_GOAL else 'MISSED'}"
    )
    return "\n".join(lines), records


@pytest.mark.parametrize("name", CASES)
def test_adafactor(name: str, settings: Settings, benchmark: Any) -> None:
    done = CASES[name].run(settings, benchmark)
    print(f"\n{done.text()}")
    assert all(s.median > 0 for s in done.samples.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_adafactor_memory(dtype: str, settings: Settings) -> None:
    text, records = memory(dtype, settings)
    print(f"\n{text}")
    # Not a time: it does not depend on what else the machine does. At tiny sizes a page is more than 1 %.
    assert settings.quick or max(records[0]["first_beyond_state"], records[0]["later"]) < MEMORY_GOAL


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory-of"]:
        print(json.dumps(memory_of(sys.argv[2], sys.argv[3], sys.argv[4] == "1")))
    else:
        run_all(CASES, __doc__, {f"memory-{dtype}": partial(memory, dtype) for dtype in DTYPES})
