"""torch's own optimizer inputs, error inputs and properties, driven through our classes beside torch's."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import BACKENDS, DEVICE, DTYPES, short
from torch import Tensor
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

import mo_fused

NAMES: dict[Any, str] = {
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "AdamW",
    torch.optim.SGD: "SGD",
    torch.optim.Adafactor: "Adafactor",
}
INFOS = {NAMES[info.optim_cls]: info for info in optim_db if info.optim_cls in NAMES}
# torch's Adafactor refuses complex parameters and has neither fused= nor differentiable=.
ELEMENT_WISE = [name for name in INFOS if name != "Adafactor"]


def cases_of(make: Any, dtype: torch.dtype = torch.float32, names: Sequence[str] = tuple(INFOS)) -> list[Any]:
    """One test per input of each of the optimizers."""
    return [
        pytest.param(name, one, id=f"{name}-{getattr(one, 'desc', '') or one.optimizer_error_input.desc}")
        for name, info in INFOS.items()
        if name in names
        for one in make(info, dtype)
    ]


def plain_inputs(info: OptimizerInfo, dtype: torch.dtype) -> list[OptimizerInput]:
    return list(info.optim_inputs_func(device="cpu", dtype=dtype))


def flag_inputs(info: OptimizerInfo, dtype: torch.dtype) -> list[OptimizerInput]:
    """Every input with each of foreach=True, fused=True and both False; differentiable has a test of its own."""
    inputs = _get_optim_inputs_including_global_cliquey_kwargs("cpu", dtype, info, skip=("differentiable",))
    for one in inputs:
        one.desc += " " + " ".join(k for k in ("foreach", "fused") if one.kwargs.get(k))
    return inputs


def error_inputs(info: OptimizerInfo, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    return list(info.optim_error_inputs_func(device="cpu", dtype=dtype))


def ours(name: str) -> Any:
    return getattr(mo_fused, name)


def theirs(name: str) -> Any:
    return getattr(torch.optim, name)


def problem(dtype: torch.dtype, seed: int = 0) -> tuple[list[Parameter], Any]:
    """A small least-squares problem: parameters and a function that puts fresh gradients on them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(DEVICE, dtype)

    params = [Parameter(draw(2, 3)), Parameter(draw(2)), Parameter(draw(33))]
    x, y = draw(3), draw(2)

    def backward() -> Tensor:
        loss = (params[0].mv(x) + params[1] - y).square().sum() + (params[2] * 0.5).square().sum()
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g
        return loss.detach()

    return params, backward


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name,one", cases_of(flag_inputs))
def test_every_input_trains_as_torchs_class(name: str, one: OptimizerInput, backend: str) -> None:
    """Seven steps; the flags foreach and fused are stored and shown, and choose nothing."""
    kwargs = copy.deepcopy(one.kwargs)
    a, backward_a = problem(torch.float32)
    b, backward_b = problem(torch.float32)
    x = ours(name)(a, **copy.deepcopy(kwargs), backend=backend)
    flags = [flag for flag in ("foreach", "fused") if flag in x.param_groups[0]]
    y = theirs(name)(b, **{**copy.deepcopy(kwargs), **dict.fromkeys(flags, False)})
    start = [p.detach().clone() for p in a]
    for _ in range(7):
        backward_a(), backward_b()
        x.step(), y.step()
    assert {r.backend for r in x.explain()} == {backend}
    for p, q, s in zip(a, b, start, strict=True):
        assert not torch.equal(p.detach(), s), "the optimizer did not move"
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
        for key, value in y.state[q].items():
            torch.testing.assert_close(x.state[p][key], value, rtol=1e-5, atol=1e-6)
    for flag in flags:
        assert x.param_groups[0][flag] == kwargs.get(flag)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name,one", cases_of(plain_inputs, torch.float16))
def test_every_input_in_every_dtype(name: str, one: OptimizerInput, dtype: torch.dtype) -> None:
    """With fp16's own inputs (a large eps), because torch's half-precision loop divides by zero without."""
    a, backward_a = problem(dtype)
    b, backward_b = problem(dtype)
    x, y = ours(name)(a, **copy.deepcopy(one.kwargs)), theirs(name)(b, **copy.deepcopy(one.kwargs), foreach=False)
    for _ in range(4):
        backward_a(), backward_b()
        x.step(), y.step()
    eps = torch.finfo(dtype).eps
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=16 * eps, atol=16 * eps)


