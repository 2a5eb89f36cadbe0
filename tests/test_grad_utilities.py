"""grad_stats, clip_grad_norm_, clip_grads_with_norm_ and get_total_norm against torch.nn.utils and direct formulas."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import BACKEND, DTYPES, HALF, INTERPRETED, LAYOUTS, WIDTHS, Layout, large, noise, short, some, untouched
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close, norm64
from torch import Tensor
from torch.nn import Parameter

import mo_fused
from mo_fused import clip_grad_norm_, clip_grads_with_norm_, get_total_norm, grad_stats

# 2 and inf run natively; 1, 3 and 0.5 are powers; 0 counts non-zeros; -inf is the smallest magnitude.
NATIVE = [2.0, math.inf, 2, "inf"]
OTHER = [1.0, 3.0, -math.inf, 0.0, 0.5]
SHAPES = [(7,), (33, 3), (), large(20_001)]


def with_grads(grads: Sequence[Tensor | None]) -> list[Parameter]:
    params = []
    for g in grads:
        p = Parameter(torch.zeros(3) if g is None else torch.zeros_like(g))
        p.grad = g
        params.append(p)
    return params


def sample(dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    return [noise(s, seed * 100 + i, dtype) for i, s in enumerate(SHAPES)]


def p_norm(grads: list[Tensor], norm_type: float) -> float:
    """The p-norm of all elements together in float64, as torch defines it (a norm of norms)."""
    norms = torch.stack([torch.linalg.vector_norm(g.double(), norm_type) for g in grads])
    return float(torch.linalg.vector_norm(norms, norm_type))


def within(dtype: torch.dtype) -> float:
    """Relative error allowed to a norm that is returned in this dtype: two of its spacings, and that of a long sum."""
    return 2 * torch.finfo(dtype).eps + (1e-14 if dtype == torch.float64 else 1e-6)


def promoted(dtype: torch.dtype) -> torch.dtype:
    """torch returns the gradients' dtype. For fp16 we return fp32: past 65504 a finite norm would become inf."""
    return torch.float32 if dtype == torch.float16 else dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("norm_type", NATIVE, ids=str)
def test_clip_grad_norm_against_float64(norm_type: Any, dtype: torch.dtype) -> None:
    grads = sample(dtype)
    exact = p_norm(grads, float(norm_type))
    for max_norm in (exact / 3, exact * 3):  # acts; does not act
        ours, theirs = with_grads([g.clone() for g in grads]), with_grads([g.clone() for g in grads])
        got = clip_grad_norm_(ours, max_norm, norm_type)
        want = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type, foreach=False)
        assert isinstance(got, Tensor)
        assert (got.dtype, got.shape, got.device) == (promoted(want.dtype), want.shape, want.device)
        assert float(got) == pytest.approx(exact, rel=within(dtype))
        coef = min(1.0, max_norm / (exact + 1e-6))
        for p, g in zip(ours, grads, strict=True):
            assert p.grad is not None and p.grad.dtype == dtype
            assert_close(p.grad, g.double() * coef, 1)
            assert coef < 1 or torch.equal(p.grad, g), "a clip that does not act changed a bit"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("norm_type", OTHER, ids=str)
def test_other_norms_are_torchs(norm_type: float, dtype: torch.dtype) -> None:
    grads = sample(dtype)
    ours, theirs = with_grads([g.clone() for g in grads]), with_grads([g.clone() for g in grads])
    total = get_total_norm(grads, norm_type)
    assert_close(total, torch.nn.utils.get_total_norm(grads, norm_type).double(), 2)
    got = clip_grad_norm_(ours, float(total) / 3, norm_type)
    want = torch.nn.utils.clip_grad_norm_(theirs, float(total) / 3, norm_type)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert_close(got, want.double(), 2)
    for p, q in zip(ours, theirs, strict=True):
        assert p.grad is not None and q.grad is not None
        assert_close(p.grad, q.grad.double(), 2)
    if math.isfinite(float(total)) and norm_type > 0:
        assert not torch.equal(theirs[3].grad if theirs[3].grad is not None else grads[3], grads[3]), "must clip"


@pytest.mark.parametrize("dtype", HALF, ids=short)
def test_half_precision_norms_are_summed_wider(dtype: torch.dtype) -> None:
    """100 elements of 1e4 have the norm 1e5, which neither fp16 sums nor an fp16 result can hold."""
    ps = with_grads([torch.full((25,), 1e4, dtype=dtype) for _ in range(4)])
    norm = norm64([p.grad for p in ps])
    clip_grad_norm_(ps, 1.0)
    for p in ps:
        assert p.grad is not None
        assert_close(p.grad, torch.full((25,), 1e4, dtype=torch.float64) / norm, 2)
    tiny = with_grads([torch.full((64,), 2.0**-20, dtype=dtype)])
    assert float(clip_grad_norm_(tiny, 1.0)) == pytest.approx(8 * 2.0**-20, rel=1e-2)


