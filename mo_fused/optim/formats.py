"""What an optimizer was told about the formats of its state: dtypes of moments, weights finer than their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import dispatch, errors, masters, quantised
from ..distributed import shards
from ..offload.homes import SlotForm
from ..state import STATE_DTYPES
from ..table import MASTER, SCALE0, STATE0

if TYPE_CHECKING:
    from .rules import Rule

MASTER_SLOTS = masters.ALL_SLOTS
_HALVES = (torch.bfloat16, torch.float16)
_REST = {"fp32": torch.float32, "split": torch.int16, "split8": torch.int8}
_REST_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int16: 4, torch.int8: 5}
"""DType and RestType of csrc/abi.h."""


def draws(defaults: dict[str, Any]) -> bool:
    """Whether results depend on random numbers, and so on the number of the step."""
    return defaults.get("master_weights") in masters.DRAWS or defaults.get("state_dtype") in quantised.QUANTISED


class Formats:
    """The options ``state_dtype``, ``master_weights`` and ``seed`` of one optimizer."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self.state_dtype: str | None = defaults.get("state_dtype")
        self.mode: str | None = defaults.get("master_weights")
        self.seed: int = defaults.get("seed", 0)

    def by_index(self, p: Tensor) -> bool:
        """What becomes of an element depends on its index, so that elements are walked in the order of the shape."""
        return self.mode_of(p) in masters.DRAWS or self.block_of(p) != 0

    def mode_of(self, p: Tensor) -> str | None:
        """The master mode of a parameter: None for those that are not of 16 bits."""
        return self.mode if p.dtype in _HALVES else None

    def refuse(self, p: Tensor, name: str) -> None:
        """Raises for a parameter that the mode is not for, before anything is changed."""
        if self.mode in masters.BF16_ONLY and p.dtype == torch.float16:
            raise errors.master_of_fp16(name, str(self.mode))

    def block_of(self, p: Tensor) -> int:
        """Elements of a parameter whose moments share a scale; 0 where moments are not quantised."""
        kept = self.state_dtype
        return quantised.block_of(p, kept) if kept in quantised.QUANTISED and shards.cut_of(p).in_order else 0

    def slots(self, moments: tuple[str, ...], p: Tensor) -> tuple[str, ...]:
        """The entries that hold these moments, and the one of the rest of the parameter's weights if there is one."""
        mode, kept = self.mode_of(p), str(self.state_dtype)
        rest = (masters.SLOTS[mode],) if mode in masters.SLOTS else ()
        if not self.block_of(p):
            return (*moments, *rest)
        return (*(n for key in moments for n in quantised.names(key, quantised.code_of(key, kept))), *rest)

    def needed(self, rule: Rule, group: dict[str, Any], p: Tensor) -> dict[str, SlotForm]:
        """The entries that a parameter's state has to have, beside the count of steps."""
        block, kept = self.block_of(p), self.state_dtype
        out: dict[str, SlotForm] = {}
        for key in rule.slots(group, p):
            if not block:
                out[key] = rule.slot(key, p, "fp32" if kept in quantised.QUANTISED else kept)
                continue
            code = quantised.code_of(key, str(kept))
            codes, scale = quantised.shapes_of(p.shape, code, block)
            of_codes, of_scale = quantised.names(key, code)
            out[of_codes] = SlotForm(code.dtype, tuple(codes), like_param=False)
            out[of_scale] = SlotForm(torch.float32, tuple(scale), like_param=False)
        if (mode := self.mode_of(p)) in masters.SLOTS:
            out[masters.SLOTS[mode]] = SlotForm(_REST.get(mode, p.dtype), tuple(p.shape), like_param=True)
        return out

    def state_bytes(self, rule: Rule, group: dict[str, Any], p: Tensor) -> int:
        """Bytes of a parameter's state; 0 for those that the kernels do not take."""
        if p.dtype not in dispatch.FLOATS:
            return 0
        return sum(slot.size for slot in self.needed(rule, group, p).values())

    @staticmethod
    def place(slot: str, rule: Rule) -> int:
        """The Operand of csrc/abi.h that a slot is, or the place of its scales."""
        if slot in MASTER_SLOTS:
            return MASTER
        key = quantised.slot_of(slot)
        operand = rule.places[rule.all_slots.index(key)]
        return operand - STATE0 + SCALE0 if slot == f"{key}_scale" else operand

    def code(self, slot: str, dtype: torch.dtype) -> int:
        """The code of a slot's element type in csrc/abi.h, or -1 for one that the kernels do not take."""
        if slot in MASTER_SLOTS:
            return _REST_CODES.get(dtype, -1)
        if slot in quantised.ALL_SLOTS:
            return quantised.code_of(quantised.slot_of(slot), str(self.state_dtype)).number
        return dispatch.FLOATS.get(dtype, -1)

    def why_not(self, p: Tensor) -> str:
        """Why a matrix keeps float32 moments although quantised ones were asked for; empty otherwise."""
        if self.state_dtype not in quantised.QUANTISED or p.dim() < 2 or p.numel() < quantised.SMALLEST:
            return ""
        if self.block_of(p) or p.is_complex():
            return ""
        if not shards.cut_of(p).in_order:
            return "; moments in fp32: its parts are not whole slices of dimension 0"
        width = p.numel() // p.shape[0]
        what = f"slices of {width} elements have no blocks of {quantised.SMALLEST_BLOCK}"
        return f"; moments in fp32: {what if p.dtype != torch.float64 else 'the parameter is float64'}"

    def ensure_moments(self, rule: Rule, entry: dict[str, Any], p: Tensor, moments: tuple[str, ...]) -> bool:
        """Makes the slots that are missing and converts those in another format; True when one was made."""
        block, kept = self.block_of(p), self.state_dtype
        if not block or kept is None:
            expand(entry, p, torch.float32 if kept else p.dtype)
            return rule.ensure(entry, p, moments, "fp32" if kept in quantised.QUANTISED else kept)
        made = False
        for key in moments:
            code = quantised.code_of(key, kept)
            if quantised.holds(entry, key, code, p, block):
                continue
            expand_one(entry, key, p, torch.float32)
            value, found = entry.get(key), quantised.make(key, code, p, block)
            if value is not None:
                here = shards.local(value.detach())
                quantised.store(found, key, code, here.to(p.device, torch.float32), None)
            take_out(entry, [key])  # now that the new one is there
            entry.update(found)
            made |= value is None
        return made

    def changes(self, state: Any) -> list[str]:
        """What of a state that was just loaded will be kept in another format, in words."""
        counted: dict[str, int] = {}

        def note(what: str) -> None:
            counted[what] = counted.get(what, 0) + 1

        for p, entry in state.items():
            if not isinstance(p, Tensor) or not isinstance(entry, dict):
                continue
            for key in quantised.MOMENTS:
                found, wanted = _format_of(entry, key), self._format_for(p)
                if found is not None and wanted not in (None, found):
                    note(f"{key} from {found} to {wanted}")
            rest = next((m for k in MASTER_SLOTS if (m := _mode_of(k, entry.get(k), p)) is not None), None)
            kept = self.mode_of(p) if self.mode_of(p) in masters.SLOTS else None
            if rest != kept and entry:
                note(f"master weights from {rest or 'none'} to {kept or 'none'}")
        return [f"{what} ({n} parameter{'s' if n > 1 else ''})" for what, n in counted.items()]

    def _format_for(self, p: Tensor) -> str | None:
        """What moments of this parameter will be kept in; None: in what they are."""
        if self.state_dtype is None or p.is_complex():
            return None
        return "fp32" if self.state_dtype in quantised.QUANTISED and not self.block_of(p) else self.state_dtype

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
        here = shards.local(p.detach())
        kept = None if found is None else shards.local(entry[found])
        weights = here.float() if of_found is None else masters.load(here, kept, of_found)
        self.drop(entry)
        if slot is not None:
            entry[slot] = rest = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            masters.keep(weights, here, shards.local(rest), mode)


