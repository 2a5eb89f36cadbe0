"""mo_fused.patch(): unmodified code gets our optimizers, and what it asks of torch's classes stays true."""

from __future__ import annotations

import abc
import copy
import copyreg
import importlib
import inspect
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import gradients, parameters, weights
from oracle import assert_same_bits
from torch.nn import Parameter

import mo_fused

NAMES = ["AdamW", "Adam", "SGD", "Adafactor"]
TORCHS = {name: getattr(torch.optim, name) for name in NAMES}
CLIP = torch.nn.utils.clip_grad_norm_
SHAPES = [(33, 3), (7,), (2, 5)]


class Early(torch.optim.AdamW):
    """What a library has derived before the patch, calling its base by a name that the patch changes."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        torch.optim.AdamW.__init__(self, params, lr)


@pytest.fixture(autouse=True)
def no_patch_stays() -> Iterator[None]:
    yield
    mo_fused.unpatch()


def one(value: float = 1.0) -> Parameter:
    p = Parameter(torch.full((3, 2), value))
    p.grad = torch.linspace(-1.0, 2.0, 6).reshape(3, 2)
    return p


def meanings() -> dict[str, Any]:
    """Every name that the patch may change, in every module that has it."""
    modules = [
        *{cls.__init__.__module__ for cls in TORCHS.values()},
        "torch.optim",
        "torch.nn.utils",
        "torch.nn.utils.clip_grad",
    ]
    found = {}
    for module in map(importlib.import_module, modules):
        for name in [*NAMES, "clip_grad_norm_"]:
            found[f"{module.__name__}.{name}"] = getattr(module, name, None)
    return found


# -- the names --------------------------------------------------------------------------------------------------------


def test_every_name_is_ours_and_comes_back() -> None:
    before, registered = meanings(), dict(copyreg.dispatch_table)
    with mo_fused.patch():
        during = meanings()
        for name in NAMES:
            for module in ("torch.optim", TORCHS[name].__init__.__module__):
                assert issubclass(during[f"{module}.{name}"], getattr(mo_fused, name))
                assert during[f"{module}.{name}"].__mro__[1] is getattr(mo_fused, name)
        assert during["torch.nn.utils.clip_grad_norm_"] is mo_fused.clip_grad_norm_
        assert during["torch.nn.utils.clip_grad.clip_grad_norm_"] is mo_fused.clip_grad_norm_
        assert sum(during[key] is not before[key] for key in before) == 2 * len(NAMES) + 2
    after = meanings()
    assert all(after[key] is before[key] for key in before)
    assert dict(copyreg.dispatch_table) == registered


def test_nested_repeated_and_overlapping() -> None:
    def ours() -> bool:
        return torch.optim.SGD is not TORCHS["SGD"]

    with mo_fused.patch():
        stand_in = torch.optim.SGD
        with mo_fused.patch():
            assert torch.optim.SGD is stand_in
        assert ours(), "the inner block took the outer one's patch away"
    assert not ours()
    mo_fused.patch()
    mo_fused.patch()
    with mo_fused.patch():
        pass
    assert ours()
    mo_fused.unpatch()
    mo_fused.unpatch()
    assert not ours()
    first, second = mo_fused.patch(), mo_fused.patch()  # as two threads hold it
    first.__exit__(None, None, None)
    assert ours()
    second.__exit__(None, None, None)
    assert not ours()
    with mo_fused.patch():
        mo_fused.unpatch()
        mo_fused.patch()
    assert ours(), "the end of a block whose patch is gone took somebody else's away"
    with pytest.raises(ZeroDivisionError), mo_fused.patch():
        mo_fused.unpatch()
        _ = 1 / 0
    assert not ours()


def test_what_somebody_else_has_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(torch.optim.Optimizer):
        pass

    monkeypatch.setattr(torch.optim, "SGD", torch.optim.SGD)  # puts it back after the test
    with mo_fused.patch():
        torch.optim.SGD = Other  # type: ignore[misc, assignment]
    assert torch.optim.SGD is Other and torch.optim.Adam is TORCHS["Adam"]


def test_threads_that_patch_at_random() -> None:
    wrong: list[str] = []

    def work() -> None:
        for _ in range(8):
            with mo_fused.patch():
                if not isinstance(torch.optim.AdamW([one()]), mo_fused.AdamW):
                    wrong.append("torch's under the patch")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and torch.optim.AdamW is TORCHS["AdamW"]


# -- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_isinstance_in_both_directions(name: str) -> None:
    theirs, ours = TORCHS[name]([one()]), getattr(mo_fused, name)([one()])
    with mo_fused.patch():
        cls = getattr(torch.optim, name)
        made = cls([one()])
        for opt in (theirs, ours, made):
            assert isinstance(opt, cls) and isinstance(opt, TORCHS[name]) and issubclass(type(opt), cls)
            assert isinstance(opt, torch.optim.Adam) == (name == "Adam" or isinstance(opt, TORCHS["Adam"]))
            assert isinstance(opt, torch.optim.SGD) == (name == "SGD")
        assert type(made) is cls and type(made) is not getattr(mo_fused, name)
        assert not isinstance(theirs, mo_fused.optim.FusedOptimizer)
        # Tables that were filled before: torch.distributed.optim has such a one.
        assert {TORCHS[name]: 1}[cls] == 1 and {cls: 1}[TORCHS[name]] == 1 and type(theirs) == cls  # noqa: E721
        assert cls != torch.optim.LBFGS and len({getattr(torch.optim, n) for n in NAMES}) == len(NAMES)
        assert (cls.__module__, cls.__qualname__) == (TORCHS[name].__module__, name)
        assert inspect.signature(cls) == inspect.signature(TORCHS[name])
    assert isinstance(made, TORCHS[name]) and isinstance(made, getattr(mo_fused, name))


def test_classes_that_users_derive() -> None:
    class Late(Early):
        pass

    early = Early([one()])
    with mo_fused.patch():

        class MyAdamW(torch.optim.AdamW):
            def __init__(self, params: Any, lr: float = 0.1) -> None:
                super().__init__(params, lr=lr, weight_decay=0.0)

            def step(self, closure: Any = None) -> Any:
                self.steps = getattr(self, "steps", 0) + 1
                return super().step(closure)

        mine, again, late = MyAdamW([one()]), Early([one()]), Late([one()])
        assert isinstance(mine, torch.optim.AdamW) and isinstance(mine, MyAdamW)
        for opt in (early, again, late, torch.optim.AdamW([one()])):
            assert isinstance(opt, torch.optim.AdamW) and not isinstance(opt, MyAdamW)
        for opt in (mine, again, late):
            opt.step()
        assert not isinstance(again, mo_fused.optim.FusedOptimizer), "a class derived before stays torch's"
        assert {type(again): 1}.get(torch.optim.AdamW) is None
    mine.step()
    assert mine.steps == 2 and mine.explain()[0].backend == "cpu" and isinstance(mine, TORCHS["AdamW"])
    p = one()
    twice = TORCHS["AdamW"]([p], lr=0.1, weight_decay=0.0, foreach=False)
    twice.step()
    twice.step()
    torch.testing.assert_close(mine.param_groups[0]["params"][0], p, rtol=1e-6, atol=1e-7)


# -- unmodified code --------------------------------------------------------------------------------------------------


def unmodified(steps: int = 3, **flags: Any) -> tuple[list[torch.Tensor], list[float], torch.optim.Optimizer]:
    """Code that knows of torch alone: three rates, a schedule, clipping."""
    params = parameters(weights(SHAPES))
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, **flags)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    norms = []
    for row in gradients(SHAPES, steps):
        for p, g in zip(params, row, strict=True):
            p.grad = g
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, 0.5)))
        opt.step()
        opt.zero_grad()
        schedule.step()
    return [p.detach() for p in params], norms, opt


@pytest.mark.parametrize("flag", ["none", "foreach", "fused", "capturable", "maximize"])
def test_a_script_runs_with_every_flag(flag: str) -> None:
    """capturable: torch refuses it on the CPU at the first step; here nothing stands in its way."""
    flags = {} if flag == "none" else {flag: True}
    want, norms, _ = unmodified(**({} if flag == "capturable" else flags))
    with mo_fused.patch():
        got, our_norms, opt = unmodified(**flags)
    assert isinstance(opt, mo_fused.AdamW) and {e.backend for e in opt.explain()} == {"cpu"}
    assert our_norms == pytest.approx(norms, rel=1e-6) and min(norms) > 0.5, "clipping was meant to clip"
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)


def test_a_step_that_is_differentiated() -> None:
    found = []
    for patched in (False, True):
        start, rate = torch.ones(3, requires_grad=True), torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
        if patched:
            mo_fused.patch()
        p = start.clone()
        opt = torch.optim.SGD([p], lr=0.1, differentiable=True)
        p.grad = rate * start
        opt.step()
        p.square().sum().backward()
        found.append([p.detach(), start.grad, rate.grad])
    assert isinstance(opt, mo_fused.SGD) and bool(found[1][2].abs().min() > 0)
    assert_same_bits(found[1], found[0])


def test_what_our_kernels_do_not_take_goes_to_torch_without_a_circle() -> None:
    """Our functions call torch's where they leave the work to it: by the name, they would find themselves."""
    with mo_fused.patch():
        phase = Parameter(torch.ones(4, dtype=torch.complex64))
        phase.grad = torch.full_like(phase, 3.0)
        assert float(torch.nn.utils.clip_grad_norm_([phase], 1.0)) == pytest.approx(6.0)
        p = one()
        assert float(torch.nn.utils.clip_grad_norm_([p], 1.0, norm_type=3.0)) == pytest.approx(2.2, rel=0.1)
        opt = torch.optim.SGD([phase], lr=0.5)
        opt.step()
        torch.testing.assert_close(phase.detach(), torch.full((4,), 0.75, dtype=torch.complex64), rtol=1e-5, atol=0)
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"), mo_fused.patch():
        torch.optim.AdamW([one()], fused=True, foreach=True)


