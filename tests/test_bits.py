"""Equal bits: neither another backend, nor the thread count, nor the instruction set may change a single one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    ADAMW,
    AMSGRAD,
    BACKEND,
    BACKENDS,
    CASES,
    DTYPES,
    HALF,
    INTERPRETED,
    PAIR,
    RULES,
    SGD,
    Case,
    Gradients,
    Rows,
    assert_backend,
    drive,
    gradients,
    large,
    noise,
    parameters,
    place,
    short,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits, reference
from torch import Tensor

# Vector bodies and tails of every width (33 = 2 * 16 + 1), scalars, nothing, and a tensor of more than one chunk.
SHAPES = [(), (33,), (7, 5), (0,), large(70, 300)]
# Mixed dtypes are widened tile by tile: 4100 elements are two tiles and a tail.
MIXED_SHAPES = [(), (33,), (7, 5), large(4100)]
# A thread is woken for every 131072 elements or so: this is work for three. Tensors of less than 32768 elements, so
# that torch's own operations stay on one thread; one that is longer, where torch's sums depend on the thread count.
THREAD_SHAPES = [*[(30_000,)] * 9, (40, 700), (3,), *[(n,) for n in range(1, 60)], (50_001,)]


def run(
    case: Case,
    backend: str,
    values: list[Tensor],
    grads: Rows,
    slots: dict[str, torch.dtype] | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[dict[str, Tensor]], Any]:
    """Parameters, states and the optimizer after the steps; `slots` gives state tensors another dtype after step 1."""
    params = parameters([v.to(place(backend)) for v in values])
    for p, g in zip(params, grads[0], strict=True):
        if g is not None and g.dtype != p.dtype:
            p.grad_dtype = g.dtype
    opt = case.ours(params, backend=backend, **options)
    drive(opt, params, grads[:1])
    for p in params:
        for key, dtype in (slots or {}).items():
            opt.state[p][key] = opt.state[p][key].to(dtype)
    drive(opt, params, grads[1:])
    assert_backend(opt, backend)
    return [p.detach().clone() for p in params], states(opt, params), opt


def assert_backends_agree(case: Case, values: list[Tensor], grads: Rows, **options: Any) -> None:
    native, native_states, _ = run(case, PAIR[0], values, grads, **options)
    other, other_states, _ = run(case, PAIR[1], values, grads, **options)
    assert_same_bits(other, native, "parameter")
    assert_same_bits(other_states, native_states, "state")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backends_agree(case: Case, dtype: torch.dtype) -> None:
    grads = gradients(SHAPES, 2 if INTERPRETED else 5, dtype)
    # Normal values next to the large ones of `gradients`: roundings of every size.
    more = 1 if INTERPRETED else 2
    grads += [[noise(s, 900 + 10 * t + i, dtype) for i, s in enumerate(SHAPES)] for t in range(more)]
    assert_backends_agree(case, weights(SHAPES, dtype), grads)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", RULES, ids=str)
def test_agreement_with_another_gradient_dtype(case: Case, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    values, grads = weights(MIXED_SHAPES, dtype), gradients(MIXED_SHAPES, 3, grad_dtype)
    assert_backends_agree(case, values, grads)
    params, _, _ = run(case, "cpu", values, grads)
    for p, want in zip(params, reference(case, values, grads)[0], strict=True):
        assert_close(p, want, 3)


# Every storage type of the moments under every parameter type, and moments that differ from each other.
MOMENTS = [(d, m, m) for d in DTYPES for m in DTYPES if d != m]
MOMENTS += [(torch.float32, torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("dtype,first,second", MOMENTS, ids=lambda d: short(d))
def test_agreement_with_other_moment_dtypes(dtype: torch.dtype, first: torch.dtype, second: torch.dtype) -> None:
    values, grads = weights(MIXED_SHAPES, dtype), gradients(MIXED_SHAPES, 4, dtype)
    slots = {"exp_avg": first, "exp_avg_sq": second}
    assert_backends_agree(ADAMW, values, grads, slots=slots)
    assert_backends_agree(AMSGRAD, values, grads, slots=slots | {"max_exp_avg_sq": second})
    assert_backends_agree(SGD, values, grads, slots={"momentum_buffer": first})
    _, after, _ = run(ADAMW, "cpu", values, grads, slots=slots)
    assert after[1]["exp_avg"].dtype == first and after[1]["exp_avg_sq"].dtype == second, "a slot changed its dtype"


def test_agreement_of_mixed_dtypes_in_one_group() -> None:
    values = [noise((n,), 50 + n, DTYPES[n % 4]) for n in range(1, 41)]
    grads: Gradients = [[noise(v.shape, 90 + i + 100 * t, v.dtype) for i, v in enumerate(values)] for t in range(3)]
    assert_backends_agree(ADAMW, values, grads)
    params, _, _ = run(ADAMW, "cpu", values, grads)
    for p, want in zip(params, reference(ADAMW, values, grads)[0], strict=True):
        assert_close(p, want, 3)


# inf and NaN; both zeros; denormals (of fp32, of fp16, of bf16); 1e25, whose square overflows fp32; 1e-25, whose square
# underflows; the largest finite values of fp16 and bf16; 1e200 and 1e-200 for fp64.
SPECIAL = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-45, -1e-40, 6e-8, 1e25, -1e25, 1e-25, 65504.0]
SPECIAL += [3.3e38, 1e200, 1e-200, 1.0, -2.5]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agreement_on_special_values(case: Case, dtype: torch.dtype) -> None:
    """Every special gradient meets every special weight, and a second one meets the moments that the first has left."""
    table = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    n = len(SPECIAL)
    values = [table.repeat_interleave(n), table.flip(0)]
    first, second = table.repeat(n), table.roll(5).repeat(n)
    grads: Gradients = [[first, table], [second, table.roll(3)], [first.flip(0), torch.ones_like(table)]]
    assert_backends_agree(case, values, grads)


@pytest.mark.parametrize("case", RULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
# 1024 is exact; 3 has no exact inverse, so the coefficient itself must be rounded alike.
@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_agreement_with_a_gradient_scale(case: Case, dtype: torch.dtype, scale: float) -> None:
    results = []
    for backend in PAIR:
        params = parameters([v.to(place(backend)) for v in weights(SHAPES, dtype)])
        opt = case.ours(params, backend=backend)
        opt.grad_scale = torch.tensor(scale, device=place(backend))
        opt.found_inf = torch.tensor(0.0, device=place(backend))
        drive(opt, params, gradients(SHAPES, 3, dtype))
        results.append(([p.detach() for p in params], states(opt, params)))
    assert_same_bits(results[0], results[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", RULES, ids=str)
def test_agreement_under_clipping_with_an_exact_norm(case: Case, dtype: torch.dtype) -> None:
    """Gradients of 0, 1 and 2 have a sum of squares that no order of summation rounds: the coefficients are equal."""
    values = weights(SHAPES, dtype)
    grads: Gradients = [[noise(s, 7 + t, dtype).abs().round().clamp(0, 2) for s in SHAPES] for t in range(3)]
    native, native_states, opt = run(case, PAIR[0], values, grads, max_grad_norm=1.0)
    second, second_states, other = run(case, PAIR[1], values, grads, max_grad_norm=1.0)
    assert 0 < float(opt.last_step.clip_coef) < 0.1, "the test must clip"
    assert float(opt.last_step.clip_coef) == float(other.last_step.clip_coef)
    assert_same_bits(second, native, "parameter")
    assert_same_bits(second_states, native_states, "state")


@pytest.mark.parametrize("dtype", HALF, ids=short)
def test_every_half_precision_value_is_widened_and_narrowed_alike(dtype: torch.dtype) -> None:
    """All 65536 bit patterns as weight and as gradient; SGD with rate 1 narrows their differences."""
    every = torch.arange(-32768, 32768, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)
    mixed = every[torch.randperm(65536, generator=torch.Generator().manual_seed(1), device="cpu")]
    assert_backends_agree(Case("SGD", "one", dict(lr=1.0)), [every, mixed], [[mixed, every], [every, mixed]])
    got, _, _ = run(Case("SGD", "one", dict(lr=1.0)), BACKEND, [every], [[mixed]])
    assert_same_bits(got[0], (every.float() - mixed.float()).to(dtype))


@pytest.fixture
def threads(teams_as_asked: None) -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.cpu_only(reason="only the CPU's backends work on torch's number of threads")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_thread_count_changes_no_bit(dtype: torch.dtype, backend: str, threads: None) -> None:
    values, grads = weights(THREAD_SHAPES, dtype), gradients(THREAD_SHAPES, 2, dtype)
    results = []
    # 1 thread, as many as the machine of the CI has, and one more than that.
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        params, after, opt = run(ADAMW, backend, values, grads, max_grad_norm=1.0, stats=True)
        last = opt.last_step
        numbers = [last.grad_norm, last.clip_coef, last.update_norm, last.stored_update_norm, last.param_norm]
        results.append((params, after, [torch.as_tensor(x).clone() for x in numbers]))
    assert_same_bits(results[1], results[0], "2 threads")
    assert_same_bits(results[2], results[0], "3 threads")


@pytest.mark.cpu_only(reason="only the CPU's kernels work on torch's number of threads")
def test_three_threads_are_three(run_python: Any) -> None:
    """The test above needs a team: the first step of a process starts the threads that it was told to use."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
