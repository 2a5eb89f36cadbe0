"""Gradient release: the ordinary loop's bits, at most one gradient, clipping by the step before, what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import (
    ADAM,
    ADAMW,
    AMSGRAD,
    BACKENDS,
    DEVICE,
    DTYPES,
    RATE,
    SGD,
    Case,
    Rows,
    assert_backend,
    gradients,
    parameters,
    short,
    some,
    states,
    weights,
)
from device_watch import watch
from oracle import assert_close, assert_same_bits, assert_states_close, norm64, reference, wide
from torch import Tensor, nn
from torch.nn import Parameter

import mo_fused
from mo_fused.errors import StaleStatsError
from mo_fused.masters import MODES, SLOTS

SHAPES = [(7,), (5, 3), (3, 4, 2), ()]
ADAFACTOR = Case("Adafactor", "momentum", dict(lr=RATE, weight_decay=0.1, beta1=0.9))
CASES = [ADAMW, SGD, ADAFACTOR]


class Product(nn.Module):
    """The parameters times constants: what multiplies a parameter is its gradient."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters(values))

    @property
    def params(self) -> list[Parameter]:
        return list(self.weights)

    def forward(self, row: Sequence[Tensor | None]) -> Tensor:
        terms = [(p * g.to(DEVICE)).sum().double() for p, g in zip(self.params, row, strict=True) if g is not None]
        return torch.stack(terms).sum()


def two_groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "lr": RATE / 2, "weight_decay": 0.0}]


