"""Where the state of an offloaded parameter lives: the host's memory, or a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from .files import Extent, OnDisk, StateFile


@dataclass(frozen=True)
class SlotForm:
    """What a slot of a state has to be."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    like_param: bool
    """It has an element for each of the parameter's, in the same order; others are contiguous."""
    any_float: bool = False
    """One of another floating-point type stays as it is."""

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


class HostHome:
    """The host's memory. Nothing is copied from there to a device, so it need not be pinned."""

    on_disk = False
    words = "state in the host's memory"

    def new_entry(self) -> dict[str, Any]:
        """An entry without anything."""
        return {}

    def entry(self, state: Any, p: Tensor) -> dict[str, Any]:
        """The parameter's entry in the optimizer's state, as this home keeps it."""
        found = state[p]
        if isinstance(found, OnDisk):
            found = state[p] = dict(found.items())
        entry: dict[str, Any] = found
        return entry

    def holds(self, entry: dict[str, Any], slots: Mapping[str, SlotForm], order: tuple[int, ...]) -> bool:
        """Whether all of these slots are there, in the right form and place."""
        return all(_fits(entry.get(key), slot, order) for key, slot in slots.items())

    def zeros(self, entry: dict[str, Any], key: str, slot: SlotForm, order: tuple[int, ...]) -> None:
        """Makes a slot of zeros."""
        strides = order if slot.like_param else row_major(slot.shape)
        entry[key] = torch.empty_strided(slot.shape, strides, dtype=slot.dtype).zero_()

    def fill(self, entry: dict[str, Any], key: str, p: Tensor) -> None:
        """Writes the parameter's values to a slot that is there."""
        entry[key].copy_(p.detach())

    def put(self, entry: dict[str, Any], key: str, value: Tensor, strides: tuple[int, ...]) -> None:
        """Makes ``value`` the slot, copied where it has another place or order."""
        entry[key] = on_host(value, strides)


class DiskHome:
    """A file under a folder."""

    on_disk = True

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.words = f"state in a file under {folder}"
        self.file = StateFile(folder)

    def new_entry(self) -> OnDisk:
        return OnDisk({})

    def entry(self, state: Any, p: Tensor) -> OnDisk:
        found = state[p]
        if not isinstance(found, OnDisk) or any(e.file is not self.file for e in found.extents.values()):
            found = state[p] = OnDisk(dict(found.items()))
        return found

    def holds(self, entry: dict[str, Any], slots: Mapping[str, SlotForm], order: tuple[int, ...]) -> bool:
        assert isinstance(entry, OnDisk)
        return all(_fits(entry.extents.get(k), s, order) for k, s in slots.items())

    def zeros(self, entry: dict[str, Any], key: str, slot: SlotForm, order: tuple[int, ...]) -> None:
        assert isinstance(entry, OnDisk)
        entry.put(key, self._extent(slot.dtype, slot.shape, order if slot.like_param else row_major(slot.shape)))

    def fill(self, entry: dict[str, Any], key: str, p: Tensor) -> None:
        assert isinstance(entry, OnDisk)
        extent = entry.extents[key]
        if not _same_order(extent.shape, p.stride(), extent.strides):
            return extent.store(on_host(p.detach().to(extent.dtype), extent.strides))
        part = torch.empty(min(_FILL_ELEMENTS, p.numel()), dtype=extent.dtype)
        for first in range(0, p.numel(), _FILL_ELEMENTS):
            count = min(_FILL_ELEMENTS, p.numel() - first)
            part[:count] = p.detach().as_strided((count,), (1,), p.storage_offset() + first)
            extent.file.write(part[:count].view(torch.uint8).numpy(), extent.offset + first * extent.dtype.itemsize)

    def put(self, entry: dict[str, Any], key: str, value: Tensor, strides: tuple[int, ...]) -> None:
        assert isinstance(entry, OnDisk)
        extent = self._extent(value.dtype, tuple(value.shape), strides)
        extent.store(on_host(value, strides))
        entry.put(key, extent)

    def _extent(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Extent:
        offset = self.file.allocate(math.prod(shape) * dtype.itemsize)
        return Extent(self.file, offset, dtype, shape, strides)


Home = HostHome | DiskHome
_FILL_ELEMENTS = 1 << 16
"""That are written at once: more would leave holes of their size between states in memory."""


def on_host(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor itself, or a copy, on the host with these strides."""
    value = value.detach()
    if dispatch.is_cpu(value) and _same_order(value.shape, value.stride(), strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def _same_order(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a == b for n, a, b in zip(shape, one, other, strict=True) if n != 1)


def _fits(found: Any, slot: SlotForm, order: tuple[int, ...]) -> bool:
    if isinstance(found, Extent):
        dtype, strides = found.dtype, found.strides
    elif type(found) is Tensor and dispatch.is_cpu(found):
        dtype, strides = found.dtype, found.stride()
    else:
        return False
    if tuple(found.shape) != slot.shape:
        return False
    wanted = order if slot.like_param else row_major(slot.shape)
    right = dtype == slot.dtype or (slot.any_float and dtype in dispatch.FLOATS)
    return right and _same_order(slot.shape, strides, wanted)