@pytest.mark.parametrize("norm_type", NATIVE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_get_total_norm_against_float64(norm_type: Any, dtype: torch.dtype) -> None:
    grads = sample(dtype, 2)
    kept = [g.clone() for g in grads]
    got, want = get_total_norm(grads, norm_type), torch.nn.utils.get_total_norm(grads, norm_type, foreach=False)
    assert (got.dtype, got.shape) == (promoted(want.dtype), want.shape)
    assert float(got) == pytest.approx(p_norm(grads, float(norm_type)), rel=within(dtype))
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))


@pytest.mark.parametrize("mix", [(0, 1), (1, 2), (0, 3), (1, 2, 0, 3), (3, 1)], ids=str)
def test_mixed_dtypes(mix: tuple[int, ...]) -> None:
    """One norm over all; each gradient keeps its dtype; the result has the promoted type, as torch's."""
    grads = [noise((50 + i,), 10 + i, DTYPES[k]) for i, k in enumerate(mix)]
    ours, theirs = with_grads([g.clone() for g in grads]), with_grads([g.clone() for g in grads])
    exact = norm64(grads)
    got = clip_grad_norm_(ours, exact / 4)
    want = torch.nn.utils.clip_grad_norm_(theirs, exact / 4, foreach=False)
    assert got.dtype == want.dtype
    # The narrowest gradients' sums set the accuracy of the norm, and with it of the coefficient.
    assert float(got) == pytest.approx(exact, rel=max(within(torch.float32), within(got.dtype)))
    for p, g in zip(ours, grads, strict=True):
        assert p.grad is not None and p.grad.dtype == g.dtype
        want_grad = g.double() * (exact / 4 / (exact + 1e-6))
        assert_close(p.grad.float() if g.dtype == torch.float64 else p.grad, want_grad, 8)


@pytest.mark.parametrize("norm_type,want", [(math.inf, 4.0), (1.0, 7.0), (2.0, 5.0), (3.0, 91.0 ** (1 / 3))])
@pytest.mark.parametrize("empty_first", [False, True])
def test_empty_gradients_add_nothing(norm_type: float, want: float, empty_first: bool) -> None:
    """torch raises for the largest element of nothing; here nothing has the norm 0."""
    grads = [torch.tensor([3.0, -4.0]), torch.zeros(0), torch.zeros(0, 3)]
    ps = with_grads(grads[::-1] if empty_first else grads)
    assert float(get_total_norm([p.grad for p in ps if p.grad is not None], norm_type)) == pytest.approx(want, rel=1e-6)
    assert float(clip_grad_norm_(ps, want / 2, norm_type=norm_type)) == pytest.approx(want, rel=1e-6)
    assert_close(grads[0], torch.tensor([1.5, -2.0], dtype=torch.float64), 8)


