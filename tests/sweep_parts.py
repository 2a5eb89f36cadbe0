"""What the processes of a sweep run: in a module of its own, because they have to import it by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """``blocks`` keep ``width`` activations a sample."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def dataset(size: int = 64) -> Any:
    return TensorDataset(torch.randn(size, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(size))


def loader(batch_size: int = 8) -> Any:
    return DataLoader(dataset(), batch_size=batch_size, shuffle=True)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def by_batch_size(model: nn.Module, batch: Any) -> Tensor:
    """Each size has its own end: 1 kills the process, 2 the allocator refuses, 3 raises, 4 takes forever."""
    size = len(batch[0])
    Path("written.txt").write_text("what a run writes beside itself")
    if size == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if size == 2:
        torch.empty(1 << 50)
    if size == 3:
        raise ArithmeticError("three is a crowd")
    if size == 4:
        time.sleep(60)
    if size == 5:
        os._exit(7)
    return squares(model, batch)


def slow(model: nn.Module, batch: Any) -> Tensor:
    """A fixed time a batch, so that a larger one is faster by the sample."""
    time.sleep(0.02)
    return squares(model, batch)


def hungry(model: nn.Module, batch: Any) -> Tensor:
    """4 MiB a sample, in a block that the C library takes from the system and gives back at once."""
    kept = torch.ones(len(batch[0]), 1 << 20)
    return squares(model, batch) + 0.0 * kept[0, 0]


def large(model: nn.Module, batch: Any) -> Tensor:
    """Uses the threads of torch for sure."""
    weight = torch.ones(600, 600)
    return squares(model, batch) + 0.0 * (weight @ weight)[0, 0]
