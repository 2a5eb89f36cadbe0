"""Every scheduler of torch, and torch.optim.swa_utils, drive our optimizers as they drive torch's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ADAMW, SGD, Case, assert_backend, gradients, noise, parameters, weights
from oracle import assert_close, assert_same_bits
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="schedulers write group options on the host; test_changes.py has some of them")

SHAPES = [(7,), (5, 3)]
STEPS = 9
CUT = 4  # where a run is saved: past the first switch of the sequences, in the middle of a cycle


def schedulers_of(module: Any) -> dict[str, type[LRScheduler]]:
    """The public scheduler classes that a module defines: a new one in torch has no place in MAKERS and fails."""
    found = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind) and not name.startswith("_")}
    return {
        name: kind
        for name, kind in found.items()
        if issubclass(kind, LRScheduler) and kind is not LRScheduler and kind.__module__ == module.__name__
    }


# Numbers such that the rate changes in most steps and something special happens within nine of them.
MAKERS: dict[str, Callable[[Any], Any]] = {
    # Two groups: one function for each.
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.5**t]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 6], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.25, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=7, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    # These two write `betas` or `momentum` as well.
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.2, step_size_up=3, mode="triangular2"),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.3, 0.1], total_steps=STEPS + 1),
    # Steps on a measure that stops falling: see `advance`.
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, start_factor=0.25, total_iters=3),
            lr_scheduler.CosineAnnealingLR(o, 4),
            lr_scheduler.ExponentialLR(o, 0.5),
        ],
        milestones=[3, 7],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, factor=0.5, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=[0.02, 0.03], anneal_epochs=5),
}
MEASURES = [3.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
NAMES = [*schedulers_of(lr_scheduler), *schedulers_of(swa_utils)]
# The keys of a group that schedulers write.
WRITTEN = ("lr", "initial_lr", "betas", "momentum", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")


class Run:
    """An optimizer with two groups, its scheduler, and what is seen of both after every step."""

    def __init__(self, make: Callable[..., Any], name: str, values: list[Tensor], tensor_lr: bool = False) -> None:
        assert name in MAKERS, f"torch has a scheduler {name} that no case covers: give it an entry in MAKERS"
        self.params = parameters(values)
        rates: list[Any] = [torch.tensor(x, dtype=torch.float64) if tensor_lr else x for x in (0.1, 0.05)]
        self.opt = make([{"params": self.params[:1]}, {"params": self.params[1:], "lr": rates[1]}], lr=rates[0])
        self.rates = [group["lr"] for group in self.opt.param_groups]
        self.scheduler = MAKERS[name](self.opt)
        self.measures = MEASURES if name == "ReduceLROnPlateau" else None

    def step(self, t: int, row: list[Any]) -> list[dict[str, float]]:
        """Trains once; what the groups and the scheduler then say, in numbers."""
        for p, g in zip(self.params, row, strict=True):
            p.grad = g.to(p.dtype)
        self.opt.step()
        self.scheduler.step(*([self.measures[t]] if self.measures else []))
        said = [float(x) for x in self.scheduler.get_last_lr()]
        return [{**numbers(g), "said": lr} for g, lr in zip(self.opt.param_groups, said, strict=True)]

    def load(self, other: Run) -> None:
        """As a loop does that is started anew: everything is built first, then takes the saved state."""
        self.opt.load_state_dict(copy.deepcopy(other.opt.state_dict()))
        self.scheduler.load_state_dict(copy.deepcopy(other.scheduler.state_dict()))
        with torch.no_grad():
            for p, q in zip(self.params, other.params, strict=True):
                p.copy_(q)


def numbers(group: dict[str, Any]) -> dict[str, float]:
    """What schedulers have written into a group; ``betas`` as two entries."""
    flat = {key: group[key] for key in WRITTEN if key in group}
    if "betas" in flat:
        flat["beta1"], flat["beta2"] = flat.pop("betas")
    return {key: float(value) for key, value in flat.items()}


def beside_torch(case: Case, name: str, load_at: int | None = None, tensor_lr: bool = False) -> Run:
    """Runs both: what schedulers write is equal, parameters are within rounding of torch's in float64.

    With a tensor rate torch computes the schedule in tensors, which may differ in the last bit of a double.
    """
    values = weights(SHAPES)
    pair = [(case.ours, values, tensor_lr), (case.torch, [v.double() for v in values], False)]
    ours, theirs = (Run(make, name, start, tensor) for make, start, tensor in pair)
    rates = set()
    for t, row in enumerate(gradients(SHAPES, STEPS)):
        if t == load_at:
            saved = ours, theirs
            ours, theirs = (Run(make, name, start, tensor) for make, start, tensor in pair)
            ours.load(saved[0])
            theirs.load(saved[1])
        seen, wanted = ours.step(t, row), theirs.step(t, row)
        if tensor_lr:
            for got, want in zip(seen, wanted, strict=True):
                assert got == pytest.approx(want, rel=1e-13, abs=1e-17), f"after step {t}"
        else:
            assert seen == wanted, f"after step {t}"
        rates.add(seen[0]["lr"])
        for p, q in zip(ours.params, theirs.params, strict=True):
            assert_close(p, q, t + 1, f"parameter after step {t}")
    assert len(rates) > 1, "this schedule changes nothing"
    assert_backend(ours.opt, "cpu")
    return ours


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [ADAMW, SGD], ids=str)
def test_every_scheduler(case: Case, name: str) -> None:
    """Without a break, and with a state_dict round trip of optimizer and scheduler on the way: the same bits."""
    straight = beside_torch(case, name)
    resumed = beside_torch(case, name, CUT)
    assert_same_bits([p.detach() for p in resumed.params], [p.detach() for p in straight.params])
    if name in ("CyclicLR", "OneCycleLR"):
        key = "betas" if case is ADAMW else "momentum"
        assert straight.opt.param_groups[0][key] != straight.opt.defaults[key], "the cycle moves it"


@pytest.mark.parametrize("name", NAMES)
def test_every_scheduler_with_a_tensor_rate(name: str) -> None:
    """Schedulers write a tensor in place, without a word: it is read anew in each step."""
    run = beside_torch(ADAMW, name, tensor_lr=True)
    assert all(group["lr"] is rate for group, rate in zip(run.opt.param_groups, run.rates, strict=True))


def test_the_lists_are_of_this_torch() -> None:
    assert {"OneCycleLR", "ReduceLROnPlateau", "SequentialLR", "SWALR"} <= set(NAMES)
    assert set(NAMES) == set(MAKERS), "a scheduler that torch no longer has"


@pytest.mark.parametrize("average", ["mean", "ema"])
def test_averaged_model(average: str) -> None:
    """torch.optim.swa_utils: averages of weights that were written past torch, and their batch norm's statistics."""
    averages = []
    for make in (mo_fused.SGD, torch.optim.SGD):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        opt = make(model.parameters(), lr=0.1, momentum=0.9)
        multi = swa_utils.get_ema_multi_avg_fn(0.8) if average == "ema" else None
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=multi)
        schedule = swa_utils.SWALR(opt, swa_lr=0.02, anneal_epochs=3)
        inputs = [noise((16, 6), t) for t in range(6)]
        for x in inputs:
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
            averaged.update_parameters(model)
            schedule.step()
        swa_utils.update_bn(inputs, averaged)
        averages.append({name: value.detach().clone() for name, value in averaged.module.state_dict().items()})
        last = dict(model.state_dict())
    ours, theirs = averages
    for name, value in theirs.items():
        # float32 on both sides: a spacing for each of the six steps of each.
        torch.testing.assert_close(ours[name], value, rtol=2e-6, atol=2e-6)
    assert not torch.allclose(theirs["0.weight"], last["0.weight"], atol=1e-3), "an average is not the last weight"
