"""Memory layouts: any strides of parameter and gradient run natively, touch nothing else, and give the right values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    ADAMW,
    BACKEND,
    BACKENDS,
    DTYPES,
    LAYOUTS,
    PAIR,
    RULES,
    SGD,
    WIDTHS,
    Case,
    Gradients,
    Layout,
    assert_backend,
    drive,
    gradients,
    noise,
    parameters,
    place,
    short,
    some,
    states,
    untouched,
    weights,
)
from oracle import assert_close, assert_same_bits, assert_states_close, norm64, reference, wide
from torch import Tensor
from torch.nn import Parameter

GAPS = ("every", "gaps", "six", "in_buffer", "one_element", "size_one", "offset")


def guarded(name: str) -> bool:
    """Whether this layout lies in a buffer whose other elements must stay as they are."""
    return any(word in name for word in GAPS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some(DTYPES, WIDTHS), ids=short)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_against_float64(layout: Layout, dtype: torch.dtype, backend: str) -> None:
    for case in RULES:
        p = Parameter(layout.param(noise(layout.shape, 1, dtype)))
        start, stride = p.detach().clone(), p.stride()
        grads = [layout.grad(noise(layout.shape, 2 + t, dtype, 8.0)) for t in range(3)]
        want, want_states = reference(case, [start], [[g] for g in grads])
        opt = case.ours([p], backend=backend)
        for g in grads:
            before = g.clone()
            p.grad = g
            opt.step()
            assert torch.equal(g, before), "the gradient was written"
        assert_backend(opt, backend)
        assert p.stride() == stride
        assert_close(p, want[0], 3, str(case))
        assert_states_close(states(opt, [p])[0], want_states[0], 3, str(case))
        if guarded(layout.name):
            assert untouched(p), f"{case}: wrote between or beside the parameter's elements"


@pytest.mark.parametrize("case", RULES, ids=str)
def test_all_layouts_in_one_group(case: Case) -> None:
    """Side by side in one table, with every dtype: a row of one layout must not leak into the next."""
    params = [Parameter(lay.param(noise(lay.shape, 7 + i, DTYPES[i % 4]))) for i, lay in enumerate(LAYOUTS)]
    start = [p.detach().clone() for p in params]
    rows = [
        [lay.grad(noise(lay.shape, 60 + 50 * t + i, DTYPES[i % 4], 8.0)) for i, lay in enumerate(LAYOUTS)]
        for t in range(3)
    ]
    want, _ = reference(case, start, [list(row) for row in rows])
    opt = case.ours(params)
    for row in rows:
        for p, g in zip(params, row, strict=True):
            p.grad = g
        opt.step()
    assert_backend(opt, BACKEND)
    for p, w, layout in zip(params, want, LAYOUTS, strict=True):
        assert_close(p, w, 3, layout.name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_with_mixed_dtypes(layout: Layout) -> None:
    """bf16 weights, fp32 gradients and moments, strided: gathered, widened, computed, narrowed and scattered."""
    for case in RULES:
        start = noise(layout.shape, 1, torch.bfloat16)
        grads = [noise(layout.shape, 2 + t, torch.float32, 8.0) for t in range(3)]
        want, _ = reference(case, [start], [[layout.grad(g)] for g in grads])
        results = []
        for backend in PAIR:
            p = Parameter(layout.param(start.to(place(backend))))
            p.grad_dtype = torch.float32
            opt = case.ours([p], backend=backend, stats=True)
            for t, g in enumerate(grads):
                p.grad = layout.grad(g.to(p.device))
                opt.step()
                if t == 0:
                    opt.state[p].update({k: v.float() for k, v in opt.state[p].items()})
            assert_backend(opt, backend)
            assert_close(p, want[0], 3, str(case))
            assert not guarded(layout.name) or untouched(p)
            last = opt.last_step
            assert float(last.param_norm) == pytest.approx(norm64([p]), rel=1e-6)
            results.append((p.detach().clone(), states(opt, [p]), float(last.update_norm), float(last.grad_norm)))
        assert_same_bits(results[0][:2], results[1][:2], str(case))
        assert results[0][2:] == pytest.approx(results[1][2:], rel=1e-6)


def test_state_has_the_parameters_layout() -> None:
    """As torch's zeros_like: a dense parameter's moments have its strides, so that all four are walked in one order."""
    p = Parameter(noise((4, 3, 5, 2), 1).to(memory_format=torch.channels_last))
    opt = ADAMW.ours([p], amsgrad=True)
    drive(opt, [p], gradients([(4, 3, 5, 2)], 1))
    assert {k: s.stride() for k, s in opt.state[p].items() if k != "step"} == {
        k: p.stride() for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_states_of_other_strides(layout: Layout) -> None:
    """A checkpoint or an earlier layout may leave moments whose strides are not the parameter's."""
    for case in (ADAMW, SGD):
        p = Parameter(layout.param(noise(layout.shape, 1)))
        grads: Gradients = [[noise(layout.shape, 2 + t)] for t in range(3)]
        want, want_states = reference(case, [p], grads)
        opt = case.ours([p])
        drive(opt, [p], grads[:1])
        for key, slot in opt.state[p].items():
            if key != "step":
                opt.state[p][key] = slot.t().contiguous().t() if slot.dim() == 2 else slot.contiguous()
        drive(opt, [p], grads[1:])
        assert_backend(opt, BACKEND)
        assert_close(p, want[0], 3, str(case))
        assert_states_close(states(opt, [p])[0], want_states[0], 3, str(case))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
