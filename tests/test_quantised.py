"""Moments in 8 and 4 bits: equal bits everywhere, blocks, what stays fp32, conversions, resume, errors."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from cases import (
    BACKENDS,
    PAIR,
    Layout,
    assert_backend,
    drive,
    gradients,
    inside,
    noise,
    parameters,
    place,
    some,
    states,
    weights,
)
from oracle import assert_same_bits
from torch import Tensor

import mo_fused
from mo_fused import masters, quantised

# Blocks of 256, 128 (of 4 bits), 64 and 32; a matrix without blocks, a small one, a vector.
SHAPES = some([(18, 256), (33, 384), (2, 33, 64), (129, 32), (70, 60), (16, 32), (130,)], [(16, 256), (43, 96), (40,)])
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (mo_fused.AdamW, dict(lr=1e-3, weight_decay=0.1)),
    "amsgrad": (mo_fused.AdamW, dict(lr=1e-3, betas=(0.9, 0.5), amsgrad=True)),
    "sgd": (mo_fused.SGD, dict(lr=1e-2, momentum=0.9, weight_decay=0.1)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATES = ("int8", "int4")


def run(kind: str, dtype: torch.dtype, backend: str, steps: int = 4, shapes: Any = None, **options: Any) -> Any:
    make, arguments = KINDS[kind]
    shapes = SHAPES if shapes is None else shapes
    params = parameters([w.to(place(backend)) for w in weights(shapes, dtype)])
    opt = make(params, **{**arguments, **options}, backend=backend)
    drive(opt, params, gradients(shapes, steps, dtype))
    assert_backend(opt, backend)
    return params, opt


def assert_equal_runs(kind: str, dtype: torch.dtype, **options: Any) -> None:
    (a, first), (b, second) = (run(kind, dtype, backend, **options) for backend in PAIR)
    assert_same_bits([p.detach() for p in a], [p.detach() for p in b], "parameters")
    assert_same_bits(states(first, a), states(second, b), "state")


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("dtype", some(DTYPES, DTYPES[:2]), ids=str)
@pytest.mark.parametrize("kind", some([*KINDS], ["adamw", "sgd"]))
def test_backends_agree_to_the_bit(kind: str, dtype: torch.dtype, state_dtype: str) -> None:
    for stats in some([False, True], [False]):
        assert_equal_runs(kind, dtype, state_dtype=state_dtype, stats=stats)


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("mode", some([*masters.MODES], ["split8", "stochastic"]))
def test_backends_agree_with_master_weights(mode: str, state_dtype: str) -> None:
    for stats in some([False, True], [True]):
        assert_equal_runs("adamw", torch.bfloat16, state_dtype=state_dtype, master_weights=mode, stats=stats)


@pytest.mark.parametrize("state_dtype", STATES)
def test_backends_agree_on_mixed_dtypes(state_dtype: str) -> None:
    """fp32 parameters with bf16 gradients, as gradient hooks of mixed precision make them."""
    out = []
    for backend in PAIR:
        p = torch.nn.Parameter(noise((18, 256), 1).to(place(backend)))
        p.grad_dtype = None
        opt = mo_fused.AdamW([p], lr=1e-3, state_dtype=state_dtype, backend=backend)
        for t in range(3):
            p.grad = noise((18, 256), 10 + t, torch.bfloat16).to(place(backend))
            opt.step()
        assert_backend(opt, backend)
        out.append((p.detach(), states(opt, [p])))
    assert_same_bits(out[0], out[1], "bf16 gradients")


LAYOUTS = [
    Layout("transposed", (70, 64), lambda x: x.t().contiguous().t(), lambda x: x.clone()),
    Layout("transposed_grad", (70, 64), lambda x: x.clone(), lambda x: x.t().contiguous().t()),
    Layout("channels_last", (16, 32, 3, 3), lambda x: x.to(memory_format=torch.channels_last), lambda x: x.clone()),
    Layout("gaps", (70, 64), lambda x: inside(x, (80, 1)), lambda x: x.clone()),
    Layout("unaligned", (70, 64), lambda x: inside(x, (64, 1), 1), lambda x: inside(x, (64, 1), 3)),
]


@pytest.mark.parametrize("state_dtype", some(STATES, ["int4"]))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout: Layout, state_dtype: str) -> None:
    """The same elements and blocks as a contiguous parameter: codes lie in the order of the shape."""
    value = noise(layout.shape, 1, torch.bfloat16)
    grads = [noise(layout.shape, 10 + t, torch.bfloat16) for t in range(3)]
    out = []
    for backend in PAIR:
        for lay in (layout.param, lambda x: x.clone()):
            p = torch.nn.Parameter(lay(value.to(place(backend))))
            opt = mo_fused.AdamW([p], lr=1e-3, master_weights="split8", state_dtype=state_dtype, backend=backend)
            for g in grads:
                p.grad = layout.grad(g.to(place(backend))) if lay is layout.param else g.to(place(backend)).clone()
                opt.step()
            assert_backend(opt, backend)
            entry = {k: v for k, v in states(opt, [p])[0].items() if k in quantised.ALL_SLOTS}
            assert len(entry) == 4
            out.append((p.detach().clone(memory_format=torch.contiguous_format), entry))
    for other in out[1:]:
        assert_same_bits(other, out[0], f"{layout} {state_dtype}")


def entries(p: Tensor, **options: Any) -> tuple[Any, dict[str, Any]]:
    opt = mo_fused.AdamW([p], lr=1e-3, **options)
    p.grad = torch.ones_like(p)
    opt.step()
    return opt, opt.state[p]


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((16, 512), {"int8": 256, "int4": 128}),
        ((43, 96), {"int8": 32, "int4": 32}),
        ((8, 3, 192), {"int8": 64, "int4": 64}),
    ],
)
def test_blocks_never_cross_a_slice(shape: tuple[int, ...], block: dict[str, int]) -> None:
    for kept in STATES:
        p = torch.nn.Parameter(torch.zeros(shape))
        _, entry = entries(p, state_dtype=kept)
        width = math.prod(shape[1:])
        assert entry["exp_avg_scale"].shape == (shape[0], width // block[kept])
        codes = entry["exp_avg_q8" if kept == "int8" else "exp_avg_q4"]
        assert codes.shape == (shape if kept == "int8" else (shape[0], width // 2))


@pytest.mark.parametrize("shape", [(4096,), (63, 64), (64, 65), (4096, 16), (0, 64), (4096, 1)], ids=str)
def test_what_stays_fp32(shape: tuple[int, ...]) -> None:
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    opt, entry = entries(p, state_dtype="int8")
    assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.float32
    assert not set(entry) & {*quantised.ALL_SLOTS}
    says = "moments in fp32: slices of" in opt.explain()[0].reason
    assert says == (len(shape) > 1 and p.numel() >= 4096)


def test_a_shard_of_the_first_dimension_has_the_bits_of_the_whole() -> None:
    """As FSDP2 cuts a parameter. (Random numbers go by the index in the shard, so these are moments without them.)"""
    value, grads = noise((32, 256), 1), [noise((32, 256), 10 + t) for t in range(1)]
    whole = torch.nn.Parameter(value.clone())
    halves = [torch.nn.Parameter(h.clone()) for h in value.chunk(2)]
    opt, of_halves = (mo_fused.SGD(ps, lr=0.1, momentum=0.9, state_dtype="int8") for ps in ([whole], halves))
    for g in grads:
        whole.grad = g.clone()
        for h, part in zip(halves, g.chunk(2), strict=True):
            h.grad = part.clone()
        opt.step()
        of_halves.step()
    scales = [of_halves.state[h]["momentum_buffer_scale"] for h in halves]
    assert_same_bits(torch.cat(scales), opt.state[whole]["momentum_buffer_scale"], "scales")
    assert_same_bits(torch.cat([h.detach() for h in halves]), whole.detach(), "parameters")


@pytest.mark.parametrize(("kept", "size"), [("int8", 2 * (1 + 4 / 256)), ("int4", 2 * (0.5 + 4 / 128))])
def test_bytes_of_a_parameter(kept: str, size: float) -> None:
    p = torch.nn.Parameter(torch.zeros(64, 512, dtype=torch.bfloat16))
    _, entry = entries(p, state_dtype=kept, master_weights="split8")
    moments = sum(v.numel() * v.element_size() for k, v in entry.items() if k in quantised.ALL_SLOTS)
    assert moments == size * p.numel()
    everything = moments + entry["master_low"].numel() + 2 * p.numel() + 2 * p.numel()
    assert kept != "int8" or everything <= 7.1 * p.numel()


CODES = [quantised.Q8, quantised.Q8_ROOT, quantised.Q4, quantised.Q4_ROOT]


@pytest.mark.parametrize("code", CODES, ids=lambda c: f"{c.bits}{'root' if c.root else ''}")
def test_every_code_comes_back_as_itself(code: quantised.Code) -> None:
    """And with random bits too: a value on the grid stays where it is."""
    lowest = 0 if code.root else -code.top
    numbers = torch.arange(lowest, code.top + 1, dtype=torch.int32)
    numbers = torch.cat([numbers, numbers[-1:].expand(512 - len(numbers))]).reshape(2, 256)
    codes = numbers.to(code.dtype) if code.bits == 8 else _packed(numbers)
    for size in (1e-20, 1.0, 3e4):
        scale = torch.full((2,), size) / code.reach
        values = quantised.decode(codes, scale, code)
        assert values.diff(dim=1).min() >= 0
        found, of_scale = quantised.encode(values, code, scale, None)
        assert_same_bits(found.reshape(codes.shape), codes, "codes")
        assert torch.allclose(of_scale, scale, rtol=1e-6, atol=0)


def _packed(numbers: Tensor) -> Tensor:
    pairs = (numbers & 15).to(torch.uint8).reshape(len(numbers), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


@pytest.mark.parametrize("code", CODES, ids=lambda c: f"{c.bits}{'root' if c.root else ''}")
def test_stochastic_rounding_is_unbiased(code: quantised.Code) -> None:
    """The mean of 10^5 stores of one value, beside the block's largest, is that value."""
    value, draws = (1.1 if code.root else 0.21) / code.reach, 100_000
    x = torch.full((draws // 10, 256), value)
    x[:, 0] = 1.0
    random = masters.draw(x.shape, masters.step_key(7, 3, 2), x.device) >> 16
    codes, scale = quantised.encode(x, code, torch.zeros(len(x)), random)
    found = quantised.decode(codes, scale, code)[:, 1:11].double()
    spacing = 2.0 * 2.0**-code.mantissa / code.reach
    assert abs(float(found.mean()) - value) < 4 * spacing / math.sqrt(draws)
    assert len(found.unique()) == 2


def test_a_small_root_is_never_zero() -> None:
    """A second moment of zero under a first moment that is not would make the update huge."""
    for code in (quantised.Q8_ROOT, quantised.Q4_ROOT):
        x = torch.full((1, 256), 1e-9)
        x[0, 0], x[0, 1] = 1.0, 0.0
        codes, scale = quantised.encode(x, code, torch.zeros(1), torch.zeros(256, dtype=torch.int64))
        found = quantised.decode(codes, scale, code)[0]
        assert found[2:].min() > 0 and found[1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dtype", STATES)
def test_a_moment_that_gets_no_gradient_decays(state_dtype: str, backend: str) -> None:
    """Rounded to nearest it would stick where a tenth of it is less than half a step: at 0.006 and at 0.3."""
    p = torch.nn.Parameter(torch.zeros(16, 256, device=place(backend)))
    opt = mo_fused.AdamW([p], lr=1e-3, weight_decay=0.0, state_dtype=state_dtype, backend=backend)
    for t in range(70):
        p.grad = torch.ones_like(p)
        p.grad[:, 1::2] = 0.3 if t < 5 else 0.0
        opt.step()
    m = quantised.load(opt.state[p], "exp_avg", quantised.code_of("exp_avg", state_dtype), p.shape)
    assert m[:, ::2].min() > 0.9
    assert m[:, 1::2].mean() < (0.003 if state_dtype == "int8" else 0.02)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dtype", STATES)
def test_values_that_are_not_finite(state_dtype: str, backend: str) -> None:
    """Infinite values count as the largest finite one; a NaN makes its block NaN and no other."""
    p = torch.nn.Parameter(torch.zeros(16, 256, device=place(backend)))
    opt = mo_fused.AdamW([p], lr=1e-3, state_dtype=state_dtype, backend=backend)
    p.grad = torch.ones_like(p)
    p.grad[0, 3], p.grad[1, 5] = math.nan, math.inf
    opt.step()
    m = quantised.load(opt.state[p], "exp_avg", quantised.code_of("exp_avg", state_dtype), p.shape)
    block = quantised.block_of(p, state_dtype)
    assert m[0, :block].isnan().all()
    assert m[0, block:].isfinite().all() and m[1:].isfinite().all()
    assert (m[2:] > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", some([*KINDS], ["adamw"]))
@pytest.mark.parametrize("state_dtype", STATES)
def test_resume(kind: str, state_dtype: str, backend: str) -> None:
    options = dict(state_dtype=state_dtype, master_weights="stochastic", seed=3)
    whole, _ = run(kind, torch.bfloat16, backend, 4, **options)
    first, opt = run(kind, torch.bfloat16, backend, 2, **options)
    make, arguments = KINDS[kind]
    params = parameters([p.detach() for p in first])
    again = make(params, **{**arguments, **options}, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(copy.deepcopy(opt.state_dict()))
    drive(again, params, gradients(SHAPES, 4, torch.bfloat16)[2:])
    assert_same_bits([p.detach() for p in params], [p.detach() for p in whole], f"{kind} {state_dtype}")


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("kind", [*KINDS])
def test_a_skipped_step_changes_nothing(kind: str, state_dtype: str) -> None:
    for backend in BACKENDS:
        params, opt = run(kind, torch.bfloat16, backend, 2, state_dtype=state_dtype, skip_nonfinite=True)
        before = [p.detach().clone() for p in params], states(opt, params)
        for p in params:
            p.grad = torch.full_like(p, math.inf)
        opt.step()
        assert_same_bits(([p.detach() for p in params], states(opt, params)), before, kind)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_first_step_leaves_no_momentum(backend: str) -> None:
    p = torch.nn.Parameter(torch.ones(16, 256, device=place(backend)))
    opt = mo_fused.SGD([p], lr=0.1, momentum=0.9, state_dtype="int8", skip_nonfinite=True, backend=backend)
    p.grad = torch.full_like(p, math.nan)
    opt.step()
    assert not any("momentum" in key for key in opt.state_dict()["state"].get(0, {}))
    p.grad = torch.ones_like(p)
    opt.step()
    assert_same_bits(p.detach(), torch.full_like(p, 1.0) - 0.1 * torch.ones_like(p), "first step")


FORMATS = [None, "fp32", "bf16", "int8", "int4"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", some(FORMATS, ["fp32"]))
@pytest.mark.parametrize("target", some(FORMATS, ["int8"]))
def test_a_checkpoint_of_one_format_loads_into_another(source: str | None, target: str | None, backend: str) -> None:
    params, opt = run("adamw", torch.float32, backend, 2, state_dtype=source)
    make, arguments = KINDS["adamw"]
    fresh = parameters([p.detach() for p in params])
    other = make(fresh, **arguments, state_dtype=target, backend=backend)
    same = source == target or {source, target} <= {None, "fp32"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
    said = [str(w.message) for w in caught if "kept in other formats" in str(w.message)]
    assert bool(said) == (not same and target is not None), said
    if said:
        assert f"to {target}" in said[0]
    before = {p: moment(opt, q, "exp_avg") for p, q in zip(fresh, params, strict=True)}
    # Without a gradient's influence the moments stay what they were, but for what the format cannot hold.
    other.param_groups[0].update(betas=(0.9, 0.999))
    for p in fresh:
        p.grad = torch.zeros_like(p)
    other.step()
    error = {None: 0.01 if source == "bf16" else 1e-6, "fp32": 1e-6, "bf16": 0.01, "int8": 0.02, "int4": 0.35}
    for p, m in before.items():
        found = moment(other, p, "exp_avg")
        assert float((found - 0.9 * m).norm()) <= error[target] * float(m.norm()) + 1e-12


def moment(opt: Any, p: Tensor, key: str) -> Tensor:
    entry = opt.state[p]
    code = quantised.find(entry, key)
    return (entry[key] if code is None else quantised.load(entry, key, code, p.shape)).float()


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("state_dtype", STATES)
def test_a_checkpoint_for_torch(kind: str, state_dtype: str) -> None:
    params, opt = run(kind, torch.bfloat16, BACKENDS[0], 3, state_dtype=state_dtype, master_weights="split8")
    found = mo_fused.to_torch_state_dict(opt)
    _, arguments = KINDS[kind]
    theirs = getattr(torch.optim, type(opt).__name__)(params, **arguments)
    drive(theirs, params, gradients(SHAPES, 1, torch.bfloat16))
    fresh = theirs.state_dict()
    assert [list(e) for e in found["state"].values()] == [list(e) for e in fresh["state"].values()]
    for key, entry in found["state"].items():
        for name, value in entry.items():
            assert name == "step" or value.shape == params[key].shape
            if name != "step":
                assert_same_bits(value.float(), moment(opt, params[key], name), name)
    theirs.load_state_dict(found)
    drive(theirs, params, gradients(SHAPES, 1, torch.bfloat16))
    assert not set(opt.state[params[0]]) & {"exp_avg", "momentum_buffer"}, "the optimizer's own state stays as it is"


def test_codes_of_another_model_are_refused() -> None:
    p = torch.nn.Parameter(torch.zeros(16, 256))
    opt, _ = entries(p, state_dtype="int8")
    other = mo_fused.AdamW([torch.nn.Parameter(torch.zeros(16, 512))], state_dtype="int8")
    with pytest.raises(ValueError, match=r"expected state 'exp_avg_q8' of .* to have codes for \(16, 512\)"):
        other.load_state_dict(opt.state_dict())
    assert not other.state
    entry = opt.state[p]
    entry["exp_avg_scale"] = torch.zeros(3, 3)
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with pytest.raises(ValueError, match="codes for"):
        opt.step()
    assert_same_bits(p.detach(), before, "nothing changed")


def test_a_row_that_torch_steps_gets_plain_moments() -> None:
    """A parameter that becomes sparse or differentiable half-way is torch's, and comes back."""
    p = torch.nn.Parameter(noise((16, 256), 1))
    opt, entry = entries(p, state_dtype="int8")
    m = moment(opt, p, "exp_avg")
    q = torch.nn.Parameter(p.detach().clone())
    opt.add_param_group({"params": [q], "differentiable": True})
    shared = torch.nn.Parameter(p.data)  # it shares memory, so both go to torch
    opt.add_param_group({"params": [shared]})
    p.grad, shared.grad = torch.zeros_like(p), torch.zeros_like(p)
    opt.step()
    assert {r.backend for r in opt.explain() if r.name in ("0", "2")} == {"torch"}
    assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.allclose(entry["exp_avg"], 0.9 * m, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_release(backend: str) -> None:
    """Stepped one by one during the backward: the same bits, and no gradient stays."""
    shapes = [(16, 256), (70, 64), (70,)]
    out = []
    for released in (False, True):
        params = parameters([w.to(place(backend)) for w in weights(shapes, torch.bfloat16)])
        model = torch.nn.ParameterList(params)
        opt = mo_fused.AdamW(
            model.parameters(), lr=1e-3, state_dtype="int8", master_weights="split8", seed=5, backend=backend
        )
        if released:
            mo_fused.gradient_release(model, opt)
        for t in range(3):
            loss = sum((p * noise(p.shape, 50 + t, torch.bfloat16).to(p.device)).sum() for p in params)
            loss.backward()
            assert all(p.grad is None for p in params) == released
            opt.step()
            opt.zero_grad()
        assert_backend(opt, backend)
        out.append(([p.detach() for p in params], states(opt, params)))
    assert_same_bits(out[1], out[0], "released")


def test_options_are_checked() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    for kind in (mo_fused.AdamW, mo_fused.Adam, mo_fused.SGD):
        with pytest.raises(ValueError, match="'fp32', 'bf16', 'int8', 'int4' or None"):
            kind([p], lr=1e-3, state_dtype="int2")
    with pytest.raises(ValueError, match="state_dtype"):
        mo_fused.Adafactor([p], beta1=0.9, state_dtype="int8")
