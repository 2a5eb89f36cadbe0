"""Learning-rate schedules against their closed formulas, and against being stopped and resumed anywhere."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mo_fused
from mo_fused.training import schedules, warmup_cosine


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


# --- the other schedules: their formulas written anew, as fractions of the peak at step k


def line(k: int, total: int, warmup: int, ratio: float) -> float:
    if k < warmup:
        return (k + 1) / warmup
    if k >= total:
        return ratio
    if warmup == total - 1:
        return 1.0  # as the cosine: of one step after the warm-up the line has its beginning
    left = (total - 1 - k) / (total - 1 - warmup)  # share of the way that is still to go
    return (1 - left) * ratio + left


def stable(k: int, total: int, warmup: int, decay: int, ratio: float, shape: str) -> float:
    if k < warmup:
        return (k + 1) / warmup
    if k >= total:
        return ratio
    done = max(0, k + 1 + decay - total) / max(1, decay)
    return 1 - (1 - ratio) * (done if shape == "linear" else math.sqrt(done))


def constant(k: int, warmup: int) -> float:
    return min(1.0, (k + 1) / warmup) if warmup else 1.0


def vaswani(k: int, warmup: int) -> float:
    """min(n**-0.5, n * N**-1.5) of step n = k + 1, over its value at n = N."""
    n = k + 1
    return min(1 / math.sqrt(n), n / math.sqrt(warmup**3)) * math.sqrt(warmup)


SHAPES: dict[str, Callable[..., float]] = {
    "warmup_cosine": closed_form,
    "warmup_linear": line,
    "warmup_stable_decay": stable,
    "warmup_constant": constant,
    "inverse_sqrt": vaswani,
}


@st.composite
def shapes(draw: st.DrawFn, name: str) -> tuple[Any, ...]:
    """Positional arguments after the optimizer, all given."""
    total = draw(st.integers(1, 40))
    warmup = draw(st.integers(0, total))
    ratio = draw(st.floats(0.0, 1.0))
    if name == "warmup_stable_decay":
        return total, warmup, draw(st.integers(0, total - warmup)), ratio, draw(st.sampled_from(["linear", "sqrt"]))
    if name == "warmup_constant":
        return (warmup,)
    return (max(1, warmup),) if name == "inverse_sqrt" else (total, warmup, ratio)


def two_groups(name: str, *shape: Any, tensor: bool = False) -> tuple[torch.optim.Optimizer, Any]:
    a, b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    peaks: list[Any] = [0.5, 2.0]
    if tensor:
        peaks = [torch.tensor(peak, dtype=torch.float64) for peak in peaks]
    optimizer = torch.optim.SGD([{"params": [a], "lr": peaks[0]}, {"params": [b], "lr": peaks[1]}])
    return optimizer, getattr(schedules, name)(optimizer, *shape)


def walk(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[tuple[float, ...]]:
    seen = []
    for _ in range(steps):
        seen.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=30)
@given(data=st.data())
def test_every_schedule_follows_its_formula(name: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(name))
    tensor = data.draw(st.booleans())
    seen = walk(*two_groups(name, *shape, tensor=tensor), 44)
    expected = [SHAPES[name](k, *shape) for k in range(44)]
    assert [a for a, _ in seen] == pytest.approx([0.5 * factor for factor in expected], abs=1e-12)
    assert [b for _, b in seen] == pytest.approx([2.0 * factor for factor in expected], abs=1e-12), "its own peak"


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=20)
@given(data=st.data())
def test_every_schedule_goes_on_where_it_stopped(name: str, data: st.DataObject) -> None:
    shape, other = data.draw(shapes(name)), data.draw(shapes(name))
    stop = data.draw(st.integers(0, 40))
    undisturbed = walk(*two_groups(name, *shape), 44)
    optimizer, schedule = two_groups(name, *shape)
    first = walk(optimizer, schedule, stop)
    assert all(type(value) in (int, float) for shape in schedule.state_dict()["lr_lambdas"] for value in shape.values())
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    optimizer, schedule = two_groups(name, *other)
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    assert first + walk(optimizer, schedule, 44 - stop) == undisturbed


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        # 200 steps: 2 of warm-up, and 20 of decay, of which the last has the minimum
        ("warmup_linear", {"total_steps": 200}, {0: 0.5, 1: 1.0, 2: 1.0, 199: 0.0, 200: 0.0}),
        ("warmup_linear", {"total_steps": 12, "warmup_steps": 1, "min_ratio": 0.2}, {1: 1.0, 6: 0.6, 11: 0.2}),
        ("warmup_stable_decay", {"total_steps": 200}, {0: 0.5, 179: 1.0, 180: 0.95, 189: 0.5, 199: 0.0}),
        ("warmup_stable_decay", {"total_steps": 200, "shape": "sqrt"}, {179: 1.0, 184: 0.5, 199: 0.0}),
        ("warmup_stable_decay", {"total_steps": 1}, {0: 1.0, 1: 0.0}),
        ("warmup_constant", {"total_steps": 200}, {0: 0.5, 1: 1.0, 500: 1.0}),
        ("warmup_constant", {"warmup_steps": 0}, {0: 1.0, 9: 1.0}),
        ("inverse_sqrt", {"warmup_steps": 4}, {0: 0.25, 3: 1.0, 15: 0.5, 399: 0.1}),
        ("inverse_sqrt", {"total_steps": 400}, {0: 0.25, 15: 0.5}),
    ],
)
def test_schedules_at_known_points(name: str, shape: dict[str, Any], expected: dict[int, float]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = getattr(schedules, name)(optimizer, **shape)
    factors = {k: schedule.lr_lambdas[0](k) for k in expected}
    assert factors == pytest.approx(expected)


def test_a_checkpoint_of_the_stable_part_can_be_decayed_early() -> None:
    """As the head of schedules.py says: the optimizer's state, and a schedule of the new shape that goes on."""
    optimizer, schedule = two_groups("warmup_stable_decay", 1000, 10)
    walk(optimizer, schedule, 50)
    again, _ = two_groups("warmup_constant", 1)
    again.load_state_dict(optimizer.state_dict())
    shorter = schedules.warmup_stable_decay(again, 60, 10, 5, last_epoch=49)
    factors = [a / 0.5 for a, _ in walk(again, shorter, 10)]
    assert factors == pytest.approx([1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0])


