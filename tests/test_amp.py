"""Loss scaling: torch's GradScaler and ours, explicit unscaling, overflow, user-set scales, several optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import (
    ADAMW,
    BACKEND,
    BACKENDS,
    DAMPENED,
    DEVICE,
    RULES,
    SGD,
    Case,
    assert_backend,
    gradients,
    noise,
    parameters,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits, assert_states_close, clip64, reference
from torch import Tensor
from torch.nn import Parameter

import mo_fused

SHAPES = [(7,), (33, 3), ()]
SCALE = 64.0  # a power of two, so that scaled gradients hold the same digits
SCALERS = {"torch": torch.amp.GradScaler, "ours": mo_fused.GradScaler}


def make_scaler(kind: str, scale: float = SCALE, **options: Any) -> Any:
    scaler = SCALERS[kind](DEVICE.type, init_scale=scale, growth_interval=10**6, **options)
    scaler.scale(torch.zeros(()))  # makes the scale tensor exist
    return scaler


def set_grads(params: list[Parameter], row: list[Tensor | None], scale: float) -> None:
    for p, g in zip(params, row, strict=True):
        p.grad = None if g is None else g * scale


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("amp", ["fused", "torch"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_"])
@pytest.mark.parametrize("scaler_kind", list(SCALERS))
@pytest.mark.parametrize("case", [*RULES, DAMPENED], ids=str)
def test_overflow_skips_and_the_run_goes_on(
    case: Case, scaler_kind: str, unscale: bool, max_norm: float | None, amp: str, backend: str
) -> None:
    """Steps 0 and 2 overflow: SGD's momentum must not start from a skipped step, nor Adam's count include one."""
    values, grads = weights(SHAPES), gradients(SHAPES, 5)
    good = [grads[t] for t in (1, 3, 4)]
    want, want_states = reference(case, values, good, max_norm=math.inf if max_norm is None else max_norm)
    params = parameters(values)
    opt = case.ours(params, max_grad_norm=max_norm, amp=amp, backend=backend)
    scaler = make_scaler(scaler_kind)
    scale = SCALE
    for t, row in enumerate(grads):
        set_grads(params, row, scale)
        overflow = t in (0, 2)
        if overflow:
            assert params[1].grad is not None
            params[1].grad[4, 1] = float("inf") if t == 0 else float("nan")
        before = [p.detach().clone() for p in params], states(opt, params)
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        assert not hasattr(opt, "grad_scale") and not hasattr(opt, "found_inf")
        if overflow:
            scale /= 2
            assert_same_bits([p.detach() for p in params], before[0], "a skipped step changed a parameter")
            for now, then in zip(states(opt, params), before[1], strict=True):
                if then:
                    assert_same_bits(now, then, "a skipped step changed the state")
                assert then or not any(bool(s.any()) for s in now.values()), "state that a skip creates must be blank"
        if amp == "fused":
            assert bool(opt.last_step.skipped) is overflow
            # Where the scaler has found the infinities and nothing is clipped, nobody needs a norm: it is not measured.
            if not overflow and (max_norm is not None or (scaler_kind == "ours" and not unscale)):
                _, norm, coef = clip64(row, math.inf if max_norm is None else max_norm)
                assert float(opt.last_step.grad_norm) == pytest.approx(norm, rel=1e-6), "norm of the unscaled gradients"
                if max_norm is not None:
                    assert float(opt.last_step.clip_coef) == pytest.approx(coef, rel=1e-6)
        assert scaler.get_scale() == scale
    assert_backend(opt, backend)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, 3)
        assert_states_close(s, ws, 3)


@pytest.mark.parametrize("scaler_kind", list(SCALERS))
@pytest.mark.parametrize("case", RULES, ids=str)
def test_scaled_steps_have_the_bits_of_unscaled_ones(case: Case, scaler_kind: str) -> None:
    """A power of two cancels exactly."""
    plain, scaled = parameters(weights(SHAPES)), parameters(weights(SHAPES))
    a, b = case.ours(plain), case.ours(scaled)
    scaler = make_scaler(scaler_kind)
    for row in gradients(SHAPES, 3):
        set_grads(plain, row, 1.0)
        a.step()
        set_grads(scaled, row, SCALE)
        scaler.step(b)
        scaler.update()
    assert_same_bits([p.detach() for p in scaled], [p.detach() for p in plain])
    assert_same_bits(states(b, scaled), states(a, plain))


@pytest.mark.parametrize("scaler_kind", list(SCALERS))
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9])
def test_gradients_are_rewritten_only_on_request(in_place: bool, max_norm: float | None, scaler_kind: str) -> None:
    values, grads = weights(SHAPES), gradients(SHAPES, 1)[0]
    clipped, _, _ = clip64(grads, math.inf if max_norm is None else max_norm)
    params = parameters(values)
    opt = SGD.ours(params, clip_in_place=in_place, max_grad_norm=max_norm)
    scaler = make_scaler(scaler_kind)
    set_grads(params, grads, SCALE)
    kept = [p.grad.clone() for p in params if p.grad is not None]
    versions = [p.grad._version for p in params if p.grad is not None]
    scaler.step(opt)
    left = [p.grad for p in params if p.grad is not None]
    if in_place:
        for g, c in zip(left, clipped, strict=True):
            assert c is not None
            assert_close(g, c, 2, "the clipped, unscaled gradient")
    else:
        assert_same_bits(left, kept, "gradient")
        if scaler_kind == "ours":
            assert [g._version for g in left] == versions, "our scaler must not touch the gradients"
    want, _ = reference(SGD, values, [clipped])
    for p, w in zip(params, want, strict=True):
        assert_close(p, w, 1)


@pytest.mark.parametrize("in_place", [False, True])
def test_clipping_in_place_without_a_scaler(in_place: bool) -> None:
    values, grads = weights(SHAPES), gradients(SHAPES, 1)[0]
    clipped, _, coef = clip64(grads, 0.5)
    params = parameters(values)
    opt = SGD.ours(params, clip_in_place=in_place, max_grad_norm=0.5)
    set_grads(params, grads, 1.0)
    opt.step()
    assert coef < 0.1
    for p, g, c in zip(params, grads, clipped, strict=True):
        assert p.grad is not None and g is not None and c is not None
        assert_close(p.grad, c if in_place else g.double(), 2)


@pytest.mark.parametrize("backend", BACKENDS)
# 3 has no exact inverse; 2**-14 is smaller than one; 2**20 overflows nothing here but is a common first scale.
@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**-14, 2.0**20])
@pytest.mark.parametrize("case", RULES, ids=str)
def test_scale_set_by_the_user(case: Case, scale: float, backend: str) -> None:
    """Frameworks set the two attributes themselves; both then stay where they are."""
    values, grads = weights(SHAPES), gradients(SHAPES, 2)
    want, _ = reference(case, values, grads)
    params = parameters(values)
    opt = case.ours(params, backend=backend)
    opt.grad_scale, opt.found_inf = torch.tensor(scale), torch.tensor(0.0)
    for row in grads:
        set_grads(params, row, scale)
        opt.step()
    assert_backend(opt, backend)
    assert float(opt.grad_scale) == scale
    for p, w in zip(params, want, strict=True):
        assert_close(p, w, 3)


@pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_"])
@pytest.mark.parametrize("scaler_kind", list(SCALERS))
def test_scale_of_the_user_multiplies_the_scalers(scaler_kind: str, unscale: bool) -> None:
    values, grads = weights(SHAPES), gradients(SHAPES, 2)
    want, _ = reference(SGD, values, grads)
    params = parameters(values)
    opt = SGD.ours(params)
    scaler = make_scaler(scaler_kind)
    for row in grads:
        set_grads(params, row, SCALE * 8)
        opt.grad_scale = torch.tensor(8.0)
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        assert not hasattr(opt, "grad_scale"), "torch's scaler deletes it"
    for p, w in zip(params, want, strict=True):
        assert_close(p, w, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("found", [1.0, 2.0, torch.tensor(1.0), torch.tensor([1.0]), 1, True])
def test_found_inf_alone_skips(found: Any, backend: str) -> None:
    """After `unscale_` there is no scale, and the infinities may be on another device's share: the flag decides."""
    for case in RULES:
        params = parameters(weights(SHAPES))
        start = [p.detach().clone() for p in params]
        opt = case.ours(params, backend=backend)
        opt.grad_scale, opt.found_inf = None, found
        set_grads(params, gradients(SHAPES, 1)[0], 1.0)
        opt.step()
        assert bool(opt.last_step.skipped)
        assert_same_bits([p.detach() for p in params], start)
        assert all(float(s.get("step", torch.tensor(0.0))) == 0 for s in states(opt, params))