@pytest.mark.parametrize("name,one", cases_of(error_inputs))
def test_every_error_input_raises_torchs_error(name: str, one: ErrorOptimizerInput) -> None:
    given = one.optimizer_error_input
    params = given.params if given.params is not None else [Parameter(torch.randn(2, 3))]

    def attempt(cls: Any) -> tuple[type[BaseException], str]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                opt = cls(copy.copy(params), **copy.deepcopy(given.kwargs))
                if one.error_on == OptimizerErrorEnum.STEP_ERROR:
                    opt.step()
            except (Exception, UserWarning) as error:
                return type(error), str(error)
        raise AssertionError(f"{cls.__module__}.{cls.__name__} accepted: {given.desc}")

    got, want = attempt(ours(name)), attempt(theirs(name))
    assert got[0] is want[0] is one.error_type
    assert got[1] == want[1] and re.search(one.error_regex, got[1]), got[1]


# Errors that optim_db leaves out on machines without an accelerator.
MORE_ERRORS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", dict(foreach=True, fused=True)),
    ("AdamW", dict(fused=True, differentiable=True)),
    ("SGD", dict(foreach=True, fused=True)),
    ("SGD", dict(fused=True, differentiable=True)),
    ("Adam", dict(lr=-1.0)),
    ("AdamW", dict(eps=-1e-8)),
    ("AdamW", dict(betas=(0.9, 1.0))),
    ("SGD", dict(lr=-0.1)),
    ("SGD", dict(weight_decay=-0.1)),
    ("SGD", dict(nesterov=True)),
    ("SGD", dict(nesterov=True, momentum=0.9, dampening=0.1)),
    ("AdamW", dict(lr=torch.tensor([0.1, 0.2]))),
    ("AdamW", dict(betas=(torch.tensor([0.9, 0.8]), torch.tensor(0.9)))),
]


