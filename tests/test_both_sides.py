"""Parameters of one optimizer on the host and on a device: one norm, one decision to skip, statistics of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import (
    ADAM,
    ADAMW,
    BACKEND,
    DAMPENED,
    DEVICE,
    ON_HOST,
    SGD,
    Case,
    drive,
    gradients,
    noise,
    parameters,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits, clip64, norm64, reference
from torch import Tensor
from torch.nn import Parameter

import mo_fused
from mo_fused import dispatch
from mo_fused.device_gradients import measuring, on_one_device

pytestmark = pytest.mark.device_only(reason="test_triton_suite.py and test_cuda_suite.py run it")


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Tensor]], list[Parameter]]:
    """Makes parameters of which every second one is stepped by the CPU's kernels, the others by the backend under test.

    On a GPU machine they lie on the two devices. On the CPU the choice itself is divided.
    """

    def make(values: Sequence[Tensor]) -> list[Parameter]:
        params = parameters([v.to("cpu" if i % 2 else DEVICE) for i, v in enumerate(values)])
        if ON_HOST:
            native = {id(p) for p in params[1::2]}
            real = dispatch.choose

            def choose(tensor: Tensor, backend: str | None = None) -> Any:
                return dispatch.Choice("cpu", "divided") if id(tensor) in native else real(tensor, backend)

            monkeypatch.setattr(dispatch, "choose", choose)
        return params

    return make


DIVIDED = [(7,), (33, 3), (2300,), (5,), (), (0,)]


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("case", [ADAMW, ADAM, SGD, DAMPENED], ids=str)
def test_host_and_device_share_one_norm(case: Case, max_norm: float, split: Any) -> None:
    values, grads = weights(DIVIDED), gradients(DIVIDED, 4)
    want, want_states = reference(case, values, grads, max_norm=max_norm)
    params = split(values)
    opt = case.ours(params, max_grad_norm=max_norm, stats=True)
    for row in grads:
        drive(opt, params, [row])
        _, norm, coef = clip64(row, max_norm)
        assert float(opt.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
        assert float(opt.last_step.clip_coef) == pytest.approx(coef, rel=1e-6)
        # What each of the two sides has found and decided.
        rows = opt._rows()
        host, device = rows.ring[rows.turn], rows.devices[0].stats
        for name in ("grad_norm", "clip_coef", "grad_amax", "nonfinite", "skipped"):
            assert float(device.field(name)) == pytest.approx(host[name], rel=1e-12), name
    assert [r.backend for r in opt.explain()] == [BACKEND, "cpu"] * 3
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, 12)
        assert {k: float(v.double().norm()) for k, v in s.items()} == pytest.approx(
            {k: float(v.double().norm()) for k, v in ws.items()}, rel=1e-5
        )
    records = opt.last_step.per_param()
    assert list(records) == list(range(len(DIVIDED))), "in the order of the state_dict, not of the sides"
    for i, g in enumerate(grads[-1]):
        assert records[i].grad_norm == pytest.approx(norm64([g]), rel=1e-6), i
        assert records[i].param_norm == pytest.approx(norm64([params[i]]), rel=1e-6), i
    assert float(opt.last_step.param_norm) == pytest.approx(norm64(params), rel=1e-6)


@pytest.mark.parametrize("way", ["skip_nonfinite", "found_inf", "scaler"])
@pytest.mark.parametrize("side", [0, 1], ids=["device", "host"])
@pytest.mark.parametrize("case", [ADAMW, DAMPENED], ids=str)
def test_host_and_device_share_one_skip(case: Case, side: int, way: str, split: Any) -> None:
    """The first step is a skipped one, and one in the middle; the run goes on as if neither had been seen."""
    values, grads = weights(DIVIDED), gradients(DIVIDED, 4)
    want, _ = reference(case, values, [grads[t] for t in (1, 3)])
    params = split(values)
    opt = case.ours(params, skip_nonfinite=way == "skip_nonfinite")
    scaler = mo_fused.GradScaler(DEVICE.type, init_scale=1.0)
    scaler.scale(torch.zeros((), device=DEVICE))
    for t, row in enumerate(grads):
        bad = t in (0, 2)
        for p, g in zip(params, row, strict=True):
            assert g is not None
            p.grad = g.to(p.device).clone()
        if bad and way != "found_inf":
            target = params[side].grad
            assert target is not None
            target.view(-1)[-1] = math.nan
        start = [p.detach().clone() for p in params]
        if way == "scaler":
            scaler.step(opt)
        else:
            if way == "found_inf":  # on the device where the other half of the parameters is
                opt.found_inf = torch.tensor(float(bad), device=params[side].device)
            opt.step()
        if way == "scaler":
            found = opt.last_step.skipped
            scale = scaler.get_scale()
            scaler.update(1.0)
            assert scale == 1.0 and bool(found) is bad
        assert bool(opt.last_step.skipped) is bad
        for i, (p, s) in enumerate(zip(params, start, strict=True)):
            if bad or p.numel() == 0:
                assert_same_bits(p.detach(), s, f"step {t}, parameter {i}")
            else:
                assert not torch.equal(p.detach(), s), f"step {t}, parameter {i} stood still"
    for p, w in zip(params, want, strict=True):
        assert_close(p, w, 3)
    steps = [float(s["step"]) for s in states(opt, params) if "step" in s]
    assert steps == ([2.0] * len(params) if case.kind != "SGD" else [])


@pytest.mark.parametrize("case", [ADAMW, SGD], ids=str)
def test_parameters_of_torchs_own_step_share_norm_and_skip(case: Case) -> None:
    """Complex ones, and two that share their memory, beside rows of the kernels."""
    shared = noise((30,), 8)
    values = [noise((40,), 1), torch.complex(noise((6,), 2), noise((6,), 3)), noise((2300,), 4)]
    params = [*parameters(values), Parameter(shared[:20]), Parameter(shared[10:])]
    truth: list[Any] = [v.to(torch.complex128 if v.is_complex() else torch.float64).cpu().clone() for v in values]
    double = shared.double().cpu().clone()
    truth = [*parameters(truth), Parameter(double[:20]), Parameter(double[10:])]
    opt, theirs = case.ours(params, max_grad_norm=2.0, skip_nonfinite=True), case.torch(truth)
    for t in range(4):
        row: list[Tensor] = [
            torch.complex(noise(p.shape, 70 + 9 * t + i), noise(p.shape, 170 + 9 * t + i))
            if p.is_complex()
            else noise(p.shape, 70 + 9 * t + i)
            for i, p in enumerate(params)
        ]
        bad = t in (1, 2)
        if bad:
            row[t][3] = math.nan  # of the complex one; of a row of the kernels
        start = [p.detach().clone() for p in params]
        for p, g in zip(params, row, strict=True):
            p.grad = g
        opt.step()
        assert bool(opt.last_step.skipped) is bad
        if bad:
            assert_same_bits(
                [torch.view_as_real(x) if x.is_complex() else x for x in (p.detach() for p in params)],
                [torch.view_as_real(x) if x.is_complex() else x for x in start],
            )
            continue
        clipped, norm, coef = clip64(row, 2.0)
        assert float(opt.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
        assert float(opt.last_step.clip_coef) == pytest.approx(coef, rel=1e-6) and coef < 0.2
        drive(theirs, truth, [clipped])
    assert [r.backend for r in opt.explain()] == [BACKEND, "torch", BACKEND, "torch", "torch"]
    for i, (p, q) in enumerate(zip(params, truth, strict=True)):
        p, q = (torch.view_as_real(x.detach()) if x.is_complex() else x.detach() for x in (p, q))
        assert_close(p, q, 8, f"parameter {i}")


# -- totals that other devices have a share in ------------------------------------------------------------------------


def finished(part: Any, max_norm: float, *extras: Tensor, **options: Any) -> dict[str, float]:
    """The result of one measurement and finish of a device's part."""
    part.begin(measuring(max_norm), first=True)
    part.measure(count_zeros=True)
    part.finish(extras, **options)
    names = ("grad_norm", "clip_coef", "nonfinite", "zeros", "grad_amax", "found_inf")
    return {name: float(part.stats.field(name)) for name in names}


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "nonfinite"])
def test_extras_that_contain_these_gradients(bad: bool, scale: float) -> None:
    """With ``elsewhere`` the totals are those of the extras; without it the device's own are added to them."""

    def part_of(seed: int, zeros: int, shapes: Sequence[tuple[int, ...]]) -> Any:
        grads = [noise(shape, seed + i, scale=scale) for i, shape in enumerate(shapes)]
        grads[0][:zeros] = 0.0
        if bad:
            grads[0][-1] = math.inf
        found = on_one_device(grads)
        assert found is not None
        kept.append(grads)  # the table has their addresses alone
        return found._part

    kept: list[Any] = []
    part, other = part_of(1, 2, [(40,), (33, 3), (2300,)]), part_of(11, 3, [(50,), (700,)])
    limit = 0.5 * scale
    usual = finished(part, limit)
    assert usual["zeros"] == 2 and usual["nonfinite"] == bad and usual["clip_coef"] < 1
    own = part.partial().clone()
    same = pytest.approx(usual, rel=0, abs=0, nan_ok=True)
    assert finished(part, limit, own, elsewhere=True) == same
    assert finished(part, limit) == same, "and it is over with that step"
    twice = {k: usual[k] * {"grad_norm": math.sqrt(2), "zeros": 2, "nonfinite": 2}.get(k, 1) for k in usual}
    coef = min(1.0, limit / (twice["grad_norm"] + 1e-6))
    doubled = pytest.approx({**twice, "clip_coef": coef}, rel=1e-12, nan_ok=True)
    assert finished(part, limit, own) == doubled
    assert finished(part, limit, own, own, elsewhere=True) == doubled
    of_other = finished(other, limit)
    assert of_other["zeros"] == 3
    alone = finished(part, limit, other.partial().clone(), elsewhere=True)
    assert alone == pytest.approx(of_other, rel=0, abs=0, nan_ok=True)