def release(model: nn.Module, opt: Any, accumulation_steps: int = 1) -> Any:
    """gradient_release without its warning, which has a test of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return mo_fused.gradient_release(model, opt, accumulation_steps)


def train(model: Product, opt: Any, grads: Rows, each: int = 1) -> None:
    """The ordinary loop: one step for every ``each`` rows of gradients."""
    for at, row in enumerate(grads, 1):
        model(row).backward()
        if at % each == 0:
            opt.step()
            opt.zero_grad()


def pair(case: Case, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Product, Any, Product, Any]:
    """Two equal models, each with its optimizer."""
    values = weights(SHAPES, dtype)
    plain, model = Product(values), Product(values)
    return plain, case.ours(plain.params, **options), model, case.ours(model.params, **options)


def assert_same(model: Product, opt: Any, plain: Product, other: Any) -> None:
    assert_same_bits([p.detach() for p in model.params], [p.detach() for p in plain.params])
    assert_same_bits(states(opt, model.params), states(other, plain.params))


# -- the ordinary loop's results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16]), ids=short)
@pytest.mark.parametrize("case", [*CASES, AMSGRAD], ids=str)
def test_bits_are_those_of_the_ordinary_loop(case: Case, dtype: torch.dtype, each: int, backend: str) -> None:
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 3 * each, dtype)
    plain, model = Product(values), Product(values)
    other = case.ours(two_groups(plain.params), backend=backend)
    opt = case.ours(two_groups(model.params), backend=backend)
    handle = release(model, opt, each)
    assert f"{case.kind}, 4 parameters, accumulation_steps={each}" in repr(handle)
    for t in range(3):
        rows = grads[t * each : (t + 1) * each]
        for at, row in enumerate(rows, 1):
            before = [p.detach().clone() for p in model.params]
            model(row).backward()
            last = at == each
            assert all((p.grad is None) == last for p in model.params)
            # (A single number may be too large for a step to be seen in bf16.)
            moved = [not torch.equal(b, p) for b, p in zip(before, model.params, strict=True)]
            assert moved[:3] == [last] * 3 and moved[3] <= last
        opt.step()
        opt.zero_grad()
        train(plain, other, rows, each)
        assert_same(model, opt, plain, other)
    assert_backend(opt, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", some([*MODES], ["split8"]))
@pytest.mark.parametrize("case", [ADAMW, SGD], ids=str)
def test_master_weights_have_the_bits_of_the_ordinary_loop(case: Case, mode: str, backend: str) -> None:
    """Random numbers too: a parameter that is stepped alone keeps its place among all of them."""
    values, grads = weights(SHAPES, torch.bfloat16), gradients(SHAPES, 4, torch.bfloat16)
    grads[1][1] = None
    plain, model = Product(values), Product(values)
    options: dict[str, Any] = dict(master_weights=mode, state_dtype="fp32", seed=5, backend=backend)
    other, opt = (case.ours(two_groups(m.params), **options) for m in (plain, model))
    release(model, opt)
    for row in grads:
        train(plain, other, [row])
        train(model, opt, [row])
        assert_same(model, opt, plain, other)
    slot = SLOTS.get(mode)
    assert all((slot in s) == (slot is not None) for s in states(opt, model.params))
    assert_backend(opt, backend)


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_last_step_is_that_of_the_whole_step(case: Case, stats: bool) -> None:
    values, grads = weights(SHAPES), gradients(SHAPES, 5)
    grads[1][2] = None
    plain, model = Product(values), Product(values)
    named = [list(zip("abcd", m.params, strict=True)) for m in (plain, model)]
    other, opt = (case.ours(params, stats=stats) for params in named)
    release(model, opt)
    assert opt.last_step is None
    kept = []
    for row in grads:
        train(plain, other, [row])
        train(model, opt, [row])
        got, want = opt.last_step, other.last_step
        assert float(got.clip_coef) == 1 and not bool(got.skipped)
        for name in ("grad_norm", "grad_amax", "update_norm", "stored_update_norm", "param_norm"):
            if not stats:
                assert getattr(got, name) is None
            elif row[2] is not None or name != "param_norm":
                assert float(getattr(got, name)) == pytest.approx(float(getattr(want, name)), rel=1e-6), name
        assert got.nonfinite is None or float(got.nonfinite) == 0
        mine, theirs = got.per_param(), want.per_param()
        if stats:
            assert list(mine) == [name for name, g in zip("abcd", row, strict=True) if g is not None]
            for name, one in mine.items():
                assert one.grad_norm == pytest.approx(theirs[name].grad_norm, rel=1e-6)
                assert one.update_norm == pytest.approx(theirs[name].update_norm, rel=1e-6)
        kept.append(got)
    assert float(kept[1].clip_coef) == 1, "readable for three further steps"
    with pytest.raises(StaleStatsError):
        _ = kept[0].clip_coef
    opt.step()
    assert float(opt.last_step.clip_coef) == 1 and opt.last_step.per_param() == {}, "a step without any gradient"


def test_at_most_one_gradient_exists() -> None:
    """Counted when each gradient is complete, before it is used."""
    layers = [nn.Linear(4, 4, bias=False, device=DEVICE) for _ in range(6)]
    model = nn.Sequential(*layers)
    counts: list[int] = []
    seen: list[weakref.ref[Any]] = []

    def look(p: Tensor) -> None:
        counts.append(sum(q.grad is not None for q in model.parameters()))
        seen.append(weakref.ref(p.grad))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    opt = mo_fused.AdamW(model.parameters(), lr=RATE)
    x = torch.ones(2, 4, device=DEVICE)
    model(x).square().sum().backward()
    assert max(counts) == 6, "all of them without gradient release"
    opt.zero_grad()
    counts.clear()
    release(model, opt)  # torch runs hooks in the order of their registration
    for _ in range(2):
        model(x).square().sum().backward()
        assert all(grad() is None for grad in seen), "something keeps gradients that have been used"
        opt.step()
    assert counts == [1] * 12


def test_schedule_and_hooks_of_the_step() -> None:
    """Rates are read when a parameter is stepped, which is before schedule.step() in either loop."""
    plain, other, model, opt = pair(ADAMW)
    calls: list[str] = []
    opt.register_step_pre_hook(lambda o, a, k: calls.append("pre"))
    opt.register_step_post_hook(lambda o, a, k: calls.append("post"))
    loops = []
    release(model, opt)
    for m, o in ((plain, other), (model, opt)):
        loops.append((m, o, torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k))))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch's, when schedule.step() seems to come before opt.step()
        for row in gradients(SHAPES, 3):
            for m, o, schedule in loops:
                train(m, o, [row])
                schedule.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(RATE / 4)
    assert calls == ["pre", "post"] * 3
    assert_same(model, opt, plain, other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saved_and_loaded_in_the_middle(case: Case) -> None:
    plain, other, model, opt = pair(case)
    grads = gradients(SHAPES, 4)
    release(model, opt)
    train(plain, other, grads[:2])
    train(model, opt, grads[:2])
    saved, theirs = copy.deepcopy((opt.state_dict(), other.state_dict()))  # a state_dict shares its tensors
    assert saved["param_groups"] == theirs["param_groups"]
    assert list(saved["state"]) == list(theirs["state"])
    assert_same_bits(list(saved["state"].values()), list(theirs["state"].values()))
    start = [p.detach().clone() for p in model.params]
    for fresh in (False, True):
        if fresh:
            model = Product(start)
            opt = case.ours(model.params)
            release(model, opt)
        else:
            train(model, opt, gradients(SHAPES, 1, seed=9))
            with torch.no_grad():
                for p, value in zip(model.params, start, strict=True):
                    p.copy_(value)
        opt.load_state_dict(saved)
        resumed = Product(start)
        third = case.ours(resumed.params)
        third.load_state_dict(theirs)
        train(resumed, third, grads[2:])
        train(model, opt, grads[2:])
        assert_same(model, opt, resumed, third)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_removing_puts_everything_back(case: Case) -> None:
    plain, other, model, opt = pair(case, stats=True)
    grads = gradients(SHAPES, 3)
    with release(model, opt) as handle:
        train(model, opt, grads[:1])
        inside = opt.last_step
        assert "removed" not in repr(handle)
    assert "removed" in repr(handle)
    handle.remove()
    model(grads[1]).backward()
    assert all(p.grad is not None for p in model.params)
    opt.step()
    opt.zero_grad()
    train(plain, other, grads[:2])
    assert_same(model, opt, plain, other)
    assert float(inside.grad_norm) == pytest.approx(norm64(grads[0]), rel=1e-6)
    release(model, opt)  # once more
    train(model, opt, grads[2:])
    train(plain, other, grads[2:])
    assert_same(model, opt, plain, other)


def test_closure() -> None:
    plain, other, model, opt = pair(ADAMW)
    release(model, opt)
    (row,) = gradients(SHAPES, 1)
    losses = []
    for m, o in ((plain, other), (model, opt)):

        def closure(m: Product = m, o: Any = o) -> Tensor:
            o.zero_grad()
            loss = m(row)
            loss.backward()
            return loss

        losses.append(float(o.step(closure).detach()))
        losses.append(float(o.step(closure).detach()))
    assert losses[:2] == losses[2:] and losses[0] != losses[1]
    assert_same(model, opt, plain, other)


# -- which parameters -------------------------------------------------------------------------------------------------


def test_fewer_micro_batches_than_asked_for() -> None:
    """opt.step() steps the parameters whose hook has not fired often enough, and counting begins anew."""
    plain, other, model, opt = pair(SGD)
    release(model, opt, 2)
    grads = gradients(SHAPES, 4)
    grads[1][1] = None
    grads[3][2] = grads[2][2] = None
    for at in (0, 2):
        model(grads[at]).backward()
        model(grads[at + 1]).backward()
        assert [p.grad is None for p in model.params] == [True, at == 2, True, True]
        opt.step()
        assert all(p.grad is None for p in model.params)
        train(plain, other, grads[at : at + 2], 2)
        assert_same(model, opt, plain, other)


def test_a_second_backward_is_an_error() -> None:
    model = Product(weights(SHAPES))
    opt = ADAMW.ours(list(zip("abcd", model.params, strict=True)))
    release(model, opt)
    first, second = gradients(SHAPES, 2)
    model(first).backward()
    after = [p.detach().clone() for p in model.params]
    with pytest.raises(
        RuntimeError, match=r"expected 1 gradient\(s\) of [abcd] between .*accumulation_steps.*; found "
    ):
        model(second).backward()
    assert_same_bits([p.detach() for p in model.params], after)


def test_parameters_of_one_side_alone() -> None:
    """What the optimizer lacks keeps its gradient; what the model lacks is stepped by opt.step(), and keeps it too."""
    values, (row, again) = weights(SHAPES), gradients(SHAPES, 2)
    model, plain = Product(values), Product(values)
    (apart, same), grad = parameters(weights([(3,)]) * 2), torch.full((3,), 2.0)
    opt, other = ADAMW.ours([*model.params[1:], apart]), ADAMW.ours([*plain.params[1:], same])
    release(model, opt)
    for m, p, o in ((model, apart, opt), (plain, same, other)):
        p.grad = grad.clone()
        m(row).backward()
        assert torch.equal(p.detach(), weights([(3,)])[0]) and p.grad is not None
        o.step()
        assert p.grad is not None and m.params[0].grad is not None
        o.zero_grad()
        p.grad = None
        train(m, o, [again])
    assert_same_bits(apart.detach(), same.detach())
    assert_same(model, opt, plain, other)
    assert_same_bits(model.params[0].detach(), values[0])


def test_a_group_added_later_and_a_thawed_parameter() -> None:
    values, grads = weights(SHAPES), gradients(SHAPES, 3)
    loops = []
    for released in (False, True):
        model = Product(values)
        model.params[1].requires_grad_(False)
        opt = SGD.ours(model.params[:3])
        if released:
            release(model, opt)
        train(model, opt, grads[:1])
        assert not model.params[1].requires_grad
        model.params[1].requires_grad_(True)
        opt.zero_grad()
        model.params[3].grad = None
        opt.add_param_group({"params": model.params[3:], "lr": RATE / 3})
        for row in grads[1:]:
            model(row).backward()
            assert all((p.grad is None) is released for p in model.params)
            opt.step()
            opt.zero_grad()
        loops.append((model, opt))
    (plain, other), (model, opt) = loops
    assert_same(model, opt, plain, other)


def test_tied_weights_are_stepped_once() -> None:
    models = []
    for released in (False, True):
        torch.manual_seed(3)
        first, head = (nn.Linear(4, 4, bias=False) for _ in range(2))
        head.weight = first.weight
        model = nn.Sequential(first, nn.Tanh(), head).to(DEVICE)
        opt = ADAMW.ours(model.parameters())
        if released:
            release(model, opt)
        for _ in range(2):
            model(torch.ones(2, 4, device=DEVICE)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        models.append(model)
        assert float(opt.state[first.weight]["step"]) == 2
    assert_same_bits(*([p.detach() for p in m.parameters()] for m in models))


def test_a_parameter_that_no_kernel_takes() -> None:
    """Complex parameters go to torch's own step, one by one as always."""
    loops = []
    for released in (False, True):
        model = Product([torch.ones(3, dtype=torch.complex64), torch.ones(2)])
        opt = mo_fused.SGD(model.params, lr=RATE, momentum=0.9, stats=True)
        if released:
            release(model, opt)
        for _ in range(3):
            (model.params[0].abs().sum() * 3 + model.params[1].sum()).backward()
            opt.step()
            opt.zero_grad()
        loops.append((model, opt))
    (plain, other), (model, opt) = loops
    assert [e.backend for e in opt.explain()] == [e.backend for e in other.explain()] and "torch" in str(opt.explain())
    for p, q in zip(model.params, plain.params, strict=True):
        assert torch.equal(p, q)
    assert float(opt.last_step.grad_norm) == pytest.approx(float(other.last_step.grad_norm), rel=1e-6)