@pytest.mark.parametrize("fused", [None, True])
def test_a_scaler_unscales_where_it_would_with_torchs_class(fused: bool | None) -> None:
    """Some code looks at .grad after the step, and some refuses to clip when the step unscales by itself."""
    seen = []
    for patched in (False, True):
        p = one()
        if patched:
            mo_fused.patch()
        opt = torch.optim.AdamW([p], lr=0.1, fused=fused)
        mo_fused.unpatch()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(opt)
        assert p.grad is not None
        seen.append((p.grad.clone(), p.detach().clone(), getattr(opt, "_step_supports_amp_scaling", False)))
    assert seen[0][2] == seen[1][2] == bool(fused)
    torch.testing.assert_close(seen[1][1], seen[0][1], rtol=1e-6, atol=0)
    if not fused:
        assert_same_bits([seen[1][0]], [seen[0][0]])


# -- copies and checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_of_what_the_name_means_where_it_is_loaded(protocol: int) -> None:
    theirs = TORCHS["AdamW"]([one()], lr=0.1)
    theirs.step()
    plain = pickle.dumps(theirs, protocol)
    with mo_fused.patch():
        ours = torch.optim.AdamW([one()], lr=0.1)
        ours.step()
        during = [plain, pickle.dumps(theirs, protocol), pickle.dumps(ours, protocol)]
        loaded = [pickle.loads(data) for data in during]
        assert [type(opt) for opt in loaded] == [torch.optim.AdamW] * 3
        assert all(opt.defaults["amp"] == "torch" for opt in loaded)
    loaded += [pickle.loads(data) for data in (*during, pickle.dumps(ours, protocol))]
    assert [type(opt) for opt in loaded[3:]] == [TORCHS["AdamW"]] * 4
    for opt in loaded:
        (p,) = opt.param_groups[0]["params"]
        p.grad = torch.linspace(2.0, -1.0, 6).reshape(3, 2)
        opt.step()
        assert float(opt.state[p]["step"]) == 2
        torch.testing.assert_close(p, loaded[0].param_groups[0]["params"][0], rtol=1e-6, atol=0)


