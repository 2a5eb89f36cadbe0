"""The processes that train one model together: how many, sums over them, and backward passes without communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mo_fused.distributed import shards


class Processes:
    """One process, or the ranks that a ``DistributedDataParallel`` or ``fully_shard`` model averages gradients over.

    Args:
        model: as the trainer got it.
    """

    def __init__(self, model: nn.Module) -> None:
        model = _uncompiled(model)
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._fsdp: Any = model if hasattr(model, "set_requires_gradient_sync") else None
        self.sharded = any(shards.is_dtensor(parameter) for parameter in model.parameters())
        """Whether parameters are DTensors: no process has the whole model."""
        self.group = self._ddp.process_group if self._ddp is not None else None
        together = self._ddp is not None or self._fsdp is not None
        self.count = dist.get_world_size(self.group) if together else 1
        self.rank = dist.get_rank(self.group) if together else 0
        self.module: nn.Module = _uncompiled(self._ddp.module) if self._ddp is not None else model
        """The model without wrappers (``torch.compile``'s too): its state_dict is the same in one process."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Gradients of the backward passes inside add up on each process alone."""
        if self._ddp is not None:
            return self._ddp.no_sync()
        return _no_sync(self._fsdp) if self._fsdp is not None else nullcontext()

    def nothing(self, loss: Tensor) -> Tensor:
        """A loss whose gradients are zero, in place of that of a batch without valid targets, which may be 0/0.

        The backward pass has to be made all the same, because the other processes wait for its communication.
        """
        if self._ddp is None:
            return loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        trained = [parameter for parameter in self._ddp.parameters() if parameter.requires_grad]
        return torch.stack([parameter.sum().to(loss) for parameter in trained]).sum() * 0.0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every process's ``value`` (pickled), in the order of ranks, on all of them."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """The first process's ``value`` on all of them."""
        return self.gather(value)[0]


def _uncompiled(model: nn.Module) -> nn.Module:
    """What ``torch.compile`` was called with: the module it returns has the same parameters by other names."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are (the first one's device; the CPU where there is none)."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