def test_nothing_to_clip_gives_torchs_zero() -> None:
    for params in ([], with_grads([None, None])):
        got, want = clip_grad_norm_(params, 1.0), torch.nn.utils.clip_grad_norm_(params, 1.0)
        assert float(got) == 0 and (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
    assert float(get_total_norm([])) == 0


def as_generator(ps: list[Parameter]) -> Iterator[Parameter]:
    yield from ps


FORMS: dict[str, Callable[[list[Parameter]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": as_generator,
    "filter": lambda ps: filter(lambda p: p.requires_grad, ps),
    "map": lambda ps: map(Parameter.requires_grad_, ps),
    "dict_values": lambda ps: dict(enumerate(ps)).values(),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_every_kind_of_iterable_is_read_once(form: str) -> None:
    ps = with_grads([torch.tensor([3.0, 4.0]), None, torch.tensor([12.0])])
    assert float(clip_grad_norm_(FORMS[form](ps), 1.3)) == pytest.approx(13.0)
    assert_close(torch.cat([p.grad for p in ps if p.grad is not None]), torch.tensor([0.3, 0.4, 1.2]).double(), 8)
    stats = grad_stats(FORMS[form](ps))
    assert float(stats.total_norm) == pytest.approx(1.3, rel=1e-5)


def test_a_single_tensor() -> None:
    p = with_grads([torch.tensor([3.0, 4.0])])[0]
    assert float(clip_grad_norm_(p, 10.0)) == 5.0
    assert p.grad is not None and torch.equal(p.grad, torch.tensor([3.0, 4.0]))
    assert float(get_total_norm(p.grad)) == 5.0
    clip_grads_with_norm_(p, 1.0, torch.tensor(5.0))
    assert_close(p.grad, torch.tensor([0.6, 0.8]).double(), 8)


def test_spent_iterators_warn() -> None:
    """A loop that consumed its iterator would clip nothing, in silence."""
    ps = with_grads([torch.ones(2)])
    spent = as_generator(ps)
    list(spent)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_(spent, 1.0)
    plain = iter(ps)
    list(plain)
    with pytest.warns(UserWarning):
        clip_grad_norm_(plain, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_([], 1.0)  # an empty list is no accident
        clip_grad_norm_(iter(ps), 1.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids=str)
def test_error_if_nonfinite_leaves_the_gradients(norm_type: float, bad: float) -> None:
    grads = sample(torch.float32)
    grads[3][777] = bad
    kept = [g.clone() for g in grads]
    ps = with_grads(grads)
    with pytest.raises(RuntimeError) as ours:
        clip_grad_norm_(ps, 1.0, norm_type, error_if_nonfinite=True)
    with pytest.raises(RuntimeError) as theirs:
        torch.nn.utils.clip_grad_norm_(with_grads([g.clone() for g in kept]), 1.0, norm_type, error_if_nonfinite=True)
    assert str(ours.value) == str(theirs.value)
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(grads, kept, strict=True))
    with pytest.raises(RuntimeError, match="non-finite"):
        get_total_norm(grads, norm_type, error_if_nonfinite=True)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=str)
def test_non_finite_norms_scale_as_torchs(norm_type: float, bad: float) -> None:
    grads = sample(torch.float32)
    grads[1][3, 1] = bad
    ours, theirs = with_grads([g.clone() for g in grads]), with_grads([g.clone() for g in grads])
    got = clip_grad_norm_(ours, 1.0, norm_type)
    want = torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type, foreach=False)
    assert float(got) == pytest.approx(float(want), nan_ok=True)
    for p, q in zip(ours, theirs, strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad.isnan(), q.grad.isnan())
        assert_close(p.grad, q.grad.double(), 2)


@pytest.mark.parametrize("size", [1e25, 1e-25, 1e-40])
def test_norms_beyond_the_range_of_squares(size: float) -> None:
    g = torch.full(large(5000), size)
    want = norm64([g])
    assert float(get_total_norm([g])) == pytest.approx(want, rel=1e-5)
    assert float(grad_stats([g]).total_norm) == pytest.approx(want, rel=1e-5)
    p = with_grads([g])[0]
    assert float(clip_grad_norm_(p, want / 2)) == pytest.approx(want, rel=1e-5)
    assert_close(g, torch.full(g.shape, size).double() * (want / 2 / (want + 1e-6)), 4)


def test_gradients_are_written_only_when_clipped() -> None:
    """Neither their bits nor their version: a clip that does not act must not cost a pass or break autograd."""
    g = sample(torch.float32)[1]
    p = with_grads([g])[0]
    version, kept = g._version, g.clone()
    clip_grad_norm_([p], 1e9)
    assert torch.equal(g, kept)
    # Of an accelerator the host does not know, without waiting for it, whether the clip acts.
    assert BACKEND != "cpu" or g._version == version
    version = g._version
    clip_grad_norm_([p], 0.1)
    assert g._version > version, "a raw write must raise the version counter"


def test_clip_grads_with_norm_against_the_formula() -> None:
    totals = [(torch.tensor(10.0), 1.0), (torch.tensor(0.5, dtype=torch.float64), 1.0), (torch.tensor(0.0), 0.0)]
    for dtype in DTYPES:
        for total, max_norm in totals:
            grads = sample(dtype)
            ours = with_grads([*(g.clone() for g in grads), None])
            assert (
                clip_grads_with_norm_(as_generator(ours) if dtype == torch.float32 else ours, max_norm, total) is None
            )
            coef = min(1.0, max_norm / (float(total) + 1e-6))
            for p, g in zip(ours, grads, strict=False):
                assert p.grad is not None
                assert_close(p.grad, g.double() * coef, 2)


@pytest.mark.parametrize("dtype", some(DTYPES, WIDTHS), ids=short)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout(layout: Layout, dtype: torch.dtype) -> None:
    g = layout.grad(noise(layout.shape, 3, dtype))
    want, largest = norm64([g]), float(g.double().abs().max())
    stats = grad_stats([g])
    assert float(stats.total_norm) == pytest.approx(want, rel=1e-5)
    assert float(stats.amax) == largest and int(stats.nonfinite) == 0
    assert float(get_total_norm([g.clone()])) == pytest.approx(want, rel=4 * within(dtype))
    if 0 in g.stride() and g.numel() > 1 and layout.name.startswith("expanded"):
        return  # torch refuses to scale a gradient that repeats one element; the next test has that
    p = Parameter(torch.zeros_like(g))
    p.grad = g
    before = g.double().clone()
    clip_grad_norm_([p], want / 2)
    assert_close(g, before * ((want / 2) / (want + 1e-6)), 8)
    if any(word in layout.name for word in ("every_second_both", "every_third_column", "offset_3", "in_buffer")):
        assert "transposed" in layout.name or untouched(g), "wrote between the gradient's elements"


def test_expanded_gradients_are_refused_as_in_torch() -> None:
    p = Parameter(torch.zeros(4, 3))
    p.grad = torch.ones(3).expand(4, 3)
    assert float(grad_stats([p]).total_norm) == pytest.approx(math.sqrt(12))
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        clip_grad_norm_([p], 1.0)
    assert torch.equal(p.grad, torch.ones(4, 3))
    assert float(clip_grad_norm_([p], 100.0)) == pytest.approx(math.sqrt(12)), "nothing is written when nothing clips"


def test_complex_gradients() -> None:
    g = torch.tensor([3.0 + 4.0j, 0j])
    p = with_grads([g])[0]
    assert float(clip_grad_norm_([p], 2.5)) == pytest.approx(5.0)
    assert_close(torch.view_as_real(g), torch.tensor([[1.5, 2.0], [0.0, 0.0]]).double(), 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_grad_stats_against_formulas(dtype: torch.dtype) -> None:
    grads = [*sample(dtype), torch.zeros(0, dtype=dtype), torch.zeros(5, dtype=dtype), noise((3,), 9, torch.float32)]
    grads[0][2], grads[1][0, 0], grads[1][4, 1], grads[3][:100] = math.nan, math.inf, -math.inf, 0.0
    stats = grad_stats(grads)
    wides = [g.double() for g in grads]
    assert stats.nonfinites.tolist() == [1, 2, 0, 0, 0, 0, 0]
    assert stats.zero_counts.tolist() == [int((g == 0).sum()) for g in grads]
    assert (int(stats.nonfinite), int(stats.zeros)) == (3, sum(stats.zero_counts.tolist()))
    assert all(x.dim() == 0 for x in (stats.total_norm, stats.amax, stats.nonfinite, stats.zeros))
    assert all(x.shape == (len(grads),) for x in (stats.norms, stats.amaxes, stats.nonfinites, stats.zero_counts))
    assert not math.isfinite(float(stats.total_norm))
    for i in range(2, len(grads)):
        assert float(stats.norms[i]) == pytest.approx(norm64([grads[i]]), rel=1e-6), i
        assert float(stats.amaxes[i]) == (float(wides[i].abs().max()) if grads[i].numel() else 0.0), i
    clean = grad_stats(grads[2:])
    assert float(clean.total_norm) == pytest.approx(norm64(grads[2:]), rel=1e-6)
    assert float(clean.amax) == max(float(w.abs().max()) for w in wides[2:] if w.numel())


def test_grad_stats_takes_parameters_by_their_gradients() -> None:
    ps = with_grads([torch.tensor([3.0]), torch.tensor([4.0])])
    assert float(grad_stats(ps).total_norm) == 5.0
    loose = torch.zeros(1, requires_grad=True)
    loose.grad = torch.tensor([12.0])
    assert float(grad_stats([*ps, loose]).total_norm) == 13.0
    assert float(grad_stats([p.detach() for p in ps]).total_norm) == 0.0
    assert float(grad_stats([Parameter(torch.ones(3)), *ps]).total_norm) == 5.0, "no gradient, no contribution"
    assert float(grad_stats([]).total_norm) == 0.0


def test_signatures_are_torchs() -> None:
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"):
        ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (mo_fused, torch.nn.utils))
        assert [(p.name, p.default, p.kind) for p in ours.values()] == [
            (p.name, p.default, p.kind) for p in theirs.values()
        ]


@settings(max_examples=30 if INTERPRETED else 60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8),
    share=st.floats(0.01, 4.0),
)
def test_random_lists(sizes: list[int], dtypes: list[torch.dtype], share: float) -> None:
    grads = [noise((n,), 70 + i, d) for i, (n, d) in enumerate(zip(sizes, dtypes, strict=False))]
    exact = norm64(grads)
    stats = grad_stats(grads)
    assert float(stats.total_norm) == pytest.approx(exact, rel=1e-5)
    ps = with_grads([g.clone() for g in grads])
    clip_grad_norm_(ps, exact * share)
    coef = min(1.0, exact * share / (exact + 1e-6))
    for p, g in zip(ps, grads, strict=True):
        assert p.grad is not None
        assert_close(p.grad.float() if g.dtype == torch.float64 else p.grad, g.double() * coef, 8)
