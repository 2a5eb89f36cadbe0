"""Steps of parameters that ranks share (DTensor) are those of one process: to the bit where no sum is in another order.

Functions without ``test_`` run in each rank; what they compare with is the same optimizer over plain tensors there.
"""

from __future__ import annotations

import math
from typing import Any

import distributed_cases as d
import pytest
import torch
from cases import Case
from distributed_cases import Arrangement, Pair, place_of, placed, same_everywhere, told
from oracle import assert_same_bits, norm64
from process_pool import pool
from torch import Tensor

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="processes of their own, with the CPU's backends")

# Options under which the coefficient is exactly 1; none of them may change a bit.
FREE: list[dict[str, Any]] = [{}, dict(max_grad_norm=1e6, stats=True), dict(skip_nonfinite=True), dict(backend="eager")]


def same_steps(rank: int, case: Case, how: Arrangement, options: dict[str, Any]) -> Any:
    pair = Pair(case, how, **options)
    for step in range(3):
        grads: list[Tensor | None] = list(d.grads_of(pair.values, step))
        for i in ((1, 8), (), (2, 8))[step]:  # one has its first gradient in the second step, another never loses it
            grads[i] = None
        pair.step(grads)
        pair.assert_same_bits(f"step {step}")
    if "backend" not in options:
        pair.assert_native()
    if not options:
        pair.assert_whole()
    pair.assert_gradients(grads)
    return told(pair.opt.last_step)


@pytest.mark.parametrize("options", FREE, ids=["free", "unreached", "skip", "eager"])
@pytest.mark.parametrize("how", d.ARRANGEMENTS, ids=str)
def test_bits_of_one_process(how: Arrangement, options: dict[str, Any]) -> None:
    for case in d.CASES if not options else d.RULES:
        found = same_everywhere(pool(how.ranks).run(same_steps, case, how, options))
        assert found["skipped"] == 0 and found["clip_coef"] == 1
        assert (found["grad_norm"] is None) == (not options or "backend" in options)
        assert (found["update_norm"] is None) == ("stats" not in options)


