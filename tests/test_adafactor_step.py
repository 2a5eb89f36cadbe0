"""Adafactor's step: clipping, skipping, loss scaling, groups, statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adafactor_reference import BOTH, FORMS, MOMENTUM, TORCH, Form
from cases import (
    BACKENDS,
    DEVICE,
    DTYPES,
    assert_backend,
    drive,
    gradients,
    parameters,
    short,
    snapshot,
    some,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits, clip64, norm64, rms, wide
from torch import Tensor
from torch.nn import Parameter

import mo_fused

SHAPES = [(), (7,), (5, 3), (3, 4, 5), some([(130, 70)], [(11, 30)])[0]]


# -- clipping, skipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16]), ids=short)
@pytest.mark.parametrize("form", some([TORCH, MOMENTUM, FORMS[3]], [FORMS[3]]), ids=str)
def test_clipping_is_clip_grad_norm_and_then_a_step(form: Form, dtype: torch.dtype, backend: str) -> None:
    """Where eps[0] counts, the update depends on the gradient's size, which a scale-free rule hides."""
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 3, dtype)
    want, want_states = form.exact(values, grads, keep=True, max_norm=0.5)
    params, others = parameters(values), parameters(values)
    opt, other = form.ours(params, max_grad_norm=0.5, backend=backend), form.ours(others, backend=backend)
    for row in grads:
        drive(opt, params, [row])
        _, norm, coef = clip64(row, 0.5)
        assert float(opt.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
        assert float(opt.last_step.clip_coef) == pytest.approx(coef, rel=1e-6)
        assert not bool(opt.last_step.skipped)
        for p, g in zip(others, row, strict=True):
            assert g is not None
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(others, 0.5)
        other.step()
    assert_backend(opt, backend)
    slack = 1e7 if dtype == torch.float64 else 1  # torch and the kernels take the norm of fp64 gradients differently
    for p, q, w, s, ws in zip(params, others, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, 12, f"{tuple(p.shape)}")
        for key in s:
            if key != "step":
                assert_close(s[key], ws[key], 32, f"{tuple(p.shape)} {key}")
        # Half-precision gradients are rounded once more when they are clipped in memory.
        assert rms(wide(p) - wide(q)) <= slack * 8 * torch.finfo(dtype).eps * max(1.0, rms(wide(q)))


@pytest.mark.parametrize("max_norm", [1e9, math.inf])
def test_a_clip_that_does_not_act_changes_no_bit(max_norm: float) -> None:
    results = []
    for options in ({}, {"max_grad_norm": max_norm}):
        params = parameters(weights(SHAPES))
        opt = MOMENTUM.ours(params, **options)
        drive(opt, params, gradients(SHAPES, 2))
        results.append(snapshot(opt, params))
    assert float(opt.last_step.clip_coef) == 1
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", some(BOTH, [MOMENTUM]), ids=str)
def test_nonfinite_gradients_are_skipped(form: Form, backend: str) -> None:
    """First, and in between: parameters, state and step counts keep their bits, and the run goes on."""
    values, grads = weights(SHAPES), gradients(SHAPES, 5)
    want, want_states = form.exact(values, [grads[t] for t in (1, 3, 4)], max_norm=0.5)
    params = parameters(values)
    opt = form.ours(params, skip_nonfinite=True, max_grad_norm=0.5, stats=True, backend=backend)
    for t, row in enumerate(grads):
        if t in (0, 2):
            bad = row[2 + t]
            assert bad is not None
            bad.view(-1)[3] = math.inf if t else math.nan
        before = snapshot(opt, params)
        drive(opt, params, [row])
        assert bool(opt.last_step.skipped) is (t in (0, 2))
        if t in (0, 2):
            assert_same_bits([p.detach() for p in params], before[0])
            for now, then in zip(states(opt, params), before[1], strict=True):
                assert_same_bits(now, then) if then else None
                assert then or not any(bool(v.any()) for v in now.values()), "state that a skip creates must be blank"
    assert_backend(opt, backend)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, 8)
        assert float(s["step"]) == ws["step"] == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("amp", ["fused", "torch"])
