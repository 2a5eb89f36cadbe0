"""State slots: lazily made, kept in the dtype they have, loaded from checkpoints of any age."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import dispatch, errors, masters, quantised
from .distributed import shards

if TYPE_CHECKING:
    from .offload.engine import Offload
    from .optim.rules import Rule

Group = dict[str, Any]
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What ``state_dtype`` may be, and the dtype of the moments then."""


def step_dtype(group: Group) -> torch.dtype:
    """torch's rule: float32, or float64 when that is the default dtype and the group is not fused."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 and not group.get("fused") else torch.float32


def ensure_step(state: dict[str, Any], param: Tensor, group: Group, on_host: bool = False) -> None:
    """Makes ``state["step"]`` a 0-dim floating tensor on the parameter's device, whatever kind of number it was."""
    value = state.get("step")
    on_host = on_host or dispatch.is_meta(param)  # a meta tensor cannot be counted on
    device = torch.device("cpu") if on_host else param.device
    if (
        type(value) is Tensor
        and value.dim() == 0
        and value.dtype in (torch.float32, torch.float64)
        and value.device == device
    ):
        return
    if value is None:
        state["step"] = torch.zeros((), dtype=step_dtype(group), device=device)
        return
    if isinstance(value, Tensor):
        dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
        state["step"] = value.detach().reshape(()).to(device=device, dtype=dtype, copy=True)
    else:
        state["step"] = torch.tensor(float(value), dtype=step_dtype(group), device=device)


def ensure_slots(state: dict[str, Any], param: Tensor, keys: Sequence[str], state_dtype: str | None = None) -> bool:
    """Makes the slots that are missing, as zeros like the parameter; True when one was made.

    Where ``state_dtype`` names a dtype, slots of another one are converted.
    """
    made = False
    dtype = None if state_dtype is None or param.is_complex() else STATE_DTYPES[state_dtype]
    for key in keys:
        value = state.get(key)
        if value is None:
            state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            made = True
        elif dtype is not None and type(shards.local(value)) is Tensor and value.dtype != dtype:
            state[key] = value.to(dtype)
    return made


def check_slot(
    state: dict[str, Any], param: Tensor, key: str, name: str, shape: torch.Size, anywhere: bool = False
) -> None:
    """Refuses a slot that cannot belong to the parameter, before anything is changed.

    ``anywhere``: it may lie on another device, from where it will be moved.
    """
    value = state[key]
    if not isinstance(value, Tensor):
        raise errors.state_mismatch("type", name, key, "torch.Tensor", type(value).__name__)
    if value.shape != shape:
        raise errors.state_mismatch("shape", name, key, tuple(shape), tuple(value.shape))
    if shards.is_dtensor(value) != shards.is_dtensor(param):
        raise errors.state_mismatch("kind", name, key, type(param).__name__, type(value).__name__)
    if shards.is_dtensor(param):
        wanted, found = shards.placements_of(param, shape, key), tuple(value.placements)  # type: ignore[attr-defined]
        if found != wanted:
            raise errors.state_mismatch("placements", name, key, wanted, found)
        for dim in {x.dim % param.dim() for x in wanted if hasattr(x, "dim")}:
            own, here = shards.local(param).shape[dim], shards.local(value).shape[dim]
            if own != here:
                raise errors.state_mismatch(f"local size along dimension {dim}", name, key, own, here)
    if value.device != param.device and not anywhere:
        raise errors.state_mismatch("device", name, key, param.device, value.device)


def _check_names(saved_groups: list[Group], groups: list[Group]) -> None:
    for saved, own in zip(saved_groups, groups, strict=True):
        saved_names, own_names = saved.get("param_names"), own.get("param_names")
        if not saved_names or not own_names or saved_names == own_names:
            continue
        # Renamed parameters keep their places; the same names in other places would swap moments in silence.
        if set(saved_names) & {n for n, s in zip(own_names, saved_names, strict=False) if n != s}:
            raise errors.reordered_names(list(saved_names), list(own_names))


