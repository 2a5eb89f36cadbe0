"""Parameters that nothing moves are found after their steps on end, never before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from watcher_loop import Loop, set_gradients, three_layers

import mo_fused
from mo_fused.training.watchers import DeadGradient


def run_dead(
    steps: int, dead: Any, watcher: DeadGradient, optimizer: Any, model: nn.Module, loop: Loop | None = None
) -> list[dict[str, Any]]:
    """``dead(step, name)``: None for no gradient, True for zeros."""
    loop = loop or Loop(optimizer, watcher)
    for step in range(1, steps + 1):
        for name, parameter in model.named_parameters():
            how = dead(step, name)
            parameter.grad = None if how is None else torch.full_like(parameter, 0.0 if how else 0.1)
        optimizer.step()
        loop.step()
    watcher.close()
    return loop.events


@pytest.mark.parametrize("stats", [True, False])
def test_dead_gradient_after_steps_on_end(stats: bool) -> None:
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), stats=stats, max_grad_norm=1.0, lr=1e-3)
    watcher = DeadGradient(20, action="log")
    events = run_dead(60, lambda step, name: name == "1.weight" and step > 11, watcher, optimizer, model)
    (event,) = events
    assert event["parameters"] == ["1.weight"] and event["kind"] == "zero gradient" and event["groups"] == []
    # 20 on end are over at step 31; blocks of 2 steps end at 32.
    assert event["step"] == 32 and event["steps"] == 20


def test_dead_gradient_is_exact() -> None:
    """One element of 1e-30, whose square is 0, once in 20 steps keeps a parameter alive; 19 zeros are not 20."""
    model = three_layers()
    optimizer = mo_fused.SGD(model.named_parameters(), lr=0.1, max_grad_norm=1.0)
    watcher = DeadGradient(20, action="log")
    loop = Loop(optimizer, watcher)
    for step in range(1, 101):
        set_gradients(model)
        for parameter in model[0].parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        assert model[0].weight.grad is not None and model[0].bias.grad is not None
        if step % 20 == 0:
            model[0].weight.grad[3, 3] = 1e-30
            model[0].bias.grad[0] = math.nan if step == 20 else 1.0
        optimizer.step()
        loop.step()
    watcher.close()
    assert loop.events == []


def test_dead_group_and_a_second_time() -> None:
    model = three_layers()
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].named_parameters(prefix="0"))},
        {"params": list(model[1].named_parameters(prefix="1"))},
        {"params": list(model[2].named_parameters(prefix="2")), "lr": 0.0},
    ]
    optimizer = mo_fused.AdamW(groups, stats=True)
    watcher = DeadGradient(10, action="log")
    events = run_dead(60, lambda step, name: name.startswith("1.") and not 30 <= step < 35, watcher, optimizer, model)
    assert [event["step"] for event in events] == [10, 44]
    assert events[0]["groups"] == [1] and events[0]["parameters"] == ["1.weight", "1.bias"]
    assert "(all of group 1)" in events[0]["message"]


def test_steps_without_a_gradient_do_not_count() -> None:
    """A gradient of zero in every second step, and none in the others: 20 zeros are there after 40 steps."""
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), stats=True)
    watcher = DeadGradient(20, action="log")

    def dead(step: int, name: str) -> bool | None:
        return False if name != "2.bias" else (None if step % 2 == 0 and step > 1 else True)

    events = run_dead(60, dead, watcher, optimizer, model)
    assert [(event["step"], event["parameters"]) for event in events] == [(40, ["2.bias"])]
    absent = run_dead(
        60, lambda step, name: None if name == "0.bias" and step > 5 else False, watcher, optimizer, model
    )
    assert absent == []


def test_empty_parameters_are_not_dead() -> None:
    empty, full = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(4))
    optimizer = mo_fused.AdamW([empty, full], stats=True)
    watcher = DeadGradient(5, action="log")
    loop = Loop(optimizer, watcher)
    for _ in range(20):
        empty.grad, full.grad = torch.zeros_like(empty), torch.ones_like(full)
        optimizer.step()
        loop.step()
    assert loop.events == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stalled_update_of_16_bit_parameters(dtype: torch.dtype) -> None:
    """1 + 1e-5 is 1 in 16 bits; with a master copy the same update is kept."""
    for master, found in ((None, True), ("kahan", False)):
        model = nn.Linear(16, 16).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = mo_fused.AdamW(
            model.named_parameters(), lr=1e-5, weight_decay=0.0, stats=True, master_weights=master
        )
        watcher = DeadGradient(30, action="log")
        events = run_dead(35, lambda step, name: False, watcher, optimizer, model)
        assert [event["kind"] for event in events] == (["stalled update"] if found else [])
        if found:
            assert events[0]["parameters"] == ["weight", "bias"] and events[0]["step"] == 30
            assert events[0]["groups"] == [0]


def test_a_stall_goes_on_over_steps_without_a_gradient() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = mo_fused.AdamW(model.named_parameters(), lr=1e-5, weight_decay=0.0, stats=True)
    watcher = DeadGradient(20, action="log")

    def dead(step: int, name: str) -> bool | None:
        return None if name == "weight" and 11 <= step <= 16 else False

    events = run_dead(40, dead, watcher, optimizer, model)
    assert [(event["step"], event["parameters"]) for event in events if "weight" in event["parameters"]] == [
        (26, ["weight"])
    ]


def test_no_stall_where_nothing_was_asked_for() -> None:
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), lr=0.0, stats=True)
    watcher = DeadGradient(5, action="log")
    assert run_dead(20, lambda step, name: False, watcher, optimizer, model) == []


def test_counting_begins_anew_with_other_rows() -> None:
    """A new parameter: what was counted in between is not known, so nothing is found early."""
    model = three_layers()
    optimizer = mo_fused.AdamW(list(model[0].parameters()), stats=True)
    watcher = DeadGradient(20, action="log")
    loop = Loop(optimizer, watcher, model=model)
    for step in range(1, 41):
        if step == 16:
            optimizer.add_param_group({"params": list(model[1].parameters())})
        set_gradients(model)
        assert model[0].bias.grad is not None
        model[0].bias.grad.zero_()
        optimizer.step()
        loop.step()
    watcher.close()
    assert [(event["step"], event["parameters"]) for event in loop.events] == [(35, ["0.bias"])]


def test_dead_gradient_says_when_it_cannot_look() -> None:
    model = three_layers()
    for optimizer in (torch.optim.AdamW(model.parameters()), mo_fused.AdamW(model.parameters())):
        watcher = DeadGradient(5)
        loop = Loop(optimizer, watcher)
        with pytest.warns(RuntimeWarning, match="not looked at: an optimizer of mo_fused with stats=True"):
            set_gradients(model)
            optimizer.step()
            loop.step()
        loop.step()
        assert len(loop.events) == 1


def test_a_step_that_torchs_scaler_leaves_out_is_nothing_to_speak_of() -> None:
    """The update would have measured the gradients; without one they are not known, for this step alone."""
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), stats=True)
    watcher, scaler = DeadGradient(5, action="log"), torch.amp.GradScaler("cpu", init_scale=8.0)
    loop = Loop(optimizer, watcher)
    for step in range(1, 13):
        scaler.scale(torch.zeros(()))  # makes the scale
        set_gradients(model, math.inf if step in (1, 4) else 0.1)
        model[1].weight.grad = torch.full_like(model[1].weight, math.inf if step == 1 else 0.0)
        scaler.step(optimizer)
        scaler.update()
        loop.step()
    watcher.close()
    (event,) = loop.events
    assert event["parameters"] == ["1.weight"] and event["kind"] == "zero gradient"
    assert event["step"] == 7, "steps 2, 3, 5, 6 and 7 are five"