torch.set_num_threads(3)
from cases import ADAMW, drive, gradients, parameters, weights
from child_process import teams_as_asked
from test_bits import THREAD_SHAPES
params, grads = parameters(weights(THREAD_SHAPES[:-1])), gradients(THREAD_SHAPES[:-1], 1)
teams_as_asked()
before = len(os.listdir("/proc/self/task"))
drive(ADAMW.ours(params, backend="cpu"), params, grads)
print("started", len(os.listdir("/proc/self/task")) - before)
"""
    done = run_python("-c", code)
    assert done.stdout.split()[-2:] == ["started", "2"], done.stdout + done.stderr[-2000:]


def fingerprint() -> str:
    """A hash of parameters, states and norms after a few steps of every rule in every dtype."""
    digest = hashlib.sha256()
    shapes = [(33,), (41, 401), *[(n,) for n in range(1, 40, 3)]]
    for dtype in DTYPES:
        for case in [*RULES, AMSGRAD]:
            params, after, opt = run(
                case, "cpu", weights(shapes, dtype), gradients(shapes, 2, dtype), max_grad_norm=1.0, stats=True
            )
            last = opt.last_step
            tensors = [*params, *(s for state in after for s in state.values())]
            tensors += [last.grad_norm, last.update_norm, last.stored_update_norm, last.param_norm]
            for x in tensors:
                digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def instruction_sets() -> list[str]:
    """The clones that this processor can run, by the abilities that the operating system reports."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    needs = {"base": set(), "avx2": {"avx2", "f16c", "bmi2"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
    return [name for name, needed in needs.items() if needed <= flags]


