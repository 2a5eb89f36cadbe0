"""Adafactor against float64 references written from the papers' formulae (tests/adafactor_reference.py)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adafactor_reference import BOTH, FORMS, MOMENTUM, TORCH, Form, State
from cases import (
    BACKEND,
    BACKENDS,
    DTYPES,
    HALF,
    INTERPRETED,
    LAYOUTS,
    Layout,
    assert_backend,
    drive,
    gradients,
    inside,
    noise,
    parameters,
    short,
    some,
    states,
    strided_views,
    untouched,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close, assert_same_bits, rms, wide
from torch import Tensor
from torch.nn import Parameter

# A scalar, vectors, matrices, wide and tall ones, a batch of matrices, convolutions, 1x1 matrices, and nothing.
SHAPES = [
    (),
    (7,),
    (5, 3),
    (2, 70),
    (70, 2),
    (3, 4, 5),
    (6, 2, 3, 3),
    (4, 5, 1, 1),
    (1, 9),
    (9, 1),
    (0, 4),
    (3, 0),
    (0,),
]
FEW = some(SHAPES, [(), (7,), (5, 3), (3, 2, 3), (0, 4)])
STEPS = some([50], [3])[0]


def assert_states(got: dict[str, Tensor], want: State, within: int, where: str = "state") -> None:
    """Keys in order, equal counts, and values within so many spacings."""
    assert list(got) == list(want), f"{where}: keys {list(got)} instead of {list(want)}"
    assert float(got["step"]) == want["step"]
    for key in want:
        if key != "step":
            assert_close(got[key], want[key], within, f"{where}[{key!r}]")


def spacings(steps: int, dtype: torch.dtype) -> int:
    """What assert_close may allow of a parameter: in float64 the reference itself rounds as much as what is tested."""
    return 4 * steps if dtype == torch.float64 else steps


def assert_nearly(got: Tensor, want: Tensor, tolerance: float, where: str) -> None:
    """Every element within `tolerance` of its size and the tensor's."""
    off = (wide(got) - want).abs() - tolerance * (want.abs() + rms(want))
    assert not (off > 0).any(), f"{where}: off by {float((wide(got) - want).abs().max()):.3g}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_float64_is_the_formula(form: Form, backend: str) -> None:
    """Fifty steps to 1e-12, with a parameter that has no gradient at times and keeps its own step count."""
    values, grads = weights(FEW, torch.float64), gradients(FEW, STEPS, torch.float64)
    grads[2][1] = None
    want, want_states = form.exact(values, grads)
    params = parameters(values)
    opt = form.ours(params, backend=backend)
    drive(opt, params, grads)
    assert_backend(opt, backend)
    moved = rms(want[2] - wide(values[2])) / rms(want[2])
    assert moved > 1e-6, f"the reference moved by {moved:.2g} only: no test of it"
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        where = f"{tuple(p.shape)}"
        assert_nearly(p, w, 1e-12, where)
        assert list(s) == list(ws) and float(s["step"]) == ws["step"]
        for key in s:
            assert s[key].dtype == (torch.float32 if key == "step" else torch.float64)
            if key != "step":
                assert_nearly(s[key], ws[key], 1e-12, f"{where} {key}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", some(FORMS, FORMS[1:12:5]), ids=str)
def test_float32_is_the_formula_within_rounding(form: Form, backend: str) -> None:
    """A spacing a step: each step rounds the parameter once, and a step's own error is a few spacings of its size."""
    values, grads = weights(FEW), gradients(FEW, STEPS)
    want, want_states = form.exact(values, grads)
    params = parameters(values)
    opt = form.ours(params, backend=backend)
    drive(opt, params, grads)
    assert_backend(opt, backend)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, STEPS, f"{tuple(p.shape)}")
        assert_states(s, ws, 8, f"{tuple(p.shape)}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALF, ids=short)
@pytest.mark.parametrize("form", some([TORCH, MOMENTUM, FORMS[3], FORMS[8]], [FORMS[3]]), ids=str)
def test_half_precision_rounds_the_parameter_alone(form: Form, dtype: torch.dtype, backend: str) -> None:
    """Against a float64 reference that rounds the parameter after each step and nothing else.

    An fp32 step is off by some 2^-22 of the values it adds, so that it lands on the other side of the middle between
    two neighbours for about one element in 2^-22 / 2^-8 = 16384 (bf16; fp16: 2048) a step. Such an element is one
    spacing off, and stays so: gradients are given, and nothing draws it back. It also moves the RMS of its parameter,
    and with it the step size, by a few times what rounding does: so a few times as many may differ, by a spacing.
    """
    shapes = some([(), (300,), (40, 30), (4, 5, 7), (16, 8, 3, 3)], [(), (300,), (20, 10), (8, 3, 3)])
    values, grads = weights(shapes, dtype), gradients(shapes, STEPS, dtype)
    want, want_states = form.exact(values, grads, keep=True)
    params = parameters(values)
    opt = form.ours(params, backend=backend)
    drive(opt, params, grads)
    assert_backend(opt, backend)
    differ = elements = 0
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert p.dtype == dtype and all(v.dtype == torch.float32 for v in s.values())
        differ += int((wide(p) != w).sum())
        elements += p.numel()
        assert_close(p, w, 2, f"{tuple(p.shape)}")
        assert_states(
            {k: v for k, v in s.items() if k != "exp_avg"}, {k: v for k, v in ws.items() if k != "exp_avg"}, 8
        )
    tipped = STEPS * 2**-22 / (torch.finfo(dtype).eps / 2) * elements
    assert differ <= 4 * tipped + 2, f"{differ} of {elements} differ: more than ties explain"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16, torch.float64]), ids=short)