def test_what_no_kernel_takes_is_clipped_too() -> None:
    """Gradients of magnitude 3 and 1 as long as the values are positive."""
    model = Product([torch.ones(3, dtype=torch.complex64), torch.ones(2)])
    opt = mo_fused.SGD(model.params, lr=RATE, max_grad_norm=1.0)
    release(model, opt)
    values = [1.0, 1.0]
    for t in range(3):
        (model.params[0].abs().sum() * 3 + model.params[1].sum()).backward()
        opt.step()
        norms = (math.sqrt(29),) * 2 if t else (math.sqrt(27), math.sqrt(2))
        values = [v - RATE * g / n for v, g, n in zip(values, (3, 1), norms, strict=True)]
        assert model.params[0].detach().cpu().numpy() == pytest.approx([complex(values[0])] * 3, rel=1e-5)
        assert model.params[1].detach().cpu().numpy() == pytest.approx([values[1]] * 2, rel=1e-5)
        assert float(opt.last_step.grad_norm) == pytest.approx(math.sqrt(29), rel=1e-5)


def test_a_parameter_taken_out_of_the_optimizer() -> None:
    """It keeps its gradient from then on, and can be put back."""
    model = Product(weights(SHAPES))
    opt = ADAMW.ours(model.params)
    handle = release(model, opt)
    grads = gradients(SHAPES, 3)
    train(model, opt, grads[:1])
    del opt.param_groups[0]["params"][1]
    for row, group in zip(grads[1:], (None, {"params": [model.params[1]]}), strict=True):
        if group is not None:
            opt.add_param_group(group)
        before = [p.detach().clone() for p in model.params]
        model(row).backward()
        assert [p.grad is None for p in model.params] == [True, group is not None, True, True]
        changed = [not torch.equal(b, p) for b, p in zip(before, model.params, strict=True)]
        assert changed == [True, group is not None, True, True]
        assert f" {3 if group is None else 4} parameters" in repr(handle), "no hook stays on what was taken out"
        opt.step()
        opt.zero_grad()
        model.params[1].grad = None