@pytest.mark.parametrize("unscale", some([False, True], [False]), ids=lambda x: "unscale_" if x else "implicit")
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, mo_fused.GradScaler], ids=["torch", "ours"])
def test_grad_scalers(scaler_class: Any, unscale: bool, amp: str, backend: str) -> None:
    """Steps 0 and 2 overflow. The scale is a power of two, so that scaled gradients hold the same digits."""
    values, grads = weights(SHAPES), gradients(SHAPES, 5)
    form = MOMENTUM
    want, want_states = form.exact(values, [grads[t] for t in (1, 3, 4)])
    params = parameters(values)
    opt = form.ours(params, amp=amp, backend=backend)
    scaler = scaler_class(DEVICE.type, init_scale=64.0, growth_interval=10**6)
    scaler.scale(torch.zeros(()))
    for t, row in enumerate(grads):
        scale = scaler.get_scale()
        for p, g in zip(params, row, strict=True):
            assert g is not None
            p.grad = g * scale
        if t in (0, 2):
            assert params[2].grad is not None
            params[2].grad[1, 1] = math.inf if t else math.nan
        before = snapshot(opt, params)
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        if t in (0, 2):
            assert_same_bits([p.detach() for p in params], before[0])
            for now, then in zip(states(opt, params), before[1], strict=True):
                assert_same_bits(now, then) if then else None
                assert then or not any(bool(v.any()) for v in now.values())
        assert scaler.get_scale() == (scale / 2 if t in (0, 2) else scale)
    assert_backend(opt, backend)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, 4)
        assert float(s["step"]) == ws["step"] == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_with_their_own_options(backend: str) -> None:
    """Both forms side by side, one group out of clipping; a parameter without a gradient; read anew at each step."""
    shapes = [(5, 3), (7,), (3, 4, 5), (9,), (4, 4)]
    groups: list[tuple[list[int], dict[str, Any]]] = [
        ([0, 1], dict(lr=0.2, weight_decay=0.1)),
        ([2], dict(lr=0.05, relative_step=False, clip=False, eps=(1e-3, 0.5), clip_threshold=1.5, decay_rate=-0.6)),
        ([3, 4], dict(lr=None, relative_step=True, transformers_form=True, beta1=0.9, eps=(1e-30, 1e-3))),
    ]
    params = parameters(weights(shapes))
    opt = mo_fused.Adafactor(
        [{"params": [params[i] for i in which], **options} for which, options in groups],
        max_grad_norm=0.5,
        backend=backend,
    )
    entries: list[Any] = [{} for _ in shapes]
    for t, row in enumerate(gradients(shapes, 4)):
        if t == 1:
            row[4] = None
        if t == 2:
            opt.param_groups[0]["maximize"] = groups[0][1]["maximize"] = True
            opt.param_groups[2]["beta1"] = groups[2][1]["beta1"] = 0.5
        counted = [None if i == 2 else g for i, g in enumerate(row)]
        clipped, norm, _ = clip64(counted, 0.5)
        before = [p.detach().clone() for p in params]
        want: list[Tensor] = list(before)
        for which, options in groups:
            settings = {k: v for k, v in options.items() if k != "clip"}
            for i in which:
                g = row[i] if i == 2 else clipped[i]
                if g is not None:
                    one = Form("", "torch", settings).exact([before[i]], [[g]], states=[entries[i]])
                    (want[i],), (entries[i],) = one
        drive(opt, params, [row])
        assert float(opt.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
        for i, (p, w) in enumerate(zip(params, want, strict=True)):
            assert_close(p, w.double(), 3, f"step {t}, parameter {i}")
    assert_backend(opt, backend)


# -- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16]), ids=short)
@pytest.mark.parametrize("form", some([FORMS[1], MOMENTUM], [MOMENTUM]), ids=str)
def test_statistics_against_float64(form: Form, dtype: torch.dtype, backend: str) -> None:
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 2, dtype)
    params = parameters(values)
    opt = form.ours(params, stats=True, max_grad_norm=50.0, backend=backend)
    entries: list[Any] = [{} for _ in SHAPES]
    for row in grads:
        before = [p.detach().clone() for p in params]
        clipped, norm, coef = clip64(row, 50.0)
        want, entries = form.exact(before, [clipped], states=entries)
        drive(opt, params, [row])
        last = opt.last_step
        asked = [wide(b) - w for b, w in zip(before, want, strict=True)]
        stored = [wide(p) - wide(b) for p, b in zip(params, before, strict=True)]
        assert float(last.grad_norm) == pytest.approx(norm, rel=1e-6)
        assert float(last.clip_coef) == pytest.approx(coef, rel=1e-6)
        assert float(last.update_norm) == pytest.approx(norm64(asked), rel=1e-5)
        assert float(last.stored_update_norm) == pytest.approx(norm64(stored), rel=1e-5)
        assert float(last.param_norm) == pytest.approx(norm64(params), rel=1e-6)
        assert float(last.grad_amax) == max(float(g.abs().max()) for g in row if g is not None)
        assert int(last.nonfinite) == 0 and not bool(last.skipped)
        for i, (p, g) in enumerate(zip(params, row, strict=True)):
            assert g is not None
            one = last.per_param()[i]
            assert one.grad_norm == pytest.approx(norm64([g]), rel=1e-6)
            assert one.update_norm == pytest.approx(norm64([asked[i]]), rel=1e-5)
            assert one.stored_update_norm == pytest.approx(norm64([stored[i]]), rel=1e-5)
            assert one.param_norm == pytest.approx(norm64([p]), rel=1e-6)
    assert_backend(opt, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16]), ids=short)
@pytest.mark.parametrize("form", some([FORMS[1], MOMENTUM], [MOMENTUM]), ids=str)
def test_statistics_change_no_bit(form: Form, dtype: torch.dtype, backend: str) -> None:
    """Turned on for all steps, for none, and, because carried sums of parameters may not know, for every other."""
    shapes = [*some(SHAPES, SHAPES[1:4]), (30, 9)]
    results = []
    for pattern in ((True,) * 4, (False,) * 4, (True, False) * 2):
        params = parameters(weights(shapes, dtype))
        params[-1] = Parameter(params[-1].detach().t().contiguous().t())
        opt = form.ours(params, stats=pattern[0], backend=backend)
        for stats, row in zip(pattern, gradients(shapes, 4, dtype), strict=True):
            opt.defaults["stats"] = stats
            drive(opt, params, [row])
        results.append(snapshot(opt, params))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[2], results[1])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16]), ids=short)
def test_gradients_are_rewritten_only_on_request(dtype: torch.dtype, in_place: bool) -> None:
    values, row = weights(SHAPES, dtype), gradients(SHAPES, 1, dtype)[0]
    clipped, _, _ = clip64(row, 0.5)
    results = []
    for option in (False, in_place):
        params = parameters(values)
        opt = MOMENTUM.ours(params, max_grad_norm=0.5, clip_in_place=option)
        drive(opt, params, [row])
        results.append(snapshot(opt, params))
    for p, g, c in zip(params, row, clipped, strict=True):
        assert p.grad is not None and g is not None and c is not None
        if in_place:
            assert_close(p.grad, c, 2, "the clipped gradient")
        else:
            assert_same_bits(p.grad, g, "the gradient")
    assert_same_bits(results[1], results[0])
