"""Hyper-parameters on their way from groups to tables: as numbers, or as the addresses of tensors that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import dispatch
from ..device_part import DevicePart
from ..device_table import SOURCE_F64
from ..table import HYPER, Table
from .rules import Rule

FIELDS = 16
"""Fields of csrc/abi.h's Hyper that a rule gives."""


def same_values(new: Any, old: Any) -> bool:
    """Equality of nested sequences. A tensor equals itself alone: comparing values would wait for its device."""
    if new is old or (type(new) is tuple and type(old) is tuple and len(new) == len(old) and all(map(is_, new, old))):
        return True
    if type(new) is tuple or type(new) is list:
        return type(new) is type(old) and len(new) == len(old) and all(map(same_values, new, old))
    if isinstance(new, Tensor) or isinstance(old, Tensor):
        return False
    return bool(new == old)


class HyperWriter:
    """Writes what groups say into the tables of the host and of devices."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._moved: dict[tuple[torch.device, int, int], Tensor] = {}
        self._by_address: dict[tuple[torch.device, int, int], tuple[Tensor, int, torch.dtype]] = {}
        self._read_again: set[int] = set()  # a tensor that can be written in place and that no kernel reads by itself

    def stale(self) -> list[int]:
        """Groups to be written again although they say the same: their tensors may hold, or lie, elsewhere."""
        moved = {
            g
            for (device, g, _), (tensor, address, dtype) in self._by_address.items()
            if tensor.data_ptr() != address or tensor.dtype != dtype or tensor.device != device
        }
        return sorted(self._read_again | moved)

    def write(
        self, groups: list[dict[str, Any]], which: Sequence[int], host: Table | None, devices: Sequence[DevicePart]
    ) -> None:
        """Writes the groups ``which``; ``host`` is None when no row needs the host's numbers."""
        fields = [self._rule.hyper(groups[g]) for g in which]
        tensors = {
            (g, at): value
            for g, row in zip(which, fields, strict=True)
            for at, value in enumerate(row)
            if isinstance(value, Tensor)
        }
        self._read_again -= set(which)
        again = self._read_again
        self._by_address = {key: value for key, value in self._by_address.items() if key[1] not in which}
        rows = np.array(which, dtype=np.int64)
        if host is not None:
            words = host.hyper.view(np.float64).reshape(-1, HYPER.itemsize // 8)
            words[rows, :FIELDS] = np.array([[float(v) for v in row] for row in fields])
            again.update(g for g, _ in tensors)
        for part in devices:
            sources = {key: self._source(part, key, value) for key, value in tensors.items()}
            numbers = fields
            if tensors:
                numbers = [
                    tuple(0.0 if sources.get((g, at), (0, True))[0] else float(v) for at, v in enumerate(row))
                    for g, row in zip(which, fields, strict=True)
                ]
                again.update(g for (g, _), (_, settled) in sources.items() if not settled)
            part.table.settings[1 + rows, :FIELDS] = np.array(numbers, dtype=np.float64)
            part.table.sources[1 + rows, :FIELDS] = 0
            for (g, at), (word, _) in sources.items():
                part.table.sources[1 + g, at] = word

    def _source(self, part: DevicePart, key: tuple[int, int], value: Tensor) -> tuple[int, bool]:
        """(address word of a tensor for the device to read, or 0; whether it holds for the next steps too)."""
        if value.device != part.device and dispatch.is_cpu(value):
            return 0, False
        settled = value.device == part.device and value.dtype in (torch.float32, torch.float64)
        if not settled:
            dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
            value = self._moved[(part.device, key[0], key[1])] = value.detach().to(
                part.device, dtype, non_blocking=True
            )
        else:
            self._by_address[(part.device, key[0], key[1])] = (value, value.data_ptr(), value.dtype)
        return value.data_ptr() | (SOURCE_F64 if value.dtype == torch.float64 else 0), settled