def test_a_stale_backward_raises() -> None:
    """A value that a later part of the backward reads was written by the step."""
    p, x = Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    model = nn.Module()
    model.register_parameter("p", p)
    opt = ADAMW.ours([p])
    release(model, opt)
    late = p.detach() * x  # the graph holds p's memory, but p's gradient does not wait for it
    p.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


def test_a_dropped_optimizer_frees_its_parameters() -> None:
    """Without waiting for the cycle collector; and a model that is left trains without hooks that do anything."""
    model = Product(weights(SHAPES))
    opt = ADAMW.ours(model.params, stats=True)
    handle = release(model, opt)
    train(model, opt, gradients(SHAPES, 2))
    alive = weakref.ref(opt)
    gc.disable()
    try:
        del opt
        assert alive() is None, "a reference cycle keeps the optimizer"
        (row,) = gradients(SHAPES, 1)
        model(row).backward()
        assert all(p.grad is not None for p in model.params)
        assert "removed" in repr(handle)
        parameter = weakref.ref(model.params[0])
        del model, handle
        assert parameter() is None, "a reference cycle keeps the parameters"
    finally:
        gc.enable()


# -- clipping ---------------------------------------------------------------------------------------------------------


def emulate(grads: Rows, limit: float, counted: Sequence[bool]) -> tuple[list[list[Tensor | None]], list[float]]:
    """float64 gradients clipped as gradient_release does it, and the norm of each step."""
    rows: list[list[Tensor | None]] = []
    norms: list[float] = []
    for row in grads:
        out: list[Tensor | None] = []
        for g, counts in zip(row, counted, strict=True):
            if g is None or not counts:
                out.append(None if g is None else wide(g))
                continue
            norm = norms[-1] if norms else norm64([g])
            out.append(wide(g) * min(1.0, limit / (norm + 1e-6)))
        rows.append(out)
        norms.append(norm64([g for g, counts in zip(row, counted, strict=True) if counts]))
    return rows, norms


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], [torch.float32]), ids=short)
@pytest.mark.parametrize("case", [SGD, ADAM], ids=str)
def test_clipping_is_by_the_norm_of_the_step_before(case: Case, dtype: torch.dtype, backend: str) -> None:
    limit, sizes = 40.0, (8.0, 0.1, 30.0, 8.0, 8.0)
    grads = [gradients(SHAPES, 1, dtype, seed=20 + t, scale=size)[0] for t, size in enumerate(sizes)]
    grads[3][0] = None
    values = weights(SHAPES, dtype)
    clipped, norms = emulate(grads, limit, (True, True, False, True))
    assert norms[0] > limit > norms[1] and norms[2] > limit, "steps that follow both kinds"

    def groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
        return [{"params": params[:2]}, {"params": params[2:3]}, {"params": params[3:]}]

    want, want_states = reference(case, values, clipped, groups=groups)
    model = Product(values)
    listed = groups(model.params)
    listed[1]["clip"] = False
    opt = case.ours(listed, max_grad_norm=limit, backend=backend)
    handle = release(model, opt)
    assert "not by the exact global norm" in repr(handle)
    for t, row in enumerate(grads):
        train(model, opt, [row])
        last = opt.last_step
        assert float(last.grad_norm) == pytest.approx(norms[t], rel=1e-5), "of gradients that are not clipped"
        smallest = max(norms[t - 1] if t else norm64([g]) for g in (row[0], row[1], row[3]) if g is not None)
        assert float(last.clip_coef) == pytest.approx(min(1.0, limit / (smallest + 1e-6)), rel=1e-5)
        assert last.update_norm is None and last.param_norm is None, "stats=False"
        for at, one in last.per_param().items():
            assert one.grad_norm == pytest.approx(norm64([row[at]]), rel=1e-5)
            assert one.update_norm is None
    assert_backend(opt, backend)
    for p, w, s, ws in zip(model.params, want, states(opt, model.params), want_states, strict=True):
        assert_close(p, w, 5)
        assert_states_close(s, ws, 5)