def _mode_of(slot: str, rest: Any, p: Tensor) -> str | None:
    """The mode whose slot this is. None for a rest of another dtype: torch's loader casts state to the parameter's."""
    if not isinstance(rest, Tensor):
        return None
    modes = {"master": "fp32", "master_low": "split8" if rest.dtype == torch.int8 else "split", "compensation": "kahan"}
    mode = modes[slot]
    return mode if rest.dtype == _REST.get(mode, p.dtype) and rest.shape == p.shape else None


def expand_one(entry: dict[str, Any], key: str, p: Tensor, dtype: torch.dtype) -> None:
    """A slot that is there in codes becomes the plain slot."""
    code = quantised.find(entry, key)
    if code is not None:
        here = quantised.load(entry, key, code, shards.local(p).shape).to(p.device, dtype)
        entry[key] = shards.like(p, here, p.shape)
    quantised.drop(entry, key)


def expand(entry: dict[str, Any] | None, p: Tensor, dtype: torch.dtype) -> None:
    """All moments that are there in codes become plain slots of this dtype."""
    for key in quantised.MOMENTS if entry else ():
        assert entry is not None
        expand_one(entry, key, p, dtype)


def take_out(entry: dict[str, Any], keys: Sequence[str]) -> None:
    """Takes slots out of a state, in whatever format they are."""
    for key in keys:
        entry.pop(key, None)
        quantised.drop(entry, key)


def _format_of(entry: dict[str, Any], key: str) -> str | None:
    code = quantised.find(entry, key)
    if code is not None:
        return f"int{code.bits}"
    value = entry.get(key)
    if not isinstance(value, Tensor) or value.is_complex():
        return None
    names = {dtype: name for name, dtype in STATE_DTYPES.items()}
    return names.get(value.dtype, str(value.dtype).removeprefix("torch."))
