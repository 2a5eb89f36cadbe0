"""States that are offloaded: which parameters', saved and loaded, copied, freed; groups, schedules; what is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ADAMW, DEVICE, SGD, Case, gradients, noise, parameters, some, states, weights
from offload_pair import (
    ADAFACTOR_MOMENTUM,
    AMSGRAD,
    IDS,
    ONE_OF_EACH,
    SHAPES,
    TAKEN,
    Pair,
    assert_same,
    backward,
    by_case,
    in_pieces,
    nets,
    rows,
    split,
)
from oracle import assert_same_bits

import mo_fused

CASES = some([*ONE_OF_EACH, AMSGRAD], [SGD])
WHERE = some(["cpu", "disk"], ["cpu"])


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch)


def home(where: str | None, path: Path) -> str | None:
    return f"disk:{path}" if where == "disk" else where


def through_a_file(saved: Any) -> Any:
    """What comes out of torch.load, which takes nothing but tensors, numbers and containers."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- saved and loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [("cpu", "cpu", "dict"), ("cpu", "cpu", "file"), ("cpu", None, "dict"), (None, "cpu", "file")]
    + some([("cpu", "disk", "file"), ("disk", "cpu", "dict"), ("disk", None, "file")], []),
)
@by_case(CASES)
def test_saved_and_loaded_in_the_middle(
    case: Case, before: str | None, after: str | None, how: str, tmp_path: Path
) -> None:
    """The run that goes on elsewhere has the bits of the one that stays."""
    grads = rows(5)
    first = parameters(weights(SHAPES))
    plain = parameters(weights(SHAPES))
    opt, other = (
        case.ours(split(p), offload=where, max_grad_norm=1.0)
        for p, where in ((first, home(before, tmp_path)), (plain, None))
    )
    drive(opt, first, grads[:3])
    drive(other, plain, grads[:3])
    saved = opt.state_dict()
    theirs = other.state_dict()
    assert all(type(entry) is dict for entry in saved["state"].values())
    assert saved["param_groups"] == theirs["param_groups"]
    assert list(saved["state"]) == list(theirs["state"])
    assert_same_bits(list(saved["state"].values()), list(theirs["state"].values()))
    loaded = through_a_file(saved) if how == "file" else saved
    second = parameters([p.detach() for p in first])
    resumed = case.ours(split(second), offload=home(after, tmp_path), max_grad_norm=1.0)
    resumed.load_state_dict(loaded)
    kept = copy.deepcopy(loaded["state"])
    drive(resumed, second, grads[3:])
    drive(other, plain, grads[3:])
    assert_same_bits([p.detach() for p in second], [p.detach() for p in plain])
    assert_same_bits(states(resumed, second), states(other, plain))
    assert_same_bits(list(loaded["state"].values()), list(kept.values()), "what was loaded is not written")
    drive(opt, first, grads[3:])
    assert_same_bits(states(opt, first), states(other, plain), "the first goes on by itself")


def drive(opt: Any, params: Any, grads: Any) -> None:
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else g.to(p.device).clone()
        opt.step()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("saved_with", "loaded_with"),
    [
        ({}, dict(state_dtype="bf16")),
        (dict(state_dtype="bf16"), {}),
        (dict(state_dtype="int8"), dict(state_dtype="fp32")),
        (dict(state_dtype="fp32"), dict(state_dtype="int4")),
        ({}, dict(master_weights="fp32")),
        (dict(master_weights="fp32"), dict(master_weights="split")),
        (dict(master_weights="split"), dict(master_weights="split8", state_dtype="int8")),
        (dict(master_weights="split8"), dict(master_weights="stochastic")),
        (dict(master_weights="fp32", state_dtype="int4"), {}),
    ],
    ids=str,
)
def test_loaded_into_other_formats(
    saved_with: dict[str, Any], loaded_with: dict[str, Any], where: str, tmp_path: Path
) -> None:
    """Conversions have the bits of those beside the parameters."""
    shapes = [(33, 64), (40, 6), (9,)]
    grads = gradients(shapes, 4, torch.bfloat16)
    found = []
    for offload in (None, home(where, tmp_path)):
        params = parameters(weights(shapes, torch.bfloat16))
        opt = ADAMW.ours(params, offload=offload, **saved_with)
        drive(opt, params, grads[:2])
        new = ADAMW.ours(params, offload=offload, **loaded_with)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # kept in other formats
            new.load_state_dict(through_a_file(opt.state_dict()))
        drive(new, params, grads[2:])
        found.append(([p.detach() for p in params], states(new, params)))
    assert_same_bits(found[1], found[0])