def test_adafactor_is_clipped_like_the_others() -> None:
    """Against the ordinary step over gradients clipped by hand (eps[0] makes the size of a gradient count)."""
    grads = gradients(SHAPES, 4)
    clipped, _ = emulate(grads, 3.0, [True] * 4)
    options: dict[str, Any] = dict(eps=(0.5, 1e-3), transformers_form=True)
    plain, model = Product(weights(SHAPES)), Product(weights(SHAPES))
    other, opt = (
        mo_fused.Adafactor(m.params, RATE, **options, **more)
        for m, more in ((plain, {}), (model, {"max_grad_norm": 3.0}))
    )
    release(model, opt)
    train(model, opt, grads)
    train(plain, other, [[None if g is None else g.float() for g in row] for row in clipped])
    for p, q in zip(model.params, plain.params, strict=True):
        assert_close(p, q, 8)


def test_a_norm_that_is_not_finite_is_not_used() -> None:
    """The last finite one is, so that one bad gradient does not set every later one to zero."""
    model = Product(weights(SHAPES))
    opt = SGD.ours(model.params, max_grad_norm=1.0)
    release(model, opt)
    grads = gradients(SHAPES, 4)
    for t, bad in ((1, math.inf), (2, math.nan)):
        g = grads[t][0]
        assert g is not None
        g[0] = bad
    for t in range(4):
        train(model, opt, grads[t : t + 1])
        assert math.isfinite(float(opt.last_step.grad_norm)) is (t in (0, 3))
        if t:
            want = 1 / (norm64(grads[0]) + 1e-6)
            assert float(opt.last_step.clip_coef) == pytest.approx(want, rel=1e-5)
    first = Product(weights(SHAPES))
    opt = SGD.ours(first.params, max_grad_norm=1.0)
    release(first, opt)
    train(first, opt, grads[1:2])
    train(first, opt, grads[3:])
    assert float(opt.last_step.clip_coef) == pytest.approx(1.0, rel=1e-5), "there was no norm before"


