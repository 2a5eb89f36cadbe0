"""The update rules against torch's single-tensor path in float64: values, rounding error, sizes, hyper-parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import (
    ADAM,
    ADAMW,
    BACKEND,
    BACKENDS,
    CASES,
    DTYPES,
    GUARD,
    HALF,
    INTERPRETED,
    RULES,
    SGD,
    Case,
    Gradients,
    assert_backend,
    drive,
    gradients,
    inside,
    large,
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
from oracle import assert_close, assert_same_bits, assert_states_close, reference, rms, wide
from torch import Tensor
from torch.nn import Parameter

# Scalars, one vector with a tail, a matrix, nothing at all, and one element more than a power of two.
SHAPES = [(), (1,), (7,), (5, 3), (0, 4), (1025,)]
STEPS = 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_against_float64(case: Case, dtype: torch.dtype, backend: str) -> None:
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, STEPS, dtype)
    grads[2][1] = None  # a parameter without a gradient keeps its own step count
    want, want_states = reference(case, values, grads)
    params = parameters(values)
    opt = case.ours(params, backend=backend)
    drive(opt, params, grads[:-1])
    drive(opt, params, grads[-1:])
    assert_backend(opt, backend)

    # The test must be able to see a wrong step: the weights moved by far more than the tolerance.
    moved = rms(want[-1] - wide(values[-1])) / (STEPS * torch.finfo(dtype).eps * 2 * rms(want[-1]))
    assert moved > 2, f"the reference moved by only {moved:.2g} tolerances"
    # In fp64 the bias correction 1 - beta**t itself is only known to eps / (1 - beta), in torch and here.
    slack = 10**6 if dtype == torch.float64 and "high" in case.name else 1
    for i, p in enumerate(params):
        assert_close(p, want[i], STEPS * slack, f"parameter {i} {tuple(p.shape)}")
        assert_states_close(states(opt, [p])[0], want_states[i], STEPS, f"state {i} {tuple(p.shape)}")


# The four rules that differ in arithmetic; amsgrad adds a maximum, Nesterov a second use of the gradient.
LONG_RUNS = [
    ADAMW,
    Case("AdamW", "amsgrad", dict(lr=1e-2, betas=(0.9, 0.9), weight_decay=0.1, amsgrad=True)),
    Case("Adam", "l2", dict(lr=1e-2, weight_decay=0.01)),
    Case("SGD", "nesterov", dict(lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.01)),
]
# Enough elements that the ratio of two rounding errors is known to about one per cent.
LONG_SHAPE = (4096,)
PERIOD = 50


def _long_data(dtype: torch.dtype) -> tuple[list[Tensor], Gradients]:
    return weights([LONG_SHAPE], dtype), [[noise(LONG_SHAPE, 100 + t, dtype)] for t in range(PERIOD)]


def _eps(index: int, dtype: torch.dtype) -> dict[str, Any]:
    """torch's own fp16 loop needs an eps that fp16 can hold, or it divides by zero and has no error to compare with."""
    return {"eps": 1e-3} if dtype == torch.float16 and LONG_RUNS[index].kind != "SGD" else {}