@pytest.mark.parametrize("scaler_kind", list(SCALERS))
def test_optimizer_without_gradients_gets_a_python_zero(scaler_kind: str) -> None:
    """GradScaler sums an empty list of flags: found_inf is the int 0. The other optimizer goes on."""
    idle, busy = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    a, b = ADAMW.ours([idle], max_grad_norm=1.0), ADAMW.ours([busy])
    scaler = make_scaler(scaler_kind)
    busy.grad = torch.full((3,), SCALE)
    scaler.step(a)
    scaler.step(b)
    scaler.update()
    assert torch.equal(idle.detach(), torch.ones(3)) and not a.state
    assert_close(busy, reference(ADAMW, [torch.ones(3)], [[torch.ones(3)]])[0][0], 1)
    assert scaler.get_scale() == SCALE
    direct = ADAMW.ours([busy])
    direct.grad_scale, direct.found_inf = None, 0
    busy.grad = torch.ones(3)
    direct.step()
    assert not bool(direct.last_step.skipped) and float(direct.state[busy]["step"]) == 1


@pytest.mark.parametrize("scaler_kind", list(SCALERS))
@pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_"])
def test_several_optimizers_share_a_scaler(unscale: bool, scaler_kind: str) -> None:
    """Each is skipped for its own gradients only; one overflow is enough to halve the scale; torch's are among them."""
    values, grads = weights(SHAPES), gradients(SHAPES, 1)[0]
    sets = [parameters(values) for _ in range(3)]
    opts: list[Any] = [ADAMW.ours(sets[0]), SGD.ours(sets[1]), SGD.torch(sets[2])]
    scaler = make_scaler(scaler_kind)
    for bad in (0, 1, 2):
        before = [[p.detach().clone() for p in params] for params in sets]
        for i, params in enumerate(sets):
            set_grads(params, grads, scaler.get_scale())
            if i == bad:
                assert params[0].grad is not None
                params[0].grad[2] = float("-inf")
        for opt in opts:
            if unscale:
                scaler.unscale_(opt)
        for opt in opts:
            scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == SCALE / 2 ** (bad + 1)
        for i, params in enumerate(sets):
            moved = any(not torch.equal(p.detach(), b) for p, b in zip(params, before[i], strict=True))
            assert moved is (i != bad), f"optimizer {i} while {bad} overflows"
    for case, params in zip((ADAMW, SGD, SGD), sets, strict=True):
        for p, w in zip(params, reference(case, values, [list(grads)] * 2)[0], strict=True):
            assert_close(p, w, 2)