def test_a_limit_of_zero_and_a_load() -> None:
    model = Product(weights(SHAPES))
    opt = mo_fused.SGD(model.params, lr=RATE, max_grad_norm=0.0)
    release(model, opt)
    grads = gradients(SHAPES, 3)
    train(model, opt, grads)
    assert_same_bits([p.detach() for p in model.params], weights(SHAPES))
    assert float(opt.last_step.grad_norm) == pytest.approx(norm64(grads[2]), rel=1e-6)
    opt = SGD.ours(model.params, max_grad_norm=1.0)
    with release(model, opt):
        train(model, opt, grads[:2])
        own = 1 / (max(norm64([g]) for g in grads[2]) + 1e-6)
        opt.load_state_dict(opt.state_dict())
        train(model, opt, grads[2:])
        assert float(opt.last_step.clip_coef) == pytest.approx(own, rel=1e-5), "the first step of another run"


def test_the_warning_is_given_once() -> None:
    model = Product(weights(SHAPES))
    opt = ADAMW.ours(model.params, max_grad_norm=1.0)
    with pytest.warns(UserWarning, match="not by the exact global norm") as caught:
        mo_fused.gradient_release(model, opt)
        train(model, opt, gradients(SHAPES, 3))
    ours = [w for w in caught if w.category is UserWarning]
    assert len(ours) == 1 and ours[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = Product(weights(SHAPES))
        mo_fused.gradient_release(plain, ADAMW.ours(plain.params))


@pytest.mark.device_only(reason="on the host there is nothing to wait for")
@pytest.mark.parametrize("limit", [None, 1.0])
def test_nothing_waits_for_the_device(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Product(weights(SHAPES))
    opt = SGD.ours(model.params, max_grad_norm=limit, stats=True)
    release(model, opt)
    grads = gradients(SHAPES, 4)
    train(model, opt, grads[:1])
    with watch(monkeypatch)():
        train(model, opt, grads[1:])
    assert float(opt.last_step.grad_norm) == pytest.approx(norm64(grads[3]), rel=1e-5)


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(error: type[Exception], said: str, make: Callable[[], Any], model: nn.Module) -> None:
    """The error has the form of all of them, and nothing has been changed."""
    with pytest.raises(error, match=f"expected .*{said}"):
        make()
    for p in model.parameters():
        p.grad = None
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None for p in model.parameters())


def test_wrong_arguments_are_refused() -> None:
    model = Product(weights(SHAPES))
    gr, params = mo_fused.gradient_release, model.params
    ours: Any = ADAMW.ours(params)
    theirs: Any = torch.optim.AdamW(params)
    refused(
        TypeError, "an optimizer of this package; found torch.optim.adamw.AdamW; use", lambda: gr(model, theirs), model
    )
    refused(TypeError, "torch.nn.Module; found list; pass", lambda: gr(params, ours), model)  # type: ignore[arg-type]
    for wrong in (0, -1, True, 1.5, "2"):
        refused(ValueError, "accumulation_steps to be a whole number", lambda n=wrong: gr(model, ours, n), model)
    for option, why in (("skip_nonfinite", "written"), ("clip_in_place", "no gradients left")):
        opt = ADAMW.ours(params, **{option: True})
        refused(ValueError, f"{option}=False .*found {option}=True, but .*{why}", lambda o=opt: gr(model, o), model)
    opt = ADAMW.ours(params, differentiable=True)
    refused(ValueError, "differentiable=False", lambda: gr(model, opt), model)
    wrapped = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)  # without a process group, which this refusal does not need
    wrapped.module = model
    refused(
        ValueError, "found a DistributedDataParallel, which averages", lambda: gr(nn.Sequential(wrapped), ours), model
    )


