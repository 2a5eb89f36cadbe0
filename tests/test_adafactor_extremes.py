"""Adafactor with huge, tiny, zero and non-finite gradients, at large step counts, and what must change no bit."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adafactor_reference import BOTH, FORMS, MOMENTUM, TORCH, TRANSFORMERS, Form
from cases import (
    BACKENDS,
    DTYPES,
    assert_backend,
    drive,
    gradients,
    noise,
    parameters,
    short,
    snapshot,
    some,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits, norm64, wide
from test_bits import instruction_sets
from torch import Tensor
from torch.nn import Parameter

import mo_fused
from mo_fused.backends import cpu

SHAPES = [(), (7,), (5, 3), (3, 4, 5), some([(130, 70)], [(11, 30)])[0]]


# -- extreme gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16, torch.float64], [torch.float32]), ids=short)
@pytest.mark.parametrize("form", BOTH, ids=str)
def test_huge_gradients_with_clipping(form: Form, dtype: torch.dtype, backend: str) -> None:
    """Their squares are beyond fp32 (of 1e200, beyond doubles): the norm is right, and so are the statistics."""
    size = 1e200 if dtype == torch.float64 else 1e25
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 2, dtype, scale=size)
    want, want_states = form.exact(values, grads, keep=True, max_norm=1.0)
    params = parameters(values)
    opt = form.ours(params, max_grad_norm=1.0, backend=backend)
    for row in grads:
        drive(opt, params, [row])
        assert float(opt.last_step.grad_norm) == pytest.approx(norm64(row), rel=1e-6)
    assert_backend(opt, backend)
    for p, w, s, ws in zip(params, want, states(opt, params), want_states, strict=True):
        assert_close(p, w, 16, f"{tuple(p.shape)}")
        for key in s:
            if key != "step":
                assert_close(s[key], ws[key], 64, f"{tuple(p.shape)} {key}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16, torch.float64], [torch.float32]), ids=short)
def test_tiny_gradients(dtype: torch.dtype, backend: str) -> None:
    """Of 1e-25: eps[0] decides, in either form. Of 1e-17 without it: the update has its full size."""
    cases: list[tuple[float, Form]] = [
        (1e-25, Form("tiny", "torch", dict(lr=0.1, eps=(1e-20, 1e-3), relative_step=False))),
        (1e-25, Form("tiny", "torch", dict(lr=0.1))),
        (1e-25, Form("tiny", "transformers", dict(lr=1e10, relative_step=False, beta1=0.9))),
        (1e-17, Form("tiny", "torch", dict(lr=0.1, eps=(0.0, 1e-3)))),
    ]
    shapes = some(SHAPES, SHAPES[1:4])
    for scale, form in cases:
        values, grads = weights(shapes, dtype), gradients(shapes, 2, dtype, scale=scale)
        want, _ = form.exact(values, grads, keep=True)
        params = parameters(values)
        opt = form.ours(params, backend=backend, stats=True)
        drive(opt, params, grads)
        assert_backend(opt, backend)
        assert float(opt.last_step.grad_norm) == pytest.approx(norm64(grads[-1]), rel=1e-6)
        for p, w in zip(params, want, strict=True):
            assert_close(p, w, 8, f"{scale} {form.options} {tuple(p.shape)}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some(DTYPES, [torch.float16]), ids=short)
def test_zero_gradients_without_decay_change_no_bit(dtype: torch.dtype, backend: str) -> None:
    """Also not the sign of zero, in both forms, from the start and after other gradients; nothing becomes NaN."""
    tiny = torch.finfo(dtype).smallest_normal
    special = torch.tensor([0.0, -0.0, tiny, -tiny, tiny / 4, 1.0, -3.0, 7.0], dtype=dtype)
    for form in (TORCH, TRANSFORMERS, Form("floor", "torch", dict(eps=(1e-30, 1e-3)))):
        params = parameters([special, special.repeat(4, 1), special.repeat(3).reshape(2, 3, 4)])
        start = [p.detach().clone() for p in params]
        opt = form.ours(params, backend=backend, weight_decay=0.0)
        drive(opt, params, [[torch.zeros_like(p) for p in params]] * 2)
        assert_same_bits([p.detach() for p in params], start, str(form))
        drive(opt, params, [[torch.ones_like(p) for p in params]])
        kept = [p.detach().clone() for p in params]
        drive(opt, params, [[torch.zeros_like(p) for p in params]])
        assert_same_bits([p.detach() for p in params], kept, str(form))
        assert all(bool(v.isfinite().all()) for s in states(opt, params) for v in s.values())
    # A row, and a column, that never had a gradient, as of a word that does not occur.
    p = Parameter(noise((6, 5), 1, dtype))
    before, g = p.detach().clone(), noise((6, 5), 2, dtype)
    g[2], g[:, 3] = 0.0, 0.0
    opt = TORCH.ours([p], backend=backend)
    drive(opt, [p], [[g]])
    assert torch.equal(p[2], before[2]) and torch.equal(p[:, 3], before[:, 3])
    assert_close(p, TORCH.exact([before], [[g]])[0][0], 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_gradients_without_skipping_do_what_torchs_do(bad: float, backend: str) -> None:
    """NaN where torch has NaN; elsewhere the same numbers (RMS(U) = NaN limits nothing, as with Python's max)."""
    shapes = [(9,), (6, 5), (2, 3, 4)]
    values, grads = weights(shapes), gradients(shapes, 3)
    for g in grads[1]:
        assert g is not None
        g.view(-1)[4] = bad
    params, others = parameters(values), parameters([wide(v) for v in values])
    opt = mo_fused.Adafactor(params, lr=0.1, eps=(1e-3, 1e-3), backend=backend)
    other = torch.optim.Adafactor(others, lr=0.1, eps=(1e-3, 1e-3), foreach=False)
    for row in grads:
        drive(opt, params, [row])
        drive(other, others, [[g if g is None else wide(g) for g in row]])
        for p, q in zip(params, others, strict=True):
            assert_close(p, q.detach(), 6, f"{tuple(p.shape)}")
    assert all(bool(p.isnan().any()) for p in params)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_beyond_fp32s_squares_without_clipping_give_torchs_nan(backend: str) -> None:
    params, others = parameters(weights([(6, 5)])), parameters(weights([(6, 5)]))
    row = gradients([(6, 5)], 1, scale=1e25)
    drive(mo_fused.Adafactor(params, backend=backend), params, row)
    drive(torch.optim.Adafactor(others), others, row)
    assert_same_bits(params[0].detach().isnan(), others[0].detach().isnan())


# -- sizes of steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
# 1 / sqrt(t) reaches 0.01, and 1e-6 t reaches 1 / sqrt(t), at ten thousand; 2**24 is the last that fp32 counts.
@pytest.mark.parametrize("count", some([98, 9998, 40_000, 2**24 - 4], [9998]))
@pytest.mark.parametrize("form", [TORCH, TRANSFORMERS, FORMS[7], FORMS[8]], ids=str)
def test_step_sizes_at_large_counts(form: Form, count: int, backend: str) -> None:
    values, grads = weights([(9, 5), (6,)]), gradients([(9, 5), (6,)], 4)
    _, entries = form.exact(values, grads[:1])
    params = parameters(values)
    opt = form.ours(params, backend=backend)
    drive(opt, params, grads[:1])
    for p, e in zip(params, entries, strict=True):
        opt.state[p]["step"].fill_(count)
        e["step"] = float(count)
    want, _ = form.exact([p.detach() for p in params], grads[1:], states=entries)
    drive(opt, params, grads[1:])
    assert_backend(opt, backend)
    for p, w in zip(params, want, strict=True):
        assert float(opt.state[p]["step"]) == count + 3
        assert_close(p, w, 4)


def test_maximize_is_a_step_against_the_gradient() -> None:
    for form in some((TORCH, TRANSFORMERS), (TORCH,)):
        up, down = parameters(weights(SHAPES)), parameters(weights(SHAPES))
        a, b = form.ours(up, maximize=True), form.ours(down)
        for row in gradients(SHAPES, 2):
            drive(a, up, [row])
            drive(b, down, [[None if g is None else -g for g in row]])
        assert_same_bits(snapshot(a, up), snapshot(b, down))


@pytest.mark.parametrize("dtypes", some([(torch.float32,), tuple(DTYPES)], [tuple(DTYPES)]), ids=len)
def test_order_and_grouping_change_no_bit(dtypes: tuple[torch.dtype, ...]) -> None:
    """With eps[0] = None each parameter has the spacing of its own dtype (torch's loop gives all that of the first)."""
    values = [noise(s, i, dtypes[i % len(dtypes)]) for i, s in enumerate(SHAPES)]
    rows = [[noise(s, 50 * t + i, values[i].dtype, 1e-4) for i, s in enumerate(SHAPES)] for t in (1, 2)]
    results = []
    for how in ("as they are", "reversed", "a group each"):
        params = parameters(values)
        order = params[::-1] if how == "reversed" else params
        opt = TORCH.ours([{"params": [p]} for p in params] if how == "a group each" else order)
        drive(opt, params, rows)
        results.append(snapshot(opt, params))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64), None], ids=str)
