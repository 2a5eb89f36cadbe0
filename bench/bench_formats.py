"""AdamW in bf16 with master weights and quantised moments, clipping and step: GPT-2's 124 M parameters.

    python bench/bench_formats.py [--quick] [--json FILE] [--rounds N] [--threads N] [--only TEXT]
    pytest bench/bench_formats.py [--quick]

Bytes counted, an element: the gradient is read twice (2 x 2), the parameter and bf16 moments are read and written
(3 x 4), and so is the rest of the weights: 8 more with fp32, 4 with split and kahan, 2 with split8. Moments of 8 bits
take 4 less, of 4 bits 6 less. torch's clip and fused step move 20 and keep no rest.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from bench_clip import after_clipping
from measure import Case, Contender, Goal, Settings, copy_contender, run_all
from workloads import FUSED, MAX_NORM, OURS, WORKLOADS, ours, torch_fused

from mo_fused import masters

REST = {"fp32": 8, "split": 4, "split8": 2, "kahan": 4, "stochastic": 0}
SPLIT = f"{OURS} split"
# Quantised moments: state_dtype, master_weights, bytes that are moved fewer than with bf16 moments.
QUANTISED = [("int8", None, 4.0), ("int8", "split8", 4.0), ("int8", "split", 4.0), ("int4", "split8", 6.0)]
INT8_SPLIT8 = f"{OURS} int8 split8"


def contenders(settings: Settings) -> list[Contender]:
    workload = WORKLOADS["gpt2-bf16"]
    params = workload.parameters(settings.quick)
    elements = sum(p.numel() for p in params)
    racing = [Contender(OURS, ours(params, max_grad_norm=MAX_NORM).step, 16.0 * elements)]
    for mode in masters.MODES:
        step = ours(params, max_grad_norm=MAX_NORM, master_weights=mode).step
        racing.append(Contender(f"{OURS} {mode}", step, (16.0 + REST[mode]) * elements))
    for kept, mode, less in QUANTISED:
        step = ours(params, max_grad_norm=MAX_NORM, state_dtype=kept, master_weights=mode).step
        name = " ".join(filter(None, (OURS, kept, mode)))
        racing.append(Contender(name, step, (16.0 + REST.get(mode or "", 0) - less) * elements))
    racing.append(Contender(FUSED, after_clipping(torch_fused(params), params), 20.0 * elements))
    return [*racing, copy_contender(settings.quick)]


def bytes_of(mode: str | None, kept: str | None = None) -> float:
    """Parameter, gradient, moments and master weights of one bf16 element of a matrix, measured."""
    p = torch.nn.Parameter(torch.zeros(256, 256, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = ours([p], master_weights=mode, state_dtype=kept)
    optimizer.step()
    tensors = [p, p.grad, *(v for v in optimizer.state[p].values() if v.dim())]
    return sum(t.numel() * t.element_size() for t in tensors) / p.numel()


def sizes(_: Any) -> list[str]:
    masters_only = ", ".join(f"{m or 'none'} {bytes_of(m):g}" for m in (None, *masters.MODES))
    quantised = ", ".join(f"{kept} {m or 'none'} {bytes_of(m, kept):g}" for kept, m, _ in QUANTISED)
    released = bytes_of("split8", "int8") - 2
    return [
        f"bytes a parameter: {masters_only}; {quantised}",
        f"with gradient release int8 split8 {released:g}, and the largest gradient",
    ]


CASES = {
    "masters": Case(
        "formats",
        "GPT-2 124M bfloat16, clip + step with master weights",
        partial(contenders),
        [Goal(SPLIT, FUSED, 1.4), Goal(INT8_SPLIT8, FUSED, 1.0)],
        rounds=9,
        notes=sizes,
    )
}


@pytest.mark.parametrize("name", CASES)
def test_formats(name: str, settings: Settings, benchmark: Any) -> None:
    done = CASES[name].run(settings, benchmark)
    print(f"\n{done.text()}")
    assert all(s.median > 0 for s in done.samples.values())


if __name__ == "__main__":
    run_all(CASES, __doc__)