def clipped_steps(rank: int, case: Case, how: Arrangement, in_place: bool) -> Any:
    unclipped = [3, 5]
    pair = Pair(case, how, unclipped=unclipped, max_grad_norm=0.5, stats=True, clip_in_place=in_place)
    for step in range(3):
        grads = d.grads_of(pair.values, step)
        pair.step(grads)
        inside = [g for i, g in enumerate(grads) if i not in unclipped]
        norm = norm64(inside)
        coef = 0.5 / (norm + 1e-6)
        got, want = told(pair.opt.last_step), told(pair.alone.last_step)
        assert got["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert got["clip_coef"] == pytest.approx(coef, rel=1e-6)
        for name in got:
            assert got[name] == pytest.approx(want[name], rel=1e-5), name
        assert got["grad_amax"] == want["grad_amax"]
        pair.assert_gradients(grads, [i for i in range(len(grads)) if in_place and i not in unclipped], coef)
    pair.assert_native()
    pair.assert_close(12)
    return told(pair.opt.last_step), pair.opt.last_step.per_param()


@pytest.mark.parametrize("in_place", [False, True], ids=["folded", "in_place"])
@pytest.mark.parametrize("how", d.ARRANGEMENTS, ids=str)
def test_clipping_by_the_norm_over_all_ranks(how: Arrangement, in_place: bool) -> None:
    """With a group that is not clipped, and one of nothing. Replicas are counted once."""
    for case in [d.MOMENTUM] if in_place else d.RULES:
        same_everywhere(pool(how.ranks).run(clipped_steps, case, how, in_place))


def statistics(rank: int, how: Arrangement, stats: bool) -> Any:
    pair = Pair(d.MOMENTUM, how, max_grad_norm=1e6, stats=stats)
    grads = d.grads_of(pair.values, 0)
    grads[2].zero_()
    grads[5] = torch.zeros_like(grads[5])
    grads[5].view(-1)[-1] = 2.0  # all but one rank have zeros alone
    pair.step(grads)
    got, want = pair.opt.last_step.per_param(), pair.alone.last_step.per_param()
    assert list(got) == list(want) == list(range(len(grads)))
    for i, (found, expected) in enumerate(zip(got.values(), want.values(), strict=True)):
        place = place_of(how, i, pair.values[i].shape)
        cut = place is not None and any(hasattr(x, "dim") for x in place[1])
        for name, value in vars(expected).items():
            mine = getattr(found, name)
            if stats or not cut:
                assert mine == (None if value is None else pytest.approx(value, rel=1e-6)), (i, name)
                assert type(mine) is type(value), (i, name)
            else:
                assert mine is None, (i, name)
    return told(pair.opt.last_step), got if stats else None


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("how", d.ARRANGEMENTS, ids=str)
def test_statistics_of_each_parameter(how: Arrangement, stats: bool) -> None:
    """Those of whole parameters, or none at all."""
    same_everywhere(pool(how.ranks).run(statistics, how, stats))


def spoilt_steps(rank: int, case: Case, how: Arrangement, scaler: str, bad: float, on: int, which: int) -> Any:
    """The second of three steps has a bad element, in the part that one rank has of one parameter."""
    options: dict[str, Any] = dict(skip_nonfinite=True) if scaler == "none" else {}
    pair = Pair(case, how, stats=True, **options)
    scale = 16.0 if scaler != "none" else 1.0
    ours = {"none": None, "ours": mo_fused.GradScaler, "torch": torch.amp.GradScaler}[scaler]
    scaling = None if ours is None else ours("cpu", init_scale=scale, growth_interval=1000)
    for step in range(4):
        grads = d.grads_of(pair.values, step)
        pair.give([g * scale for g in grads])
        before = pair.here()
        if step in (0, 2):
            grad = pair.shared[which].grad
            assert grad is not None
            if rank == on:
                here = d.part(grad).view(-1)
                assert len(here)
                here[-1] = bad
        if scaling is None:
            pair.opt.step()
        else:
            scaling.scale(torch.zeros(()))
            scaling.step(pair.opt)
            scaling.update()
        if step in (0, 2):
            assert bool(pair.opt.last_step.skipped), f"step {step}"
            assert float(pair.opt.last_step.nonfinite) > 0
            after = pair.here()
            assert_same_bits(after[0], before[0], "a skipped step changed a parameter")
            if step:
                assert_same_bits(after[1], before[1], "a skipped step changed a state")
            scale = scale if scaling is None else scale / 2
        else:
            for q, g in zip(pair.plain, grads, strict=True):
                q.grad = g.clone()
            pair.alone.step()
            assert not bool(pair.opt.last_step.skipped), f"step {step}"
            pair.assert_same_bits(f"step {step}")
    assert scaling is None or scaling.get_scale() == scale == 4.0
    return told(pair.opt.last_step)


# torch's scaler refuses plain tensors beside DTensors, and believes that replicas are equal.
SCALED = [(how, scaler) for how in [*d.FEW, d.HYBRID] for scaler in ("none", "ours")]
SCALED += [(how, "torch") for how in (d.SHARDED, d.TWICE, d.STRIDED)]


@pytest.mark.parametrize("how,scaler", SCALED, ids=str)
def test_one_rank_sees_a_bad_gradient_and_all_skip(how: Arrangement, scaler: str) -> None:
    """A parameter that is cut, and one that is the same on all ranks or should be."""
    case = d.MOMENTUM if scaler == "none" else d.ADAMW
    for bad, on, which in ((math.nan, how.ranks - 1, 0), (math.inf, 0, 1), (-math.inf, 1, 3)):
        same_everywhere(pool(how.ranks).run(spoilt_steps, case, how, scaler, bad, on, which))


def sums_not_yet_added(rank: int, how: Arrangement, options: dict[str, Any]) -> Any:
    """Gradients as sums over ranks, and as results that a collective is still working on."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Partial, Replicate

    pair = Pair(d.ADAMW, how, **options)
    size = how.ranks
    for step in range(2):
        grads = [d.in_quarters(g) for g in d.grads_of(pair.values, step)]
        for i, (p, q, g) in enumerate(zip(pair.shared, pair.plain, grads, strict=True)):
            q.grad = g.clone()
            place = place_of(how, i, g.shape)
            if place is None:
                p.grad = g.clone()
                continue
            mesh, placements = place
            mine = g * d.PARTS[size][rank] if mesh.size() == size else g * d.PARTS[2][rank % 2]
            sums = DTensor.from_local(mine, mesh, [Partial()] * mesh.ndim, run_check=False)
            if i % 3 == 0:
                p.grad = sums  # for p to be redistributed by the step
            elif i % 3 == 1:
                p.grad = sums.redistribute(mesh, placements, async_op=True)
                if step == 0 and all(isinstance(x, Replicate) for x in placements) and mesh.ndim == 1:
                    assert isinstance(p.grad._local_tensor, AsyncCollectiveTensor)
            else:
                p.grad = sums.redistribute(mesh, placements)
        pair.opt.step()
        pair.alone.step()
        pair.assert_same_bits(f"step {step}")
    pair.assert_native()
    if options.get("clip_in_place"):
        pair.assert_gradients(grads)  # the sums, where the parts were
    return told(pair.opt.last_step)


@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1e6, stats=True, clip_in_place=True)], ids=["free", "all"])
@pytest.mark.parametrize("how", [d.REPLICATED, d.SHARDED_4, d.HYBRID, d.NESTED], ids=str)
def test_gradients_that_are_sums_or_on_their_way(how: Arrangement, options: dict[str, Any]) -> None:
    same_everywhere(pool(how.ranks).run(sums_not_yet_added, how, options))


def without_some(rank: int, how: Arrangement, lacking: int, all_of_them: bool, options: dict[str, Any]) -> Any:
    """One rank has no gradient of some cut parameters (or none at all): its parts stay, those of the others move."""
    pair = Pair(d.ADAMW, how, **options)
    mine = [0, 7] if not all_of_them else range(len(pair.values))
    for step in range(2):
        grads = d.grads_of(pair.values, step)
        grads[3].zero_()  # the scalar is replicated: what it adds to a norm is another question
        pair.give(grads)
        if rank == lacking:
            for i in mine:
                pair.shared[i].grad = None
        here = [norm64([d.part(p.grad)]) ** 2 if p.grad is not None else 0.0 for p in pair.shared]
        pair.opt.step()
        pair.alone.step()
    for i, (p, q) in enumerate(zip(pair.shared, pair.plain, strict=True)):
        if rank == lacking and i in mine:
            assert p not in pair.opt.state
            assert_same_bits(d.part(p), d.part(placed(pair.values[i], how, i)), f"parameter {i} was not left alone")
        else:
            assert float(pair.opt.state[p]["step"]) == 2
            assert_same_bits(d.part(p), d.part(placed(q.detach(), how, i)), f"parameter {i}")
    told_of = pair.opt.last_step.per_param() if options.get("stats") else {}
    return here, told(pair.opt.last_step), {i: r.grad_norm for i, r in told_of.items()}


@pytest.mark.parametrize("all_of_them", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1e6, stats=True)], ids=["free", "stats"])
@pytest.mark.parametrize("how", [d.SHARDED, d.TWICE], ids=str)
def test_gradients_that_a_rank_lacks(how: Arrangement, options: dict[str, Any], all_of_them: bool) -> None:
    results = pool(how.ranks).run(without_some, how, how.ranks - 1, all_of_them, options)
    of_each = [sum(parts) for parts in zip(*(here for here, _, _ in results), strict=True)]
    for _, found, norms in results:
        if options:
            assert found["grad_norm"] == pytest.approx(math.sqrt(sum(of_each)), rel=1e-6)
        for i, norm in norms.items():
            assert norm == pytest.approx(math.sqrt(of_each[i]), rel=1e-6), i
    same_everywhere([found for _, found, _ in results])


def wrong_inputs(rank: int, how: Arrangement) -> None:
    from torch.distributed.tensor import Replicate, Shard

    def spoil_gradient(pair: Pair) -> None:
        pair.shared[0].grad = torch.ones(pair.values[0].shape)

    def spoil_placements(pair: Pair) -> None:
        state = pair.opt.state[pair.shared[0]]
        mesh = state["exp_avg"].device_mesh
        other = Replicate() if any(isinstance(x, Shard) for x in state["exp_avg"].placements) else Shard(0)
        state["exp_avg"] = state["exp_avg"].redistribute(mesh, [other] * mesh.ndim)

    def spoil_kind(pair: Pair) -> None:
        state = pair.opt.state[pair.shared[0]]
        state["exp_avg_sq"] = d.whole(state["exp_avg_sq"])

    for spoil, error, text in (
        (spoil_gradient, RuntimeError, "expected the gradient of parameter 0 .* kind .*found"),
        (spoil_placements, ValueError, "expected state 'exp_avg' of parameter 0 .* placements .*found"),
        (spoil_kind, ValueError, "expected state 'exp_avg_sq' of parameter 0 .* kind .*found"),
    ):
        pair = Pair(d.ADAMW, how, max_grad_norm=1e6)
        pair.step(d.grads_of(pair.values, 0))
        pair.give(d.grads_of(pair.values, 1))
        spoil(pair)
        before = pair.here()
        with pytest.raises(error, match=text):
            pair.opt.step()
        assert_same_bits(pair.here(), before, "a refused step changed something")


@pytest.mark.parametrize("how", [d.SHARDED, d.HYBRID], ids=str)
def test_wrong_input_is_one_clear_error(how: Arrangement) -> None:
    pool(how.ranks).run(wrong_inputs, how)


def on_half_of_the_ranks(rank: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    values, grads = d.values_of(), d.grads_of(d.values_of(), 0)
    params = [torch.nn.Parameter(distribute_tensor(values[i], mesh, [Shard(0)], src_data_rank=None)) for i in (0, 7)]
    for p, i in zip(params, (0, 7), strict=True):
        p.grad = distribute_tensor(grads[i], mesh, [Shard(0)], src_data_rank=None)
    opt = mo_fused.AdamW(params, lr=0.1, max_grad_norm=1e6, skip_nonfinite=True, stats=True)
    opt.step()
    return told(opt.last_step)["grad_norm"], len(opt.state), norm64([grads[0], grads[7]])


def test_parameters_of_other_ranks_are_no_business_of_this_one() -> None:
    for rank, (norm, states, want) in enumerate(pool(4).run(on_half_of_the_ranks)):
        if rank < 2:
            assert norm == pytest.approx(want, rel=1e-6) and states == 2
        else:
            assert norm in (0.0, None) and states == 0