def test_every_shape_alone(dtype: torch.dtype, backend: str) -> None:
    more = [
        (1,),
        (1, 1),
        (2, 1, 1),
        (1, 1, 5),
        (33, 65),
        (65, 33),
        (128, 16),
        (3, 17, 31),
        (300, 3, 3),
        (2, 2, 2, 2, 3),
    ]
    for shape in some([*SHAPES, *more], [(), (7,), (1, 1), (1, 40), (40, 1), (300, 3, 3), (33, 65)]):
        for form in some(BOTH, [MOMENTUM]):
            values, grads = weights([shape], dtype), gradients([shape], 2, dtype)
            want, want_states = form.exact(values, grads, keep=True)
            params = parameters(values)
            opt = form.ours(params, backend=backend)
            drive(opt, params, grads)
            assert_backend(opt, backend)
            assert_close(params[0], want[0], spacings(2, dtype), f"{form} {shape}")
            assert_states(states(opt, params)[0], want_states[0], 8, f"{form} {shape}")


# Larger than the largest tile in both directions, with edges that are no multiples of anything; on a device tiles have
# at most 512 columns and 256 rows or more.
CUT: list[tuple[int, ...]] = [(1031, 2053)] if BACKEND == "cpu" else [(259, 523)]
CUT += [(2, 1030, 70), (3, 5, 2070)] if BACKEND == "cpu" else [(3, 5, 530)]
CUT += [(9000, 5, 7), (270_001,)] if BACKEND == "cpu" else [(70, 5, 7), (5000,)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], [torch.float32]), ids=short)
def test_parameters_of_several_tiles(dtype: torch.dtype, backend: str) -> None:
    values, grads = weights(CUT, dtype), gradients(CUT, some([2], [1])[0], dtype)
    want, want_states = MOMENTUM.exact(values, grads, keep=True)
    params = parameters(values)
    opt = MOMENTUM.ours(params, backend=backend, stats=True)
    drive(opt, params, grads)
    assert_backend(opt, backend)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, 2, f"{tuple(p.shape)}")
        assert_states(s, ws, 8, f"{tuple(p.shape)}")
    assert float(opt.last_step.param_norm) == pytest.approx(math.hypot(*(float(w.norm()) for w in want)), rel=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout: Layout, backend: str) -> None:
    """Whatever the order in memory: rows and columns are those of the shape, and gaps are not written."""
    for form, dtype in some([(TORCH, torch.float32), (MOMENTUM, torch.bfloat16)], [(MOMENTUM, torch.bfloat16)]):
        start, drawn = noise(layout.shape, 1, dtype), [noise(layout.shape, 2 + t, dtype, 8.0) for t in range(2)]
        rows = [layout.grad(g) for g in drawn]
        want, want_states = form.exact([start], [[g] for g in rows], keep=True)
        p = Parameter(layout.param(start))
        stride, kept = p.stride(), [g.clone() for g in rows]
        opt = form.ours([p], backend=backend, stats=True)
        for g in rows:
            p.grad = g
            opt.step()
        assert_backend(opt, backend)
        assert p.stride() == stride
        assert_same_bits(rows, kept, "the gradient was written")
        assert_close(p, want[0], 3, str(form))
        assert_states(states(opt, [p])[0], want_states[0], 6, str(form))
        guarded = p.untyped_storage().nbytes() > p.numel() * p.element_size()
        assert not guarded or untouched(p), "wrote between or beside the parameter's elements"
        assert float(opt.last_step.param_norm) == pytest.approx(float(want[0].norm()), rel=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_layouts_and_dtypes_in_one_group(backend: str) -> None:
    """eps[0] = None is the spacing of each parameter's own dtype, whatever comes first in the group."""
    for turn in some((1, -1), (1,)):
        order = list(enumerate(LAYOUTS))[::turn]
        start = [lay.param(noise(lay.shape, 7 + i, DTYPES[i % 4])) for i, lay in order]
        rows = [[lay.grad(noise(lay.shape, 60 + 50 * t + i, DTYPES[i % 4], 8.0)) for i, lay in order] for t in range(2)]
        params = [Parameter(v.clone() if v.is_contiguous() else v) for v in start]
        want, _ = TORCH.exact([p.detach().clone() for p in params], rows, keep=True)
        opt = TORCH.ours(params, backend=backend)
        for row in rows:
            for p, g in zip(params, row, strict=True):
                p.grad = g
            opt.step()
        assert_backend(opt, backend)
        for p, w, (_, layout) in zip(params, want, order, strict=True):
            assert_close(p, w, spacings(2, p.dtype), layout.name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad_dtype", some(DTYPES, DTYPES[1:]), ids=short)
@pytest.mark.parametrize("dtype", some(DTYPES, DTYPES[:2]), ids=short)
def test_gradients_of_another_dtype(dtype: torch.dtype, grad_dtype: torch.dtype, backend: str) -> None:
    shapes = some([(), (33,), (7, 5), (3, 3, 3), (40, 70)], [(33,), (7, 5)])
    values, grads = weights(shapes, dtype), gradients(shapes, 2, grad_dtype)
    want, want_states = MOMENTUM.exact(values, grads, keep=True)
    params = parameters(values)
    if grad_dtype != dtype:
        for p in params:
            p.grad_dtype = grad_dtype
    opt = MOMENTUM.ours(params, backend=backend)
    drive(opt, params, grads)
    assert_backend(opt, backend)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, spacings(2, dtype))
        assert_states(s, ws, 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16]), ids=short)
