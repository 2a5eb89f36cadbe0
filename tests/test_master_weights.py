"""Weights finer than their 16-bit parameter: equal bits everywhere, exactness, moving where bf16 stalls, resume."""

from __future__ import annotations

import copy
import io
import math
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
    large,
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
from mo_fused import masters

MODES = ("fp32", "split", "split8", "kahan", "stochastic")
OF_FP16 = ("fp32", "kahan", "stochastic")
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (mo_fused.AdamW, dict(lr=1e-3, weight_decay=0.1)),
    "amsgrad": (mo_fused.AdamW, dict(lr=1e-3, betas=(0.9, 0.5), amsgrad=True)),
    "sgd": (mo_fused.SGD, dict(lr=1e-2, momentum=0.9, weight_decay=0.1)),
    "plain": (mo_fused.SGD, dict(lr=1e-2)),
}
SHAPES = [(37, 53), (1,), (), (0, 3), (2, 3, 5), large(130, 140)]
PAIRS = [(torch.bfloat16, mode) for mode in MODES] + [(torch.float16, mode) for mode in OF_FP16]


def run(kind: str, dtype: torch.dtype, mode: str | None, backend: str, steps: int = 4, **options: Any) -> Any:
    make, arguments = KINDS[kind]
    params = parameters([w.to(place(backend)) for w in weights(SHAPES, dtype)])
    opt = make(params, **{**arguments, **options}, master_weights=mode, backend=backend)
    drive(opt, params, gradients(SHAPES, steps, dtype))
    assert_backend(opt, backend)
    return params, opt


@pytest.mark.parametrize("kind", some([*KINDS], ["adamw", "sgd"]))
@pytest.mark.parametrize(("dtype", "mode"), PAIRS, ids=str)
def test_backends_agree_to_the_bit(kind: str, dtype: torch.dtype, mode: str) -> None:
    for options in some([{}, {"stats": True}], [{"stats": True}]):
        (a, first), (b, second) = (run(kind, dtype, mode, backend, **options) for backend in PAIR)
        assert_same_bits([p.detach() for p in a], [p.detach() for p in b], "parameters")
        assert_same_bits(states(first, a), states(second, b), "state")


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", some([None, *MODES], ["split"]))
def test_backends_agree_with_moments_of_another_dtype(mode: str | None, state_dtype: str) -> None:
    (a, first), (b, second) = (run("adamw", torch.bfloat16, mode, x, state_dtype=state_dtype) for x in PAIR)
    assert_same_bits([p.detach() for p in a], [p.detach() for p in b], "parameters")
    assert_same_bits(states(first, a), states(second, b), "state")
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[state_dtype]
    assert all(first.state[p][key].dtype == wanted for p in a for key in ("exp_avg", "exp_avg_sq"))


LAYOUTS = [
    Layout("transposed", (6, 35), lambda x: x.t().contiguous().t(), lambda x: x.clone()),
    Layout("channels_last", (4, 3, 5, 2), lambda x: x.to(memory_format=torch.channels_last), lambda x: x.clone()),
    Layout("gaps", (9, 16), lambda x: inside(x, (20, 1)), lambda x: x.clone()),
    Layout("unaligned", (257,), lambda x: inside(x, (1,), 1), lambda x: x.clone()),
]