@pytest.mark.parametrize("name", SHAPES)
def test_the_rates_reach_the_weights(name: str) -> None:
    """A gradient of 1 moves SGD by the sum of the rates; one of 0 shrinks AdamW by each 1 - rate * decay."""
    shape: dict[str, Any] = {"warmup_steps": 3, "total_steps": 12}
    factors = [
        getattr(schedules, name)(torch.optim.SGD([torch.zeros(1)], 1.0), **shape).lr_lambdas[0](k) for k in range(12)
    ]
    for sgd, adamw in ((torch.optim.SGD, torch.optim.AdamW), (mo_fused.SGD, mo_fused.AdamW)):
        moved, shrunk = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
        for optimizer, gradient in (
            (sgd([moved], lr=0.1), 1.0),
            (adamw([shrunk], lr=torch.tensor(0.1, dtype=torch.float64), weight_decay=0.5, foreach=False), 0.0),
        ):
            parameter = optimizer.param_groups[0]["params"][0]
            schedule = getattr(schedules, name)(optimizer, **shape)
            for _ in range(12):
                parameter.grad = torch.full_like(parameter, gradient)
                optimizer.step()
                schedule.step()
        assert moved.tolist() == pytest.approx([1 - 0.1 * sum(factors)] * 2, rel=1e-9)
        assert shrunk.tolist() == pytest.approx([math.prod(1 - 0.05 * factor for factor in factors)] * 2, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        *((name, {"total_steps": 0}, "total_steps to be 1 or more") for name in SHAPES),
        *((name, {"total_steps": 5, "warmup_steps": 6}, "warmup_steps to be . to total_steps") for name in SHAPES),
        *((name, {"total_steps": 5, "warmup_steps": 0.1}, "warmup_steps to be a whole number") for name in SHAPES),
        ("warmup_linear", {"total_steps": 5, "min_ratio": math.nan}, "min_ratio"),
        ("warmup_linear", {"total_steps": 5, "min_ratio": None}, "min_ratio to be 0 to 1"),
        ("warmup_linear", {"total_steps": 5, "min_ratio": "0.1"}, "min_ratio to be 0 to 1"),
        ("warmup_stable_decay", {"total_steps": 5, "warmup_steps": 2, "decay_steps": 4}, "decay_steps"),
        ("warmup_stable_decay", {"total_steps": 5, "decay_steps": -1}, "decay_steps"),
        ("warmup_stable_decay", {"total_steps": 5, "shape": "cosine"}, "shape"),
        ("warmup_constant", {}, "warmup_steps to be given"),
        ("warmup_constant", {"warmup_steps": -1}, "warmup_steps"),
        ("inverse_sqrt", {}, "warmup_steps to be given"),
        ("inverse_sqrt", {"warmup_steps": 0}, "warmup_steps to be 1 or more"),
        ("inverse_sqrt", {"warmup_steps": 0, "total_steps": 5}, "warmup_steps to be 1 to total_steps"),
    ],
)
def test_every_schedule_refuses_bad_shapes(name: str, shape: dict[str, Any], said: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=f"expected {said}.*; found .*; give"):
        getattr(schedules, name)(optimizer, **shape)
    assert optimizer.param_groups[0]["lr"] == 1.0 and "initial_lr" not in optimizer.param_groups[0]
