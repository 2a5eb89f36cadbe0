"""Norms and health of gradients that ranks share: mo_fused's utilities against formulas in float64 and torch's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import distributed_cases as d
import pytest
import torch
from distributed_cases import Arrangement, part, place_of, placed, replicas_of, same_everywhere
from oracle import assert_close, assert_same_bits, norm64, wide
from process_pool import pool
from torch import Tensor
from torch.nn import Parameter

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="processes of their own, with the CPU's backends")

# What torch's utilities take too: no plain tensors beside DTensors, one mesh.
TORCHS = [d.SHARDED, d.SHARDED_4, d.REPLICATED, d.HYBRID, d.TWICE, d.STRIDED]


def with_grads(how: Arrangement, grads: Sequence[Tensor]) -> list[Parameter]:
    params = [Parameter(placed(torch.zeros_like(g), how, i)) for i, g in enumerate(grads)]
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        p.grad = placed(g, how, i)
    return params


def drawn(step: int = 0) -> list[Tensor]:
    return d.grads_of(d.values_of(), step)


def assert_gradients(params: Sequence[Parameter], how: Arrangement, grads: Sequence[Tensor], coef: float = 1.0) -> None:
    """Times ``coef``, which is rounded once; 1 leaves every bit."""
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        assert p.grad is not None and p.grad.dtype == g.dtype
        got, want = part(p.grad), part(placed(g, how, i))
        if coef == 1.0:
            assert_same_bits(got, want, f"gradient {i}")
        else:
            assert_close(got.float() if got.dtype == torch.float64 else got, want.double() * coef, 4, f"gradient {i}")


def largest(grads: Sequence[Tensor]) -> float:
    return max(float(g.double().abs().max()) for g in grads if g.numel())


def norms(rank: int, how: Arrangement) -> Any:
    grads = drawn()
    found = []
    for norm_type, exact in ((2.0, norm64(grads)), (math.inf, largest(grads))):
        params = with_grads(how, grads)
        norm = mo_fused.get_total_norm([p.grad for p in params], norm_type)
        assert type(norm) is Tensor and norm.dim() == 0 and norm.dtype == torch.float64
        assert float(norm) == pytest.approx(exact, rel=1e-6)
        assert float(mo_fused.clip_grad_norm_(params, 2 * exact, norm_type)) == float(norm)
        assert_gradients(params, how, grads)  # nothing to clip
        assert float(mo_fused.clip_grad_norm_(params, exact / 2, norm_type)) == float(norm)
        assert_gradients(params, how, grads, exact / 2 / (exact + 1e-6))
        again = with_grads(how, grads)
        mo_fused.clip_grads_with_norm_(again, exact / 4, norm)
        assert_gradients(again, how, grads, exact / 4 / (exact + 1e-6))
        found.append(float(norm))
    # Of parameters and of the tensors themselves; a parameter without a gradient counts as empty.
    missing = [*with_grads(how, grads), Parameter(placed(torch.ones(5), how, 0))]
    for stats, n in ((mo_fused.grad_stats(missing), len(missing)), (_stats_of_tensors(how, grads), len(grads))):
        assert float(stats.total_norm) == pytest.approx(norm64(grads), rel=1e-6)
        assert float(stats.amax) == largest(grads) and int(stats.nonfinite) == 0
        assert stats.zero_counts.tolist()[: len(grads)] == [int((g == 0).sum()) for g in grads]
        assert int(stats.zeros) == sum(stats.zero_counts.tolist())
        assert len(stats.norms) == n
        for i, g in enumerate(grads):
            assert float(stats.norms[i]) == pytest.approx(norm64([g]), rel=1e-6), i
            assert float(stats.amaxes[i]) == (largest([g]) if g.numel() else 0.0), i
        assert n == len(grads) or float(stats.norms[-1]) == 0.0
        found.append((stats.norms.tolist(), stats.amaxes.tolist(), stats.nonfinites.tolist()))
    return found


def _stats_of_tensors(how: Arrangement, grads: Sequence[Tensor]) -> mo_fused.GradStats:
    return mo_fused.grad_stats([placed(g, how, i) for i, g in enumerate(grads)])


@pytest.mark.parametrize("how", d.ARRANGEMENTS, ids=str)
def test_norms_of_whole_gradients(how: Arrangement) -> None:
    same_everywhere(pool(how.ranks).run(norms, how))


def beside_torch(rank: int, how: Arrangement) -> Any:
    grads = [g.float() for g in drawn()]  # torch's norm is rounded to the narrowest type
    grads = [g for g in grads if g.numel()]  # and its infinity norm refuses empty tensors
    found = []
    for norm_type in (2.0, math.inf, 1.0, 3.0):
        if norm_type == math.inf and how.name != "replicated":
            continue  # a part may be empty
        for max_norm in (1e9, 1.0):
            ours, theirs = with_grads(how, grads), with_grads(how, grads)
            got = mo_fused.clip_grad_norm_(ours, max_norm, norm_type)
            want = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
            assert float(d.whole(got)) == pytest.approx(float(d.whole(want)), rel=1e-5), norm_type
            for p, q in zip(ours, theirs, strict=True):
                assert p.grad is not None and q.grad is not None
                assert p.grad.placements == q.grad.placements
                assert_close(part(p.grad), part(q.grad).double(), 60)
        found.append(float(d.whole(got)))
    return found


@pytest.mark.parametrize("how", TORCHS, ids=str)
def test_torchs_utilities_on_the_same_gradients(how: Arrangement) -> None:
    same_everywhere(pool(how.ranks).run(beside_torch, how))


def spoilt(rank: int, how: Arrangement, bad: float, on: int, which: int) -> Any:
    grads = drawn()
    params = with_grads(how, grads)
    if rank == on:
        grad = params[which].grad
        assert grad is not None
        part(grad).view(-1)[0] = bad
    kept = [part(p.grad).clone() for p in params]
    for norm_type in (2.0, math.inf):
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            mo_fused.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            mo_fused.get_total_norm([p.grad for p in params], norm_type, error_if_nonfinite=True)
        assert_same_bits([part(p.grad) for p in params], kept, "an error left the gradients changed")
    stats = mo_fused.grad_stats(params)
    if replicas_of(how, which, grads[which].shape) == 1:
        assert int(stats.nonfinite) == int(stats.nonfinites[which]) == 1
    norm = mo_fused.clip_grad_norm_(params, 1.0)
    first = part(params[6].grad)
    assert torch.equal(first, torch.zeros_like(first)) if math.isinf(bad) else bool(first.isnan().all())
    return float(norm), float(stats.total_norm), float(stats.amax), stats.nonfinites.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("how", d.ARRANGEMENTS, ids=str)
def test_one_bad_element_is_known_everywhere(how: Arrangement, bad: float) -> None:
    """In parts that no other rank has; the error leaves gradients alone on all ranks."""
    cuts = [i for i in (0, 7) if (p := how.turns[i % len(how.turns)]) is not None and any(x != "R" for x in p)]
    for which in cuts:
        found = same_everywhere(pool(how.ranks).run(spoilt, how, bad, 0, which))
        assert all(math.isnan(x) if math.isnan(bad) else math.isinf(x) for x in found[:3])


def counted(rank: int, how: Arrangement, everywhere: bool) -> Any:
    """A bad element in the first part of two parameters: in all replicas, or, as a fault would leave it, in one."""
    pair = d.Pair(d.ADAMW, how, skip_nonfinite=True, stats=True)
    pair.give(drawn())
    for i in (0, 7):
        place, grad = place_of(how, i, pair.values[i].shape), pair.shared[i].grad
        assert place is not None and grad is not None
        first = not any(k for k, x in zip(place[0].get_coordinate(), place[1], strict=True) if hasattr(x, "dim"))
        if first if everywhere else rank == 0:
            part(grad).view(-1)[0] = math.nan
    pair.opt.step()
    assert bool(pair.opt.last_step.skipped)
    of_each = [record.nonfinite for record in pair.opt.last_step.per_param().values()]
    stats = mo_fused.grad_stats(pair.shared)
    return [float(pair.opt.last_step.nonfinite), of_each], [float(stats.nonfinite), stats.nonfinites.tolist()]


@pytest.mark.parametrize("everywhere", [True, False], ids=["all_replicas", "one_replica"])
@pytest.mark.parametrize("how", [d.HYBRID, d.GRID, d.SHARDED_4], ids=str)
def test_bad_elements_are_counted_in_whole_numbers(how: Arrangement, everywhere: bool) -> None:
    for total, of_each in same_everywhere(pool(how.ranks).run(counted, how, everywhere)):
        assert of_each == [1, 0, 0, 0, 0, 0, 0, 1, 0]
        assert total == 2 if everywhere else total in (1, 2)


def incomplete(rank: int, how: Arrangement, lacking: int, every: bool) -> Any:
    """A rank has no gradient of some parameters, or of none."""
    grads = [g.zero_() if g.dim() == 0 else g for g in drawn()]  # the replicated one adds nothing
    params = with_grads(how, grads)
    if rank == lacking:
        for i, p in enumerate(params):
            if every or i in (0, 7):
                p.grad = None
    here = [0.0 if p.grad is None else norm64([part(p.grad)]) ** 2 for p in params]
    kept = [None if p.grad is None else wide(part(p.grad)) for p in params]
    stats = mo_fused.grad_stats(params)
    norm = mo_fused.clip_grad_norm_(params, 1.0)
    for p, g in zip(params, kept, strict=True):
        if g is None:
            assert p.grad is None
        else:
            got = part(p.grad)
            assert_close(got.float() if got.dtype == torch.float64 else got, g / (float(norm) + 1e-6), 4)
    return here, float(norm.double()), stats.norms.tolist(), float(stats.total_norm)


@pytest.mark.parametrize("every", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("how", [d.SHARDED, d.SHARDED_4, d.TWICE], ids=str)
def test_gradients_that_a_rank_lacks(how: Arrangement, every: bool) -> None:
    results = pool(how.ranks).run(incomplete, how, how.ranks - 1, every)
    of_each = [sum(parts) for parts in zip(*(r[0] for r in results), strict=True)]
    for _, norm, each, total in results:
        # What a rank is given is in the dtype of its own gradients.
        assert norm == pytest.approx(math.sqrt(sum(of_each)), rel=1e-6)
        assert total == pytest.approx(math.sqrt(sum(of_each)), rel=1e-6)
        assert each == pytest.approx([math.sqrt(x) for x in of_each], rel=1e-6)
    same_everywhere([r[2:] for r in results])


def sums(rank: int, how: Arrangement) -> Any:
    """Gradients that nobody has added up yet, of cut and of replicated parameters."""
    from torch.distributed.tensor import DTensor, Partial

    grads = [d.in_quarters(g) for g in drawn()]
    exact = norm64(grads)

    def fresh() -> list[Parameter]:
        params = with_grads(how, grads)
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            place = place_of(how, i, g.shape)
            assert place is not None
            mine = g * d.PARTS[how.ranks][rank]
            p.grad = DTensor.from_local(mine, place[0], [Partial()] * place[0].ndim, run_check=False)
        return params

    params = fresh()
    norm = mo_fused.get_total_norm([p.grad for p in params])
    stats = mo_fused.grad_stats(params)
    assert float(norm) == pytest.approx(exact, rel=1e-6) == float(stats.total_norm)
    assert float(stats.amax) == largest(grads)
    assert float(mo_fused.clip_grad_norm_(params, exact / 2)) == pytest.approx(exact, rel=1e-6)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        got = d.whole(p.grad)
        # Sums of parts that were rounded each: the error is that of the parts' size.
        assert_close(got.float() if got.dtype == torch.float64 else got, g.double() / 2, 12, f"gradient {i}")
    return float(norm)


@pytest.mark.parametrize("how", [d.REPLICATED, d.SHARDED_4, d.HYBRID], ids=str)
def test_sums_that_are_not_yet_added_up(how: Arrangement) -> None:
    same_everywhere(pool(how.ranks).run(sums, how))


def extremes(rank: int, how: Arrangement) -> Any:
    found = []
    for size, dtype in ((1e25, torch.float32), (1e-25, torch.float32), (1e200, torch.float64), (1e-200, torch.float64)):
        grads = [torch.full(s, size, dtype=dtype) for s in ((7, 5), (2, 3), (1, 3))]
        norm = mo_fused.clip_grad_norm_(with_grads(how, grads), math.inf)
        assert norm.dtype == dtype
        assert float(norm) == pytest.approx(norm64(grads), rel=1e-5)
        params = with_grads(how, grads)
        opt = mo_fused.SGD(params, lr=0.0, max_grad_norm=math.inf, skip_nonfinite=True, stats=True)
        opt.step()
        assert not bool(opt.last_step.skipped)
        assert float(opt.last_step.grad_norm) == pytest.approx(norm64(grads), rel=1e-5)
        stats = mo_fused.grad_stats(params)
        for i, g in enumerate(grads):
            record = opt.last_step.per_param()[i]
            assert record.grad_norm == pytest.approx(norm64([g]), rel=1e-5), (size, i)
            assert float(stats.norms[i]) == pytest.approx(norm64([g]), rel=1e-5), (size, i)
            assert not record.all_zero
        found.append((float(norm), d.told(opt.last_step)))
    return found


@pytest.mark.parametrize("how", [d.PARTLY_PLAIN, d.TWICE, d.HYBRID], ids=str)
def test_norms_beyond_the_range_of_squares(how: Arrangement) -> None:
    """An overflowing or vanishing square on its way between ranks is neither infinity nor zero."""
    same_everywhere(pool(how.ranks).run(extremes, how))
