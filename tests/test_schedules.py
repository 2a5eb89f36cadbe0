"""Learning-rate schedules against their closed formulas, and against being stopped and resumed anywhere."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mo_fused
from mo_fused.training import warmup_cosine


def rates(total: int, warmup: int | None, ratio: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_cosine(optimizer, total, warmup, ratio)
    seen = []
    for _ in range(steps):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return seen


def closed_form(k: int, total: int, warmup: int, ratio: float) -> float:
    if k < warmup:
        return (k + 1) / warmup
    if k >= total:
        return ratio
    turn = math.pi * (k - warmup) / max(1, total - 1 - warmup)
    return ratio + (1 - ratio) * (1 + math.cos(turn)) / 2


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_schedule_follows_its_formula(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 60))
    warmup = data.draw(st.integers(0, total))
    ratio = data.draw(st.floats(0.0, 1.0))
    seen = rates(total, warmup, ratio, total + 3)
    assert seen == pytest.approx([closed_form(k, total, warmup, ratio) for k in range(total + 3)], abs=1e-12)
    assert all(rate > 0 for rate in seen[:warmup])
    falling = seen[max(warmup - 1, 0) :]
    assert all(a >= b for a, b in itertools.pairwise(falling))


def test_schedule_at_known_points() -> None:
    seen = rates(total=101, warmup=10, ratio=0.1, steps=103)
    assert seen[0] == pytest.approx(0.1) and seen[9] == 1.0 and seen[10] == 1.0
    assert seen[55] == pytest.approx(0.55), "half-way down the cosine"
    assert seen[100:] == pytest.approx([0.1, 0.1, 0.1])
    assert rates(1000, None, 0.1, 1) == pytest.approx([0.1]), "the default warm-up is 1 % of the steps"


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.data())
def test_schedule_goes_on_where_it_stopped(total: int, data: st.DataObject) -> None:
    """State goes through a file that loads without code, into a schedule made with another shape."""
    warmup = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(0, total))

    def fresh(*shape: Any) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        a, b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        optimizer = torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 2.0}])
        return optimizer, warmup_cosine(optimizer, *shape)

    def go(optimizer: Any, schedule: Any, steps: int) -> list[tuple[float, ...]]:
        seen = []
        for _ in range(steps):
            seen.append(tuple(group["lr"] for group in optimizer.param_groups))
            optimizer.step()
            schedule.step()
        return seen

    undisturbed = go(*fresh(total, warmup), total + 2)
    optimizer, schedule = fresh(total, warmup)
    first = go(optimizer, schedule, stop)
    assert all(b == pytest.approx(4 * a) for a, b in undisturbed), "each group keeps its own peak"

    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    optimizer, schedule = fresh(7)
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    assert first + go(optimizer, schedule, total + 2 - stop) == undisturbed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((0,), "total_steps"), ((5, 6), "warmup_steps"), ((5, -1), "warmup_steps"), ((5, 1, 2.0), "min")],
)
def test_schedule_refuses_bad_shapes(arguments: tuple[Any, ...], said: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=f"expected {said}.*; found .*; give"):
        warmup_cosine(optimizer, *arguments)
    assert optimizer.param_groups[0]["lr"] == 1.0 and "initial_lr" not in optimizer.param_groups[0]


def test_schedule_is_the_rate_of_adafactor() -> None:
    """Its step size is the rate times the parameter's RMS, as long as that is less than 1 / sqrt(step)."""
    weight = nn.Parameter(torch.full((4, 3), 2.0))
    optimizer = mo_fused.Adafactor([weight], lr=0.1)
    schedule = warmup_cosine(optimizer, 8, 3, 0.1)
    for k in range(8):
        size = float(weight.detach()[0, 0])
        weight.grad = torch.ones(4, 3)  # equal gradients: the update of every element is the step size itself
        optimizer.step()
        schedule.step()
        expected = size * (1 - 0.1 * closed_form(k, 8, 3, 0.1))
        assert float(weight.detach()[0, 0]) == pytest.approx(expected, rel=1e-6)