@pytest.mark.parametrize("mode", some(MODES, ["split8"]))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout: Layout, mode: str) -> None:
    """The same elements as a contiguous parameter: random numbers go by an element's index, not by its place."""
    value = noise(layout.shape, 1, torch.bfloat16)
    grads = [noise(layout.shape, 10 + t, torch.bfloat16) for t in range(3)]
    out = []
    for backend in PAIR:
        for lay in (layout.param, lambda x: x.clone()):
            p = torch.nn.Parameter(lay(value.to(place(backend))))
            opt = mo_fused.AdamW([p], lr=1e-3, master_weights=mode, backend=backend)
            for g in grads:
                p.grad = layout.grad(g.to(place(backend))) if lay is layout.param else g.to(place(backend)).clone()
                opt.step()
            assert_backend(opt, backend)
            out.append(p.detach())
    for other in out[1:]:
        assert_same_bits(other, out[0], f"{layout} {mode}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_is_an_fp32_master(backend: str) -> None:
    """1000 steps: the weight that split puts together is the fp32 master bit for bit, and so is the parameter."""
    steps, shape = some([1000], [30])[0], (16, 9)
    found = []
    for mode in ("fp32", "split"):
        p = torch.nn.Parameter(noise(shape, 1, torch.bfloat16).to(place(backend)))
        opt = mo_fused.AdamW([p], lr=3e-3, master_weights=mode, backend=backend)
        for t in range(steps):
            p.grad = noise(shape, 100 + t, torch.bfloat16).to(place(backend))
            opt.step()
        entry = opt.state[p]
        weight = entry["master"] if mode == "fp32" else masters.load(p, entry["master_low"], "split")
        found.append((weight.clone(), p.detach().clone(), entry["exp_avg"].clone()))
    assert_same_bits(found[1], found[0], "split")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_weight_of_one_moves_at_a_small_rate(mode: str | None, backend: str) -> None:
    """bf16 alone stays at 1: the update is far below half of its spacing. Every mode follows the fp32 weight."""
    n, steps = some([(4096, 200)], [(512, 20)])[0]
    p = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device=place(backend)))
    opt = mo_fused.AdamW([p], lr=1e-5, weight_decay=0.0, master_weights=mode, backend=backend)
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        opt.step()
    slot = masters.SLOTS.get(mode or "")
    rest = opt.state[p][slot] if slot else None
    weight = masters.load(p, rest, mode) if mode else p.detach().float()
    if mode is None:
        assert bool((weight == 1).all())
        return
    expected = 1 - steps * 1e-5
    # One draw moves a weight by at most a bf16 spacing (2^-8 below 1); the mean of n of them is this sure. What Kahan's
    # second bf16 holds has a spacing of 7.6e-6 there, about that of an update.
    spread = {"stochastic": 6 * 2.0**-8 / math.sqrt(n), "kahan": 0.5 * (1 - expected)}.get(mode, 6 * 2.0**-16)
    assert abs(float(weight.double().mean()) - expected) < spread, float(weight.double().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_unbiased(dtype: torch.dtype) -> None:
    n = 100_000
    for value in (1.001, -3.7e-3, 123.456, 6.1e-6, 3.3e-8):
        x = torch.full((n,), value, dtype=torch.float32)
        got = masters.stochastic(x, dtype, masters.draw(x.shape, masters.step_key(7, 3), x.device)).double()
        low, high = float(got.min()), float(got.max())
        true = float(x[0].double())
        assert low <= true <= high and len(got.unique()) <= 2
        sigma = (high - low) / 2 / math.sqrt(n)
        assert abs(float(got.mean()) - true) <= 5 * sigma, (dtype, value, float(got.mean()))


def test_random_numbers_are_uniform_and_differ_by_key() -> None:
    shape = torch.Size((1 << 16,))
    a, b = (masters.draw(shape, masters.step_key(masters.stream(0, 0), t), torch.device("cpu")) for t in (1, 2))
    for bit in range(32):
        share = float(((a >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / 256
        assert abs(float((((a ^ b) >> bit) & 1).double().mean()) - 0.5) < 5 * 0.5 / 256
    assert int(a.unique().numel()) > 65000
    assert masters.stream(0, 1) != masters.stream(1, 0) != masters.stream(0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", some(["adamw", "sgd"], ["adamw"]))
@pytest.mark.parametrize(("dtype", "mode"), some(PAIRS, PAIRS[1:3]), ids=str)
def test_a_resumed_run_has_the_same_bits(kind: str, dtype: torch.dtype, mode: str, backend: str) -> None:
    grads = gradients(SHAPES[:3], 6, dtype)
    make, arguments = KINDS[kind]

    def fresh() -> Any:
        params = parameters([w.to(place(backend)) for w in weights(SHAPES[:3], dtype)])
        return params, make(params, **arguments, master_weights=mode, seed=5, backend=backend)

    params, opt = fresh()
    drive(opt, params, grads[:3])
    file = io.BytesIO()
    torch.save({"p": [p.detach() for p in params], "opt": opt.state_dict()}, file)
    drive(opt, params, grads[3:])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, other = fresh()
    with torch.no_grad():
        for p, value in zip(again, saved["p"], strict=True):
            p.copy_(value)
    other.load_state_dict(saved["opt"])
    drive(other, again, grads[3:])
    assert_same_bits([p.detach() for p in again], [p.detach() for p in params], "parameters")
    assert_same_bits(states(other, again), states(opt, params), "state")


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_differ(backend: str) -> None:
    one, other = (run("adamw", torch.bfloat16, "stochastic", backend, seed=s)[0] for s in (1, 2))
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_skipped_step_changes_no_bit(mode: str, backend: str) -> None:
    params, opt = run("adamw", torch.bfloat16, mode, backend, skip_nonfinite=True)
    before = [p.detach().clone() for p in params], copy.deepcopy(states(opt, params))
    for p in params:
        p.grad = torch.full_like(p, float("inf"))
    opt.step()
    assert bool(opt.last_step.skipped)
    assert_same_bits(([p.detach() for p in params], states(opt, params)), before, "skip")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "mode"), PAIRS, ids=str)
def test_values_that_are_not_finite(dtype: torch.dtype, mode: str, backend: str) -> None:
    values = torch.tensor([1.0, float("inf"), -float("inf"), float("nan"), 65504.0, -1e-8, 0.0], dtype=dtype)
    p = torch.nn.Parameter(values.to(place(backend)))
    opt = mo_fused.SGD([p], lr=0.1, master_weights=mode, backend=backend)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        opt.step()
    assert_same_bits(p.detach(), values.to(place(backend)), "a zero gradient moves nothing")
    p.grad = torch.full_like(p, float("nan"))
    opt.step()
    assert bool(p.isnan().all())


@pytest.mark.filterwarnings("ignore:this checkpoint is kept in other formats")
@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("source", MODES)
def test_checkpoints_cross_from_mode_to_mode(source: str, target: str) -> None:
    """The weight that a checkpoint holds goes on in the other format, as far as that can hold it."""
    params, opt = run("adamw", torch.bfloat16, source, BACKENDS[0])
    slot = masters.SLOTS.get(source)
    before = [masters.load(p, opt.state[p][slot] if slot else None, source) for p in params]
    other = mo_fused.AdamW(params, master_weights=target, backend=BACKENDS[0])
    other.load_state_dict(opt.state_dict())
    for group in other.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    drive(other, params, gradients(SHAPES, 1, torch.bfloat16))
    slot = masters.SLOTS.get(target)
    for p, weight in zip(params, before, strict=True):
        assert [k for k in masters.ALL_SLOTS if k in other.state[p]] == ([slot] if slot else [])
        after = masters.load(p, other.state[p][slot] if slot else None, target)
        # What the formats hold: split all but, where Kahan has rounded the other way, the last bit.
        kept = {"fp32": 2.0**-22, "split": 2.0**-22, "split8": 2.0**-14, "kahan": 2.0**-16, "stochastic": 2.0**-7}[
            target
        ]
        assert bool(((after - weight).abs() <= kept * weight.abs()).all()), (source, target)


def test_what_is_refused() -> None:
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    with pytest.raises(ValueError, match="expected master_weights to be"):
        mo_fused.AdamW([p], master_weights="fp16")
    with pytest.raises(ValueError, match="expected state_dtype to be"):
        mo_fused.SGD([p], state_dtype="fp8")
    with pytest.raises(ValueError, match="expected seed to be a whole number"):
        mo_fused.Adam([p], seed=1.5)  # type: ignore[arg-type]
    opt = mo_fused.AdamW([p], master_weights="split")
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="expected bf16 parameters with master_weights='split'; found float16"):
        opt.step()
    assert not opt.state and bool((p == 0).all())


def test_parameters_of_32_bits_need_no_master() -> None:
    p, q = (torch.nn.Parameter(noise((5, 4), 3)) for _ in range(2))
    for x, options in ((p, {"master_weights": "split"}), (q, {})):
        opt = mo_fused.AdamW([x], lr=0.1, **options)
        x.grad = torch.ones_like(x)
        opt.step()
        assert list(opt.state[x]) == ["step", "exp_avg", "exp_avg_sq"]
    assert_same_bits(p.detach(), q.detach(), "fp32")


def stepped(mode: str, backend: str, steps: int = 5, lr: float = 1e-3) -> Any:
    p = torch.nn.Parameter((noise((64, 16), 1) * 10).bfloat16().to(place(backend)))
    opt = mo_fused.AdamW([p], lr=lr, weight_decay=0.0, master_weights=mode, backend=backend)
    for t in range(steps):
        p.grad = noise((64, 16), 10 + t, torch.bfloat16).to(place(backend))
        opt.step()
    return p, opt


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("replan", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_somebody_else_writes(mode: str, replan: bool, backend: str) -> None:
    """Weights that are loaded, masked or set to zero stay so: what the state has of the old ones does not come back."""
    for value in some([5.0, 0.0, -0.0, 2.0**-13, float("inf")], [-0.0, float("inf")]):
        p, opt = stepped(mode, backend)
        opt.param_groups[0]["lr"] = 0.0
        with torch.no_grad():
            p.fill_(value)
        if replan:
            opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, device=place(backend)))]})
        opt.step()
        # A remainder is at most half a spacing of what it stands beside.
        reach = 0.0 if mode in ("fp32", "stochastic") else 2.0**-7 * abs(value)
        if math.isfinite(value):
            assert float((p.detach().float() - value).abs().max()) <= reach, value
        else:
            assert bool((p == value).all()), value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_values_that_are_swapped_out_and_back_lose_nothing(mode: str, backend: str) -> None:
    found = []
    for swap in (False, True):
        p = torch.nn.Parameter(noise((64,), 1, torch.bfloat16).to(place(backend)))
        opt = mo_fused.AdamW([p], lr=1e-5, weight_decay=0.0, master_weights=mode, backend=backend)
        for _ in range(some([60], [8])[0]):
            p.grad = torch.ones_like(p)
            opt.step()
            if swap:
                with torch.no_grad():
                    kept = p.clone()
                    p.mul_(0.5)
                    p.copy_(kept)
        found.append((p.detach().clone(), states(opt, [p])))
    assert_same_bits(found[1], found[0], "swap")


