"""What the tests of other libraries' training loops share: a small model, its batches, and optimizers in pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mo_fused

# Losses of two runs of six or so steps in float32, ours and torch's: the rules agree to rounding, not to the bit.
FP32 = dict(rtol=2e-6, atol=1e-7)
# Under autocast a weight that differs in its last bit of 24 may round to another of bf16's 8 or fp16's 11 bits.
BF16 = dict(rtol=2e-3, atol=1e-4)
FP16 = dict(rtol=3e-4, atol=1e-5)
LIMIT = 0.05
"""A norm to clip to that every gradient of these runs exceeds."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Imported by the modules that use it: for a model as small as this a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """A small regression with dropout, so that a resumed run needs its random numbers too; forward returns the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.body(x).float() - y).square().mean()}


def net(dropout: float = 0.0) -> Net:
    """The same start for every run."""
    torch.manual_seed(0)
    return Net(dropout)


def rows(count: int) -> list[dict[str, Tensor]]:
    """Samples of a function that the model can learn, so that losses fall."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3:].sum(1)], 1)
    return [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]


def batches(count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    samples = rows(count * size)
    cut = [samples[i : i + size] for i in range(0, count * size, size)]
    return [(torch.stack([r["x"] for r in c]), torch.stack([r["y"] for r in c])) for c in cut]


@dataclass(frozen=True)
class Pair:
    """One optimizer, ours and torch's with the same arguments."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.kind

    def ours(self, params: Iterable[Any], **more: Any) -> Any:
        return getattr(mo_fused, self.kind)(params, **self.options, **more)

    def torch(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        opt: torch.optim.Optimizer = getattr(torch.optim, self.kind)(params, foreach=False, **self.options)
        return opt


ADAMW = Pair("AdamW", dict(lr=0.02, weight_decay=0.1))
# One of each rule. SGD shows a factor on the gradient that Adam's does not depend on.
PAIRS = [ADAMW, Pair("SGD", dict(lr=0.05, momentum=0.9)), Pair("Adafactor", dict(lr=0.02))]


def falling(opt: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that is another one in each step."""
    return torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.9**t)


def assert_losses(got: list[float], want: list[float], *, rtol: float, atol: float) -> None:
    assert len(got) == len(want) > 2
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=rtol, atol=atol)


def assert_differ(got: list[float], other: list[float], *, rtol: float, atol: float) -> None:
    """The comparison above can tell these two runs apart."""
    assert not torch.allclose(torch.tensor(got), torch.tensor(other), rtol=10 * rtol, atol=10 * atol)
