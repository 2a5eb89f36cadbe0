"""Adafactor beside its two models: torch.optim.Adafactor and the transformers library's, with schedulers of both."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import (
    BACKENDS,
    DTYPES,
    assert_backend,
    drive,
    gradients,
    noise,
    parameters,
    short,
    some,
    states,
    weights,
)
from oracle import assert_close, rms, wide
from torch import Tensor
from torch.nn import Parameter
from transformers.optimization import Adafactor as Transformers
from transformers.optimization import AdafactorSchedule

import mo_fused

SHAPES = [(), (7,), (5, 3), (3, 4, 5), (4, 2, 3, 3)]
STEPS = some([6], [2])[0]


def brief(options: dict[str, Any]) -> str:
    return "-".join(str(float(v) if isinstance(v, Tensor) else v).replace(" ", "") for v in options.values())


def assert_like(ours: list[Parameter], theirs: list[Parameter], steps: int) -> None:
    """Within what two fp32 computations of the same numbers in another order may differ by."""
    for p, q in zip(ours, theirs, strict=True):
        assert_close(p, wide(q), 2 * steps, f"{tuple(p.shape)}")


# -- torch ------------------------------------------------------------------------------------------------------------

TORCH_OPTIONS: list[dict[str, Any]] = [
    dict(lr=lr, weight_decay=decay, beta2_decay=beta2_decay, d=d, maximize=maximize, eps=eps)
    for (lr, decay), (beta2_decay, d), (maximize, eps) in itertools.product(
        [(0.3, 0.0), (torch.tensor(0.25), 0.1)],
        [(-0.8, 1.0), (-0.5, 2.0)],
        [(False, (None, 1e-3)), (True, (1e-2, 0.5))],
    )
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("foreach", some([False, True], [False]))
@pytest.mark.parametrize("options", some(TORCH_OPTIONS, TORCH_OPTIONS[::5]), ids=brief)
def test_torchs_options(options: dict[str, Any], foreach: bool, backend: str) -> None:
    """Both of torch's implementations, in float32; foreach is stored, and chooses nothing of ours."""
    params, others = parameters(weights(SHAPES)), parameters(weights(SHAPES))
    opt = mo_fused.Adafactor(params, **options, foreach=foreach, backend=backend)
    other = torch.optim.Adafactor(others, **options, foreach=foreach)
    assert opt.param_groups[0]["foreach"] is foreach
    grads = gradients(SHAPES, STEPS)
    drive(opt, params, grads)
    drive(other, others, grads)
    assert_backend(opt, backend)
    assert_like(params, others, STEPS)
    for s, o in zip(states(opt, params), states(other, others), strict=True):
        assert list(s) == list(o)
        for key in o:
            assert_close(s[key], wide(o[key]), 16, key)


