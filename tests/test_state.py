"""State: same keys as torch, checkpoints that cross both ways, loading that refuses or repairs, copies that go on."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
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
    RULES,
    SGD,
    Case,
    Gradients,
    assert_backend,
    drive,
    gradients,
    noise,
    parameters,
    short,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits, reference
from torch import Tensor
from torch.nn import Parameter

# A vector, a matrix, a scalar and nothing: what a checkpoint of a real model holds.
SHAPES = [(7,), (5, 3), (), (0,)]
PLAIN = Case("SGD", "plain", dict(lr=0.1))
KEPT = [*RULES, AMSGRAD, PLAIN]


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """What torch.save and the safe loader make of it."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def snapshot(opt: torch.optim.Optimizer, params: list[Parameter]) -> tuple[Any, Any, Any]:
    """Everything that a refused operation must leave alone."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    return [p.detach().clone() for p in params], states(opt, params), copy.deepcopy(groups)


def assert_unchanged(opt: torch.optim.Optimizer, params: list[Parameter], before: tuple[Any, Any, Any]) -> None:
    after = snapshot(opt, params)
    assert_same_bits(after[0], before[0], "parameter")
    assert_same_bits(after[1], before[1], "state")
    assert repr(after[2]) == repr(before[2]), "a group's options changed"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_has_torchs_keys_dtypes_and_shapes(case: Case, dtype: torch.dtype) -> None:
    def facts(opt: torch.optim.Optimizer, params: list[Parameter]) -> Any:
        return [
            {k: (type(v), v.dtype, tuple(v.shape), v.device) for k, v in opt.state.get(p, {}).items()} for p in params
        ]

    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 2, dtype)
    grads[0][0] = grads[1][0] = None  # never had a gradient: no state at all
    ours, theirs = parameters(values), parameters(values)
    a, b = case.ours(ours), case.torch(theirs)
    drive(a, ours, grads)
    drive(b, theirs, grads)
    assert facts(a, ours) == facts(b, theirs)
    assert ours[0] not in a.state
    saved_a, saved_b = a.state_dict(), b.state_dict()
    assert list(saved_a) == list(saved_b) == ["state", "param_groups"]
    assert list(saved_a["state"]) == list(saved_b["state"])
    for g, h in zip(saved_a["param_groups"], saved_b["param_groups"], strict=True):
        assert set(h) <= set(g), f"group keys of torch are missing: {set(h) - set(g)}"
        assert g["params"] == h["params"]


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=short)
def test_step_counts_past_256_under_any_default_dtype(default: torch.dtype) -> None:
    """bf16 stops counting at 256. The dtype is torch's choice: float32, or float64 where that is the default."""
    counted = 250 if INTERPRETED else 1  # what one step leaves is set to this; the interpreter has no time for all
    p, q = Parameter(torch.ones(4)), Parameter(torch.ones(4, dtype=torch.float64))
    torch.set_default_dtype(default)
    try:
        opt, theirs = ADAMW.ours([p]), ADAMW.torch([q])
        for o, x in ((opt, p), (theirs, q)):
            grads: Gradients = [[torch.full((4,), 0.1, dtype=x.dtype)]]
            drive(o, [x], grads)
            o.state[x]["step"].fill_(counted)
            drive(o, [x], grads * (300 - counted))
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(opt.state[p]["step"]) == 300
    assert opt.state[p]["step"].dtype == theirs.state[q]["step"].dtype
    assert opt.state[p]["exp_avg"].dtype == torch.float32
    assert_close(p, q.detach(), 300)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("case", KEPT, ids=str)
def test_resume_is_bit_exact_and_keeps_dtypes(case: Case, dtype: torch.dtype) -> None:
    """Also fp32 moments of half-precision weights, which torch's loader rounds to the weights' type."""
    values, grads = weights(SHAPES, dtype), gradients(SHAPES, 6, dtype)
    params = parameters(values)
    opt = case.ours(params)
    drive(opt, params, grads[:1])
    for state in opt.state.values():
        for key in state:
            if key != "step" and dtype in HALF:
                state[key] = state[key].float()
    drive(opt, params, grads[1:3])
    saved = through_file(opt.state_dict())
    middle, middle_states = [p.detach().clone() for p in params], states(opt, params)
    drive(opt, params, grads[3:])
    for _ in range(2):  # one checkpoint serves twice: loading must not hand out its own tensors
        again = parameters(middle)
        new = case.ours(again)
        new.load_state_dict(copy.deepcopy(saved))
        assert_same_bits(states(new, again), middle_states, "loaded state")
        drive(new, again, grads[3:])
        assert_same_bits([p.detach() for p in again], [p.detach() for p in params], "parameter")
        assert_same_bits(states(new, again), states(opt, params), "state")


