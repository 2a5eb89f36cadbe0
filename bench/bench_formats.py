"""AdamW in bf16 with master weights and quantised moments, clipping and step: GPT-2's 124 M parameters.

    python bench/bench_formats.py [--quick] [--output FILE] [--rounds N] [--threads N] [--only TEXT]

Bytes counted, an element: the gradient is read twice (2 x 2), the parameter and bf16 moments are read and written
(3 x 4), and so is the rest of the weights: 8 more with fp32, 4 with split and kahan, 2 with split8. Moments in fp32
take 8 more, in 8 bits 4 less, in 4 bits 6 less. torch's clip and fused step move 20 and keep no rest.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mo_fused import masters
from mo_fused.bench.case import Case, Goal, Settings, copy_contender, run_all
from mo_fused.bench.peers import FUSED, OURS, ours, torch_fused
from mo_fused.bench.race import Contender
from mo_fused.bench.steps import after_clipping
from mo_fused.bench.workloads import MAX_NORM, WORKLOADS

REST = {"fp32": 8, "split": 4, "split8": 2, "kahan": 4, "stochastic": 0}
# What is moved with these moments and no rest.
MOVED = {"bf16": 16.0, "fp32": 24.0, "int8": 12.0, "int4": 10.0}


def name_of(kept: str, mode: str | None) -> str:
    """The contender with these moments and these master weights."""
    return f"{OURS} {kept} {mode or 'none'}"


def contenders(kept: str, settings: Settings) -> list[Contender]:
    workload = WORKLOADS["gpt2-bf16"]
    params = workload.parameters(settings.quick)
    elements = sum(p.numel() for p in params)
    racing = []
    for mode in (None, *masters.MODES):
        step = ours(params, max_grad_norm=MAX_NORM, state_dtype=kept, master_weights=mode).step
        racing.append(Contender(name_of(kept, mode), step, (MOVED[kept] + REST.get(mode or "", 0)) * elements))
    racing.append(Contender(FUSED, after_clipping(torch_fused(params).step, params), 20.0 * elements))
    return [*racing, copy_contender(settings.quick)]


def bytes_of(kept: str, mode: str | None) -> float:
    """Parameter, gradient, moments and master weights of one bf16 element of a matrix, measured."""
    p = torch.nn.Parameter(torch.zeros(256, 256, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = ours([p], master_weights=mode, state_dtype=kept)
    optimizer.step()
    tensors = [p, p.grad, *(v for v in optimizer.state[p].values() if v.dim())]
    return sum(t.numel() * t.element_size() for t in tensors) / p.numel()


def sizes(kept: str, _: Any) -> list[str]:
    found = {mode or "none": bytes_of(kept, mode) for mode in (None, *masters.MODES)}
    released = ", ".join(f"{mode} {size - 2:g}" for mode, size in found.items())
    return [
        "bytes a parameter: " + ", ".join(f"{mode} {size:g}" for mode, size in found.items()),
        f"with gradient release, beside the largest gradient: {released}",
    ]


GOALS = {
    "bf16": [Goal(name_of("bf16", "split"), FUSED, 1.4)],
    "int8": [Goal(name_of("int8", "split8"), FUSED, 1.0)],
}
CASES = {
    kept: Case(
        "formats",
        f"GPT-2 124M bfloat16, clip + step, {kept} moments",
        partial(contenders, kept),
        GOALS.get(kept, []),
        rounds=9,
        notes=partial(sizes, kept),
    )
    for kept in MOVED
}


if __name__ == "__main__":
    run_all(CASES, __doc__)
