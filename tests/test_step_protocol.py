"""What surrounds a step: hooks, closures, the profiler, autograd, class identity, lifetime."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from cases import ADAMW, BACKENDS, RATE, RULES, SGD, Case, Gradients, drive, gradients, parameters, states, weights
from oracle import assert_close, assert_same_bits, reference
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import mo_fused

SHAPES = [(7,), (5, 3)]
ADAFACTOR = Case("Adafactor", "decay", dict(lr=RATE, weight_decay=0.1))
EVERY = [*RULES, ADAFACTOR]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_stale_backward_raises(case: Case, backend: str) -> None:
    """Raw writes raise no version counter: without a bump the gradient below would be silently wrong."""
    p, x = Parameter(torch.ones(5)), torch.ones(5, requires_grad=True)
    opt = case.ours([p], backend=backend)
    loss = (p * p * x).sum()
    p.grad = torch.ones(5)
    version = p._version
    opt.step()
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_no_gradient_is_a_no_op(case: Case) -> None:
    params = parameters(weights(SHAPES))
    opt = case.ours(params, max_grad_norm=1.0, skip_nonfinite=True, stats=True)
    start = [p.detach().clone() for p in params]
    assert opt.last_step is None
    assert opt.step() is None
    assert not any(len(s) for s in opt.state.values())
    assert_same_bits([p.detach() for p in params], start)
    drive(opt, params, gradients(SHAPES, 1))
    before, kept = states(opt, params), [p.detach().clone() for p in params]
    opt.zero_grad()
    assert all(p.grad is None for p in params)
    opt.step()
    assert_same_bits(states(opt, params), before)
    assert_same_bits([p.detach() for p in params], kept)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_hooks_run_once_each_in_torchs_order(case: Case) -> None:
    """Also when torch's own class was used before: its `step` is patched once, and must not wrap ours twice."""
    other, p = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    drive(case.torch([other]), [other], [[torch.ones(2)]])
    opt = case.ours([p])
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda o, a, k: calls.append("global post")),
        opt.register_step_pre_hook(lambda o, a, k: calls.append("pre")),
        opt.register_step_post_hook(lambda o, a, k: calls.append("post")),
    ]
    try:
        drive(opt, [p], [[torch.ones(2)]])
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["global pre", "pre", "post", "global post"]
    opt.step()
    assert len(calls) == 4, "a removed hook was called"


def test_pre_hook_may_replace_the_arguments() -> None:
    p = Parameter(torch.ones(2))
    opt = SGD.ours([p])
    opt.register_step_pre_hook(lambda o, args, kwargs: ((args[0], lambda: 42), kwargs))
    p.grad = torch.ones(2)
    assert opt.step() == 42


def test_load_and_save_hooks_run_once() -> None:
    p = Parameter(torch.ones(2))
    opt = ADAMW.ours([p])
    drive(opt, [p], [[torch.ones(2)]])
    calls: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: calls.append("save pre"))
    opt.register_state_dict_post_hook(lambda o, s: calls.append("save post"))
    opt.register_load_state_dict_pre_hook(lambda o, s: calls.append("load pre"))
    opt.register_load_state_dict_post_hook(lambda o: calls.append(f"load post {float(o.state[p]['step'])}"))
    opt.load_state_dict(opt.state_dict())
    assert calls == ["save pre", "save post", "load pre", "load post 1.0"], "the post hook sees the loaded state"

    def other_step(o: Any, saved: dict[str, Any]) -> dict[str, Any]:
        return {**saved, "state": {0: {**saved["state"][0], "step": torch.tensor(7.0)}}}

    opt.register_load_state_dict_pre_hook(other_step)
    opt.load_state_dict(opt.state_dict())
    assert float(opt.state[p]["step"]) == 7, "what a pre hook returns is what is loaded"


