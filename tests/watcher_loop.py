"""A stand-in for the monitor: what watchers are told in a loop, one step late as by the real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mo_fused.training.watchers import Watcher


class Loop:
    """Trains nothing: ``step`` is called after each optimizer step and tells the watchers.

    Values are read one step late (``late`` steps), outside of what a watcher may be blamed for.
    """

    def __init__(self, optimizer: Optimizer, *watchers: Watcher, model: nn.Module | None = None, late: int = 1) -> None:
        self.optimizer, self.model, self.watchers, self.late = optimizer, model, watchers, late
        self.events: list[dict[str, Any]] = []
        self.stopped = 0
        self.number = 0
        self._waiting: list[dict[str, Any]] = []
        for watcher in watchers:
            watcher.attach(self)

    def emit(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def stop(self) -> None:
        self.stopped += 1

    def step(self, loss: Tensor | float = 1.0, info: Mapping[str, Any] | None = None, **extra: Any) -> None:
        self.number += 1
        for watcher in self.watchers:
            watcher.on_step(self, loss, {"step": self.number, **(info or {})})
        last: Any = getattr(self.optimizer, "last_step", None)
        record: dict[str, Any] = {"step": self.number, "loss": loss, "lr": self.optimizer.param_groups[0]["lr"]}
        if last is not None:
            record.update({key: getattr(last, key) for key in ("grad_norm", "skipped")})
        self._waiting.append({**record, **extra})
        if len(self._waiting) > self.late:
            self._tell()

    def flush(self) -> None:
        while self._waiting:
            self._tell()

    def _tell(self) -> None:
        record = self._waiting.pop(0)
        plain = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in record.items()}
        for watcher in self.watchers:
            watcher.on_record(plain)


def feed(watcher: Watcher, key: str, values: Any, **others: Any) -> list[int]:
    """Records of nothing but ``key``; the steps (from 1) that were found."""
    for step, value in enumerate(values, 1):
        watcher.on_record({"step": step, key: float(value), **others})
    return [event["step"] for event in watcher.events]


def three_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)).to(dtype)


def set_gradients(model: nn.Module, value: float = 0.1) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


READING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every way in which Python asks a tensor for its value, as it is taken."""
    seen: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(Tensor, name)

        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return real(self, *args, **kwargs)

        return call

    for name in READING:
        monkeypatch.setattr(Tensor, name, counted(name))
    yield seen
