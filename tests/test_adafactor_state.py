"""Adafactor's state: torch's keys and shapes, its size, checkpoints of torch and of transformers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from adafactor_reference import FORMS, MOMENTUM, TORCH, TRANSFORMERS, Form
from cases import (
    BACKENDS,
    DEVICE,
    DTYPES,
    HALF,
    Gradients,
    assert_backend,
    drive,
    gradients,
    noise,
    parameters,
    short,
    some,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits
from torch import Tensor
from torch.nn import Parameter
from transformers.optimization import Adafactor as Transformers

import mo_fused
from mo_fused.factored import HOST, Tiling, device_limits
from mo_fused.optim.base import OPTIONS

SHAPES = [(), (7,), (5, 3), (3, 4, 5), (4, 2, 3, 3)]
OURS = ("scale_parameter", "relative_step", "warmup_init", "beta1", "transformers_form")


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """What torch.save and the safe loader make of it."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def theirs(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.3, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_keys_order_shapes_and_dtypes(dtype: torch.dtype) -> None:
    """torch's, but for the statistics' dtype: never a half type."""
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 1, dtype)
    ours, others = parameters(values), parameters(values)
    a, b = TORCH.ours(ours), theirs(others)
    drive(a, ours, grads)
    drive(b, others, grads)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for p, q in zip(ours, others, strict=True):
        assert list(a.state[p]) == list(b.state[q])
        assert {k: v.shape for k, v in a.state[p].items()} == {k: v.shape for k, v in b.state[q].items()}
        assert {k: v.dtype for k, v in a.state[p].items() if k != "step"} == {
            k: compute for k in a.state[p] if k != "step"
        }
        assert a.state[p]["step"].dtype == torch.float32 and a.state[p]["step"].device == p.device
    assert set(a.param_groups[0]) - set(OURS) == set(b.param_groups[0])

    params = parameters(values)
    opt = MOMENTUM.ours(params)
    drive(opt, params, grads)
    assert list(opt.state[params[1]]) == ["step", "variance", "exp_avg"]
    assert list(opt.state[params[3]]) == ["step", "row_var", "col_var", "exp_avg"]
    assert opt.state[params[3]]["exp_avg"].shape == (3, 4, 5) and opt.state[params[3]]["exp_avg"].dtype == compute


def test_first_moment_has_the_parameters_strides() -> None:
    p = Parameter(noise((4, 2, 3, 3), 1).to(memory_format=torch.channels_last))
    opt = MOMENTUM.ours([p])
    drive(opt, [p], gradients([(4, 2, 3, 3)], 1))
    assert opt.state[p]["exp_avg"].stride() == p.stride()
    assert all(opt.state[p][k].is_contiguous() for k in ("row_var", "col_var"))


# -- size -------------------------------------------------------------------------------------------------------------


def state_bytes(opt: torch.optim.Optimizer) -> int:
    return sum(v.numel() * v.element_size() for s in opt.state.values() for v in s.values())


@pytest.mark.not_interpreted(reason="steps a matrix of 45 million elements")
def test_state_of_a_large_matrix() -> None:
    p = Parameter(torch.zeros(4096, 11008, dtype=torch.bfloat16, device=DEVICE))
    opt = TORCH.ours([p])
    p.grad = torch.ones_like(p)
    opt.step()
    assert {k: v.numel() for k, v in opt.state[p].items()} == {"step": 1, "row_var": 4096, "col_var": 11008}
    assert state_bytes(opt) == 4 * (15_104 + 1)


def gpt2(layers: int = 12, width: int = 768) -> list[tuple[int, ...]]:
    """Shapes of GPT-2's parameters, with tied embeddings."""
    block: list[tuple[int, ...]] = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


