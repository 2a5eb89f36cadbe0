"""Small models, batches and comparisons that the tests of the training loop share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import assert_same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

from mo_fused.training.checkpoints import Checkpoints
from mo_fused.training.trainer import Trainer

Batch = tuple[Tensor, Tensor]
IGNORED = -100


def model_of(seed: int = 0, *, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    """6 numbers to 4 classes."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)]
    if dropout:
        layers.insert(2, nn.Dropout(dropout))
    if norm:
        layers.insert(1, nn.BatchNorm1d(16))
    return nn.Sequential(*layers)


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the targets that count; logits may have a dimension of positions."""
    inputs, targets = batch
    inputs = inputs.to(next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs).flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED)


def exact_loss(model: nn.Module, batch: Batch) -> Tensor:
    """:func:`class_loss` in float64."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs.double()).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def padded_batches(valid: Sequence[int], *, length: int = 5, seed: int = 0) -> list[Batch]:
    """A batch of sequences for each number, which says how many of its targets count."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for count in valid:
        rows = max(2, -(-count // length))
        inputs = torch.randn(rows, length, 6, generator=generator)
        targets = torch.randint(0, 4, (rows * length,), generator=generator)
        targets[torch.randperm(rows * length, generator=generator)[count:]] = IGNORED
        batches.append((inputs, targets.view(rows, length)))
    return batches


def together(batches: Sequence[Batch]) -> Batch:
    """One large batch."""
    return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])


class Samples(Dataset[Batch]):
    """``size`` samples; with ``noise`` a draw of torch's global generator is added each time that one is read."""

    def __init__(self, size: int, *, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(size, 6, generator=generator)
        self.targets = torch.randint(0, 4, (size,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        inputs = self.inputs[index]
        if self.noise:
            inputs = inputs + self.noise * torch.randn(6) + self.noise * float(np.random.rand())
        return inputs, self.targets[index]


class Log:
    """A monitor that keeps everything; ``then`` is called with the step."""

    def __init__(self, then: Callable[[int], object] | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.then = then

    def step(self, loss: Tensor, batch_info: Mapping[str, Any]) -> None:
        measured = {name: float(value) for name, value in batch_info["measured"].items()}
        self.rows.append({**batch_info, "loss": float(loss), "measured": measured})
        if self.then is not None:
            self.then(int(batch_info["step"]))

    def of(self, key: str) -> list[Any]:
        return [row[key] for row in self.rows]


def falling(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Another rate in every step, so that one step too many or too few shows."""
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def frozen(state: Any) -> Any:
    """A copy that later steps do not change."""
    return copy.deepcopy(state)


def assert_same(got: Any, want: Any, where: str = "state") -> None:
    """Equal bits of tensors and equal values of everything else, to any depth."""
    if isinstance(want, Mapping):
        assert list(got) == list(want), f"{where}: keys {list(got)} instead of {list(want)}"
        for key in want:
            assert_same(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {len(got)} entries instead of {len(want)}"
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, f"{where}[{i}]")
    elif isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{where}: {got!r}, no tensor"
        assert_same_bits(got, want, where)
    else:
        assert got == want or got != got and want != want, f"{where}: {got!r} instead of {want!r}"


def simple(
    folder: Path | None = None, *, seed: int = 0, loader: Iterable[Any] | None = None, **options: Any
) -> tuple[Trainer, Iterable[Any]]:
    """A trainer with AdamW, dropout and a schedule, and a shuffled loader of 5 batches."""
    model = model_of(seed, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if folder is not None:
        options.setdefault("checkpoints", Checkpoints(folder, every=2, keep=2))
    trainer = Trainer(model, optimizer, class_loss, schedule=falling(optimizer), **options)
    return trainer, loader if loader is not None else DataLoader(Samples(20), batch_size=4, shuffle=True)