@pytest.mark.not_interpreted(reason="300 steps")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("library", ["torch", "transformers"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_error_after_300_steps_is_at_most_theirs(backend: str, library: str, dtype: torch.dtype) -> None:
    """Against the same class of theirs in float64, on one matrix of enough elements to know both errors."""
    shape = (60, 70)
    options: dict[str, Any] = dict(lr=1e-2, weight_decay=0.01)
    if library == "transformers":
        options = dict(beta1=0.9, weight_decay=0.01)
    class_of = {"torch": torch.optim.Adafactor, "transformers": Transformers}[library]
    make = {"torch": mo_fused.Adafactor, "transformers": mo_fused.Adafactor.like_transformers}[library]
    rows = [[noise(shape, 100 + t, dtype)] for t in range(50)] * 6
    (ours,), (theirs,), exact = (parameters([noise(shape, 1, dtype)]) for _ in range(3))
    exact = [Parameter(wide(exact[0]))]
    eps = {"eps": (torch.finfo(dtype).eps, 1e-3)} if library == "torch" else {}
    opt = make([ours], **options, **eps, backend=backend)
    drive(opt, [ours], rows)
    assert_backend(opt, backend)
    drive(class_of([theirs], **options, **eps), [theirs], rows)
    drive(class_of(exact, **options, **eps), exact, [[wide(g) for g in row] for row in rows])
    error, allowed = (rms(wide(p) - wide(exact[0])) for p in (ours, theirs))
    assert allowed > 0 and error <= 1.15 * allowed, f"RMS error {error:.4g}, theirs {allowed:.4g}"


# -- transformers -----------------------------------------------------------------------------------------------------


def transformers_options() -> list[dict[str, Any]]:
    """Every combination of what chooses a branch; numbers of the other options change along."""
    out = []
    rates: list[dict[str, Any]] = [
        dict(relative_step=True, warmup_init=False),
        dict(relative_step=True, warmup_init=True),
        dict(relative_step=False, lr=0.1),
    ]
    for i, (rate, scale, beta1, decay) in enumerate(itertools.product(rates, (True, False), (None, 0.9), (0.0, 0.1))):
        threshold, power = [(1.0, -0.8), (2.0, -0.5), (1.5, -0.8), (1.0, -1.0)][i % 4]
        # decay_rate -1.0 with a plain mean, and an eps that counts
        eps = [(1e-30, 1e-3), (1e-3, 0.5), (30.0, 1e-3)][i % 3]
        options = dict(rate, scale_parameter=scale, beta1=beta1, weight_decay=decay, eps=eps)
        out.append(dict(options, clip_threshold=threshold, decay_rate=power))
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", some(transformers_options(), transformers_options()[::7]), ids=brief)
def test_transformers_options(options: dict[str, Any], backend: str) -> None:
    dtypes = some((torch.float32, torch.bfloat16, torch.float64), (torch.bfloat16,))
    for dtype in dtypes:
        values, grads = weights(SHAPES, dtype), gradients(SHAPES, STEPS, dtype)
        params, others = parameters(values), parameters(values)
        opt = mo_fused.Adafactor.like_transformers(params, **options, backend=backend)
        other = Transformers(others, **options)
        drive(opt, params, grads)
        drive(other, others, grads)
        assert_backend(opt, backend)
        assert_like(params, others, STEPS)
        for p, q in zip(params, others, strict=True):
            s, o = opt.state[p], other.state[q]
            names = {"row_var": "exp_avg_sq_row", "col_var": "exp_avg_sq_col", "variance": "exp_avg_sq"}
            for key in s:
                if key != "step":
                    theirs = o[names.get(key, key)]
                    assert_close(s[key].reshape(-1), wide(theirs).reshape(-1), 64, f"{dtype} {key}")
            assert float(s["step"]) == o["step"]


@pytest.mark.parametrize("dtype", some(DTYPES, [torch.float64]), ids=short)
def test_torchs_defaults_are_ours(dtype: torch.dtype) -> None:
    """Called with parameters alone, in every dtype; torch's half-precision statistics set the tolerance there."""
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 4, dtype, scale=1.0)
    params, others = parameters(values), parameters(values)
    drive(mo_fused.Adafactor(params), params, grads)
    drive(torch.optim.Adafactor(others), others, grads)
    for p, q in zip(params, others, strict=True):
        assert_close(p, wide(q), 8, f"{tuple(p.shape)}")


def test_transformers_errors_and_signature() -> None:
    p = Parameter(torch.ones(3))
    for options in (dict(lr=0.1), dict(lr=0.1, relative_step=False, warmup_init=True)):
        texts = []
        for make in (Transformers, mo_fused.Adafactor.like_transformers):
            with pytest.raises(ValueError) as error:
                make([p], **options)
            texts.append(str(error.value))
        assert texts[0] == texts[1]
    want = list(inspect.signature(Transformers).parameters.values())
    got = list(inspect.signature(mo_fused.Adafactor.like_transformers).parameters.values())
    assert [(x.name, x.default) for x in got[: len(want)]] == [(x.name, x.default) for x in want]


def test_a_rate_of_none_stays_none() -> None:
    """As in transformers; the first group and those added later."""
    params = parameters(weights(SHAPES))
    opt = mo_fused.Adafactor.like_transformers(params[:2])
    opt.add_param_group({"params": params[2:]})
    drive(opt, params, gradients(SHAPES, 1))
    assert [g["lr"] for g in opt.param_groups] == [None, None] and opt.defaults["lr"] is None


def test_a_clip_threshold_below_one_is_transformers() -> None:
    """torch refuses d < 1; transformers does not, so neither does its form."""
    params, others = parameters(weights(SHAPES)), parameters(weights(SHAPES))
    opt = mo_fused.Adafactor.like_transformers(params, clip_threshold=0.5)
    other = Transformers(others, clip_threshold=0.5)
    grads = gradients(SHAPES, 3)
    drive(opt, params, grads)
    drive(other, others, grads)
    assert_like(params, others, 3)


# -- schedulers -------------------------------------------------------------------------------------------------------


def run_with(
    opt: torch.optim.Optimizer, params: list[Parameter], make: Callable[[Any], Any], steps: int = 8
) -> list[list[float]]:
    """Trains with a scheduler and returns the rates that it says after each step."""
    scheduler = make(opt)
    rates = []
    for row in gradients(SHAPES, steps):
        drive(opt, params, [row])
        scheduler.step()
        rates.append([float(x) for x in scheduler.get_last_lr()])
    return rates


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t)),
    "one_cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=10, cycle_momentum=False),
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8),
    "step": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", some(list(SCHEDULERS), ["one_cycle"]))