def test_empty_parameters(shape: tuple[int, ...], place: int, backend: str) -> None:
    """An empty tensor at the end of a group once made a pending launch get lost elsewhere."""
    for case in RULES:
        shapes: list[tuple[int, ...]] = [(7,), (5, 3)]
        shapes.insert(place, shape)
        values, grads = weights(shapes), gradients(shapes, 2)
        params = parameters(values)
        opt = case.ours(params, backend=backend, max_grad_norm=1e9, stats=True)
        drive(opt, params, grads)
        assert_backend(opt, backend)
        for p, want in zip(params, reference(case, values, grads)[0], strict=True):
            assert_close(p, want, 2, f"{case} {shape}")


def test_nothing_but_empty_parameters() -> None:
    p = Parameter(torch.empty(0, 3))
    opt = ADAMW.ours([p], max_grad_norm=1.0)
    drive(opt, [p], [[torch.empty(0, 3)]] * 2)
    assert float(opt.state[p]["step"]) == 2
    assert float(opt.last_step.grad_norm) == 0


def expand_rows() -> Tensor:
    return torch.ones(3).expand(4, 3)


def expand_columns() -> Tensor:
    return torch.ones(4, 1).expand(4, 3)


def expand_scalar() -> Tensor:
    return torch.ones(()).expand(5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [expand_rows, expand_columns, expand_scalar])
def test_overlapping_parameter_is_refused(make: Any, backend: str) -> None:
    """With torch's text, and before anything has changed, also in the parameters ahead of it."""
    for case in RULES:
        good, bad = Parameter(torch.ones(6)), Parameter(make())
        opt = case.ours([good, bad], backend=backend)
        good.grad, bad.grad = torch.ones(6), torch.ones(bad.shape)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single mem"):
            opt.step()
        assert torch.equal(good.detach(), torch.ones(6)), f"{case}: a parameter changed before the refusal"
        assert torch.equal(bad.detach(), make()), f"{case}: the refused parameter changed"
        assert not any(float(s.get("step", 0)) for s in opt.state.values()), f"{case}: a step was counted"
        bad.grad = None
        opt.step()  # the optimizer is still in order
        assert not torch.equal(good.detach(), torch.ones(6))


