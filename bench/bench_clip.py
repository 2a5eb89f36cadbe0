"""Clipping and the AdamW step, and GradScaler, clipping and the step.

    python bench/bench_clip.py [--quick] [--json FILE] [--rounds N] [--threads N] [--only TEXT]
    pytest bench/bench_clip.py [--quick]

Bytes counted, in elements read or written: the step itself moves 7. Ours reads the gradient once more for the norm: 8.
torch reads it for the norm, reads and writes it to scale it: 10; its scaler reads and writes it before that: 12. Ours
under torch's own scaler, which reads and writes every gradient to look for infinities: 10; under our scaler: 8.

torch scales the shared gradients in place, so that from the second round on they have the norm that is asked for; that
changes what is multiplied, not what is read and written. For the same reason the scaler's scale is 1: a larger one
would divide the gradients again in every round, down to denormal numbers, which are slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from measure import Case, Contender, Goal, Settings, copy_contender, run_all
from torch import Tensor
from workloads import FUSED, MAX_NORM, OURS, WORKLOADS, agree, ours, peers, share_state, torch_fused

import mo_fused

CLIP_GOALS = {"gpt2-fp32": 1.4, "gpt2-bf16": 1.9, "small-fp32": 8.0, "small-bf16": 8.0}
OURS_TORCH_SCALER = "mo_fused, torch's GradScaler"
OURS_OUR_SCALER = "mo_fused, mo_fused.GradScaler"


def clip_(params: list[Tensor]) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, MAX_NORM)


def after_clipping(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> Callable[[], None]:
    def call() -> None:
        clip_(params)
        optimizer.step()

    return call


def clipping(name: str, settings: Settings) -> list[Contender]:
    workload = WORKLOADS[name]
    agree(torch_fused, ours, workload.dtype, clip_, max_grad_norm=MAX_NORM)
    params = workload.parameters(settings.quick)
    counted = workload.counted_bytes(params)
    own, others = ours(params, max_grad_norm=MAX_NORM), {who: make(params) for who, make in peers().items()}
    share_state([own, *others.values()])
    racing = [Contender(OURS, own.step, 8 * counted)]
    racing += [Contender(who, after_clipping(other, params), 10 * counted) for who, other in others.items()]
    return [*racing, copy_contender(settings.quick)] if workload.in_memory else racing


def scaler_of(kind: type[torch.amp.GradScaler]) -> torch.amp.GradScaler:
    scaler = kind("cpu", init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.zeros(()))  # makes the scale tensor, as a training loop does before its first step
    return scaler


def under_scaler(
    kind: type[torch.amp.GradScaler], optimizer: torch.optim.Optimizer, clipped: list[Tensor] | None
) -> Callable[[], None]:
    """A step as PyTorch's guide writes it; `clipped`: parameters to unscale and clip by hand before it."""
    scaler = scaler_of(kind)

    def call() -> None:
        if clipped is not None:
            scaler.unscale_(optimizer)
            clip_(clipped)
        scaler.step(optimizer)
        scaler.update()

    return call


def scaling(name: str, settings: Settings) -> list[Contender]:
    workload = WORKLOADS[name]
    agree(torch_fused, ours, workload.dtype, clip_, max_grad_norm=MAX_NORM)
    params = workload.parameters(settings.quick)
    counted = workload.counted_bytes(params)
    theirs, own = torch.amp.GradScaler, mo_fused.GradScaler
    first, second = (ours(params, max_grad_norm=MAX_NORM) for _ in range(2))
    others = {who: make(params) for who, make in peers(scaled=True).items()}
    share_state([first, second, *others.values()])
    racing = [
        Contender(OURS_OUR_SCALER, under_scaler(own, first, None), 8 * counted),
        Contender(OURS_TORCH_SCALER, under_scaler(theirs, second, None), 10 * counted),
        *(Contender(who, under_scaler(theirs, other, params), 12 * counted) for who, other in others.items()),
    ]
    return [*racing, copy_contender(settings.quick)] if workload.in_memory else racing


def rounds(name: str) -> int:
    return 15 if WORKLOADS[name].in_memory else 40


CASES = {
    f"clip-{name}": Case(
        "clip",
        f"{WORKLOADS[name].name}, clip + step",
        partial(clipping, name),
        [Goal(OURS, FUSED, goal)],
        rounds(name),
    )
    for name, goal in CLIP_GOALS.items()
}
CASES |= {
    f"scaler-{name}": Case(
        "clip", f"{WORKLOADS[name].name}, scaler + clip + step", partial(scaling, name), rounds=rounds(name)
    )
    for name in ("gpt2-fp32", "small-fp32")
}


@pytest.mark.parametrize("name", CASES)
def test_clip(name: str, settings: Settings, benchmark: Any) -> None:
    done = CASES[name].run(settings, benchmark)
    print(f"\n{done.text()}")
    assert all(s.median > 0 for s in done.samples.values())


if __name__ == "__main__":
    run_all(CASES, __doc__)