@pytest.mark.parametrize("name,kwargs", MORE_ERRORS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_more_constructor_errors(name: str, kwargs: dict[str, Any]) -> None:
    texts = []
    for cls in (ours(name), theirs(name)):
        with pytest.raises((ValueError, RuntimeError)) as error:
            cls([Parameter(torch.ones(2))], **kwargs)
        texts.append((error.type, str(error.value)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("bad", [[], [torch.tensor(1)], [3.0], [{"lr": 0.1}], [torch.ones(2, requires_grad=True) * 2]])
def test_bad_parameter_lists(bad: Any) -> None:
    """Nothing; an integer tensor is taken as torch takes it; numbers; a group without params; a non-leaf."""
    results: list[tuple[type[BaseException] | None, str]] = []
    for cls in (mo_fused.AdamW, torch.optim.AdamW):
        try:
            cls(list(bad))
            results.append((None, ""))
        except (ValueError, TypeError, KeyError) as error:
            results.append((type(error), str(error)))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", list(INFOS))
def test_param_groups_have_their_own_options(name: str) -> None:
    """Rate and decay of a group win over the constructor's; a group of one tensor; groups may be generators."""
    results = []
    for cls, options in ((ours(name), {}), (theirs(name), {"foreach": False})):
        params, backward = problem(torch.float32)
        groups = [
            {"params": params[0], "weight_decay": 0.3},
            {"params": (p for p in params[1:2]), "lr": 0.02},
            {"params": [params[2]], "lr": 0.0},
        ]
        start = params[2].detach().clone()
        opt = cls(groups, lr=0.05, weight_decay=0.0, **options)
        for _ in range(5):
            backward()
            opt.step()
        assert torch.equal(params[2].detach(), start)
        results.append([p.detach() for p in params])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name,one", cases_of(plain_inputs))
def test_state_dict_is_deterministic(name: str, one: OptimizerInput) -> None:
    """Load the state into a second optimizer over copied parameters: both go on bit for bit."""
    params, backward = problem(torch.float32)
    opt = ours(name)(params, **copy.deepcopy(one.kwargs))
    for _ in range(4):
        backward()
        opt.step()
    again, backward_again = problem(torch.float32)
    with torch.no_grad():
        for p, q in zip(again, params, strict=True):
            p.copy_(q)
    new = ours(name)(again, **copy.deepcopy(one.kwargs))
    new.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert str(new.state_dict()) == str(opt.state_dict())
    for _ in range(4):
        backward(), backward_again()
        opt.step(), new.step()
    assert all(torch.equal(p, q) for p, q in zip(params, again, strict=True))


@pytest.mark.parametrize("name", list(INFOS))
def test_public_attributes_survive_deepcopy(name: str) -> None:
    params, backward = problem(torch.float32)
    opt = ours(name)(params)
    opt.note = "mine"
    for _ in range(2):
        backward()
        opt.step()
    names = [{k for k in o.__dict__ if not k.startswith("_")} - {"note"} for o in (opt, copy.deepcopy(opt))]
    assert names[0] == names[1]


@pytest.mark.parametrize("name,one", cases_of(plain_inputs))
def test_non_empty_state(name: str, one: OptimizerInput) -> None:
    """A step keeps state that others have put beside ours."""
    params, backward = problem(torch.float32)
    opt = ours(name)(params, **copy.deepcopy(one.kwargs))
    backward()
    opt.step()
    keys = [set(opt.state[p]) for p in params]
    for p in params:
        opt.state[p]["foreign"] = torch.ones(3)
    saved = opt.state_dict()
    backward()
    opt.step()
    assert [set(opt.state[p]) - {"foreign"} for p in params] == keys
    assert all("foreign" in opt.state[p] for p in params)
    assert all("foreign" in s for s in saved["state"].values())


@pytest.mark.parametrize("name,one", cases_of(plain_inputs))
def test_step_without_gradients_is_a_no_op(name: str, one: OptimizerInput) -> None:
    params, _ = problem(torch.float32)
    params[1].grad = None
    start = [p.detach().clone() for p in params]
    opt = ours(name)(params, **copy.deepcopy(one.kwargs))
    opt.step()
    assert all(torch.equal(p, s) for p, s in zip(params, start, strict=True))
    assert not any(opt.state[p] for p in params if p in opt.state)


@pytest.mark.parametrize("name", list(INFOS))
def test_gradients_are_never_written(name: str) -> None:
    for options in ({}, {"maximize": True}, {"weight_decay": 0.1}, {"max_grad_norm": 0.01}):
        params, backward = problem(torch.float32)
        opt = ours(name)(params, **options)
        for _ in range(2):
            backward()
            kept = [p.grad.clone() for p in params if p.grad is not None]
            versions = [p.grad._version for p in params if p.grad is not None]
            opt.step()
            for p, g, v in zip(params, kept, versions, strict=True):
                assert p.grad is not None and torch.equal(p.grad, g) and p.grad._version == v


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("name", list(INFOS))
def test_tensor_rates_of_any_dimension(name: str, shape: tuple[int, ...]) -> None:
    results = []
    for lr in (0.0625, torch.full(shape, 0.0625)):
        params, backward = problem(torch.float32)
        opt = ours(name)(params, lr=lr)
        for _ in range(5):
            backward()
            opt.step()
        assert opt.param_groups[0]["lr"] is lr, "the tensor keeps its identity"
        results.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name,one", cases_of(plain_inputs, names=ELEMENT_WISE))
def test_complex_parameters_equal_pairs_of_real_ones(name: str, one: OptimizerInput) -> None:
    """In two dimensions: a complex weight moves as its real and imaginary part would alone."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(4, 5, generator=generator, dtype=torch.complex64, device="cpu").to(DEVICE)
    pair, single = Parameter(torch.view_as_real(z).clone()), Parameter(z.clone())
    a, b = ours(name)([pair], **copy.deepcopy(one.kwargs)), ours(name)([single], **copy.deepcopy(one.kwargs))
    for _ in range(3):
        g = torch.randn(4, 5, generator=generator, dtype=torch.complex64, device="cpu").to(DEVICE)
        pair.grad, single.grad = torch.view_as_real(g).clone(), g
        a.step()
        b.step()
    assert [r.backend for r in b.explain()] == ["torch"]
    torch.testing.assert_close(torch.view_as_real(single.detach()), pair.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_differentiable_goes_to_torch(name: str) -> None:
    """The step itself is part of the graph: the derivative of the result by the gradient's factor is not zero."""
    outcomes = []
    for cls in (ours(name), theirs(name)):
        base, factor = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        weight = Parameter(torch.ones(3))
        opt = cls([weight], lr=0.1, weight_decay=0.1, differentiable=True)
        opt.param_groups[0]["params"] = [base * 1.0]
        (moved,) = opt.param_groups[0]["params"]
        moved.grad = torch.tensor([0.5, 1.0, -1.0]) * factor
        opt.step()
        moved.sum().backward()
        assert base.grad is not None and factor.grad is not None
        outcomes.append((moved.detach(), base.grad, factor.grad))
        if cls is ours(name):
            assert [r.backend for r in opt.explain()] == ["torch"]
    torch.testing.assert_close(outcomes[0], outcomes[1])


@pytest.mark.not_interpreted(reason="what an interpreted launch allocates says nothing about a compiled one")
def test_peak_of_temporaries_is_small() -> None:
    """A steady step allocates nothing of the parameters' size, also when it clips and takes statistics."""
    from torch.profiler import ProfilerActivity, profile

    for name in INFOS:
        params = [Parameter(torch.ones(1 << 16)) for _ in range(4)]
        opt = ours(name)(params, max_grad_norm=1.0, stats=True)
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        opt.step()
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            opt.step()
        used = sum(max(0, e.self_cpu_memory_usage) for e in prof.key_averages())
        if DEVICE.type == "cuda":
            used += torch.cuda.max_memory_allocated() - before
        assert used < 0.01 * 4 * 4 * (1 << 16), f"{name}: {used} bytes"