def test_torchs_schedulers(name: str, tensor: bool, backend: str) -> None:
    """Also with a tensor rate, which schedulers write in place, without a word."""
    lr: Any = torch.tensor(0.2) if tensor else 0.2
    params, others = parameters(weights(SHAPES)), parameters(weights(SHAPES))
    opt = mo_fused.Adafactor(params, lr=lr.clone() if tensor else lr, weight_decay=0.1, backend=backend)
    other = torch.optim.Adafactor(others, lr=lr.clone() if tensor else lr, weight_decay=0.1)
    kept = opt.param_groups[0]["lr"]
    steps = some([8], [3])[0]
    assert run_with(opt, params, SCHEDULERS[name], steps) == run_with(other, others, SCHEDULERS[name], steps)
    assert_backend(opt, backend)
    assert_like(params, others, steps)
    if tensor:
        assert opt.param_groups[0]["lr"] is kept


def test_transformers_with_torchs_scheduler() -> None:
    options: dict[str, Any] = dict(lr=0.1, relative_step=False, beta1=0.9, weight_decay=0.1)
    params, others = parameters(weights(SHAPES)), parameters(weights(SHAPES))
    opt = mo_fused.Adafactor.like_transformers(params, **options)
    other = Transformers(others, **options)
    assert run_with(opt, params, SCHEDULERS["lambda"], 3) == run_with(other, others, SCHEDULERS["lambda"], 3)
    assert_like(params, others, 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warmup_init", [False, True])
@pytest.mark.parametrize("scale_parameter", [False, True])
def test_transformers_schedule(scale_parameter: bool, warmup_init: bool, backend: str) -> None:
    """It trains as theirs does, and reports what the optimizer's step size is.

    Theirs is scaled by the parameter's RMS before the step, ours by that which it has now: read before a step, ours is
    what theirs says after it.
    """
    options = dict(scale_parameter=scale_parameter, warmup_init=warmup_init)
    params, others = parameters(weights(SHAPES)), parameters(weights(SHAPES))
    halves = [[{"params": x[:2]}, {"params": x[2:]}] for x in (params, others)]
    opt = mo_fused.Adafactor.like_transformers(halves[0], **options, backend=backend)
    other = Transformers(halves[1], **options)
    ours, theirs = AdafactorSchedule(opt), AdafactorSchedule(other)
    assert ours.get_lr() == theirs.get_lr() == [0.0, 0.0], "before the first step: the initial rate"
    for row in gradients(SHAPES, 3):
        sizes = [rms(wide(params[i])) for i in (0, 2)]
        drive(opt, params, [row])
        drive(other, others, [row])
        ours.step()
        theirs.step()
        said = [float(x) for x in theirs.get_lr()]
        now = [rms(wide(params[i])) for i in (0, 2)]
        ratio = [n / s if scale_parameter else 1.0 for n, s in zip(now, sizes, strict=True)]
        assert ours.get_lr() == pytest.approx([x * r for x, r in zip(said, ratio, strict=True)], rel=1e-5)
    assert_backend(opt, backend)
    assert_like(params, others, 3)


def test_a_tensor_rate_is_read_when_it_was_written() -> None:
    lr = torch.tensor(0.5)
    params, others = parameters(weights(SHAPES)), parameters(weights(SHAPES))
    opt = mo_fused.Adafactor(params, lr=lr, relative_step=False, weight_decay=0.1)
    numbers: Any = mo_fused.Adafactor(others, lr=0.5, relative_step=False, weight_decay=0.1)
    for t, row in enumerate(gradients(SHAPES, 4)):
        rate = 0.5 / 2**t
        lr.fill_(rate)
        numbers.param_groups[0]["lr"] = rate
        drive(opt, params, [row])
        drive(numbers, others, [row])
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p.detach(), q.detach())
    kept: Tensor = opt.param_groups[0]["lr"]
    assert kept is lr