@pytest.mark.parametrize("scaler_kind", list(SCALERS))
@pytest.mark.parametrize("case", RULES, ids=str)
def test_fp16_parameters(case: Case, scaler_kind: str) -> None:
    """torch's scaler refuses to unscale fp16 gradients, but lets the optimizer do it, in fp32."""
    values, grads = weights(SHAPES, torch.float16), gradients(SHAPES, 3, torch.float16, scale=1.0)
    want, _ = reference(case, values, grads)
    params = parameters(values)
    opt = case.ours(params)
    scaler = make_scaler(scaler_kind)
    for row in grads:
        set_grads(params, row, SCALE)
        scaler.step(opt)
        scaler.update()
    assert_backend(opt, BACKEND)
    for p, w in zip(params, want, strict=True):
        assert_close(p, w, 3)
    set_grads(params, grads[0], SCALE)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(opt)


@pytest.mark.parametrize("scaler_kind", list(SCALERS))
def test_tiny_unscaled_gradients_are_not_lost(scaler_kind: str) -> None:
    """g / scale below the smallest fp16 number exists in fp32, where the update is computed."""
    p = Parameter(torch.zeros(8, dtype=torch.float16))
    opt = Case("AdamW", "plain", dict(lr=0.125, weight_decay=0.0, eps=1e-12)).ours([p], stats=True)
    scaler = make_scaler(scaler_kind, 2.0**16)
    p.grad = torch.full((8,), 2.0**-10, dtype=torch.float16)
    scaler.step(opt)
    assert torch.equal(p.detach(), torch.full((8,), -0.125, dtype=torch.float16))
    assert float(opt.last_step.grad_norm) == pytest.approx(math.sqrt(8) * 2.0**-26, rel=1e-6)


