"""What an optimizer was told about the formats of its state: dtypes of moments, weights finer than their parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import errors, masters
from ..state import STATE_DTYPES

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

    def changes(self, state: Any) -> list[str]:
        """What of a state that was just loaded will be kept in another format, in words."""
        counted: dict[str, int] = {}

        def note(what: str) -> None:
            counted[what] = counted.get(what, 0) + 1

        for p, entry in state.items():
            if not isinstance(p, Tensor) or not isinstance(entry, dict):
                continue
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"):
                value, wanted = entry.get(key), STATE_DTYPES.get(self.state_dtype or "")
                if wanted is not None and isinstance(value, Tensor) and value.dtype not in (wanted, torch.complex64):
                    note(f"{key} from {str(value.dtype).removeprefix('torch.')} to {self.state_dtype}")
            found = next((m for k in MASTER_SLOTS if (m := _mode_of(k, entry.get(k), p)) is not None), None)
            kept = self.mode_of(p) if self.mode_of(p) in masters.SLOTS else None
            if found != kept and entry:
                note(f"master weights from {found or 'none'} to {kept or 'none'}")
        return [f"{what} ({n} parameter{'s' if n > 1 else ''})" for what, n in counted.items()]

    @staticmethod
    def drop(entry: dict[str, Any] | None) -> None:
        """Takes out the rest of weights that nobody will keep up to date: later it would be taken for the truth."""
        for key in MASTER_SLOTS:
            if entry is not None:
                entry.pop(key, None)

    def ensure(self, entry: dict[str, Any], p: Tensor) -> None:
        """Makes the rest of the weights where it is missing; one of another mode is converted."""
        mode = self.mode_of(p)
        if mode is None:
            return self.drop(entry)
        slot, dtype = masters.SLOTS.get(mode), _REST.get(mode, p.dtype)
        found = next((k for k in MASTER_SLOTS if _mode_of(k, entry.get(k), p) is not None), None)
        if found == slot and (slot is None or entry[slot].dtype == dtype):
            return
        of_found = None if found is None else _mode_of(found, entry[found], p)
        weights = p.detach().float() if of_found is None else masters.load(p, entry[str(found)], of_found)
        self.drop(entry)
        if slot is not None:
            entry[slot] = rest = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            masters.keep(weights, p, rest, mode)


def _mode_of(slot: str, rest: Any, p: Tensor) -> str | None:
    """The mode whose slot this is. None for a rest of another dtype: torch's loader casts state to the parameter's."""
    if not isinstance(rest, Tensor):
        return None
    modes = {"master": "fp32", "master_low": "split8" if rest.dtype == torch.int8 else "split", "compensation": "kahan"}
    mode = modes[slot]
    return mode if rest.dtype == _REST.get(mode, p.dtype) and rest.shape == p.shape else None


def rest_code(rest: Tensor) -> int:
    """The code of its dtype, or -1 for one that no mode has."""
    return _REST_CODES.get(rest.dtype, -1)
