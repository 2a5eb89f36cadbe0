"""Gradients with offload="cpu": accumulated, discarded, edited after the backward, scaled; copied and taken ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ADAMW, DEVICE, SGD, Case, noise, states
from offload_pair import (
    IDS,
    NESTEROV,
    ONE_OF_EACH,
    TAKEN,
    Net,
    assert_same,
    backward,
    by_case,
    clipped,
    in_pieces,
    nets,
)
from oracle import assert_same_bits
from torch import Tensor

import mo_fused


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch)


# -- accumulation, edits of gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [2, 3])
@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
@by_case(ONE_OF_EACH)
def test_accumulation(case: Case, taken: bool, micro: int) -> None:
    plain, other, model, opt = nets(case, offload_gradients=taken, **clipped(0.5, taken))
    for t in range(4):
        for m, o in ((plain, other), (model, opt)):
            for k in range(micro):
                backward(m, micro * t + k, 1 / micro)
            o.step()
            o.zero_grad()
        assert_same(model, opt, plain, other)


@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
def test_accumulation_without_a_gradient_in_some_batches(taken: bool) -> None:
    plain, other, model, opt = nets(SGD, offload_gradients=taken)
    for t in range(3):
        for m, o in ((plain, other), (model, opt)):
            for k in range(3):
                m.first.weight.requires_grad_(k != t)
                backward(m, 3 * t + k)
            o.step()
            o.zero_grad()
        assert_same(model, opt, plain, other)


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
def test_discarded_batches(taken: bool, to_none: bool) -> None:
    """zero_grad() forgets what a backward has brought, wherever it is now."""
    plain, other, model, opt = nets(ADAMW, offload_gradients=taken)
    for t in range(4):
        for m, o in ((plain, other), (model, opt)):
            backward(m, t)
            if t == 1:
                backward(m, 50)
            o.zero_grad(set_to_none=to_none)
            backward(m, 10 + t)
            o.step()
            o.zero_grad(set_to_none=to_none)
        assert_same(model, opt, plain, other)
    for m, o in ((plain, other), (model, opt)):
        backward(m, 20)
        o.zero_grad()
        o.step()
    assert_same(model, opt, plain, other)


def test_gradients_of_zeros_are_gradients() -> None:
    """After zero_grad(set_to_none=False) a step without a backward is one of zeros, as it is without offload."""
    plain, other, model, opt = nets(ADAMW)
    for m, o in ((plain, other), (model, opt)):
        backward(m, 0)
        o.step()
        o.zero_grad(set_to_none=False)
        o.step()
    assert_same(model, opt, plain, other)


def replaced(params: list[Tensor]) -> None:
    for i, p in enumerate(params):
        p.grad = noise(p.shape, 500 + i)


def replaced_in_place(params: list[Tensor]) -> None:
    for p in params:
        assert p.grad is not None
        p.grad = p.grad.neg()


EDITS: dict[str, Callable[[list[Tensor]], Any]] = {
    "clipped by torch": lambda params: torch.nn.utils.clip_grad_norm_(params, 0.1),
    "clipped": lambda params: mo_fused.clip_grad_norm_(params, 0.1),
    "scaled": lambda params: [p.grad.mul_(0.5) for p in params if p.grad is not None],
    "an element": lambda params: params[0].grad.view(-1)[3:4].fill_(2.0),  # type: ignore[union-attr]
    "replaced": replaced,
    "negated": replaced_in_place,
    "some removed": lambda params: [setattr(p, "grad", None) for p in params[::2]],
    "moved": lambda params: setattr(params[0].grad, "data", params[0].grad.detach() * 3),
}


@pytest.mark.parametrize("edit", [*EDITS])
@by_case(ONE_OF_EACH)
def test_edited_between_backward_and_step(case: Case, edit: str) -> None:
    plain, other, model, opt = nets(case)
    for t in range(3):
        for m, o in ((plain, other), (model, opt)):
            backward(m, t)
            finish_copies(o)
            EDITS[edit](list(m.parameters()))
            o.step()
            if t != 1:
                o.zero_grad()
        assert_same(model, opt, plain, other)


def test_edited_by_hooks_of_the_step() -> None:
    plain, other, model, opt = nets(ADAMW)
    for m, o in ((plain, other), (model, opt)):
        o.register_step_pre_hook(lambda o, a, k, m=m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3))
        for t in range(3):
            backward(m, t)
            o.step()
            o.zero_grad()
    assert_same(model, opt, plain, other)


@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
def test_closure(taken: bool) -> None:
    plain, other, model, opt = nets(SGD, offload_gradients=taken)
    losses: list[list[float]] = [[], []]
    for t in range(3):
        for found, m, o in ((losses[0], plain, other), (losses[1], model, opt)):

            def closure(m: Net = m, o: Any = o, t: int = t) -> Tensor:
                o.zero_grad()
                loss = m(torch.ones(2, 12, device=DEVICE) * t).square().sum()
                loss.backward()
                return loss

            found.append(float(o.step(closure).detach()))
    assert losses[0] == losses[1]
    assert_same(model, opt, plain, other)


def test_double_backward() -> None:
    """Gradients that are part of a graph themselves."""
    plain, other, model, opt = nets(SGD)
    for m, o in ((plain, other), (model, opt)):
        params = list(m.parameters())
        for t in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's, about cycles
                m(torch.ones(2, 12, device=DEVICE) + t).square().sum().backward(create_graph=True)
            torch.stack([p.grad.square().sum() for p in params if p.grad is not None]).sum().backward()
            o.step()
            o.zero_grad()
    assert_same(model, opt, plain, other)


# -- loss scaling -----------------------------------------------------------------------------------------------------


def finish_copies(opt: Any) -> None:
    """Whatever changes gradients from now on comes after their copies."""
    if opt._offload is not None:
        for found in opt._offload._gradients.values():
            for mark in found.marks:
                mark.wait()


def scaler_of(kind: Any) -> Any:
    return kind(DEVICE.type, init_scale=64.0, growth_interval=2)


def scaled_steps(kind: Any, m: Net, o: Any, unscale: bool = False) -> None:
    scaler = scaler_of(kind)
    for t in range(6):
        loss = m(torch.ones(2, 12, device=DEVICE) * (t + 1)).square().mean()
        if t in (0, 3):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        finish_copies(o)
        if unscale:
            scaler.unscale_(o)
            if t > 3:
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        scaler.step(o)
        scaler.update()
        o.zero_grad()
    assert scaler.get_scale() == 64.0, "two halves, two doubles"


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.not_interpreted(reason="what is computed on a device is the same for all of them")
@pytest.mark.parametrize("how", ["ours", "ours taken", "ours unscale_", "torch", "torch unscale_", "torch amp"])
@by_case([ADAMW, SGD])
def test_scalers(case: Case, how: str, max_norm: float | None) -> None:
    """Overflows at the first step, so that momentum starts later, and at another."""
    options: dict[str, Any] = dict(offload_gradients="taken" in how)
    if max_norm is not None:
        options.update(clipped(max_norm, "taken" in how))
    if "amp" in how:
        options["amp"] = "torch"
    plain, other, model, opt = nets(case, **options)
    for m, o in ((plain, other), (model, opt)):
        kind = torch.amp.GradScaler if "torch" in how else mo_fused.GradScaler
        scaled_steps(kind, m, o, "unscale_" in how)
    assert_same(model, opt, plain, other)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "torch's": lambda s, o: torch_scaler().step(o),
    "torch's unscale_": lambda s, o: unscaled(torch_scaler(), o),
    "ours unscale_": lambda s, o: s.unscale_(o),
}


def torch_scaler() -> Any:
    scaler = scaler_of(torch.amp.GradScaler)
    scaler.scale(torch.zeros((), device=DEVICE))
    return scaler


def unscaled(scaler: Any, opt: Any) -> None:
    scaler.unscale_(opt)
    scaler.step(opt)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("what", [*REFUSED])
def test_scalers_that_look_into_grad_are_refused(what: str, fraction: float) -> None:
    """Nothing has changed then, and the gradients are still there for a step without a scaler."""
    plain, other, model, opt = nets(SGD, offload_gradients=True, offload_fraction=fraction)
    backward(model, 0)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = scaler_of(mo_fused.GradScaler)
    scaler.scale(torch.zeros((), device=DEVICE))
    with pytest.raises(RuntimeError, match=r"expected mo_fused\.GradScaler, without unscale_"):
        REFUSED[what](scaler, opt)
    assert_same_bits([p.detach() for p in model.parameters()], before)
    assert not any(states(opt, list(model.parameters())))
    if fraction == 1.0:  # (what stayed beside its parameter may have been unscaled)
        opt.step()
        backward(plain, 0)
        other.step()
        assert_same(model, opt, plain, other)


@pytest.mark.not_interpreted(reason="what is computed on a device is the same for all of them")
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("how", ["torch", "torch unscale_", "ours", "ours unscale_"])
def test_a_scaler_that_unscales_by_itself_finds_all_gradients(how: str, fraction: float) -> None:
    """With ``amp="torch"`` gradients stay where they are until the step, and are taken then."""
    options: dict[str, Any] = dict(amp="torch", offload_gradients=True, offload_fraction=fraction)
    plain, other, model, opt = nets(SGD, **options)
    for m, o in ((plain, other), (model, opt)):
        scaled_steps(torch.amp.GradScaler if "torch" in how else mo_fused.GradScaler, m, o, "unscale_" in how)
    assert_same(model, opt, plain, other)
    backward(model, 0)
    assert all(p.grad is not None for p in model.parameters())
    opt.step()
    offloaded = ["state in" in row.reason for row in opt.explain()]
    assert [p.grad is None for p in model.parameters()] == offloaded and any(offloaded)


def test_what_a_scaler_says_when_it_is_switched_off() -> None:
    plain, other, model, opt = nets(ADAMW, offload_gradients=True)
    for m, o in ((plain, other), (model, opt)):
        for scaler in (torch.amp.GradScaler(DEVICE.type, enabled=False), mo_fused.GradScaler("cpu", enabled=False)):
            scaler.scale(m(torch.ones(2, 12, device=DEVICE)).sum()).backward()
            scaler.step(o)
            scaler.update()
            o.zero_grad()
    assert_same(model, opt, plain, other)


def test_a_scale_set_by_hand_with_taken_gradients() -> None:
    plain, other, model, opt = nets(NESTEROV, offload_gradients=True, **clipped(0.1, True))
    for m, o in ((plain, other), (model, opt)):
        for t in range(3):
            backward(m, t, 8.0)
            o.grad_scale = torch.tensor(8.0, device=DEVICE)
            o.step()
            o.zero_grad()
    assert_same(model, opt, plain, other)


@pytest.mark.parametrize("taken", [False, True])
def test_a_gradient_set_after_the_backward_takes_the_place_of_its(taken: bool) -> None:
    plain, other, model, opt = nets(SGD, offload_gradients=taken)
    for m, o in ((plain, other), (model, opt)):
        for t in range(3):
            backward(m, t)
            for i, p in enumerate(m.parameters()):
                if i != t:
                    p.grad = torch.full_like(p, 0.01 * (i + 1))
            o.step()
            o.zero_grad()
    assert_same(model, opt, plain, other)