def test_first_moment_of_another_dtype(dtype: torch.dtype, state_dtype: str, backend: str) -> None:
    values, grads = weights(FEW, dtype), gradients(FEW, 3, dtype)
    want, want_states = MOMENTUM.exact(values, grads, keep=True)
    params = parameters(values)
    opt = MOMENTUM.ours(params, backend=backend, state_dtype=state_dtype)
    drive(opt, params, grads)
    assert_backend(opt, backend)
    stored = torch.float32 if state_dtype == "fp32" else torch.bfloat16
    coarse = max(torch.finfo(stored).eps, torch.finfo(dtype).eps)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert s["exp_avg"].dtype == stored
        assert_close(s["exp_avg"], ws["exp_avg"], 3)
        # The moments' rounding counts by the size of the moments, a hundredth of the weights'.
        assert_nearly(p, w, 3 * torch.finfo(dtype).eps + 0.06 * coarse, f"{tuple(p.shape)}")


@pytest.mark.parametrize("dtype", some(DTYPES, DTYPES[:2]), ids=short)
def test_unaligned_addresses(dtype: torch.dtype) -> None:
    """Everything that has an address begins at an odd one, between guards."""
    shapes = some([(n,) for n in (1, 5, 17, 65)] + [(3, 5), (9, 33), (2, 3, 3), (17, 1)], [(17,), (9, 33), (2, 3, 3)])
    values, grads = weights(shapes, dtype), gradients(shapes, 3, dtype)
    want, want_states = MOMENTUM.exact(values, grads, keep=True)
    params = [Parameter(inside(v, v.stride(), 1 + i % 3)) for i, v in enumerate(values)]
    opt = MOMENTUM.ours(params, backend=BACKEND)
    for t, row in enumerate(grads):
        for i, (p, g) in enumerate(zip(params, row, strict=True)):
            assert g is not None
            p.grad = inside(g, g.stride(), (i + t) % 4)
        opt.step()
        if t == 0:
            for i, p in enumerate(params):
                entry = opt.state[p]
                entry.update({k: inside(v, v.stride(), 1 + i % 3) for k, v in entry.items() if k != "step"})
    assert_backend(opt, BACKEND)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, spacings(3, dtype), f"{tuple(p.shape)}")
        assert_states(s, ws, 8, f"{tuple(p.shape)}")
        for x in (p, p.grad, *(v for k, v in opt.state[p].items() if k != "step")):
            assert x is not None and untouched(x), f"{tuple(p.shape)}: wrote outside a tensor"


@settings(max_examples=6 if INTERPRETED else 80)
@given(
    views=st.lists(strided_views(), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    backend=st.sampled_from(BACKENDS),
    offset=st.integers(0, 5),
)
def test_random_shapes_strides_and_options(
    views: Any, dtype: torch.dtype, form: Form, backend: str, offset: int
) -> None:
    shapes = [shape for shape, _, _ in views]
    values, grads = weights(shapes, dtype), gradients(shapes, 2, dtype)
    want, want_states = form.exact(values, grads, keep=True)
    params = [Parameter(inside(v, s, offset)) for v, (_, s, _) in zip(values, views, strict=True)]
    opt = form.ours(params, backend=backend)
    for row in grads:
        for p, g, (_, _, s) in zip(params, row, views, strict=True):
            assert g is not None
            p.grad = inside(g, s, offset // 2)
        opt.step()
    assert_backend(opt, backend)
    for p, w, s, ws, view in zip(params, want, states(opt, params), want_states, views, strict=True):
        assert_close(p, w, spacings(2, dtype), f"{form}: shape, strides {view}")
        assert_states(s, ws, 8, f"{form}: shape, strides {view}")
        assert untouched(p), f"{view}: wrote between the elements"