def test_a_checkpoint_of_torch() -> None:
    params, plain, theirs = (parameters(weights(SHAPES)) for _ in range(3))
    grads = rows(5)
    saved_by = ADAMW.torch(theirs)
    drive(saved_by, theirs, grads[:3])
    saved = through_a_file(saved_by.state_dict())
    opt, other = ADAMW.ours(params, offload="cpu"), ADAMW.ours(plain)
    for ours, o in ((params, opt), (plain, other)):
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                p.copy_(q)
        o.load_state_dict(saved)
        drive(o, ours, grads[3:])
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])
    assert_same_bits(states(opt, params), states(other, plain))
    back = ADAMW.torch(theirs)
    back.load_state_dict(opt.state_dict())
    assert_same_bits(states(back, theirs), states(opt, params))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@by_case(ONE_OF_EACH)
def test_copies_of_the_optimizer(case: Case, how: str, where: str, tmp_path: Path) -> None:
    """They go on by themselves, and so does the original."""
    plain, other, model, opt = nets(case, offload=home(where, tmp_path))
    loops = [(plain, other), (model, opt)]
    for m, o in loops:
        for t in range(2):
            backward(m, t)
            o.step()
            o.zero_grad()
    copies = [copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair)) for pair in loops]
    assert copies[1][1].defaults["offload"] == home(where, tmp_path)
    for t in range(2, 4):
        for k, (m, o) in enumerate([*loops, *copies]):
            backward(m, t if k < 2 else t + 10)
            o.step()
            o.zero_grad()
    assert_same(model, opt, plain, other)
    assert_same(*copies[1], *copies[0])


@by_case(ONE_OF_EACH)
def test_states_put_in_by_hand(case: Case) -> None:
    """A state that somebody replaces, or takes away, is what the next step works on."""
    two = Pair(case, weights(SHAPES))
    grads = rows(6)
    two.drive(grads[:3])
    for params, opt in two.both:
        for i, p in enumerate(params):
            if i == 1:
                opt.state.pop(p)
                continue
            for key, value in list(opt.state[p].items()):
                if key != "step":
                    opt.state[p][key] = value.clone() * 0.5
    two.drive(grads[3:])


# -- groups, rates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
def test_a_group_added_later(taken: bool, fraction: float) -> None:
    """The new parameters may be larger than those that were offloaded until now."""
    values = weights([(40, 10), (30, 10), (200, 100), (5,)])
    grads = gradients([v.shape for v in values], 5)
    two = Pair(ADAMW, values, groups=lambda params: params[:2], offload_gradients=taken, offload_fraction=fraction)
    for t, row in enumerate(grads):
        if t == 2:
            for params, opt in two.both:
                opt.add_param_group({"params": params[2:], "lr": 0.01, "amsgrad": True})
        last = 2 if t < 2 else 4
        for params, opt in two.both:
            for p, g in zip(params[:last], row[:last], strict=True):
                assert g is not None
                p.grad = g.to(DEVICE).clone()
            opt.step()
        two.check()
    assert "host's memory" in two.opt.explain()[2].reason
    assert ("host's memory" in two.opt.explain()[0].reason) is (fraction == 1.0)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("schedule", [*SCHEDULES])
@by_case([ADAMW, SGD])
def test_schedules(case: Case, schedule: str) -> None:
    plain, other, model, opt = nets(case)
    loops = [(m, o, SCHEDULES[schedule](o)) for m, o in ((plain, other), (model, opt))]
    for t in range(5):
        for m, o, s in loops:
            backward(m, t)
            o.step()
            o.zero_grad()
            s.step(*((1.0,) if schedule == "ReduceLROnPlateau" else ()))
        assert_same(model, opt, plain, other)
    assert opt.param_groups[0]["lr"] == other.param_groups[0]["lr"] != 1e-2


@by_case(ONE_OF_EACH)
def test_options_of_groups_changed_between_steps(case: Case) -> None:
    two = Pair(case, weights(SHAPES), groups=split)
    for t, row in enumerate(rows(5)):
        for _, opt in two.both:
            opt.param_groups[0]["lr"] = 0.1 / (1 + t)
            opt.param_groups[1]["weight_decay"] = 0.01 * t
            if t == 3 and case is ADAMW:
                opt.param_groups[0]["amsgrad"] = True
            if t == 3 and case is SGD:
                opt.param_groups[0]["momentum"] = 0.0
        two.drive([row])