def own_copy(value: Any, param: Tensor, key: str, device: torch.device | None = None) -> Any:
    """A copy of an entry of a checkpoint, on the parameter's device or another one."""
    if not isinstance(value, Tensor):
        return value
    device = param.device if device is None else device
    if shards.is_dtensor(value) or (shards.is_dtensor(param) and key != "step"):
        value = shards.beside(param, value, key)
        return value.detach().clone() if value.device == device else value.detach().to(device)
    if key in quantised.ALL_SLOTS:  # in the order of the shape, whatever the parameter's
        return value.detach().to(device=device, copy=True, memory_format=torch.contiguous_format)
    if key == "step" or value.shape != param.shape or type(value) is not Tensor or type(param.data) is not Tensor:
        return value.detach().to(device=value.device if key == "step" else device, copy=True)
    # In the parameter's memory format, so that the step walks both in one order.
    out = torch.empty_like(
        param, dtype=value.dtype, device=device, requires_grad=False, memory_format=torch.preserve_format
    )
    return out.copy_(value.detach())


class Loader:
    """Takes a state_dict apart for ``load_state_dict``: groups go through torch, state keeps its dtypes.

    torch's own loader casts every floating state tensor to the parameter's dtype (fp32 moments of bf16 parameters
    would be rounded) and aliases the checkpoint's tensors.
    """

    def __init__(self, groups: list[Group], rule: Rule, offload: Offload | None = None) -> None:
        self._groups = groups
        self._offload = offload
        self._rule = rule
        self._state: dict[Any, Any] = {}

    def take(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Validates everything, keeps the state, and returns a state_dict of groups alone for torch to load."""
        saved_groups = state_dict["param_groups"]
        if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in self._groups]:
            return state_dict  # torch's loader has the text for this
        _check_names(saved_groups, self._groups)
        by_id: dict[Any, tuple[Tensor, str]] = {}
        for saved, own in zip(saved_groups, self._groups, strict=True):
            names = own.get("param_names") or [f"parameter {i}" for i in saved["params"]]
            by_id.update(zip(saved["params"], zip(own["params"], names, strict=True), strict=True))
        for key, entry in state_dict["state"].items():
            if key not in by_id:
                self._state[key] = entry
                continue
            param, name = by_id[key]
            for slot in (*self._rule.all_slots, *masters.ALL_SLOTS):
                value = entry.get(slot)
                shape = param.shape if slot in masters.ALL_SLOTS else self._rule.slot_shape(slot, param)
                if isinstance(value, Tensor) and value.shape != shape:
                    raise errors.state_mismatch("shape", name, slot, tuple(shape), tuple(value.shape))
            for slot in quantised.MOMENTS:
                quantised.check(entry, slot, param.shape, name)
            saved = {k: v for k, v in entry.items() if v is not None}
            if not shards.cut_of(param).in_order:  # its parts would cut blocks
                quantised.expand_whole(saved, param.shape)
            home = None if self._offload is None else self._offload.home_of(param)
            if home is None:
                self._state[param] = {k: own_copy(v, param, k) for k, v in saved.items()}
            else:
                from .offload.states import taken_over  # which needs this module

                self._state[param] = taken_over(home, saved, param)
        # These are keys of this package's groups: a plain torch checkpoint does not know them and must not lose them.
        keys = ("clip", *self._rule.group_keys)
        kept = [{key: own[key] for key in keys if key in own} for own in self._groups]
        groups = [
            {**saved, **{key: value for key, value in own.items() if key not in saved}}
            for own, saved in zip(kept, saved_groups, strict=True)
        ]
        return {**state_dict, "param_groups": groups, "state": {}}

    def put(self, state: dict[Any, Any]) -> None:
        """Fills the optimizer's state with copies of what was taken."""
        state.update(self._state)