@pytest.mark.parametrize("case", RULES, ids=str)
def test_an_overflow_in_any_group_skips_all(case: Case) -> None:
    """Also in a group that takes no part in clipping."""
    params = parameters(weights(SHAPES))
    start = [p.detach().clone() for p in params]
    opt = case.ours([{"params": params[:1]}, {"params": params[1:], "clip": False}], max_grad_norm=1.0)
    scaler = make_scaler("ours")
    set_grads(params, gradients(SHAPES, 1)[0], SCALE)
    assert params[2].grad is not None
    params[2].grad.fill_(float("nan"))
    scaler.step(opt)
    scaler.update()
    assert bool(opt.last_step.skipped) and scaler.get_scale() == SCALE / 2
    assert_same_bits([p.detach() for p in params], start)


def test_amp_option_decides_what_the_scaler_sees() -> None:
    p = Parameter(torch.ones(3))
    for case in RULES:
        assert case.ours([p])._step_supports_amp_scaling is True
        assert case.ours([p], amp="torch")._step_supports_amp_scaling is False
        with pytest.raises(ValueError, match="amp"):
            case.ours([p], amp="other")


def test_our_scaler_is_torchs_in_everything_else() -> None:
    """State, growth, disabling, and torch's errors about the order of calls."""
    assert issubclass(mo_fused.GradScaler, torch.amp.GradScaler)
    ours = mo_fused.GradScaler(DEVICE.type, init_scale=4.0, growth_interval=2)
    theirs = torch.amp.GradScaler(DEVICE.type, init_scale=4.0, growth_interval=2)
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    pairs = [(ours, SGD.ours([p]), p), (theirs, SGD.torch([q]), q)]
    for bad in (False, False, True, False, False, False):
        for scaler, opt, x in pairs:
            opt.zero_grad()
            scaler.scale((x * noise((3,), 1)).sum()).backward()
            if bad:
                assert x.grad is not None
                x.grad[0] = float("inf")
            scaler.step(opt)
            scaler.update()
        assert ours.state_dict() == theirs.state_dict()
    assert ours.get_scale() == 4.0 * 2 / 2 * 2
    assert_close(p, q.detach().double(), 6)

    opt = SGD.ours([p])
    p.grad = torch.ones(3)
    ours.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        ours.unscale_(opt)
    ours.step(opt)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        ours.step(opt)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        ours.step(opt, closure=lambda: None)
    off = mo_fused.GradScaler(DEVICE.type, enabled=False)
    before = p.detach().clone()
    p.grad = torch.full((3,), float("inf"))
    off.step(opt)  # a disabled scaler only calls step()
    off.update()
    assert not torch.equal(p.detach(), before)


def test_schedule_sees_the_skip() -> None:
    """The usual recipe compares scales; ours also offers last_step.skipped. Both must agree at every step."""
    p = Parameter(torch.ones(4))
    opt, scaler = ADAMW.ours([p]), make_scaler("ours")
    for bad in (True, False, True, True, False):
        before = scaler.get_scale()
        p.grad = torch.ones(4) * before
        if bad:
            p.grad[1] = float("nan")
        scaler.step(opt)
        scaler.update()
        assert bool(opt.last_step.skipped) is bad
        assert (scaler.get_scale() < before) is bad