def test_copies_keep_their_class_and_state_dicts_cross() -> None:
    theirs = TORCHS["AdamW"]([one()], lr=0.1)
    theirs.step()
    with mo_fused.patch():
        ours = torch.optim.AdamW([one()], lr=0.3)
        ours.load_state_dict(theirs.state_dict())
        kinds = [(type(copy.deepcopy(o)), type(copy.copy(o))) for o in (theirs, ours)]
    kinds += [(type(copy.deepcopy(o)), type(copy.copy(o))) for o in (theirs, ours)]
    assert kinds == [(type(theirs),) * 2, (type(ours),) * 2] * 2
    back = TORCHS["AdamW"]([one()])
    back.load_state_dict(ours.state_dict())
    assert back.param_groups[0]["lr"] == 0.1
    for a, b in zip(back.state.values(), theirs.state.values(), strict=True):
        assert_same_bits([a["exp_avg"], a["exp_avg_sq"]], [b["exp_avg"], b["exp_avg_sq"]])


# -- code of torch and of others that names these classes -------------------------------------------------------------


def test_swa_and_zero_redundancy() -> None:
    zero = importlib.import_module("torch.distributed.optim.zero_redundancy_optimizer")
    with mo_fused.patch():
        p = one()
        opt = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        rate = torch.optim.swa_utils.SWALR(opt, swa_lr=0.05, anneal_epochs=1)
        cyclic = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=5)
        opt.step()
        rate.step()
        cyclic.step()
        assert opt.param_groups[0]["lr"] != 0.1
        # torch's table of functional optimizers has torch's classes for keys.
        assert torch.optim.AdamW in zero.functional_optim_map
        group = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=group, rank=0, world_size=1)
        try:
            sharded = zero.ZeroRedundancyOptimizer([p], optimizer_class=torch.optim.AdamW, lr=0.1)
            before = p.detach().clone()
            sharded.step()
            assert isinstance(sharded.optim, mo_fused.AdamW) and not torch.equal(p.detach(), before)
        finally:
            torch.distributed.destroy_process_group()