def test_a_second_release_and_a_differentiable_group_are_refused() -> None:
    model = Product(weights(SHAPES))
    opt = ADAMW.ours(model.params[:3])
    handle = release(model, opt)
    with pytest.raises(ValueError, match=r"expected an optimizer without a gradient release; .*remove"):
        mo_fused.gradient_release(model, opt)
    with pytest.raises(ValueError, match="expected differentiable=False"):
        opt.add_param_group({"params": model.params[3:], "differentiable": True})
    assert len(opt.param_groups) == 1
    handle.remove()
    release(model, opt)


@pytest.mark.parametrize("amp", ["fused", "torch"])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_a_loss_scaler_is_refused(kind: str, unscale: bool, amp: str) -> None:
    scaler_class = {"torch": torch.amp.GradScaler, "ours": mo_fused.GradScaler}[kind]
    scaler = scaler_class(DEVICE.type, init_scale=4.0)
    model = Product(weights(SHAPES))
    opt = ADAMW.ours(model.params, amp=amp)
    release(model, opt)
    (row,) = gradients(SHAPES, 1)
    scaler.scale(model(row)).backward()
    after = [p.detach().clone() for p in model.params]
    with pytest.raises(RuntimeError, match="expected no loss scaling with gradient_release.*; found .*; train without"):
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
    assert_same_bits([p.detach() for p in model.params], after)
    assert getattr(opt, "grad_scale", None) is None and getattr(opt, "found_inf", None) is None
    opt.step()
    off = scaler_class(DEVICE.type, enabled=False)
    off.scale(model(row)).backward()
    off.unscale_(opt)
    off.step(opt)
    off.update()
    assert float(opt.state[model.params[0]]["step"]) == 2, "a scaler that is switched off does nothing"


def test_a_scale_that_is_there_already_is_noticed_in_the_backward() -> None:
    model = Product(weights(SHAPES))
    opt = ADAMW.ours(model.params)
    handle = release(model, opt)
    opt.grad_scale = torch.tensor(4.0)
    (row,) = gradients(SHAPES, 1)
    with pytest.raises(RuntimeError, match="found opt.grad_scale"):
        model(row).backward()
    with pytest.raises(RuntimeError, match="found opt.grad_scale"):
        opt.step()
    assert_same_bits([p.detach() for p in model.params], weights(SHAPES))
    handle.remove()
    with pytest.raises(RuntimeError, match="found opt.grad_scale"):
        mo_fused.gradient_release(model, opt)


def test_sparse_gradients() -> None:
    """Refused where the class refuses them; SGD takes them."""
    tables = []
    for case, released in itertools.product((ADAMW, SGD), (False, True)):
        torch.manual_seed(5)
        model = nn.Embedding(5, 3, sparse=True, device=DEVICE)
        opt = case.ours(model.parameters(), weight_decay=0.0)
        if released:
            release(model, opt)
        index = torch.tensor([1, 3], device=DEVICE)
        with contextlib.nullcontext() if case is SGD else pytest.raises(RuntimeError, match="SparseAdam"):
            for _ in range(2):
                model(index).sum().backward()
                opt.step()
                opt.zero_grad()
        tables.append(model.weight.detach())
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[2], tables[3])
    assert not torch.equal(tables[1], tables[3])