@functools.cache
def _long_reference(index: int, data: torch.dtype, dtype: torch.dtype) -> tuple[Any, Any]:
    values, grads = _long_data(data)
    return reference(LONG_RUNS[index], values, grads * (1000 // PERIOD), dtype=dtype, **_eps(index, data))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For thousands of tiny steps: two threads on a busy machine would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.not_interpreted(
    reason="1000 steps; test_triton.py shows that a long run has the bits of the CPU's kernels"
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=short)
@pytest.mark.parametrize(
    "index,backend", [(i, b) for b in BACKENDS for i in range(4) if b != "eager" or i in (0, 3)], ids=str
)
def test_error_after_1000_steps_is_at_most_torchs(
    index: int, backend: str, dtype: torch.dtype, one_thread: None
) -> None:
    values, grads = _long_data(dtype)
    (exact,), (exact_state,) = _long_reference(index, dtype, torch.float64)
    (theirs,), (their_state,) = _long_reference(index, dtype, dtype)
    params = parameters(values)
    opt = LONG_RUNS[index].ours(params, backend=backend, **_eps(index, dtype))
    drive(opt, params, grads * (1000 // PERIOD))
    assert_backend(opt, backend)
    state = states(opt, params)[0]
    pairs = {"parameter": (params[0], theirs, exact)}
    pairs |= {k: (state[k], their_state[k], exact_state[k]) for k in exact_state if k != "step"}
    for name, (ours, torchs, truth) in pairs.items():
        assert ours.dtype == dtype
        error, allowed = rms(wide(ours) - truth), rms(wide(torchs) - truth)
        assert allowed > 0, f"{name}: torch has no rounding error to compare with"
        assert error <= 1.15 * allowed, f"{name}: RMS error {error:.4g}, torch's {allowed:.4g}: {error / allowed:.3f} x"


# 1..70 covers every vector tail of every width; then one less and one more than likely chunk and block sizes. (A block
# of the Triton kernels is 256 to 1024 elements, and the smallest chunk 2048.)
EDGES = [n + d for n in some((1024, 4096, 16384, 32768), (256, 512, 1024, 2048)) for d in (-1, 0, 1)]
LAST = 36 if INTERPRETED else 70  # a thread of the Triton kernels takes at most 8 elements at a time
SIZES = [*range(1, LAST + 1), *EDGES]
OFFSETS = (0, 1, 3)  # aligned; off by one element; off by three (no alignment at all for 2-byte types)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", [ADAMW, SGD], ids=str)
def test_sizes_and_offsets_in_one_group(case: Case, dtype: torch.dtype) -> None:
    """Kernels only: what they cut into pieces, torch's operations of the eager backend take whole."""
    plan = [(n, off) for n in SIZES for off in (OFFSETS if n <= LAST else OFFSETS[n % 2 : n % 2 + 1])]
    total = sum(n for n, _ in plan)
    values, grads = noise((total,), 5, dtype), [noise((total,), 6 + t, dtype, 8.0) for t in range(2)]
    want = reference(case, [values], [[g] for g in grads])[0][0]
    cuts = [n for n, _ in plan]
    params = [Parameter(inside(v, (1,), off)) for v, (_, off) in zip(values.split(cuts), plan, strict=True)]
    opt = case.ours(params, backend=BACKEND)
    for t, flat in enumerate(grads):
        for p, g, (_, off) in zip(params, flat.split(cuts), plan, strict=True):
            p.grad = inside(g, (1,), OFFSETS[(off + t) % 3])
        opt.step()
    assert_backend(opt, BACKEND)
    for p, w, (n, off) in zip(params, want.split(cuts), plan, strict=True):
        assert_close(p, w, 2, f"size {n}, offset {off}")
        assert untouched(p), f"size {n}, offset {off}: wrote outside the parameter"
        assert p.grad is not None and untouched(p.grad), f"size {n}, offset {off}: wrote outside the gradient"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", [ADAMW, SGD], ids=str)
def test_sizes_alone(case: Case, dtype: torch.dtype, one_thread: None) -> None:
    """One tensor per optimizer: here nothing shares a chunk, and the states lie unaligned in guarded buffers."""
    for n in [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 65, *EDGES]:
        values, grads = [noise((n,), n, dtype)], [[noise((n,), n + 1 + t, dtype, 8.0)] for t in range(2)]
        p = Parameter(inside(values[0], (1,), n % 4))
        opt = case.ours([p], backend=BACKEND)
        drive(opt, [p], grads[:1])
        for key, slot in opt.state[p].items():
            if key != "step":
                opt.state[p][key] = inside(slot, (1,), (n + 1) % 4)
        drive(opt, [p], grads[1:])
        assert_backend(opt, BACKEND)
        want, want_states = reference(case, values, grads)
        assert_close(p, want[0], 2, f"size {n}")
        assert_states_close(states(opt, [p])[0], want_states[0], 2, f"size {n}")
        buffers = [p, *(s for k, s in opt.state[p].items() if k != "step")]
        assert all(untouched(b) for b in buffers), f"size {n}: wrote outside a tensor"


@settings(max_examples=40 if INTERPRETED else 80, deadline=None, derandomize=True)
@given(
    views=st.lists(strided_views(), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    case=st.sampled_from(RULES),
    backend=st.sampled_from(BACKENDS),
    offset=st.integers(0, 5),
)
def test_random_shapes_and_strides(views: Any, dtype: torch.dtype, case: Case, backend: str, offset: int) -> None:
    shapes = [shape for shape, _, _ in views]
    values, grads = weights(shapes, dtype), gradients(shapes, 2, dtype)
    want, _ = reference(case, values, grads)
    params = [Parameter(inside(v, s, offset)) for v, (_, s, _) in zip(values, views, strict=True)]
    opt = case.ours(params, backend=backend)
    for row in grads:
        for p, g, (_, _, s) in zip(params, row, views, strict=True):
            assert g is not None
            p.grad = inside(g, s, offset // 2)
        opt.step()
    assert_backend(opt, backend)
    for p, w, (shape, s, gs) in zip(params, want, views, strict=True):
        assert_close(p, w, 2, f"shape {shape}, strides {s}, gradient strides {gs}")
        assert untouched(p), f"shape {shape}, strides {s}: wrote between the elements"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=short)
# 0.999999 and 0.99999999: the bias corrections 1e-6 and 1e-8 must come from doubles, or the step is not lr.
@pytest.mark.parametrize("beta2", [0.9, 0.999, 0.999999, 0.99999999])
def test_first_adam_step_is_the_rate(beta2: float, dtype: torch.dtype, backend: str) -> None:
    p = Parameter(torch.zeros(33, dtype=dtype))
    p.grad = torch.full((33,), 0.5, dtype=dtype)
    opt = ADAMW.ours([p], lr=0.125, betas=(0.9, beta2), backend=backend)
    opt.step()
    assert_backend(opt, backend)
    # eps = 1e-8 beside a gradient of 0.5 takes 2e-8 off; the remainder is rounding.
    error = float((wide(p) + 0.125 / (1 + 2e-8)).abs().max())
    assert error <= 0.125 * 4 * max(torch.finfo(dtype).eps, 1e-14), f"off by {error:.3g}"


@pytest.mark.parametrize("backend", BACKENDS)
# 1000: the exponent matters; 10**6: 0.999999**t is 1/e; 2**24 - 2: the last counts that fp32 holds exactly.
@pytest.mark.parametrize("count", [1000, 10**6, 2**24 - 2])
def test_bias_correction_at_large_step_counts(count: int, backend: str) -> None:
    case = Case("AdamW", "long", dict(lr=0.1, betas=(0.9999, 0.999999)))
    values, grads = weights([(64,)]), gradients([(64,)], 2)
    params, truth = parameters(values), [wide(v).requires_grad_() for v in values]
    ours, theirs = case.ours(params, backend=backend), case.torch(truth)
    for opt, ps in ((ours, params), (theirs, truth)):
        drive(opt, ps, [[g if g is None else g.to(ps[0].dtype) for g in row] for row in grads[:1]])
        opt.state[ps[0]]["step"].fill_(count)
        drive(opt, ps, [[g if g is None else g.to(ps[0].dtype) for g in row] for row in grads[1:]])
    assert float(ours.state[params[0]]["step"]) == count + 1
    assert_close(params[0], truth[0].detach(), 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_zero_gradient_without_decay_changes_nothing(case: Case, dtype: torch.dtype, backend: str) -> None:
    """eps = 1e-8 is 0 in fp16: computed there, a zero gradient would give 0 / 0."""
    values = weights([(8, 3), (5,)], dtype)
    params = parameters(values)
    opt = case.ours(params, weight_decay=0.0, backend=backend)
    drive(opt, params, [[torch.zeros_like(v) for v in values]] * 3)
    assert_same_bits([p.detach() for p in params], values)
    assert all(bool(s.isfinite().all()) for st_ in states(opt, params) for s in st_.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rate_zero_changes_no_bit_of_a_parameter(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Also not the sign of zero: 0 - 0 * g is +0 or -0, depending on the sign of g."""
    tiny = torch.finfo(dtype).smallest_normal
    # An infinite weight may stay one too, unless L2 decay carries it into the moments.
    l2 = case.kwargs.get("weight_decay", 0.0) != 0 and case.kind != "AdamW" and "decoupled" not in case.name
    edge = 1e4 if l2 else math.inf
    special = torch.tensor([0.0, -0.0, tiny, -tiny, tiny / 4, -tiny / 4, 1.0, -3.0, edge, -edge], dtype=dtype)
    values = [special.repeat_interleave(4), noise((37,), 3, dtype)]
    signs = torch.tensor([1.0, -1.0, 0.0, -0.0], dtype=dtype).repeat(10)
    params = parameters(values)
    zero = torch.zeros_like(torch.as_tensor(case.kwargs["lr"])) if torch.is_tensor(case.kwargs["lr"]) else 0.0
    opt = case.ours(params, lr=zero, backend=backend)
    drive(opt, params, [[signs * (t + 1), noise((37,), 4 + t, dtype)] for t in range(3)])
    assert_backend(opt, backend)
    assert_same_bits([p.detach() for p in params], values)
    if case.kwargs.get("betas", (0.9,))[0] != 0 or "momentum_buffer" in opt.state[params[1]]:
        slots = [s for k, s in opt.state[params[1]].items() if k != "step"]
        assert all(bool((s != 0).any()) for s in slots), "moments must go on at rate 0"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALF, ids=short)
@pytest.mark.parametrize("case", [ADAMW, ADAM, SGD], ids=str)
def test_half_precision_weights_are_written_once(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Decay and update go into one fp32 value and one rounding: half a spacing from the exact result, never more."""
    shape = large(5000)
    values, grads = weights([shape], dtype), gradients([shape], 1, dtype)
    want = reference(case, values, grads)[0][0]
    params = parameters(values)
    opt = case.ours(params, backend=backend)
    drive(opt, params, grads)
    assert_backend(opt, backend)
    nearest = want.to(dtype)
    # fp32 noise may tip a value that lies almost exactly between two neighbours: allow one in a thousand.
    differ = int((params[0].detach().cpu() != nearest).sum())
    assert differ <= shape[0] // 1000, f"{differ} of {shape[0]} are not the rounded exact result"


def test_guard_finds_a_stray_write() -> None:
    """The guard itself must fail when it should."""
    view = inside(torch.ones(3, 2), (4, 2))
    assert untouched(view)
    torch.empty(0).set_(view.untyped_storage())[33] = GUARD + 1
    assert not untouched(view)
