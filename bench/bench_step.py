"""The bare AdamW step: GPT-2's 124 M parameters, and 1000 tensors of 64 elements.

    python bench/bench_step.py [--quick] [--json FILE] [--rounds N] [--threads N] [--only TEXT]
    pytest bench/bench_step.py [--quick]

Bytes counted: parameter, gradient and two moments are read, all but the gradient written: 28 an element in fp32, 14 in
bf16, for every contender (torch's foreach really moves more). All contenders step the same parameters with the same
state tensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from measure import Case, Contender, Goal, Settings, copy_contender, run_all
from workloads import FUSED, OURS, WORKLOADS, agree, ours, peers, share_state, torch_fused

GOALS = {"gpt2-fp32": 1.0, "gpt2-bf16": 1.4, "small-fp32": 6.0, "small-bf16": 6.0}


def contenders(name: str, settings: Settings) -> list[Contender]:
    workload = WORKLOADS[name]
    agree(torch_fused, ours, workload.dtype)
    params = workload.parameters(settings.quick)
    counted = 7.0 * workload.counted_bytes(params)
    optimizers = {who: make(params) for who, make in {OURS: ours, **peers()}.items()}
    share_state(list(optimizers.values()))
    racing = [Contender(who, optimizer.step, counted) for who, optimizer in optimizers.items()]
    return [*racing, copy_contender(settings.quick)] if workload.in_memory else racing


CASES = {
    name: Case(
        "step",
        f"{WORKLOADS[name].name}, step",
        partial(contenders, name),
        [Goal(OURS, FUSED, goal)],
        rounds=15 if WORKLOADS[name].in_memory else 40,
    )
    for name, goal in GOALS.items()
}


@pytest.mark.parametrize("name", CASES)
def test_step(name: str, settings: Settings, benchmark: Any) -> None:
    done = CASES[name].run(settings, benchmark)
    print(f"\n{done.text()}")
    assert all(s.median > 0 for s in done.samples.values())


if __name__ == "__main__":
    run_all(CASES, __doc__)