@pytest.mark.not_interpreted(reason="steps 46 million elements")
def test_state_of_gpt2_is_a_three_hundredth_of_adamws() -> None:
    """Measured on the embeddings and one layer, of which the other eleven are copies."""

    def measured(kind: str, shapes: list[tuple[int, ...]]) -> list[int]:
        params = [Parameter(torch.zeros(s, device=DEVICE)) for s in shapes]
        opt: Any = getattr(mo_fused, kind)(params)
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.step()
        return [sum(v.numel() * v.element_size() for v in opt.state[p].values()) for p in params]

    one = gpt2(layers=1)
    layer = slice(2, 14)
    whole = {}
    for kind in ("Adafactor", "AdamW"):
        sizes = measured(kind, one)
        whole[kind] = sum(sizes) + 11 * sum(sizes[layer])
    assert sum(torch.Size(s).numel() for s in gpt2()) == 124_439_808
    assert whole["AdamW"] == 2 * 4 * 124_439_808 + 4 * 148, "two moments and a step count each"
    assert whole["Adafactor"] <= 0.003 * whole["AdamW"], f"{whole['Adafactor'] / whole['AdamW']:.3%}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_scratch_of_a_step_is_less_than_a_hundredth_of_the_parameters(dtype: torch.dtype) -> None:
    """Norms of the rows and columns of all tiles: what a step needs beyond parameters, gradients and state."""
    for shapes in (gpt2(), [(4096, 11008), (11008, 4096), (4096, 4096), (32000, 4096)]):
        elements = sum(torch.Size(s).numel() for s in shapes)
        for limits in (HOST, device_limits(elements, 16384)):
            tiling = Tiling(shapes, [4] * len(shapes), limits)
            share = tiling.scratch_bytes / (elements * dtype.itemsize)
            assert 0 < share < 0.01, f"{share:.2%} with {limits}"


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.float64, *HALF], [torch.bfloat16]), ids=short)
@pytest.mark.parametrize("first", ["torch", "ours"])
def test_checkpoints_cross_to_and_from_torch(first: str, dtype: torch.dtype, backend: str) -> None:
    """Three steps with one class, three with the other. Half-precision statistics of torch's are widened, and go on."""
    # torch's fp16 statistics must not leave fp16's range.
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 6, dtype, scale=1.0)
    params = parameters(values)
    makers = [theirs, lambda p: TORCH.ours(p, backend=backend)]
    old, new = [m(params) for m in (makers if first == "torch" else makers[::-1])]
    drive(old, params, grads[:3])
    new.load_state_dict(through_file(old.state_dict()))
    drive(new, params, grads[3:])
    want, want_states = TORCH.exact(values, grads, keep=True)
    # torch keeps the statistics in the parameter's type: its own steps, and what it loads, are as coarse as that.
    coarse = dtype in HALF
    for p, w, s, ws in zip(params, want, states(new, params), want_states, strict=True):
        assert_close(p, w, 60 if coarse else 24, f"{tuple(p.shape)}")
        assert list(s) == list(ws) and float(s["step"]) == 6
        for key in s:
            if key != "step" and first == "torch":
                assert s[key].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                error = float((s[key].cpu().double() - ws[key]).abs().max() / ws[key].abs().max())
                assert error < (10 * torch.finfo(dtype).eps)
    if first == "torch":
        assert_backend(new, backend)


@pytest.mark.parametrize("form", some(FORMS, [MOMENTUM]), ids=str)
@pytest.mark.parametrize("way", some(["file", "deepcopy", "pickle"], ["file"]))
def test_resuming_is_never_having_stopped(form: Form, way: str) -> None:
    """Bit for bit: also RMS(p), which the first optimizer carries and the second has to take again."""
    dtype = torch.bfloat16 if way == "pickle" else torch.float32
    shapes = [*SHAPES, some([(130, 70)], [(20, 30)])[0]]
    values, grads = weights(shapes, dtype), gradients(shapes, 6, dtype)
    whole = parameters(values)
    opt = form.ours(whole, max_grad_norm=1.0)
    drive(opt, whole, grads)
    params = parameters(values)
    before = form.ours(params, max_grad_norm=1.0)
    drive(before, params, grads[:3])
    if way == "file":
        after = form.ours(params, max_grad_norm=1.0)
        after.load_state_dict(through_file(before.state_dict()))
    else:
        after = copy.deepcopy(before) if way == "deepcopy" else pickle.loads(pickle.dumps(before))
        params = after.param_groups[0]["params"]
    drive(after, params, grads[3:])
    assert_same_bits([p.detach() for p in params], [p.detach() for p in whole])
    assert_same_bits(states(after, params), states(opt, whole))