@pytest.mark.filterwarnings("ignore:this checkpoint is kept in other formats")
@pytest.mark.parametrize("mode", ["fp32", "split", "split8", "kahan"])
def test_a_rest_that_nobody_keeps_up_to_date_is_dropped(mode: str) -> None:
    p, opt = stepped(mode, BACKENDS[0])
    plain = mo_fused.AdamW([p], lr=1e-2, backend=BACKENDS[0])
    plain.load_state_dict(opt.state_dict())
    for t in range(3):
        p.grad = noise((64, 16), 50 + t, torch.bfloat16).to(p.device)
        plain.step()
    assert not set(masters.ALL_SLOTS) & set(plain.state[p])


@pytest.mark.filterwarnings("ignore:this checkpoint is kept in other formats")
@pytest.mark.parametrize("target", ["fp32", "split", "split8", "kahan"])
@pytest.mark.parametrize("mode", ["fp32", "split", "split8"])
def test_a_checkpoint_that_went_through_torch(mode: str, target: str) -> None:
    """torch's loader casts integer state to the parameter's dtype; what is left of it is no remainder."""
    p, opt = stepped(mode, BACKENDS[0])
    theirs = torch.optim.AdamW([p])
    theirs.load_state_dict(opt.state_dict())
    before = p.detach().clone()
    again = mo_fused.AdamW([p], lr=0.0, weight_decay=0.0, master_weights=target, backend=BACKENDS[0])
    again.load_state_dict(theirs.state_dict())
    again.param_groups[0]["lr"], again.param_groups[0]["weight_decay"] = 0.0, 0.0
    p.grad = torch.ones_like(p)
    again.step()
    assert_same_bits(p.detach(), before, "parameter")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["fp32", "split", "split8", "kahan"])
