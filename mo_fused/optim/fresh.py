"""Momentum buffers that a device has, and that may hold no value yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FreshSlot:
    """A momentum buffer on a device that may hold no value yet. It outlives the rows of its parameter."""

    param: Tensor
    state: dict[str, Any]
    key: str
    slot: Tensor
    flag: Tensor

    def is_there(self) -> bool:
        return self.state.get(self.key) is self.slot

    def holds_nothing(self) -> bool:
        """Asks the device, and so waits for it."""
        return self.is_there() and bool(self.flag.item())