def test_a_plain_torch_checkpoint_keeps_our_group_keys() -> None:
    params = parameters(weights(SHAPES))
    source = theirs(params, weight_decay=0.25)
    drive(source, params, gradients(SHAPES, 1))
    opt = mo_fused.Adafactor(params, beta1=0.9, relative_step=False, scale_parameter=False, max_grad_norm=0.5)
    opt.param_groups[0]["clip"] = False
    opt.load_state_dict(through_file(source.state_dict()))
    group = opt.param_groups[0]
    kept = {k: group[k] for k in (*OURS, "clip")}
    assert kept == dict(
        scale_parameter=False, relative_step=False, warmup_init=False, beta1=0.9, transformers_form=False, clip=False
    )
    assert group["lr"] == 0.3 and group["weight_decay"] == 0.25 and opt.defaults["max_grad_norm"] == 0.5
    drive(opt, params, gradients(SHAPES, 1))
    assert all("exp_avg" in opt.state[p] for p in params), "a slot that the checkpoint lacks is made"


def test_groups_of_an_older_pickle_get_torchs_form() -> None:
    params = parameters(weights(SHAPES))
    opt = TORCH.ours(params)
    old = opt.__getstate__()
    for group in old["param_groups"]:
        for key in OURS:
            del group[key]
    new = mo_fused.Adafactor.__new__(mo_fused.Adafactor)
    new.__setstate__(old)
    assert {k: new.param_groups[0][k] for k in OURS} == dict(
        scale_parameter=True, relative_step=None, warmup_init=False, beta1=None, transformers_form=False
    )


# Each of the branches that leave something in the state or choose a step size.
CROSSED: list[dict[str, Any]] = [
    {},
    dict(warmup_init=True),
    dict(beta1=0.9, weight_decay=0.1),
    dict(lr=0.1, relative_step=False, scale_parameter=False, clip_threshold=2.0, decay_rate=-0.5, eps=(1e-3, 0.5)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], [torch.bfloat16]), ids=short)
@pytest.mark.parametrize("options", some(CROSSED, CROSSED[1:3]), ids=lambda o: "-".join(o) or "default")
def test_transformers_checkpoints_load_and_training_goes_on(
    options: dict[str, Any], dtype: torch.dtype, backend: str
) -> None:
    """Into an optimizer made with torch's defaults: the checkpoint brings the other form."""
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 6, dtype)
    params, straight = parameters(values), parameters(values)
    source, whole = Transformers(params, **options), Transformers(straight, **options)
    drive(source, params, grads[:3])
    drive(whole, straight, grads)
    opt = mo_fused.Adafactor(params, backend=backend)
    opt.load_state_dict(through_file(source.state_dict()))
    drive(opt, params, grads[3:])
    assert_backend(opt, backend)
    for p, q in zip(params, straight, strict=True):
        assert_close(p, q.detach().double(), 6, f"{tuple(p.shape)}")
        entry, other = opt.state[p], whole.state[q]
        assert float(entry["step"]) == other["step"] == 6 and "RMS" not in entry
        pairs = [("variance", "exp_avg_sq"), ("exp_avg", "exp_avg")]
        if p.dim() > 1:
            pairs = [("row_var", "exp_avg_sq_row"), ("col_var", "exp_avg_sq_col"), ("exp_avg", "exp_avg")]
        for ours, name in pairs:
            if name in other:
                assert_close(entry[ours].reshape(-1), other[name].double().reshape(-1), 16, ours)
    assert opt.param_groups[0]["transformers_form"] is True
    again = mo_fused.Adafactor(params)
    again.load_state_dict(through_file(opt.state_dict()))
    assert {k: v for k, v in again.param_groups[0].items() if k != "params"} == {
        k: v for k, v in opt.param_groups[0].items() if k != "params"
    }


