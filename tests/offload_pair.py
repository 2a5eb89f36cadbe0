"""The same parameters twice: with an optimizer that keeps its states beside them, and with one that offloads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import (
    ADAM,
    ADAMW,
    AMSGRAD,
    BACKEND,
    DEVICE,
    INTERPRETED,
    RATE,
    SGD,
    Case,
    Rows,
    gradients,
    parameters,
    states,
)
from oracle import assert_same_bits
from torch import Tensor, nn
from torch.nn import Parameter

from mo_fused.offload import ring

NESTEROV = Case("SGD", "nesterov", dict(lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.1))
PLAIN_SGD = Case("SGD", "plain", dict(lr=RATE, weight_decay=0.1))
ADAFACTOR = Case("Adafactor", "default", dict(lr=RATE, weight_decay=0.1))
ADAFACTOR_MOMENTUM = Case("Adafactor", "momentum", dict(lr=RATE, weight_decay=0.1, beta1=0.9))
OFFLOADED = [ADAMW, AMSGRAD, ADAM, SGD, PLAIN_SGD, NESTEROV, ADAFACTOR, ADAFACTOR_MOMENTUM]
ONE_OF_EACH = [ADAMW, SGD, ADAFACTOR_MOMENTUM]

SUMS = pytest.mark.cpu_only(reason="Adafactor adds up in another order on a device: see test_adafactor_of_a_device")


def by_case(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Tests that compare bits with the same optimizer without offload, whose states a device may step."""
    found = [pytest.param(c, id=str(c), marks=SUMS if c.kind == "Adafactor" else ()) for c in cases]
    return pytest.mark.parametrize("case", found)


def clipped(limit: float, on_host: bool) -> dict[str, Any]:
    """``max_grad_norm``, unless the norm is taken ``on_host`` while the optimizer without offload takes it on a device.

    Then it is another in its last digits.
    """
    return {} if on_host and BACKEND != "cpu" else {"max_grad_norm": limit}


# Several chunks, of which the last is not full; several parameters in one piece; a single number and none at all.
SHAPES: list[tuple[int, ...]] = [(130, 150), (33, 3), (7,), (), (0, 3), (16, 70)]
if INTERPRETED:
    SHAPES[0] = (60, 40)

TAKEN = [False, True]
"""Values of offload_gradients."""
IDS = ["copied", "taken"]

OF_OFFLOAD = ("offload", "offload_gradients", "offload_fraction")


def in_pieces(monkeypatch: pytest.MonkeyPatch, size: int = 80_000) -> None:
    """A ring that is too small for the parameters of a test: more pieces than slots."""
    monkeypatch.setattr(ring, "SLOT_BYTES", 4000 if INTERPRETED else size)


def split(params: Sequence[Any]) -> list[dict[str, Any]]:
    """Three groups, of which one is not clipped."""
    return [
        {"params": params[:2]},
        {"params": params[2:4], "lr": RATE / 2, "weight_decay": 0.0},
        {"params": params[4:], "lr": RATE / 4, "clip": False},
    ]


class Pair:
    """``plain`` with ``other``, and ``params`` with ``opt``, which has ``offload``."""

    def __init__(
        self,
        case: Case,
        values: Sequence[Tensor],
        make: Callable[[Sequence[Tensor]], list[Parameter]] = parameters,
        groups: Callable[[Sequence[Any]], Iterable[Any]] = lambda params: params,
        **options: Any,
    ) -> None:
        self.plain, self.params = make(values), make(values)
        beside = {key: value for key, value in options.items() if key not in OF_OFFLOAD}
        self.other = case.ours(groups(self.plain), **beside)
        self.opt = case.ours(groups(self.params), **{"offload": "cpu", **options})

    @property
    def both(self) -> Iterator[tuple[list[Parameter], Any]]:
        yield self.plain, self.other
        yield self.params, self.opt

    def drive(self, grads: Rows, make: Callable[[Tensor], Tensor] = torch.clone) -> None:
        """One step for each row of gradients, which are set by hand."""
        for row in grads:
            for params, opt in self.both:
                for p, g in zip(params, row, strict=True):
                    p.grad = None if g is None else make(g.to(p.device))
                opt.step()
            self.check()

    def check(self) -> None:
        """Parameters and states have the same bits."""
        for _, opt in self.both:
            opt.state_dict()  # takes back what a skipped first step on a device has made
        assert_same_bits([p.detach() for p in self.params], [p.detach() for p in self.plain], "parameters")
        assert_same_bits(states(self.opt, self.params), states(self.other, self.plain), "states")


def rows(steps: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> list[list[Tensor | None]]:
    """Gradients for SHAPES; some parameters have none at first, or later."""
    found = gradients(SHAPES, steps, dtype, seed)
    found[0][2] = None
    if steps > 2:
        found[1][0] = found[2][1] = None
    return found


class Net(nn.Module):
    """Layers whose weights are of several chunks, of one, and of a few elements; a weight that is used twice."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        width = 8 if INTERPRETED else 130
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(12, width)
            self.hidden = nn.Linear(width, width)
            self.last = nn.Linear(width, 3)
            self.scale = Parameter(torch.tensor(1.5))
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.hidden(x))
        return self.scale * self.last(torch.tanh(self.hidden(x)))


def nets(case: Case, **options: Any) -> tuple[Net, Any, Net, Any]:
    """Two equal models: the plain one with its optimizer, then the one with offload."""
    plain, model = Net(), Net()
    beside = {key: value for key, value in options.items() if key not in OF_OFFLOAD}
    changes = {"lr": 1e-2}
    other = case.ours(plain.parameters(), **{**changes, **beside})
    return plain, other, model, case.ours(model.parameters(), **{**changes, "offload": "cpu", **options})


def batch(t: int) -> Tensor:
    """Inputs of one batch."""
    generator = torch.Generator().manual_seed(100 + t)
    return torch.randn(5, 12, generator=generator, device="cpu").to(DEVICE)


def backward(model: nn.Module, t: int, scale: float = 1.0) -> None:
    """A backward of a loss of one batch."""
    (model(batch(t)).square().mean() * scale).backward()


def assert_same(model: nn.Module, opt: Any, plain: nn.Module, other: Any) -> None:
    mine, theirs = list(model.parameters()), list(plain.parameters())
    assert_same_bits([p.detach() for p in mine], [p.detach() for p in theirs], "parameters")
    assert_same_bits(states(opt, mine), states(other, theirs), "states")
