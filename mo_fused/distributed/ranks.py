"""Small vectors that all ranks of a mesh or a process group get to know: one all-reduce each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """Processes that hold parts of the same parameters. Every method is collective: all of them have to call it."""

    def __init__(self, members: Sequence[int], groups: Sequence[Any], kind: str) -> None:
        self.members = tuple(members)
        """Global ranks, sorted."""
        self._groups = list(groups)
        self._kind = kind
        self.at = self.members.index(dist.get_rank())
        """The place of this process among them."""

    @property
    def size(self) -> int:
        return len(self.members)

    def gathered(self, own: Tensor) -> Tensor:
        """What each of them says, in the order of their ranks: shape ``(size, *own.shape)``.

        An all-reduce of zeros around what is said here: every rank gets the same bits, in the same places, and adds
        them up in the same order, whatever the order in which the network did.
        """
        out = torch.zeros((self.size, *own.shape), dtype=own.dtype, device=self._wire())
        out[self.at] = own
        return self._reduced(out, dist.ReduceOp.SUM).to(own.device)

    def add(self, values: Tensor) -> Tensor:
        """The sum of their values, the same bits on all of them."""
        return self._reduced(self._sent(values), dist.ReduceOp.SUM).to(values.device)

    def add_(self, values: Tensor) -> None:
        """The sum of their values takes the place of this rank's, the same bits on all of them."""
        values.copy_(self.add(values))

    def largest(self, values: Tensor) -> Tensor:
        """The largest of their values, element by element; a NaN may be lost."""
        return self._reduced(self._sent(values), dist.ReduceOp.MAX).to(values.device)

    def _sent(self, values: Tensor) -> Tensor:
        return values.detach().to(self._wire(), copy=True)

    def _reduced(self, values: Tensor, op: Any) -> Tensor:
        for group in self._groups:  # more than one: of a mesh, dimension after dimension
            dist.all_reduce(values, op=op, group=group)
        return values

    def _wire(self) -> torch.device:
        """Where values travel: what mesh or group are for, on every rank, wherever its own parameters are."""
        if self._kind == "cpu":
            return torch.device("cpu")
        return torch.device(self._kind, torch.get_device_module(self._kind).current_device())


@dataclass(frozen=True)
class Share:
    """DTensors that are cut among, or replicated over, the same ranks, and as many replicas of each part."""

    members: tuple[int, ...]
    replicas: int


def of_mesh(mesh: Any) -> Ranks:
    """The ranks of a DeviceMesh that this process is in. The whole world is one group, other meshes one a dimension."""
    members = sorted(int(r) for r in mesh.mesh.flatten().tolist())
    if len(members) == dist.get_world_size():
        return Ranks(members, [dist.group.WORLD], mesh.device_type)
    return Ranks(members, [mesh.get_group(dim) for dim in range(mesh.ndim)], mesh.device_type)


def of_dims(mesh: Any, dims: Sequence[int]) -> Ranks:
    """Those of a DeviceMesh that differ from this process along some of its dimensions alone."""
    at = mesh.get_coordinate()
    there = mesh.mesh[tuple(slice(None) if d in dims else at[d] for d in range(mesh.ndim))]
    members = sorted(int(r) for r in there.flatten().tolist())
    return Ranks(members, [mesh.get_group(d) for d in dims], mesh.device_type)


def of_group(group: Any) -> Ranks:
    """The ranks of a process group."""
    backend = str(dist.get_backend(group))
    on_host = backend in ("gloo", "mpi") or not torch.accelerator.is_available()
    kind = "cpu" if on_host else torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    return Ranks(sorted(dist.get_process_group_ranks(group)), [group], kind)