@pytest.mark.parametrize("case", KEPT, ids=str)
@pytest.mark.parametrize("fused", [None, True], ids=["torch_default", "torch_fused"])
def test_checkpoints_cross_to_torch_and_back(case: Case, fused: bool | None) -> None:
    values, grads = weights(SHAPES), gradients(SHAPES, 9)
    want, _ = reference(case, values, grads)
    params = parameters(values)
    theirs = getattr(torch.optim, case.kind)(params, fused=fused, **case.arguments())
    drive(theirs, params, grads[:3])
    ours = case.ours(params)
    ours.load_state_dict(through_file(theirs.state_dict()))
    drive(ours, params, grads[3:6])
    assert_backend(ours, BACKEND)
    back = getattr(torch.optim, case.kind)(params, fused=fused, **case.arguments())
    back.load_state_dict(through_file(ours.state_dict()))
    drive(back, params, grads[6:])
    for p, w in zip(params, want, strict=True):
        assert_close(p, w, 9)
    for p in params:
        if "step" in back.state[p]:
            assert float(back.state[p]["step"]) == 9


def test_load_takes_torchs_keyword() -> None:
    p = Parameter(torch.ones(3))
    opt = ADAMW.ours([p])
    drive(opt, [p], [[torch.ones(3)]])
    new = ADAMW.ours([p])
    new.load_state_dict(state_dict=opt.state_dict())
    assert float(new.state[p]["step"]) == 1


