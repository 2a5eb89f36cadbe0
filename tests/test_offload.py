"""offload="cpu": the bits of the same optimizer without it, whatever the rules, gradients, layouts and formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import (
    ADAMW,
    BACKEND,
    BACKENDS,
    DEVICE,
    DTYPES,
    LAYOUTS,
    Case,
    Layout,
    gradients,
    inside,
    noise,
    parameters,
    short,
    some,
    states,
    untouched,
    weights,
)
from offload_pair import (
    ADAFACTOR,
    ADAFACTOR_MOMENTUM,
    IDS,
    OFFLOADED,
    ONE_OF_EACH,
    PLAIN_SGD,
    SHAPES,
    TAKEN,
    Pair,
    assert_same,
    backward,
    by_case,
    clipped,
    in_pieces,
    nets,
    rows,
    split,
)
from oracle import assert_close, assert_same_bits, assert_states_close
from torch import Tensor
from torch.nn import Parameter

from mo_fused import masters

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": dict(max_grad_norm=1.0),
    "skipping": dict(skip_nonfinite=True),
    "measured": dict(stats=True, max_grad_norm=1.0),
    "clipped_in_place": dict(clip_in_place=True, max_grad_norm=1.0),
}
FIELDS = ("grad_norm", "grad_amax", "update_norm", "stored_update_norm", "param_norm", "clip_coef", "nonfinite")


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch)


def about(value: float | None) -> Any:
    """The sum of the same numbers, added up in another order, on a device partly in single precision."""
    return None if value is None else pytest.approx(value, rel=1e-12 if BACKEND == "cpu" else 1e-6, nan_ok=True)


def assert_same_step(got: Any, want: Any) -> None:
    """Statistics of two steps of the same gradients."""
    for name in FIELDS:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        assert a is None or float(a) == about(float(b)), name
    assert bool(got.skipped) == bool(want.skipped)
    mine, theirs = got.per_param(), want.per_param()
    assert list(mine) == list(theirs)
    for key in mine:
        for name, value in vars(theirs[key]).items():
            assert getattr(mine[key], name) == about(value), (key, name)


# -- rules, options, gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fraction", some([0.0, 0.5, 1.0], [1.0]))
@pytest.mark.parametrize("option", [*OPTIONS])
@by_case(ONE_OF_EACH)
def test_gradients_set_by_hand(case: Case, option: str, fraction: float, backend: str) -> None:
    check_steps(case, option, fraction, backend)


@pytest.mark.parametrize("option", [*OPTIONS])
@by_case([case for case in OFFLOADED if case not in ONE_OF_EACH])
def test_other_rules(case: Case, option: str) -> None:
    check_steps(case, option, 1.0, BACKEND)


def check_steps(case: Case, option: str, fraction: float, backend: str) -> None:
    """Gradients that are set by hand; none for some parameters at times, and some that are not finite."""
    grads = rows(5)
    if option == "skipping":
        for t, bad in ((0, torch.inf), (3, torch.nan)):
            assert grads[t][1] is not None
            grads[t][1][2, 1] = bad
    for taken in TAKEN:
        if taken and (option == "clipped_in_place" or (BACKEND != "cpu" and "max_grad_norm" in OPTIONS[option])):
            continue  # refused; another norm (see clipped)
        options = {**OPTIONS[option], "offload_gradients": taken, "offload_fraction": fraction, "backend": backend}
        two = Pair(case, weights(SHAPES), groups=split, **options)
        for t, row in enumerate(grads):
            two.drive([row])
            got, want = two.opt.last_step, two.other.last_step
            if option in ("measured", "skipping"):
                assert_same_step(got, want)
                assert bool(got.skipped) is (option == "skipping" and t in (0, 3))
            if option == "clipped_in_place":
                assert_same_bits(
                    [p.grad for p in two.params if p.grad is not None],
                    [p.grad for p in two.plain if p.grad is not None],
                )
            offloaded = [p for p in two.params if "host's memory" in reason(two.opt, p)]
            assert all((p.grad is None) for p in offloaded) or not taken


def limited(option: str, taken: bool) -> dict[str, Any]:
    return clipped(1.0, taken) or {"max_grad_norm": None} if "max_grad_norm" in OPTIONS[option] else {}


def reason(opt: Any, p: Tensor) -> str:
    """What explain() says of a parameter."""
    params = [q for g in opt.param_groups for q in g["params"]]
    at = next(i for i, q in enumerate(params) if q is p)
    return str(opt.explain()[at].reason)


@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
@pytest.mark.parametrize("option", ["plain", "clipped", "measured"])
@by_case(some(OFFLOADED, ONE_OF_EACH))
def test_gradients_of_a_backward(case: Case, option: str, taken: bool) -> None:
    plain, other, model, opt = nets(case, offload_gradients=taken, **{**OPTIONS[option], **limited(option, taken)})
    for t in range(5):
        for m, o in ((plain, other), (model, opt)):
            for name, p in m.named_parameters():
                p.requires_grad_(not (t == 2 and name == "first.weight"))  # frozen for a step
            backward(m, t)
            if m is model and taken:
                assert all(p.grad is None for p in m.parameters())
            o.step()
            o.zero_grad()
        if option == "measured":
            assert_same_step(opt.last_step, other.last_step)
        assert_same(model, opt, plain, other)


@pytest.mark.device_only(reason="on the CPU it has the same bits")
@pytest.mark.parametrize("option", some(["plain", "clipped"], ["clipped"]))
@pytest.mark.parametrize("case", [ADAFACTOR, ADAFACTOR_MOMENTUM], ids=str)
def test_adafactor_of_a_device(case: Case, option: str) -> None:
    """Its sums are added up in another order, so that results are the same within rounding."""
    for taken in TAKEN:
        two = Pair(case, weights(SHAPES), groups=split, offload_gradients=taken, **OPTIONS[option])
        for row in rows(4):
            for params, opt in two.both:
                for p, g in zip(params, row, strict=True):
                    p.grad = None if g is None else g.to(DEVICE).clone()
                opt.step()
        for p, q in zip(two.params, two.plain, strict=True):
            assert_close(p.detach(), q.detach(), 8)
        for mine, theirs in zip(states(two.opt, two.params), states(two.other, two.plain), strict=True):
            assert_states_close(mine, theirs, 8)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("larger", [0, 1], ids=["first", "last"])
def test_one_gradient_for_several_parameters(larger: int, fraction: float) -> None:
    """It is scaled once, whether the parameters are offloaded, stay beside their states, or both."""

    def groups(params: Any) -> Any:
        states = [{"amsgrad": i == larger} for i in range(2)]  # those with the larger states are offloaded first
        return [{"params": params[2 * i : 2 * i + 2], **s} for i, s in enumerate(states)]

    options: dict[str, Any] = dict(clip_in_place=True, max_grad_norm=1.0, offload_fraction=fraction)
    two = Pair(ADAMW, weights([(40, 40)] * 4), groups=groups, **options)
    for t in range(3):
        found = []
        for params, opt in two.both:
            shared = noise((40, 40), 70 + t)
            for p in params:
                p.grad = shared
            opt.step()
            found.append(shared)
        assert_same_bits(found[1], found[0], "the gradient")
        two.check()


# -- parameters and gradients of all kinds ----------------------------------------------------------------------------


@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
@by_case(ONE_OF_EACH)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout: Layout, case: Case, taken: bool) -> None:
    value, grads = noise(layout.shape, 1), gradients([layout.shape], 3)
    for option in ["clipped"] if taken or "expanded" in layout.name else ["clipped_in_place"]:
        two = Pair(
            case,
            [value],
            lambda values: [Parameter(layout.param(v)) for v in values],
            offload_gradients=taken,
            **{**OPTIONS[option], **limited(option, taken)},
        )
        two.drive(grads, layout.grad)
        if option == "clipped_in_place":
            assert_same_bits(two.params[0].grad, two.plain[0].grad)
        if "every" in layout.name or "gaps" in layout.name or "offset" in layout.name:
            assert untouched(two.params[0]), "elements between those of the parameter were written"


@by_case(ONE_OF_EACH)
def test_a_gradient_that_comes_in_another_layout_later(case: Case) -> None:
    for taken in TAKEN:
        two = Pair(case, weights([(30, 40)]), offload_gradients=taken)
        turn: list[Callable[[Tensor], Tensor]] = [
            torch.clone,
            lambda g: g.t().contiguous().t(),
            lambda g: inside(g, (45, 1), 3),
            torch.clone,
        ]
        for make, row in zip(turn, gradients([(30, 40)], 4), strict=True):
            two.drive([row], make)


@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
@by_case(ONE_OF_EACH)
def test_gradients_of_another_dtype(case: Case, taken: bool) -> None:
    def make(values: Any) -> list[Parameter]:
        params = parameters(values)
        for p in params:
            p.grad_dtype = None  # any
        return params

    two = Pair(case, weights(SHAPES), make, split, offload_gradients=taken, **clipped(1.0, taken))
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16):
        two.drive(gradients(SHAPES, 1, dtype, seed=len(str(dtype))))


@pytest.mark.parametrize("state_dtype", [None, "fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16]), ids=short)
@by_case(ONE_OF_EACH)
def test_dtypes_and_formats(case: Case, dtype: torch.dtype, state_dtype: str | None) -> None:
    """Blocks of 32 and more, a matrix without, a vector; every kind of master weights."""
    if case.kind == "Adafactor" and state_dtype in ("int8", "int4"):
        pytest.raises(ValueError, case.ours, parameters(weights([(3,)])), offload="cpu", state_dtype=state_dtype)
        return
    shapes: list[tuple[int, ...]] = some([(70, 256), (129, 32), (70, 60), (40,), ()], [(16, 256), (40,)])
    modes: list[str | None] = [None]
    if case.kind == "Adafactor":
        pass  # which has no master weights
    elif dtype == torch.bfloat16:
        modes += [*masters.MODES]
    elif dtype == torch.float16:
        modes += [m for m in masters.MODES if m not in masters.BF16_ONLY]
    for mode in some(modes, [None, "split8"]):
        for taken in some(TAKEN, [False]):
            options: dict[str, Any] = dict(state_dtype=state_dtype)
            if mode is not None:
                options.update(master_weights=mode, seed=3)
            two = Pair(case, weights(shapes, dtype), offload_gradients=taken, **clipped(5.0, True), **options)
            two.drive(gradients(shapes, 3, dtype))


@pytest.mark.parametrize("state_dtype", some([None, "int4"], ["int4"]))
@pytest.mark.parametrize("mode", some(["fp32", "split8", "stochastic"], ["split8"]))
def test_formats_of_parameters_with_gaps(mode: str, state_dtype: str | None) -> None:
    makers: list[Callable[[Tensor], Tensor]] = [
        lambda x: inside(x, (80, 1)),
        lambda x: x.t().contiguous().t(),
        lambda x: inside(x, (64, 1), 1),
    ]
    for param in makers:
        two = Pair(
            ADAMW,
            weights([(70, 64)], torch.bfloat16),
            lambda values, param=param: [Parameter(param(v)) for v in values],
            master_weights=mode,
            state_dtype=state_dtype,
        )
        two.drive(gradients([(70, 64)], 3, torch.bfloat16))


@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
def test_parameters_that_torch_steps(taken: bool) -> None:
    """Sparse gradients, complex parameters, overlapping ones: they stay where they are, beside others that do not."""

    def make(values: Any) -> list[Parameter]:
        base = values[3].clone()
        return [*parameters(values[:3]), Parameter(base[:6]), Parameter(base[4:])]

    values = [noise((20, 4), 1), noise((5, 5), 2), noise((3,), 3).to(torch.complex64), noise((10,), 4)]
    for case in (PLAIN_SGD, ADAMW):
        two = Pair(case, values, make, offload_gradients=taken, weight_decay=0.0)
        for t in range(3):
            for params, opt in two.both:
                for i, p in enumerate(params):
                    p.grad = noise(p.shape, 30 + 10 * t + i).to(p.dtype)
                if case is PLAIN_SGD:
                    index = torch.tensor([[1, 3]], device=DEVICE)
                    params[0].grad = torch.sparse_coo_tensor(index, noise((2, 4), t), (20, 4), check_invariants=True)
                opt.step()
            two.check()
        kinds = [e.backend for e in two.opt.explain()]
        assert kinds[1] == "cpu" and kinds[2:] == ["torch"] * 3 and (kinds[0] == "torch") is (case is PLAIN_SGD)


@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
def test_groups_that_autograd_has_to_see(taken: bool) -> None:
    """differentiable=True is torch's step."""

    def groups(params: Any) -> Any:
        return [{"params": params[:2]}, {"params": params[2:], "differentiable": True}]

    two = Pair(ADAMW, weights([(4, 3)] * 3), groups=groups, offload_gradients=taken)
    with torch.no_grad():
        two.drive(gradients([(4, 3)] * 3, 3))


@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
def test_a_sparse_gradient_in_one_step(taken: bool) -> None:
    """That step is torch's, the ones before and after it are not."""
    two = Pair(PLAIN_SGD, weights([(30, 10), (20, 20)]), offload_gradients=taken, weight_decay=0.0)
    for t in range(5):
        for params, opt in two.both:
            for i, p in enumerate(params):
                p.grad = noise(p.shape, 10 * t + i)
            if t == 2:
                params[0].grad = noise((30, 10), 10 * t).to_sparse()
            opt.step()
            params[0].grad = None
        two.check()
