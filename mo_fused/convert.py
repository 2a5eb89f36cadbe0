"""Checkpoints from elsewhere and for elsewhere: plain torch's out of ours, ours out of bitsandbytes' and apex's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import errors, masters
from .optim.adamw import Adam, AdamW
from .optim.base import FusedOptimizer
from .optim.formats import expand
from .optim.rules import AdafactorRule

StateDict = dict[str, Any]
_OWN_GROUP_KEYS = ("clip", *AdafactorRule.group_keys)
_BLOCKS = (256, 2048, 4096)
"""Elements that share a scale in bitsandbytes' 8-bit states, of its present and its earlier versions."""


def to_torch_state_dict(opt: FusedOptimizer) -> StateDict:
    """A ``state_dict`` that holds what torch's class of the same name keeps, and nothing else.

    Master weights, SGD's count of steps and this package's group keys are left out; moments keep the dtype they have
    (torch casts them to the parameter's when it loads them), quantised ones become float32. Other tensors are shared
    with the optimizer, as in ``state_dict()``. What a parameter's master weights had beyond it is lost: save
    ``opt.state_dict()`` to go on with this package.

    Raises:
        ValueError: Adafactor groups in transformers' form, or with a first moment, which torch's class does not have.
    """
    if not isinstance(opt, FusedOptimizer):
        raise errors.not_ours(f"{type(opt).__module__}.{type(opt).__qualname__}")
    found = opt.state_dict()
    for group in found["param_groups"]:
        for name, plain in (("transformers_form", False), ("beta1", None), ("relative_step", None)):
            if group.get(name, plain) is not plain:
                raise errors.not_in_torch(f"{name}={group[name]!r}")
    dropped = {*masters.ALL_SLOTS, *(() if "exp_avg" in opt._rule.all_slots else ("step",))}
    params = [p for group in opt.param_groups for p in group["params"]]
    state = {}
    for key, entry in found["state"].items():
        kept = dict(entry)
        if isinstance(key, int):  # the position of a parameter
            expand(kept, params[key], torch.float32)
        kept = {name: kept[name] for name in _in_order(kept) if name not in dropped}
        if kept:
            state[key] = kept
    groups = [{k: v for k, v in group.items() if k not in _OWN_GROUP_KEYS} for group in found["param_groups"]]
    return {**found, "state": state, "param_groups": groups}


def _in_order(entry: StateDict) -> list[str]:
    """Names as torch's classes have them one after the other: ``step``, moments, the rest."""
    order = {name: i for i, name in enumerate(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"))}
    return sorted(entry, key=lambda name: order.get(name, len(order)))


def from_state_dict(opt: FusedOptimizer, state_dict: StateDict, *, source: str) -> None:
    """Loads a checkpoint of another library's AdamW (or Adam) into one of ours.

    Args:
        opt: :class:`mo_fused.AdamW` or :class:`mo_fused.Adam` over the same parameters in the same order.
        state_dict: what the other optimizer's ``state_dict()`` gave.
        source: "bitsandbytes" (32-bit and blockwise 8-bit states of AdamW, AdamW8bit, PagedAdamW and their Adams) or
            "apex" (``apex.optimizers.FusedAdam``).

    Moments become float32, or what ``state_dtype`` says. The groups' lr, betas, eps and weight_decay are taken over.

    Raises:
        ValueError: another source, an optimizer or a checkpoint that does not fit; nothing has been changed then.
    """
    readers: dict[str, Callable[[StateDict, list[Tensor]], StateDict]] = {
        "bitsandbytes": _from_bitsandbytes,
        "apex": _from_apex,
    }
    if source not in readers:
        raise errors.bad_option("source", " or ".join(map(repr, readers)), source, "torch's own load as they are")
    if not isinstance(opt, (AdamW, Adam)):
        raise errors.bad_option("opt", "mo_fused.AdamW or mo_fused.Adam", type(opt).__name__, "import into one of them")
    params = [p for group in opt.param_groups for p in group["params"]]
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    if len(saved) != len(params) or len(state_dict["param_groups"]) != len(opt.param_groups):
        raise errors.another_model(len(params), len(saved))
    by_key = dict(zip(saved, params, strict=True))
    order = {key: by_key[key] for key in state_dict["state"] if key in by_key}
    state = readers[source](state_dict, list(order.values()))
    groups = []
    for own, theirs in zip(opt.state_dict()["param_groups"], state_dict["param_groups"], strict=True):
        taken = {k: theirs[k] for k in ("lr", "eps", "weight_decay") if k in theirs}
        taken["betas"] = tuple(theirs["betas"][:2])
        groups.append({**own, **taken, "params": theirs["params"]})
    opt.load_state_dict({"state": dict(zip(order, state.values(), strict=True)), "param_groups": groups})


def _from_bitsandbytes(saved: StateDict, params: list[Tensor]) -> StateDict:
    out: StateDict = {}
    for (key, entry), p in zip(saved["state"].items(), params, strict=True):
        values = {**entry, **entry.get("__bnb_optimizer_quant_state__", {})}
        if "state1" not in values or "state2" not in values:
            raise errors.not_a_checkpoint_of(
                "bitsandbytes", f"a parameter's state without state1 and state2: {[*entry]}"
            )
        out[key] = {
            "step": torch.tensor(float(values["step"])),
            "exp_avg": _dequantized(values, "1", p),
            "exp_avg_sq": _dequantized(values, "2", p),
        }
    return out


def _dequantized(values: StateDict, which: str, p: Tensor) -> Tensor:
    """A moment in float32: code book times largest magnitude of the block (Dettmers et al. 2022, arXiv:2110.02861)."""
    codes: Tensor = values[f"state{which}"]
    if codes.dtype != torch.uint8:
        return codes.detach().float().reshape(p.shape)
    book, scales = values[f"qmap{which}"].float(), values[f"absmax{which}"].float()
    n = codes.numel()
    block = next((b for b in _BLOCKS if -(-n // b) == scales.numel()), None)
    if block is None or n != p.numel():
        raise errors.not_a_checkpoint_of("bitsandbytes", f"{scales.numel()} scales for {n} values of {p.numel()}")
    spread = scales.repeat_interleave(block)[:n]
    out: Tensor = book[codes.reshape(-1).long()] * spread
    return out.reshape(p.shape)


def _from_apex(saved: StateDict, params: list[Tensor]) -> StateDict:
    steps = {i: group.get("step") for group in saved["param_groups"] for i in group["params"]}
    out: StateDict = {}
    for key, entry in saved["state"].items():
        if "exp_avg" not in entry or "exp_avg_sq" not in entry:
            raise errors.not_a_checkpoint_of("apex", f"a parameter's state without exp_avg and exp_avg_sq: {[*entry]}")
        step = entry.get("step", steps.get(key))  # FusedAdam counts in the group
        if step is None or not math.isfinite(float(step)):
            raise errors.not_a_checkpoint_of("apex", f"step {step!r}")
        moments = {name: entry[name].detach().float() for name in ("exp_avg", "exp_avg_sq")}
        out[key] = {"step": torch.tensor(float(step)), **moments}
    return out