def test_momentum_that_begins_in_a_skipped_step(mode: str, backend: str) -> None:
    p = torch.nn.Parameter(noise((8, 8), 1, torch.bfloat16).to(place(backend)))
    opt = mo_fused.SGD([p], lr=1e-3, master_weights=mode, skip_nonfinite=True, backend=backend)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        opt.step()
    slot = masters.SLOTS[mode]
    before = opt.state[p][slot].clone()
    opt.param_groups[0]["momentum"] = 0.9
    p.grad = torch.full_like(p, float("inf"))
    opt.step()
    opt.state_dict()
    assert_same_bits(opt.state[p][slot], before, slot)


def test_bytes_of_a_parameter() -> None:
    """Master and moments, beside 2 bytes of parameter and 2 of gradient."""
    expected = {None: 4, "fp32": 8, "split": 6, "split8": 5, "kahan": 6, "stochastic": 4}
    for mode, size in expected.items():
        p = torch.nn.Parameter(torch.zeros(128, 64, dtype=torch.bfloat16))
        opt = mo_fused.AdamW([p], master_weights=mode)
        p.grad = torch.ones_like(p)
        opt.step()
        found = sum(v.numel() * v.element_size() for v in opt.state[p].values() if isinstance(v, Tensor) and v.dim())
        assert found == size * p.numel()