# Forms of `step` that checkpoints of different age and origin hold.
STEP_FORMS: dict[str, Callable[[Any], Any]] = {
    "int": lambda s: int(s),
    "float": lambda s: float(s),
    "int64": lambda s: torch.tensor(int(s)),
    "float64": lambda s: torch.tensor(float(s), dtype=torch.float64),
    "shape1": lambda s: torch.tensor([float(s)]),
    "bfloat16": lambda s: torch.tensor(float(s), dtype=torch.bfloat16),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", list(STEP_FORMS))
def test_every_form_of_step_loads_and_counts_on(form: str, backend: str) -> None:
    values, grads = weights([(6,)]), gradients([(6,)], 5)
    want, _ = reference(ADAMW, values, grads)
    params = parameters(values)
    opt = ADAMW.ours(params, backend=backend)
    drive(opt, params, grads[:3])
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["step"] = STEP_FORMS[form](saved["state"][0]["step"])
    new = ADAMW.ours(params, backend=backend)
    new.load_state_dict(saved)
    drive(new, params, grads[3:])
    assert float(new.state[params[0]]["step"]) == 5
    assert_close(params[0], want[0], 5)


@pytest.mark.parametrize("form", list(STEP_FORMS))
def test_step_replaced_in_the_state_itself(form: str) -> None:
    """Not only through load_state_dict: tools write into opt.state."""
    values, grads = weights([(6,)]), gradients([(6,)], 5)
    want, _ = reference(ADAMW, values, grads)
    params = parameters(values)
    opt = ADAMW.ours(params)
    drive(opt, params, grads[:3])
    opt.state[params[0]]["step"] = STEP_FORMS[form](opt.state[params[0]]["step"])
    drive(opt, params, grads[3:])
    assert float(opt.state[params[0]]["step"]) == 5
    assert_close(params[0], want[0], 5)


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_keys_missing_from_an_old_checkpoint_are_filled(case: Case) -> None:
    values, grads = weights(SHAPES), gradients(SHAPES, 4)
    want, _ = reference(case, values, grads)
    params = parameters(values)
    opt = case.ours(params)
    drive(opt, params, grads[:2])
    saved = copy.deepcopy(opt.state_dict())
    for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
        saved["param_groups"][0].pop(key, None)
    new = case.ours(params)
    new.load_state_dict(saved)
    drive(new, params, grads[2:])
    for p, w in zip(params, want, strict=True):
        assert_close(p, w, 4)
    assert new.param_groups[0]["maximize"] is False


def test_momentum_buffer_none_counts_as_missing() -> None:
    """Older torch stored None before the first step with momentum."""
    p = Parameter(torch.ones(3))
    opt = SGD.ours([p], weight_decay=0.0)
    saved = opt.state_dict()
    saved["state"] = {0: {"momentum_buffer": None}}
    opt.load_state_dict(saved)
    drive(opt, [p], [[torch.full((3,), 2.0)]])
    assert torch.equal(opt.state[p]["momentum_buffer"], torch.full((3,), 2.0))


@pytest.mark.parametrize("case", RULES, ids=str)
# Fewer and more elements, equal count in another shape, a broadcastable shape.
@pytest.mark.parametrize("shape", [(4, 3), (6, 3), (3, 5), (15,), (1, 3)])
def test_state_of_another_shape_is_refused(case: Case, shape: tuple[int, ...]) -> None:
    params = parameters(weights([(7,), (5, 3)]))
    opt = case.ours(params)
    grads = gradients([(7,), (5, 3)], 2)
    drive(opt, params, grads)
    saved = copy.deepcopy(opt.state_dict())
    key = "momentum_buffer" if case.kind == "SGD" else "exp_avg_sq"
    saved["state"][1][key] = torch.ones(shape)
    saved["param_groups"][0]["lr"] = 123.0
    before = snapshot(opt, params)
    with pytest.raises((ValueError, RuntimeError)) as error:
        opt.load_state_dict(saved)
    assert str(tuple(shape)) in str(error.value) or str(list(shape)) in str(error.value), error.value
    assert_unchanged(opt, params, before)
    drive(opt, params, grads)


@pytest.mark.parametrize("case", RULES, ids=str)
def test_state_of_another_shape_set_by_hand_is_refused(case: Case) -> None:
    params = parameters(weights([(7,), (5, 3)]))
    opt = case.ours(params)
    grads = gradients([(7,), (5, 3)], 2)
    drive(opt, params, grads[:1])
    key = "momentum_buffer" if case.kind == "SGD" else "exp_avg"
    opt.state[params[1]][key] = torch.zeros(3, 3)
    before = snapshot(opt, params)
    with pytest.raises((ValueError, RuntimeError)):
        drive(opt, params, grads[1:])
    assert_unchanged(opt, params, before)


def test_other_groups_are_refused_with_torchs_texts() -> None:
    params = parameters(weights([(7,), (5, 3)]))
    one, two = ADAMW.ours(params), ADAMW.ours([{"params": [p]} for p in params])
    short_one = ADAMW.ours(params[:1])
    before = snapshot(one, params)
    with pytest.raises(ValueError, match="loaded state dict has a different number of parameter groups"):
        one.load_state_dict(two.state_dict())
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        one.load_state_dict(short_one.state_dict())
    assert_unchanged(one, params, before)


def test_names_in_another_order_never_swap_states() -> None:
    """torch keeps the names and ignores them: two parameters of equal shape would get each other's moments."""
    a, b = parameters(weights([(3,), (3,)]))
    old = ADAMW.ours([("a", a), ("b", b)])
    drive(old, [a, b], [[torch.ones(3), torch.full((3,), 5.0)]])
    new = ADAMW.ours([("b", b), ("a", a)])
    before = snapshot(new, [a, b])
    try:
        new.load_state_dict(through_file(old.state_dict()))
    except ValueError as error:
        assert "'a'" in str(error) and "'b'" in str(error), f"the message must show the names: {error}"
        assert_unchanged(new, [a, b], before)
    else:
        assert float(new.state[a]["exp_avg"].mean()) < float(new.state[b]["exp_avg"].mean()), "moments swapped"


def test_our_options_survive_a_plain_torch_checkpoint() -> None:
    params, twins = parameters(weights(SHAPES)), parameters(weights(SHAPES))
    grads = gradients(SHAPES, 2)
    theirs = ADAMW.torch(params)
    drive(theirs, params, grads[:1])
    drive(ADAMW.torch(twins), twins, grads[:1])
    backend = BACKENDS[-1]
    opt = ADAMW.ours(params, max_grad_norm=0.5, skip_nonfinite=True, stats=True, backend=backend)
    opt.load_state_dict(through_file(theirs.state_dict()))
    drive(opt, params, grads[1:])
    assert_backend(opt, backend)
    assert float(opt.last_step.clip_coef) < 0.1, "the clip was lost"
    assert opt.last_step.update_norm is not None, "the statistics were lost"
    before = snapshot(opt, params)
    drive(opt, params, [[torch.full_like(p, float("nan")) for p in params]])
    assert_unchanged(opt, params, before)
    assert opt._step_supports_amp_scaling is True, "a checkpoint with fused=None must not turn the AMP path off"


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("case", [*RULES, AMSGRAD], ids=str)
def test_a_copy_goes_on_like_the_original(case: Case, way: str) -> None:
    params = parameters(weights(SHAPES))
    opt = case.ours(params, max_grad_norm=0.5, stats=True, amp="torch")
    drive(opt, params, gradients(SHAPES, 2))
    new = copy.deepcopy(opt) if way == "deepcopy" else pickle.loads(pickle.dumps(opt))
    public = [{k for k in o.__dict__ if not k.startswith("_")} for o in (opt, new)]
    assert public[0] == public[1]
    copies: list[Any] = new.param_groups[0]["params"]
    assert all(p is not q for p, q in zip(params, copies, strict=True))
    more = gradients(SHAPES, 2, seed=5)
    drive(opt, params, more)
    drive(new, copies, more)
    assert_same_bits([q.detach() for q in copies], [p.detach() for p in params])
    assert_same_bits(states(new, copies), states(opt, params))
    assert float(new.last_step.clip_coef) == float(opt.last_step.clip_coef) < 0.1
    assert new._step_supports_amp_scaling is False
    assert str(new) == str(opt)


def test_a_copy_of_a_fresh_optimizer_works() -> None:
    p = Parameter(torch.ones(3))
    new = copy.deepcopy(ADAMW.ours([p]))
    (q,) = new.param_groups[0]["params"]
    drive(new, [q], [[torch.ones(3)]])
    assert not torch.equal(q, p) and torch.equal(p.detach(), torch.ones(3))


def plain_values(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        for key, value in x.items():
            yield key
            yield from plain_values(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from plain_values(value)
    else:
        yield x


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_state_dict_holds_plain_values_only(case: Case) -> None:
    params = parameters(weights(SHAPES))
    opt = case.ours(params, max_grad_norm=1.0)
    drive(opt, params, gradients(SHAPES, 2))
    saved = opt.state_dict()
    allowed = (Tensor, int, float, bool, str, type(None))
    odd = [v for v in plain_values(saved) if type(v) not in allowed]
    assert not odd, f"not loadable everywhere: {odd}"
    odd = [v for s in saved["state"].values() for v in s.values() if type(v) not in (Tensor, int, float)]
    assert not odd, f"state values must be tensors and numbers: {odd}"


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_distributed_checkpoint_helpers(case: Case) -> None:
    """They make missing state exist by one step with rate 0 and zero gradients: no weight may move."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.bias[0] = -0.0
    params = list(model.parameters())
    start = [p.detach().clone() for p in params]
    opt = case.ours(params)
    get_optimizer_state_dict(model, opt)
    assert_same_bits([p.detach() for p in params], start, "the probing step moved a weight")

    opt = case.ours(params)
    grads: Gradients = [[noise((3, 4), 3 + t), noise((3,), 13 + t)] for t in range(5)]
    drive(opt, params, grads[:3])
    saved = get_optimizer_state_dict(model, opt)
    twin = copy.deepcopy(model)
    new = case.ours(twin.parameters())
    set_optimizer_state_dict(twin, new, saved)
    drive(opt, params, grads[3:])
    drive(new, list(twin.parameters()), grads[3:])
    assert_same_bits([p.detach() for p in twin.parameters()], [p.detach() for p in params])