def test_the_rate_is_never_written(lr: Any) -> None:
    params = parameters(weights(SHAPES))
    opt = mo_fused.Adafactor(params, lr=lr, relative_step=True if lr is None else None)
    before = copy.deepcopy(lr)
    drive(opt, params, gradients(SHAPES, 3))
    assert opt.param_groups[0]["lr"] is lr and opt.defaults["lr"] is lr
    assert torch.equal(lr, before) if isinstance(lr, Tensor) else lr == before


# -- threads and instruction sets -------------------------------------------------------------------------------------


def fingerprint() -> str:
    """Of parameters and states after a few steps of everything: work for three threads, layouts, dtypes, tiles."""
    shapes = [(1100, 2100), *[(300, 200)] * 12, (7,), (270_000,), (40, 5, 3, 3), (33, 17)]
    digest = hashlib.sha256()
    for form in (TORCH, MOMENTUM):
        values = [noise(s, i, DTYPES[i % 4]) for i, s in enumerate(shapes)]
        params = [Parameter(v.t() if i == 3 else v) for i, v in enumerate(values)]
        opt = form.ours(params, backend="cpu", max_grad_norm=1.0, stats=True)
        for t in range(2):
            for i, p in enumerate(params):
                p.grad = noise(p.shape, 100 * t + i + 50, p.dtype)
            opt.step()
        assert_backend(opt, "cpu")
        for p in params:
            for x in (p, *opt.state[p].values()):
                digest.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digest.update(repr([float(opt.last_step.update_norm), float(opt.last_step.grad_norm)]).encode())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def own_fingerprint() -> str:
    return fingerprint()