# The same memory twice; two ranges that share their middle; a matrix and its transpose. Of more than one chunk each, so
# that side by side they would be updated in another order.
ALIASES: dict[str, Any] = {
    "same": lambda b: (b, b),
    "partial": lambda b: (b[:20_000], b[9_000:]),
    "transposed": lambda b: (b.view(150, 200), b.view(150, 200).t()),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alias", list(ALIASES))
@pytest.mark.parametrize("case", RULES, ids=str)
def test_parameters_that_share_memory(case: Case, alias: str, backend: str) -> None:
    """torch's loop updates one after the other, so the second sees the first one's result."""
    buffers = [noise((30_000,), 3), wide(noise((30_000,), 3))]
    results = []
    for buffer, make in zip(buffers, (case.ours, case.torch), strict=True):
        params = [Parameter(v) for v in ALIASES[alias](buffer)]
        opt = make(params, **({"backend": backend} if make == case.ours else {}))
        for t in range(3):
            for i, p in enumerate(params):
                p.grad = noise(p.shape, 20 + 2 * t + i, torch.float32).to(p.device, p.dtype)
            opt.step()
        results.append(buffer)
    assert_close(results[0], results[1], 6)


def test_one_gradient_for_two_parameters() -> None:
    values, g = weights([(50,), (50,)]), noise((50,), 9)
    want, _ = reference(ADAMW, values, [[g, g]] * 2)
    params = parameters(values)
    opt = ADAMW.ours(params, max_grad_norm=1e9)
    for _ in range(2):
        params[0].grad = params[1].grad = g
        opt.step()
    for p, w in zip(params, want, strict=True):
        assert_close(p, w, 2)


@pytest.mark.parametrize("case", RULES, ids=str)
def test_complex_parameters_fall_back_to_torch(case: Case) -> None:
    values = [torch.complex(noise((4, 3), 1), noise((4, 3), 2)), noise((5,), 3)]
    grads: Gradients = [
        [torch.complex(noise((4, 3), 9 + t), noise((4, 3), 19 + t)), noise((5,), 29 + t)] for t in range(3)
    ]
    want, _ = reference(case, values, grads)
    params = parameters(values)
    opt = case.ours(params)
    drive(opt, params, grads)
    assert [r.backend for r in opt.explain()] == ["torch", BACKEND]
    assert all(r.reason for r in opt.explain() if r.backend == "torch"), "a fallback must say why"
    assert_close(torch.view_as_real(params[0].detach()), torch.view_as_real(want[0]), 3)
    assert_close(params[1], want[1], 3)


def test_complex_parameters_count_in_norm_and_skip() -> None:
    """A fallback parameter takes part in clipping and in the decision to skip."""
    a, b = Parameter(torch.zeros(1, dtype=torch.complex64)), Parameter(torch.zeros(1))
    opt = Case("SGD", "plain", dict(lr=1.0)).ours([a, b], max_grad_norm=6.5, skip_nonfinite=True)
    a.grad, b.grad = torch.tensor([3.0 + 4.0j]), torch.tensor([12.0])
    opt.step()
    assert float(opt.last_step.grad_norm) == pytest.approx(13.0, rel=1e-6)
    assert_close(torch.view_as_real(a.detach()), torch.tensor([[-1.5, -2.0]], dtype=torch.float64), 4)
    assert_close(b, torch.tensor([-6.0], dtype=torch.float64), 4)
    before = [a.detach().clone(), b.detach().clone()]
    a.grad = torch.tensor([complex(0.0, float("nan"))])
    opt.step()
    assert bool(opt.last_step.skipped) and torch.equal(a.detach(), before[0]) and torch.equal(b.detach(), before[1])


def test_sparse_gradients() -> None:
    """SGD trains with them, as torch's does; Adam refuses them with torch's text, whatever was ready to step."""
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    p = Parameter(torch.ones(3, 2))
    opt = Case("SGD", "plain", dict(lr=0.5)).ours([p])
    p.grad = dense.to_sparse(1)
    opt.step()
    assert torch.equal(p.detach(), 1 - 0.5 * dense)
    assert [r.backend for r in opt.explain()] == ["torch"]
    for case in RULES[:2]:
        q, r = Parameter(torch.ones(2)), Parameter(torch.ones(3, 2))
        other = case.ours([q, r])
        q.grad, r.grad = torch.ones(2), dense.to_sparse(1)
        with pytest.raises(RuntimeError, match="does not support sparse gradients, please consider SparseAdam"):
            other.step()
        assert torch.equal(q.detach(), torch.ones(2)) and not other.state[q], f"{case}: changed before the refusal"


def test_lazily_negated_gradients() -> None:
    """The imaginary part of a conjugate is a view whose sign is applied when read: raw memory has the wrong one."""
    for case in RULES:
        p = Parameter(noise((5,), 1))
        g = torch.complex(noise((5,), 2), noise((5,), 3)).conj().imag
        assert g.is_neg()
        want, _ = reference(case, [p], [[g.clone()]])
        opt = case.ours([p], max_grad_norm=1e9)
        p.grad = g
        opt.step()
        assert_close(p, want[0], 1)


def test_explain_before_the_first_step() -> None:
    params = [
        Parameter(torch.ones(2)),
        Parameter(torch.ones(2, dtype=torch.complex64)),
        Parameter(torch.ones(2, 4)[:, ::2]),
    ]
    assert [r.backend for r in ADAMW.ours(params).explain()] == [BACKEND, "torch", BACKEND]
    assert [r.backend for r in ADAMW.ours(params, backend="eager").explain()] == ["eager", "torch", "eager"]


def test_backend_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Parameter(torch.ones(2))
    monkeypatch.setenv("MO_FUSED_BACKEND", "eager")
    opt = ADAMW.ours([p])
    drive(opt, [p], [[torch.ones(2)]])
    assert_backend(opt, "eager")
    drive(explicit := ADAMW.ours([p], backend=BACKEND), [p], [[torch.ones(2)]])
    assert_backend(explicit, BACKEND)
    monkeypatch.setenv("MO_FUSED_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        ADAMW.ours([p])


def test_explain_is_a_table() -> None:
    named = [("w", Parameter(torch.ones(3, 2, dtype=torch.bfloat16))), ("b", Parameter(torch.ones(3)))]
    opt = ADAMW.ours([{"params": named[:1]}, {"params": named[1:]}])
    drive(opt, [p for _, p in named], [[torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(3)]])
    got = [(r.name, r.group, tuple(r.shape), r.dtype, r.backend) for r in opt.explain()]
    assert got == [("w", 0, (3, 2), torch.bfloat16, BACKEND), ("b", 1, (3,), torch.float32, BACKEND)]
    text = str(opt.explain())
    assert all(word in text for word in ("w", "b", BACKEND, "bfloat16")), text


def test_views_with_a_storage_offset_share_one_buffer() -> None:
    """Parameters carved out of one flat buffer, as sharded optimizers do: odd offsets, no padding between."""
    sizes = [1, 3, 5, 7, 64, 65, 129]
    flat, g = noise((sum(sizes) + 2,), 4), noise((sum(sizes),), 5)
    want, _ = reference(ADAMW, [flat[1:-1]], [[g]])
    params = [Parameter(v) for v in flat[1:-1].split(sizes)]
    ends = (float(flat[0]), float(flat[-1]))
    opt = ADAMW.ours(params)
    for p, part in zip(params, g.split(sizes), strict=True):
        p.grad = part
    opt.step()
    assert_backend(opt, BACKEND)
    assert_close(flat[1:-1], want[0], 1)
    assert (float(flat[0]), float(flat[-1])) == ends