def test_a_rate_that_is_a_tensor() -> None:
    two = Pair(ADAMW, weights(SHAPES), lr=torch.tensor(0.1))
    for t, row in enumerate(rows(4)):
        for _, opt in two.both:
            opt.param_groups[0]["lr"].fill_(0.1 / (1 + t))
        two.drive([row])


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_parameters_given_other_memory(fraction: float) -> None:
    """p.data is replaced, by another dtype too, as model.to() does."""
    two = Pair(SGD, weights(SHAPES), offload_fraction=fraction)
    two.drive(rows(2))
    for params, _ in two.both:
        for p in params:
            p.grad = None
            p.data = p.detach().clone()
    two.drive(rows(2))
    for params, _ in two.both:
        for p in params:
            p.grad = None
            p.data = p.detach().double()
    two.drive(rows(2, torch.float64))


# -- which parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.0, []), (0.01, [3]), (0.65, [3]), (0.66, [3, 1]), (0.98, [3, 1]), (0.985, [3, 1, 2]), (1.0, [0, 1, 2, 3, 4])],
)
def test_fraction(fraction: float, expected: list[int]) -> None:
    """By bytes, of 10, 500 (of float64), 50, 2000 and 0 elements; the largest come first."""
    values = [noise((n,), n, dtype) for n, dtype in ((10, torch.float32), (500, torch.float64), (50, torch.float32))]
    values += [noise((2000,), 4), noise((0,), 5)]
    params = parameters(values)
    opt = mo_fused.AdamW(params, lr=0.1, offload="cpu", offload_fraction=fraction)
    before = opt.explain()
    assert all("no step yet" in e.reason for e in before)
    drive(opt, params, [values])
    found = [i for i, e in enumerate(opt.explain()) if "state in the host's memory" in e.reason]
    assert found == sorted(expected)
    assert [i for i, e in enumerate(before) if "state in the host's memory" in e.reason] == found
    for i, p in enumerate(params):
        where = torch.device("cpu") if i in found else p.device
        assert all(value.device == where for value in opt.state[p].values())
        assert bool(p._post_accumulate_grad_hooks) is (i in found)


def test_fraction_counts_what_the_states_take() -> None:
    """Quantised moments, master weights and Adafactor's vectors are not as large as their parameters."""

    def offloaded(kind: Any, values: Any, **options: Any) -> list[int]:
        params = parameters(values)
        opt = kind(params, offload="cpu", offload_fraction=0.5, **options)
        drive(opt, params, [values])
        return [i for i, e in enumerate(opt.explain()) if "host's memory" in e.reason]

    matrix, vector = noise((64, 64), 1), noise((3000,), 2)
    assert offloaded(mo_fused.AdamW, [matrix, vector]) == [0]
    assert offloaded(mo_fused.AdamW, [matrix, vector], state_dtype="int4") == [1], "the vector keeps fp32"
    assert offloaded(mo_fused.Adafactor, [matrix, vector]) == [1], "of the matrix there are 128 numbers"
    half = matrix.bfloat16()
    assert offloaded(mo_fused.AdamW, [matrix, half], state_dtype="fp32", master_weights="fp32") == [1]
    assert offloaded(mo_fused.SGD, [matrix, vector], lr=0.1) == [], "no state at all"


# -- what is refused --------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "where": (dict(offload="gpu"), "offload.*'cpu', 'disk:PATH' or None.*'gpu'"),
    "no path": (dict(offload="disk:"), "offload.*'disk:PATH'"),
    "a bool": (dict(offload=True), "offload.*'cpu', 'disk:PATH' or None.*True"),
    "fraction": (dict(offload="cpu", offload_fraction=1.5), "offload_fraction.*from 0 to 1.*1.5"),
    "negative": (dict(offload="cpu", offload_fraction=-0.1), "offload_fraction.*-0.1"),
    "nan": (dict(offload="cpu", offload_fraction=float("nan")), "offload_fraction.*nan"),
    "fraction of a bool": (dict(offload="cpu", offload_fraction=True), "offload_fraction.*True"),
    "text": (dict(offload="cpu", offload_fraction="all"), "offload_fraction.*'all'"),
    "gradients": (dict(offload="cpu", offload_gradients=1), "offload_gradients.*True or False.*1"),
    "gradients alone": (dict(offload_gradients=True), "offload_gradients.*False without offload"),
    "in place": (dict(offload="cpu", offload_gradients=True, clip_in_place=True), "clip_in_place.*offload_gradients"),
}


