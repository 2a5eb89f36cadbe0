"""What a profile shows of a step: its name and its phases; and what that costs where no profile is taken."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from cases import BACKEND, RULES, drive, gradients, parameters, weights
from torch.profiler import ProfilerActivity, profile

import mo_fused
from mo_fused import tracing

SHAPES = [(33, 3), (7,)]


def ranges(prof: Any) -> dict[str, int]:
    """How often each range of this package and of torch's optimizers was seen."""
    names = ("Optimizer.", "mo_fused::")
    return {e.key: e.count for e in prof.key_averages() if e.key.startswith(names)}


@pytest.mark.parametrize("case", RULES, ids=str)
def test_a_step_and_its_phases(case: Any) -> None:
    params = parameters(weights(SHAPES))
    opt = case.ours(params, max_grad_norm=0.5)
    drive(opt, params, gradients(SHAPES, 1))
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        drive(opt, params, gradients(SHAPES, 2))
    on_device = {"mo_fused::send": 2, "mo_fused::norm": 2, "mo_fused::finish": 2, "mo_fused::update": 2}
    want = {f"Optimizer.step#{case.kind}.step": 2, "mo_fused::table": 2, "mo_fused::step": 2}
    found = ranges(prof)
    assert {k: v for k, v in found.items() if "zero_grad" not in k} == {
        **want,
        **({} if BACKEND == "cpu" else on_device),
    }
    # One within the other, and most of the outer one is explained.
    spans = {e.name: e.time_range for e in prof.events() if e.name in want}
    outer, inner = spans[f"Optimizer.step#{case.kind}.step"], spans["mo_fused::step"]
    assert outer.start <= inner.start and inner.end <= outer.end


@pytest.mark.cpu_only(reason="on a device the same ranges as in a step")
def test_clipping_and_the_names_under_the_patch() -> None:
    params = parameters(weights(SHAPES))
    with mo_fused.patch():
        opt = torch.optim.AdamW(params, lr=0.1)
        drive(opt, params, gradients(SHAPES, 1))
        for p, g in zip(params, gradients(SHAPES, 1)[0], strict=True):
            p.grad = g
        with torch.autograd.profiler.profile() as prof:  # the older interface
            torch.nn.utils.clip_grad_norm_(params, 1e-3)
            opt.step()
    found = ranges(prof)
    assert found == {"mo_fused::norm": 1, "Optimizer.step#AdamW.step": 1, "mo_fused::table": 1, "mo_fused::step": 1}


@pytest.mark.cpu_only(reason="nothing of it runs on a device")
def test_a_phase_costs_nothing_without_a_profile() -> None:
    """A range of torch's costs about 10 us on any machine; two of them would be a tenth of a small step."""

    def seconds(enter: Any) -> float:
        best = 1.0
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(200):
                with enter("step"):
                    pass
            best = min(best, time.perf_counter() - start)
        return best / 200

    assert seconds(tracing.phase) < 0.2 * seconds(torch.autograd.profiler.record_function)
