"""Adafactor on parts of matrices: sums over ranks make the means of the whole."""

from __future__ import annotations

from typing import Any

import distributed_cases as d
import pytest
import torch
from cases import noise
from distributed_cases import Arrangement
from process_pool import pool
from torch.nn import Parameter

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="processes of their own, with the CPU's backends")

SHAPES: list[tuple[int, ...]] = [(7, 6), (64, 48), (1, 6), (6, 1), (), (5,), (0, 3), (3, 10, 12), (2100, 40), (4, 2)]
ARRANGEMENTS = [
    d.SHARDED,
    d.SHARDED_4,
    d.COLUMNS,
    d.PARTLY_PLAIN,
    d.HYBRID,
    d.TWICE,
    d.GRID,
    d.STRIDED,
    d.NESTED,
    d.CUBE,
]
FORMS: dict[str, dict[str, Any]] = {
    "torch": dict(lr=0.02, weight_decay=0.1),
    "clipped": dict(lr=0.02, max_grad_norm=1.0, stats=True),
    "first moment": dict(lr=0.02, beta1=0.9, maximize=True, max_grad_norm=5.0),
    "fixed": dict(lr=0.02, relative_step=False, scale_parameter=False, skip_nonfinite=True),
    "eager": dict(lr=0.02, max_grad_norm=1.0, backend="eager"),
}


def build(how: Arrangement, dtype: torch.dtype, form: str) -> tuple[list[Parameter], list[Parameter], Any, Any]:
    values = [noise(s, 10 + i, torch.float32).to(dtype) for i, s in enumerate(SHAPES)]
    shared = [Parameter(d.placed(v, how, i)) for i, v in enumerate(values)]
    plain = [Parameter(v.clone()) for v in values]
    return shared, plain, mo_fused.Adafactor(shared, **FORMS[form]), mo_fused.Adafactor(plain, **FORMS[form])


def steps_of_both(rank: int, how: Arrangement, form: str, dtype: torch.dtype) -> Any:
    shared, plain, opt, alone = build(how, dtype, form)
    for step in range(6):
        for i, (p, q) in enumerate(zip(shared, plain, strict=True)):
            grad = noise(q.shape, 1000 * (step + 1) + i, torch.float32).to(dtype)
            if form == "fixed" and step == 3 and i == 1:
                grad[-1, -1] = float("nan")
            p.grad, q.grad = d.placed(grad, how, i), grad
        opt.step()
        alone.step()
    # bf16 parameters may be rounded to the other side of a half.
    tight = dict(rtol=3e-5, atol=3e-6) if dtype == torch.float32 else dict(rtol=1e-11, atol=1e-12)
    for i, (p, q) in enumerate(zip(shared, plain, strict=True)):
        bounds = dict(rtol=1e-2, atol=1e-3) if dtype == torch.bfloat16 else tight
        torch.testing.assert_close(d.whole(p), q.detach(), **bounds, msg=lambda m, i=i: f"parameter {i}: {m}")
        assert list(opt.state[p]) == list(alone.state[q])
        for key, value in alone.state[q].items():
            bounds = dict(rtol=1e-2, atol=1e-4) if dtype == torch.bfloat16 else tight
            torch.testing.assert_close(d.whole(opt.state[p][key]), value, **bounds)
    wanted = "eager" if form == "eager" else "cpu"
    assert {e.backend for e in opt.explain()} == {wanted}
    last, theirs = opt.last_step, alone.last_step
    if form in ("clipped", "eager"):
        assert float(last.grad_norm) == pytest.approx(float(theirs.grad_norm), rel=1e-5)
    if form == "clipped":
        assert float(last.update_norm) == pytest.approx(float(theirs.update_norm), rel=1e-3)
    return d.told(last)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ARRANGEMENTS, ids=str)
def test_is_the_unsharded_run(how: Arrangement, form: str) -> None:
    found = pool(how.ranks).run(steps_of_both, how, form, torch.float32)
    assert all(repr(x) == repr(found[0]) for x in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("how", [d.SHARDED_4, d.GRID], ids=str)
def test_is_the_unsharded_run_in_other_dtypes(how: Arrangement, dtype: torch.dtype) -> None:
    pool(how.ranks).run(steps_of_both, how, "first moment", dtype)


def lacking_steps(rank: int, how: Arrangement, form: str) -> Any:
    """One rank has no gradient of its part at first: the others go on with the squares that there are."""
    shared, _, opt, _ = build(how, torch.float32, form)
    missing = [1, 3, 8]
    for step in range(4):
        for i, p in enumerate(shared):
            grad = noise(SHAPES[i], 1000 * (step + 1) + i, torch.float32)
            p.grad = d.placed(grad, how, i)
            if rank == 1 and i in missing and step < 2:
                p.grad = None
        opt.step()
        if step == 1 and rank == 1:
            assert all(shared[i] not in opt.state for i in missing)
            assert all(
                torch.equal(d.part(shared[i]), d.part(d.placed(noise(SHAPES[i], 10 + i, torch.float32), how, i)))
                for i in missing
            )
    assert all(bool(torch.isfinite(d.part(p)).all()) for p in shared)
    # What ranks hold in common of a matrix: those that have seen the same steps have the same.
    return {i: opt.state[shared[i]]["col_var"]._local_tensor.tolist() for i in (1, 8)}, rank


@pytest.mark.parametrize("form", ["torch", "clipped", "eager"])
def test_a_rank_lacks_a_gradient(form: str) -> None:
    found = pool(4).run(lacking_steps, d.SHARDED_4, form)
    assert found[0][0] == found[2][0] == found[3][0]


def saved_and_loaded(rank: int) -> None:
    shared, plain, opt, alone = build(d.SHARDED, torch.float32, "torch")
    again, _, other, _ = build(d.SHARDED, torch.float32, "torch")
    for step in range(3):
        for i, (p, q) in enumerate(zip(shared, plain, strict=True)):
            grad = noise(q.shape, 1000 * (step + 1) + i, torch.float32)
            p.grad, q.grad = d.placed(grad, d.SHARDED, i), grad
        opt.step()
        alone.step()
    other.load_state_dict(alone.state_dict())  # whole tensors
    for p, q in zip(again, shared, strict=True):
        for key, value in opt.state[q].items():
            assert key == "step" or other.state[p][key].placements == value.placements
            torch.testing.assert_close(d.part(other.state[p][key]), d.part(value), rtol=1e-5, atol=1e-6)
    alone.load_state_dict(opt.state_dict())  # DTensors
    for q, p in zip(plain, shared, strict=True):
        for key, value in opt.state[p].items():
            torch.testing.assert_close(alone.state[q][key], d.whole(value))


def test_states_between_whole_and_parts() -> None:
    pool(2).run(saved_and_loaded)