@pytest.mark.parametrize("what", [*WRONG])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adafactor"])
def test_wrong_options(kind: str, what: str) -> None:
    """One clear error, and nothing has changed."""
    options, text = WRONG[what]
    params = parameters(weights(SHAPES))
    before = threading.active_count()
    with pytest.raises(ValueError, match=f"(?s)^expected .*{text}"):
        getattr(mo_fused, kind)(params, **options)
    assert not any(p._post_accumulate_grad_hooks for p in params)
    assert threading.active_count() <= before


@pytest.mark.parametrize("name", ["offload", "offload_gradients", "offload_fraction"])
def test_options_of_groups_are_refused(name: str) -> None:
    opt = mo_fused.AdamW(parameters(weights([(3,)])), offload="cpu")
    with pytest.raises(ValueError, match=f"the group key '{name}'"):
        opt.add_param_group({"params": parameters(weights([(3,)])), name: opt.defaults[name]})
    assert len(opt.param_groups) == 1 and name not in opt.param_groups[0]
    assert not {"offload", "offload_gradients", "offload_fraction"} & set(opt.state_dict()["param_groups"][0])


@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
def test_gradients_that_do_not_fit_are_refused_before_anything_changes(taken: bool) -> None:
    params = parameters(weights([(4, 3), (5,)]))
    opt = ADAMW.ours(params, offload="cpu", offload_gradients=taken)
    drive(opt, params, gradients([(4, 3), (5,)], 1))
    before = [p.detach().clone() for p in params], states(opt, params)
    params[0].grad = noise((4, 3), 1)
    params[1].grad = noise((5,), 2)
    params[1].data = noise((6,), 3)
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        opt.step()
    params[1].data = before[0][1].clone()
    assert_same_bits([p.detach() for p in params], before[0])
    assert_same_bits(states(opt, params), before[1])


# -- what stays behind ------------------------------------------------------------------------------------------------


def workers() -> int:
    return sum(t.name.startswith("mo_fused") for t in threading.enumerate())


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("taken", TAKEN, ids=IDS)
def test_a_deleted_optimizer_leaves_nothing_behind(taken: bool, where: str, tmp_path: Path) -> None:
    """No hooks, no threads, no files, and the optimizer is freed without the cycle collector."""
    plain, other, model, _ = nets(SGD)
    del other, _
    gc.collect()
    for p in model.parameters():
        p._post_accumulate_grad_hooks = None
    time.sleep(0.05)
    before = workers()
    for t in range(3):
        opt = SGD.ours(model.parameters(), offload=home(where, tmp_path), offload_gradients=taken)
        for k in range(2):
            backward(model, 2 * t + k)
            opt.step()
        backward(model, t)
        gc.collect()
        gc.disable()
        try:
            gone = (
                weakref.ref(opt),
                weakref.ref(opt._offload),
                weakref.ref(opt.state[next(model.parameters())]["momentum_buffer"]),
            )
            del opt
            assert all(ref() is None for ref in gone), "something holds the optimizer"
        finally:
            gc.enable()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters()), "hooks stay at the parameters"
        for p in model.parameters():
            p.grad = None
    assert not list(tmp_path.iterdir())
    end = time.monotonic() + 5
    while workers() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert workers() <= before, [t.name for t in threading.enumerate()]


def test_parameters_are_freed() -> None:
    """Nothing keeps a model alive whose optimizer is gone."""
    model = torch.nn.Linear(20, 20, device=DEVICE)
    opt = ADAFACTOR_MOMENTUM.ours(model.parameters(), offload="cpu")
    model(torch.ones(2, 20, device=DEVICE)).sum().backward()
    opt.step()
    opt.zero_grad()
    refs = [weakref.ref(p) for p in model.parameters()]
    gc.collect()
    del model, opt
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_no_thread_before_the_first_step() -> None:
    before = workers()
    kept = [mo_fused.AdamW(parameters(weights([(3,)])), offload="cpu") for _ in range(5)]
    assert workers() <= before and len(kept) == 5