def test_transformers_trainer_gets_ours() -> None:
    trainer = importlib.import_module("transformers.trainer")
    arguments = importlib.import_module("transformers").TrainingArguments
    given = arguments(output_dir="unused", optim="adamw_torch", use_cpu=True, report_to=[])
    with mo_fused.patch():
        cls, options = trainer.Trainer.get_optimizer_cls_and_kwargs(given)
        opt = cls([one()], **options)
    assert isinstance(opt, mo_fused.AdamW)


def test_a_derived_class_that_calls_the_constructor_of_optimizer_alone() -> None:
    with mo_fused.patch():

        class Plain(torch.optim.SGD):
            def __init__(self, params: Any, lr: float) -> None:
                flags = dict.fromkeys(("nesterov", "maximize", "differentiable"), False)
                defaults = {"lr": lr, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "foreach": None, **flags}
                torch.optim.Optimizer.__init__(self, params, {**defaults, "fused": None})

        weight = one()
        opt = Plain([weight], 0.5)
    assert "amp" not in opt.param_groups[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(opt)
    assert torch.equal(weight, torch.full_like(weight, 0.5)) and torch.equal(weight.grad, torch.ones_like(weight))


def test_classes_are_pickled_and_mixed_with_abstract_ones() -> None:
    with mo_fused.patch():
        ours = torch.optim.AdamW
        assert pickle.loads(pickle.dumps(ours)) is ours
        pickled = pickle.dumps(ours)

        class Mixed(ours, abc.ABC):  # type: ignore[misc, valid-type]
            pass

        assert type("Made", (ours,), {}).__module__ == __name__
        opt = Mixed([one()])
        assert isinstance(opt, ours) and isinstance(opt, Mixed) and not isinstance(ours([one()]), Mixed)
    assert pickle.loads(pickled) is pickle.loads(pickle.dumps(ours)) is torch.optim.AdamW