@pytest.mark.cpu_only(reason="threads are those of the CPU's kernels")
@pytest.mark.parametrize("threads", [1, 3])
def test_thread_count_changes_no_bit(threads: int, own_fingerprint: str, teams_as_asked: None) -> None:
    before = torch.get_num_threads()
    assert before != threads, "this test would compare a count with itself"
    try:
        torch.set_num_threads(threads)
        assert fingerprint() == own_fingerprint
    finally:
        torch.set_num_threads(before)


CODE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_adafactor_extremes
from mo_fused.backends import cpu
print(cpu.instruction_set()[0], test_adafactor_extremes.fingerprint())
"""


@pytest.mark.cpu_only(reason="instruction sets are those of the CPU's kernels")
def test_instruction_set_changes_no_bit(own_fingerprint: str, run_python: Callable[..., Any]) -> None:
    own = cpu.instruction_set()[0]
    assert own in instruction_sets()
    for isa in instruction_sets():
        if isa == own:
            continue
        done = run_python("-c", CODE, env={"MO_FUSED_ISA": isa})
        assert done.returncode == 0, done.stderr[-2000:]
        used, bits = done.stdout.split()[-2:]
        assert used == isa, "the choice was not honoured: this test would compare the default with itself"
        assert bits == own_fingerprint, f"{isa} gives other bits than {own}"


MEMORY = """
import ctypes, sys
from pathlib import Path
import torch, mo_fused
torch.set_num_threads(2)
def kilobytes(field):
    return next(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
def made(shapes):
    params = [torch.nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    return params, mo_fused.Adafactor(params, max_grad_norm=1.0, stats=True)
made([(1500, 2100), (7,)])[1].step()  # loads the code, starts the threads
params, opt = made([(4096, 4096)] * 4 + [(8192,)])
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS:")
for _ in range(3):
    opt.step()
peak = kilobytes("VmHWM:") - before
state = sum(v.nbytes for s in opt.state.values() for v in s.values())
print((peak * 1024 - state) / sum(p.nbytes for p in params))
"""


@pytest.mark.cpu_only(reason="the subject is the process's resident memory")
def test_peak_memory_of_steps_is_less_than_a_hundredth_of_the_parameters(
    run_python: Callable[..., Any],
) -> None:
    """Beyond the state, of the first steps over large parameters, with clipping and statistics."""
    done = run_python("-c", MEMORY)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 0.01
