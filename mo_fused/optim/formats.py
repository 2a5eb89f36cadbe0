"""What an optimizer was told about the formats of its state: dtypes of moments, weights finer than their parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import errors, masters

MASTER_SLOTS = masters.ALL_SLOTS
_HALVES = (torch.bfloat16, torch.float16)
_REST = {"fp32": torch.float32, "split": torch.int16, "split8": torch.int8}
_REST_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int16: 4, torch.int8: 5}
"""DType and RestType of csrc/abi.h."""


class Formats:
    """The options ``state_dtype``, ``master_weights`` and ``seed`` of one optimizer."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self.state_dtype: str | None = defaults.get("state_dtype")
        self.mode: str | None = defaults.get("master_weights")
        self.seed: int = defaults.get("seed", 0)

    @property
    def draws(self) -> bool:
        """Results depend on random numbers, and so on the index of an element and on the number of the step."""
        return self.mode in masters.DRAWS

    def mode_of(self, p: Tensor) -> str | None:
        """The master mode of a parameter: None for those that are not of 16 bits."""
        return self.mode if p.dtype in _HALVES else None

    def refuse(self, p: Tensor, name: str) -> None:
        """Raises for a parameter that the mode is not for, before anything is changed."""
        if self.mode in masters.BF16_ONLY and p.dtype == torch.float16:
            raise errors.master_of_fp16(name, str(self.mode))

    def slots(self, p: Tensor) -> tuple[str, ...]:
        """The slot that holds the rest of the parameter's weights, if there is one."""
        mode = self.mode_of(p)
        return (masters.SLOTS[mode],) if mode in masters.SLOTS else ()

    def ensure(self, entry: dict[str, Any], p: Tensor) -> None:
        """Makes the rest of the weights where it is missing; one of another mode is converted."""
        mode = self.mode_of(p)
        if mode is None:
            return
        slot, dtype = masters.SLOTS.get(mode), _REST.get(mode, p.dtype)
        found = next((k for k in MASTER_SLOTS if isinstance(entry.get(k), Tensor)), None)
        if found == slot and (slot is None or entry[slot].dtype == dtype):
            return
        weights = p.detach().float() if found is None else masters.load(p, entry[found], _mode_of(found, entry[found]))
        for key in MASTER_SLOTS:
            entry.pop(key, None)
        if slot is not None:
            entry[slot] = rest = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            masters.keep(weights, p, rest, mode)


def _mode_of(slot: str, rest: Tensor) -> str:
    """The mode whose slot this is."""
    if slot == "master_low":
        return "split" if rest.dtype == torch.int16 else "split8"
    return "fp32" if slot == "master" else "kahan"


def rest_code(rest: Tensor) -> int:
    """The code of its dtype, or -1 for one that no mode has."""
    return _REST_CODES.get(rest.dtype, -1)
