"""Clipping, skipping and statistics of a step, against direct formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import (
    ADAMW,
    AMSGRAD,
    BACKEND,
    BACKENDS,
    DAMPENED,
    DTYPES,
    INTERPRETED,
    RULES,
    SGD,
    Case,
    Gradients,
    assert_backend,
    drive,
    gradients,
    large,
    noise,
    parameters,
    short,
    some,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits, assert_states_close, clip64, norm64, reference, wide
from torch import Tensor
from torch.nn import Parameter

# A norm over tensors of every kind of size, one of them empty, one longer than a chunk.
SHAPES = [(7,), (33, 3), (), (0,), large(20_001)]
LONG = large(5000)
PLAIN = Case("SGD", "plain", dict(lr=1.0))


# A strong clip; about half; one that never acts; one that removes everything.
LIMITS = (0.5, 1000.0, 1e9, 0.0)
# Strongly clipped gradients have second moments below fp16's range: there the storage, not the rule, sets the error.
CLIPPED = [
    (case, dtype, limit)
    for case in RULES
    for dtype in DTYPES
    for limit in LIMITS
    if case.kind == "SGD" or dtype != torch.float16 or limit > 1
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case,dtype,max_norm", CLIPPED, ids=lambda x: short(x) if isinstance(x, torch.dtype) else str(x)
)
def test_clipped_steps_against_float64(case: Case, max_norm: float, dtype: torch.dtype, backend: str) -> None:
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 3, dtype)
    want, want_states = reference(case, values, grads, max_norm=max_norm)
    params = parameters(values)
    opt = case.ours(params, max_grad_norm=max_norm, backend=backend)
    for row in grads:
        drive(opt, params, [row])
        _, norm, coef = clip64(row, max_norm)
        assert float(opt.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
        assert float(opt.last_step.clip_coef) == pytest.approx(coef, rel=1e-6)
        assert not bool(opt.last_step.skipped) and int(opt.last_step.nonfinite) == 0
    assert_backend(opt, backend)
    # In the wide types the rounding of the norm and the coefficient shows beside that of the rule.
    spacings = 3 if dtype.itemsize == 2 else 12
    for p, w, state, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, spacings)
        assert_states_close(state, ws, spacings)


@pytest.mark.parametrize("case", RULES, ids=str)
# A limit that the norm never reaches has the coefficient 1, which changes no bit; infinity only measures.
@pytest.mark.parametrize("max_norm", [1e9, math.inf])
def test_clip_that_does_not_act_changes_no_bit(case: Case, max_norm: float) -> None:
    results = []
    for options in ({}, {"max_grad_norm": max_norm}):
        params = parameters(weights(SHAPES))
        opt = case.ours(params, **options)
        drive(opt, params, gradients(SHAPES, 2))
        results.append([p.detach() for p in params])
    assert float(opt.last_step.clip_coef) == 1
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", RULES, ids=str)
def test_groups_that_take_no_part_in_clipping(case: Case, backend: str) -> None:
    """Neither in the norm nor in the scaling; the other groups share one norm."""
    values, row = weights(SHAPES[:4] + [(9,)]), gradients(SHAPES[:4] + [(9,)], 1)[0]
    inside, outside = [0, 2, 3], [1, 4]
    clipped, norm, coef = clip64([row[i] for i in inside], 0.5)
    mixed = list(row)
    for i, g in zip(inside, clipped, strict=True):
        mixed[i] = g
    want, want_states = reference(case, values, [mixed])
    params = parameters(values)
    opt = case.ours(
        [
            {"params": [params[0], params[3]]},
            {"params": [params[i] for i in outside], "clip": False},
            {"params": [params[2]], "clip": True, "lr": 0.1},
        ],
        max_grad_norm=0.5,
        backend=backend,
    )
    drive(opt, params, [row])
    assert_backend(opt, backend)
    assert float(opt.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert float(opt.last_step.clip_coef) == pytest.approx(coef, rel=1e-6)
    for p, w, state, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, 2)
        assert_states_close(state, ws, 4)
    opt.param_groups[1]["clip"] = True  # the key is read at every step
    drive(opt, params, [row])
    assert float(opt.last_step.grad_norm) == pytest.approx(norm64(row), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("case", RULES, ids=str)
def test_non_finite_gradients_propagate_as_in_torch(case: Case, bad: float, backend: str) -> None:
    """inf: the coefficient is 0 and 0 * inf is NaN in one place; NaN: everything is NaN."""
    values, row = weights([(7,), (5, 3)]), gradients([(7,), (5, 3)], 1)[0]
    assert row[0] is not None
    row[0][2] = bad
    truth = parameters([wide(v) for v in values])
    theirs = case.torch(truth)
    for q, g in zip(truth, row, strict=True):
        q.grad = None if g is None else wide(g)
    torch.nn.utils.clip_grad_norm_(truth, 1.0)
    theirs.step()
    params = parameters(values)
    opt = case.ours(params, max_grad_norm=1.0, backend=backend)
    drive(opt, params, [row])
    assert int(opt.last_step.nonfinite) == 1 and not bool(opt.last_step.skipped)
    for p, q in zip(params, truth, strict=True):
        assert torch.equal(p.detach().cpu().isnan(), q.detach().isnan())
        assert_close(p, q.detach(), 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("case", [*RULES, DAMPENED], ids=str)
def test_skip_nonfinite(case: Case, bad: float, dtype: torch.dtype, backend: str) -> None:
    """One bad element anywhere, also where nothing is clipped: nothing changes, and the run goes on as if unseen."""
    shapes = [(7,), (33, 3), large(20_001)]
    values, grads = weights(shapes, dtype), gradients(shapes, 5, dtype)
    want, want_states = reference(case, values, [grads[t] for t in (1, 3)])
    params = parameters(values)
    opt = case.ours(
        [{"params": params[:2]}, {"params": params[2:], "clip": False}], skip_nonfinite=True, backend=backend
    )
    for t, row in enumerate(grads):
        before = [p.detach().clone() for p in params], states(opt, params)
        if t in (0, 2, 4):  # first element, last element, middle of a chunk; the first step is a skipped one
            target = row[2 if t else 1]
            assert target is not None
            target.view(-1)[(0, 0, -1, 0, shapes[2][0] // 2)[t]] = bad
        drive(opt, params, [row])
        assert bool(opt.last_step.skipped) is (t in (0, 2, 4))
        assert int(opt.last_step.nonfinite) == (t in (0, 2, 4))
        if t in (0, 2, 4):
            assert_same_bits([p.detach() for p in params], before[0], f"step {t}: a skipped step changed a parameter")
            if t:
                assert_same_bits(states(opt, params), before[1], f"step {t}: a skipped step changed the state")
            assert float(opt.last_step.update_norm or 0.0) == 0
    assert_backend(opt, backend)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, 2)
        assert_states_close(s, ws, 2)


@pytest.mark.parametrize("backend", BACKENDS)
# The square of 1e25 overflows fp32, that of 1e-25 underflows it; 1e-40 is a denormal; 1e19 is near the edge.
@pytest.mark.parametrize("size", [1e25, 1e19, 1e-20, 1e-25, 1e-40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_norms_beyond_the_range_of_squares(size: float, dtype: torch.dtype, backend: str) -> None:
    grads: Gradients = [[(noise((33, 3), 1, torch.float64) * size).to(dtype), torch.full(LONG, size, dtype=dtype)]]
    params = parameters([torch.ones(33, 3, dtype=dtype), torch.ones(LONG, dtype=dtype)])
    opt = PLAIN.ours(params, max_grad_norm=size, skip_nonfinite=True, stats=True, backend=backend)
    drive(opt, params, grads)
    _, norm, coef = clip64(grads[0], size)
    assert 0 < norm < math.inf
    last = opt.last_step
    assert float(last.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(last.clip_coef) == pytest.approx(coef, rel=1e-5)
    assert not bool(last.skipped), "an overflowing sum is not a non-finite element"
    for record, g in zip(last.per_param().values(), grads[0], strict=True):
        assert g is not None
        assert record.grad_norm == pytest.approx(norm64([g]), rel=1e-5)
        assert record.grad_amax == pytest.approx(float(g.double().abs().max()), rel=1e-6)
        assert not record.all_zero and record.nonfinite == 0
    for p, w in zip(
        params, reference(PLAIN, [torch.ones(33, 3), torch.ones(LONG)], grads, max_norm=size)[0], strict=True
    ):
        assert_close(p, w, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_norms_of_double_gradients(size: float, backend: str) -> None:
    grads: Gradients = [[noise((33, 3), 1, torch.float64) * size, torch.full((5,), size, dtype=torch.float64)]]
    params = parameters([torch.ones(33, 3, dtype=torch.float64), torch.ones(5, dtype=torch.float64)])
    opt = PLAIN.ours(params, max_grad_norm=size, backend=backend)
    drive(opt, params, grads)
    clipped, norm, coef = clip64(grads[0], size)
    assert float(opt.last_step.grad_norm) == pytest.approx(norm, rel=1e-12)
    assert float(opt.last_step.clip_coef) == pytest.approx(coef, rel=1e-6)
    for p, c in zip(params, clipped, strict=True):
        assert c is not None
        assert float((wide(p) - (1 - c)).abs().max()) <= 1e-12 * max(1.0, size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gate", [{}, {"max_grad_norm": 3.0}, {"skip_nonfinite": True}], ids=["free", "clip", "skip"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", [*RULES, PLAIN], ids=str)
def test_statistics_against_formulas(case: Case, dtype: torch.dtype, gate: dict[str, Any], backend: str) -> None:
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 2, dtype, scale=1.0)
    params = parameters(values)
    opt = case.ours(params, stats=True, backend=backend, **gate)
    drive(opt, params, grads[:1])
    old, kept = [p.detach().clone() for p in params], states(opt, params)
    drive(opt, params, grads[1:])
    row, last = [g for g in grads[1] if g is not None], opt.last_step
    changes = [wide(p) - wide(o) for p, o in zip(params, old, strict=True)]

    # The nominal update: one float64 step from the very same weights and state.
    truth = parameters([wide(o) for o in old])
    theirs = case.torch(truth)
    for q, s in zip(truth, kept, strict=True):
        theirs.state[q].update({k: v.cpu() if k == "step" else wide(v) for k, v in s.items()})
    clipped = clip64(row, gate.get("max_grad_norm", math.inf))[0]
    drive(theirs, truth, [clipped])
    nominal = [q.detach() - wide(o) for q, o in zip(truth, old, strict=True)]

    tiny = 1e-5 if dtype != torch.float64 else 1e-9
    assert float(last.grad_norm) == pytest.approx(norm64(row), rel=tiny)
    assert float(last.stored_update_norm) == pytest.approx(
        norm64(changes), rel=1e-3 if dtype == torch.float32 else tiny
    )
    assert float(last.update_norm) == pytest.approx(norm64(nominal), rel=1e-4 if dtype != torch.float64 else 1e-9)
    assert float(last.param_norm) == pytest.approx(norm64(params), rel=tiny)
    assert int(last.nonfinite) == 0 and not bool(last.skipped)
    records = list(last.per_param().values())
    assert list(last.per_param()) == list(range(len(params)))
    for i, (record, g, n, p) in enumerate(zip(records, row, nominal, params, strict=True)):
        assert record.grad_norm == pytest.approx(norm64([g]), rel=tiny), i
        assert record.grad_amax == (float(g.double().abs().max()) if g.numel() else 0.0), i
        assert record.update_norm == pytest.approx(norm64([n]), rel=1e-4 if dtype != torch.float64 else 1e-9), i
        assert record.param_norm == pytest.approx(norm64([p]), rel=tiny), i
        assert record.nonfinite == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_update_norm_tells_what_rounding_lost(backend: str) -> None:
    """A bf16 weight of 1 cannot move by 1e-4: the rule asked for it, nothing was stored."""
    p = Parameter(torch.ones(400, dtype=torch.bfloat16))
    opt = Case("SGD", "slow", dict(lr=1e-4)).ours([p], stats=True, backend=backend)
    drive(opt, [p], [[torch.ones(400, dtype=torch.bfloat16)]])
    assert float(opt.last_step.update_norm) == pytest.approx(1e-4 * 20, rel=1e-5)
    assert float(opt.last_step.stored_update_norm) == 0
    assert float(opt.last_step.param_norm) == 20


@pytest.mark.parametrize("moments", [None, *DTYPES[:2]], ids=lambda d: short(d) if d else "own")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", some([*RULES, AMSGRAD], [AMSGRAD, SGD]), ids=str)
def test_statistics_do_not_change_a_bit(case: Case, dtype: torch.dtype, moments: torch.dtype | None) -> None:
    """Statistics have kernels of their own, for each combination of dtypes. (Triton has one kernel for all Adams.)"""
    results = []
    shapes, more = (SHAPES[-2:], 1) if INTERPRETED else (SHAPES, 2)
    for options in ({}, {"stats": True}, {"stats": True, "max_grad_norm": math.inf}):
        params = parameters(weights(shapes, dtype))
        opt = case.ours(params, **options)
        drive(opt, params, gradients(shapes, 1, dtype))
        for state in opt.state.values():
            state.update({k: v.to(moments) for k, v in state.items() if moments and k != "step"})
        drive(opt, params, gradients(shapes, more, dtype, seed=3))
        assert_backend(opt, BACKEND)
        results.append(([p.detach() for p in params], states(opt, params)))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_what_was_not_measured_is_none() -> None:
    p = Parameter(torch.ones(3))
    opt = ADAMW.ours([p])
    drive(opt, [p], [[torch.ones(3)]])
    last = opt.last_step
    fields = (last.grad_norm, last.nonfinite, last.update_norm, last.stored_update_norm, last.param_norm)
    assert fields == (None,) * 5
    assert not bool(last.skipped)
    gated = ADAMW.ours([p], max_grad_norm=1.0)
    drive(gated, [p], [[torch.ones(3)]])
    assert gated.last_step.update_norm is None and gated.last_step.param_norm is None
    assert all(isinstance(x, Tensor) and x.dim() == 0 for x in (gated.last_step.grad_norm, gated.last_step.clip_coef))


def test_names_and_missing_gradients_in_per_param() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    opt = ADAMW.ours(model.named_parameters(), stats=True)
    for name, p in model.named_parameters():
        p.grad = None if name == "0.bias" else torch.full_like(p, 2.0)
    opt.step()
    records = opt.last_step.per_param()
    for name, p in model.named_parameters():
        if name != "0.bias":
            assert records[name].grad_norm == pytest.approx(2 * math.sqrt(p.numel()), rel=1e-6)
    assert set(records) >= {"0.weight", "1.weight", "1.bias"}


def test_positions_are_those_of_the_state_dict() -> None:
    params = parameters(weights([(3,), (4,), (5,)]))
    opt = ADAMW.ours([{"params": params[:1]}, {"params": params[1:]}], stats=True)
    drive(opt, params, [[None, None, torch.full((5,), 2.0)]])
    assert opt.last_step.per_param()[2].grad_amax == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_is_still_readable_three_steps_later(backend: str) -> None:
    p = Parameter(torch.ones(5))
    opt = ADAMW.ours([p], max_grad_norm=1e9, stats=True, backend=backend)
    kept = []
    for t in range(9):
        drive(opt, [p], [[torch.full((5,), float(t + 1))]])
        kept.append((opt.last_step, float(p.detach().norm())))
        for back, (last, norm) in enumerate(reversed(kept[-4:])):
            assert float(last.grad_norm) == pytest.approx((t + 1 - back) * math.sqrt(5), rel=1e-6)
            assert float(last.param_norm) == pytest.approx(norm, rel=1e-6)
            assert last.per_param()[0].grad_amax == t + 1 - back


def test_statistics_of_a_step_long_gone_raise() -> None:
    """Never another step's numbers."""
    p = Parameter(torch.ones(5))
    opt = ADAMW.ours([p], stats=True)
    drive(opt, [p], [[torch.ones(5)]])
    first = opt.last_step
    drive(opt, [p], [[torch.ones(5)]] * 4)
    for read in (lambda: first.grad_norm, lambda: first.skipped, lambda: first.per_param()):
        with pytest.raises(RuntimeError, match="three steps"):
            read()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_all_zero_is_exact(dtype: torch.dtype, backend: str) -> None:
    """One denormal among zeros is not a zero gradient; zeros of either sign are."""
    shape = large(4097)
    least = torch.zeros(shape, dtype=dtype)
    least[-1] = torch.finfo(dtype).smallest_normal / 4
    assert float(least.double().abs().max()) > 0
    rows: Gradients = [[torch.zeros(shape, dtype=dtype), -torch.zeros(shape, dtype=dtype), least, -least]]
    params = parameters([torch.ones(shape, dtype=dtype)] * 4)
    opt = SGD.ours(params, stats=True, max_grad_norm=1.0, backend=backend)
    drive(opt, params, rows)
    records = list(opt.last_step.per_param().values())
    assert [r.all_zero for r in records] == [True, True, False, False]
    assert [r.grad_norm > 0 for r in records] == [False, False, True, True]
    assert records[2].grad_norm == pytest.approx(float(least.double().max()), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nonfinite_counts_elements(backend: str) -> None:
    grads = [torch.ones(70), torch.ones(LONG), torch.ones(3)]
    grads[0][[0, 69]] = math.nan
    grads[1][: LONG[0] // 5 * 5 : LONG[0] // 5] = -math.inf
    params = parameters([torch.ones_like(g) for g in grads])
    opt = SGD.ours(params, skip_nonfinite=True, stats=True, backend=backend)
    drive(opt, params, [list(grads)])
    assert int(opt.last_step.nonfinite) == 7
    assert [r.nonfinite for r in opt.last_step.per_param().values()] == [2, 5, 0]


@pytest.mark.parametrize(
    "options,word",
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": math.nan}, "max_grad_norm"),
        ({"backend": "gpu"}, "backend"),
        ({"amp": "apex"}, "amp"),
    ],
)
def test_bad_options_are_refused_with_what_was_found(options: dict[str, Any], word: str) -> None:
    (value,) = options.values()
    for case in RULES:
        with pytest.raises((ValueError, RuntimeError)) as error:
            case.ours([Parameter(torch.ones(2))], **options)
        assert word in str(error.value) and str(value) in str(error.value), error.value