@pytest.fixture(scope="module")
def own_fingerprint() -> str:
    return fingerprint()


CODE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_bits
from mo_fused.backends import cpu
print(cpu.instruction_set()[0], test_bits.fingerprint())
"""


@pytest.mark.cpu_only(reason="instruction sets are those of the CPU's kernels")
@pytest.mark.parametrize("isa", instruction_sets())
def test_instruction_set_changes_no_bit(isa: str, own_fingerprint: str, run_python: Any) -> None:
    done = run_python("-c", CODE, env={"MO_FUSED_ISA": isa})
    assert done.returncode == 0, done.stderr[-2000:]
    used, bits = done.stdout.split()[-2:]
    assert used == isa, "the choice was not honoured: this test would compare the default with itself"
    assert bits == own_fingerprint, f"{isa} gives other bits than the default"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", RULES, ids=str)
def test_grouping_and_order_change_no_bit(case: Case, dtype: torch.dtype) -> None:
    """One group, one group per parameter, and the reverse order."""
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 3, dtype)
    want, _, _ = run(case, BACKEND, values, grads)
    params = parameters(values)
    opt = case.ours([{"params": [p]} for p in params], backend=BACKEND)
    drive(opt, params, grads)
    assert_same_bits([p.detach() for p in params], want, "a group each")
    turned, _, _ = run(case, BACKEND, values[::-1], [row[::-1] for row in grads])
    assert_same_bits(turned[::-1], want, "reversed")