@pytest.mark.parametrize(
    ("key", "shape"),
    [("row_var", (5,)), ("row_var", (1, 3)), ("row_var", (3, 1)), ("col_var", (3,)), ("col_var", (5, 1))]
    + [("exp_avg", (3, 5)), ("variance", (7,))],
)
def test_state_of_another_shape_is_refused(key: str, shape: tuple[int, ...]) -> None:
    """Before anything is changed, by load_state_dict and, when it was set by hand, by the step."""
    params = parameters(weights([(5, 3), (3,)]))
    opt = MOMENTUM.ours(params)
    drive(opt, params, gradients([(5, 3), (3,)], 2))
    at = 1 if key == "variance" else 0
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][at][key] = torch.ones(shape)
    saved["param_groups"][0]["d"] = 123.0
    before = [p.detach().clone() for p in params], copy.deepcopy(states(opt, params)), opt.param_groups[0]["d"]
    with pytest.raises(ValueError, match=rf"expected state '{key}' of parameter {at}.*to have shape.*; found .*; load"):
        opt.load_state_dict(saved)
    assert_same_bits([p.detach() for p in params], before[0])
    assert_same_bits(states(opt, params), before[1])
    assert opt.param_groups[0]["d"] == before[2]
    opt.state[params[at]][key] = torch.ones(shape, device=DEVICE)
    with pytest.raises(ValueError, match=f"expected state '{key}'"):
        drive(opt, params, gradients([(5, 3), (3,)], 1))
    assert_same_bits([p.detach() for p in params], before[0])


@pytest.mark.parametrize("dtype", HALF, ids=short)
def test_loading_keeps_fp32_statistics_of_half_parameters(dtype: torch.dtype) -> None:
    params = parameters(weights(SHAPES, dtype))
    opt = MOMENTUM.ours(params)
    rows: Gradients = gradients(SHAPES, 2, dtype)
    drive(opt, params, rows)
    new = MOMENTUM.ours(params)
    saved = through_file(opt.state_dict())
    new.load_state_dict(saved)
    assert_same_bits(states(new, params), states(opt, params))
    mine = {v.data_ptr() for s in new.state.values() for v in s.values()}
    assert not mine & {v.data_ptr() for s in saved["state"].values() for v in s.values() if isinstance(v, Tensor)}


def test_state_dict_holds_plain_values_only() -> None:
    for form in (TORCH, TRANSFORMERS, MOMENTUM):
        params = parameters(weights(SHAPES))
        opt = form.ours(params, max_grad_norm=1.0)
        drive(opt, params, gradients(SHAPES, 1))
        saved = opt.state_dict()
        for group in saved["param_groups"]:
            assert not set(group) & {*OPTIONS, "clip_threshold", "decay_rate"}
            assert all(type(v) in (int, float, bool, str, type(None), tuple, list) for v in group.values())
        assert all(type(v) is Tensor for s in saved["state"].values() for v in s.values())
        assert saved["state"][0]["step"].dim() == 0


@pytest.mark.parametrize("form", [TORCH, TRANSFORMERS, Form("beta1", "transformers", dict(beta1=0.9))], ids=str)
def test_distributed_checkpoint_helpers(form: Form) -> None:
    """They make missing state exist by one step with rate 0 and zero gradients: no weight may move."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    params = list(model.parameters())
    start = [p.detach().clone() for p in params]
    get_optimizer_state_dict(model, form.ours(params))
    assert_same_bits([p.detach() for p in params], start, "the probing step moved a weight")
    opt = form.ours(params)
    grads: Gradients = [[noise((3, 4), 3 + t), noise((3,), 13 + t)] for t in range(5)]
    drive(opt, params, grads[:3])
    saved = get_optimizer_state_dict(model, opt)
    twin = copy.deepcopy(model)
    new = form.ours(twin.parameters())
    set_optimizer_state_dict(twin, new, saved)
    drive(opt, params, grads[3:])
    drive(new, list(twin.parameters()), grads[3:])
    assert_same_bits([p.detach() for p in twin.parameters()], [p.detach() for p in params])