def test_profiler_names() -> None:
    from torch.profiler import ProfilerActivity, profile

    p = Parameter(torch.ones(2))
    opt = ADAMW.ours([p])
    p.grad = torch.ones(2)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        opt.step()
        opt.zero_grad()
    counts = {e.key: e.count for e in prof.key_averages() if e.key.startswith("Optimizer.")}
    assert counts == {"Optimizer.step#AdamW.step": 1, "Optimizer.zero_grad#AdamW.zero_grad": 1}


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_closure_runs_once_with_gradients_enabled(by: str) -> None:
    for case in EVERY:
        p = Parameter(torch.ones(3))
        opt = case.ours([p])
        seen: list[bool] = []

        def closure(p: Parameter = p, opt: Any = opt, seen: list[bool] = seen) -> Tensor:
            seen.append(torch.is_grad_enabled())
            opt.zero_grad()
            loss = (p * p).sum()
            loss.backward()
            return loss

        with torch.no_grad():
            loss = opt.step(closure) if by == "position" else opt.step(closure=closure)
        assert seen == [True] and loss.item() == 3.0
        assert_close(p, reference(case, [torch.ones(3)], [[torch.full((3,), 2.0)]])[0][0], 1)


def test_gradients_that_carry_a_graph() -> None:
    """With create_graph=True a gradient requires grad itself."""
    p = Parameter(torch.ones(3))
    opt = ADAMW.ours([p], max_grad_norm=1e9)
    (p.grad,) = torch.autograd.grad((p * p * p).sum(), p, create_graph=True)
    assert p.grad.requires_grad
    opt.step()
    assert_close(p, reference(ADAMW, [torch.ones(3)], [[torch.full((3,), 3.0)]])[0][0], 1)


def test_a_dropped_optimizer_frees_its_parameters() -> None:
    """Without waiting for the cycle collector: notebooks rebuild optimizers over large models."""
    for case in EVERY:
        p = Parameter(torch.ones(3))
        opt = case.ours([p], max_grad_norm=1.0, stats=True)
        drive(opt, [p], [[torch.ones(3)]] * 2)
        alive = weakref.ref(p)
        gc.disable()
        try:
            del opt, p
            assert alive() is None, f"{case}: a reference cycle keeps the parameter"
        finally:
            gc.enable()


def test_drop_in_class_and_signature() -> None:
    for case in EVERY:
        ours, theirs = getattr(mo_fused, case.kind), getattr(torch.optim, case.kind)
        assert issubclass(ours, theirs)
        opt = case.ours([Parameter(torch.ones(2))])
        assert isinstance(opt, theirs) and isinstance(opt, torch.optim.Optimizer)
        want = list(inspect.signature(theirs.__init__).parameters.values())
        got = list(inspect.signature(ours.__init__).parameters.values())
        positional = [p.name for p in want if p.kind == p.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in got if p.kind == p.POSITIONAL_OR_KEYWORD] == positional
        defaults = {p.name: p.default for p in got}
        assert {p.name: defaults[p.name] for p in want} == {p.name: p.default for p in want}
        assert "grad_scaler" not in inspect.signature(opt.step).parameters, "GradScaler would pass itself and warn"
        assert inspect.ismethod(opt.step), "schedulers need step.__func__"


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_parameter_listed_twice_is_updated_once(case: Case) -> None:
    """torch warns, and then steps it twice: with a tied weight the rate would silently double."""
    values, grads = weights([(5,)]), gradients([(5,)], 3)
    params = parameters(values)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        opt = case.ours([*params, *params])
    drive(opt, params, grads)
    assert_close(params[0], reference(case, values, grads)[0][0], 3)


def test_tied_weights() -> None:
    """A tied weight is one parameter and gets the sum of both uses."""
    layer = torch.nn.Linear(3, 3, bias=False)
    head = torch.nn.Linear(3, 3, bias=False)
    head.weight = layer.weight
    model = torch.nn.Sequential(layer, head)
    opt = ADAMW.ours(model.parameters())
    start = layer.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad is not None
    grads: Gradients = [[layer.weight.grad.clone()]]
    opt.step()
    assert_close(layer.weight, reference(ADAMW, [start], grads)[0][0], 1)
