"""From a checkpoint into model, optimizer, schedule and scaler: checked first, then all of it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mo_fused.training.errors import bad_input

_RESTARTS = {
    "optimizer_state_dict": "the optimizer's moments and step counts start from zero",
    "scheduler_state_dict": "the schedule starts at its first step, warm-up included",
    "scaler_state_dict": "the loss scale starts at its initial value",
    "step": "steps are counted from 0",
    "data": "the loader begins its first epoch",
    "rng": "random numbers go on from where this process stands",
}


@dataclass(frozen=True)
class Parts:
    """What a checkpoint fills."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    scaler: torch.amp.GradScaler | None

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises InputError unless the checkpoint's parts have the form of these."""
        for key in ("model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "scaler_state_dict"):
            if not isinstance(state.get(key), Mapping) and (key == "model_state_dict" or state.get(key) is not None):
                raise bad_input(
                    "checkpoint",
                    expected=f"{key} with what state_dict() returned",
                    found=f"a {type(state.get(key)).__name__}",
                    remedy="leave out what shall start anew (the model alone is needed)",
                )
        _check_model(self.model, state["model_state_dict"])
        saved = state.get("optimizer_state_dict")
        if saved is not None:
            _check_optimizer(self.optimizer, saved)
        if self.schedule is not None and state.get("scheduler_state_dict"):
            _check_schedule(self.schedule, state["scheduler_state_dict"])
            _check_shapes(self.schedule, state["scheduler_state_dict"])
        try:
            operator.index(0 if state.get("step") is None else state["step"])
        except TypeError:
            remedy = "give the number of optimizer steps done, or leave it out"
            raise bad_input(
                "checkpoint", expected="step as a whole number", found=repr(state["step"]), remedy=remedy
            ) from None

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Load every part that is there; returns a line for each missing one: what starts anew."""
        wanted = {
            "optimizer_state_dict": self.optimizer,
            "scheduler_state_dict": self.schedule,
            "scaler_state_dict": self.scaler,
        }
        missing = []
        for key, part in wanted.items():
            if part is None:
                continue
            if not state.get(key):  # {} is that of a scaler that is switched off
                missing.append(key)
            else:
                part.load_state_dict(state[key])  # the optimizer first: it may refuse values that don't fit
        self.model.load_state_dict(state["model_state_dict"])
        missing += [key for key in ("step", "data", "rng") if state.get(key) is None]
        return [f"the checkpoint has no {key}: {_RESTARTS[key]}" for key in missing]


def own_entry(entries: Any, rank: int) -> Any:
    """This process's entry of a list with one for each; the first one's where there are fewer."""
    if not isinstance(entries, (list, tuple)) or not entries:
        return None
    return entries[rank] if rank < len(entries) else entries[0]


def _check_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    own = model.state_dict()
    faults = [f"no {name}" for name in own if name not in saved]
    faults += [f"a {name} that the model doesn't have" for name in saved if name not in own]
    for name, value in own.items():
        found = saved.get(name)
        if not isinstance(value, torch.Tensor) or name not in saved:
            continue
        if not isinstance(found, torch.Tensor):
            faults.append(f"a {type(found).__name__} as {name}")
        elif found.shape != value.shape:
            faults.append(f"{name} of shape {tuple(found.shape)}, not {tuple(value.shape)}")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise bad_input(
            "checkpoint",
            expected="the model that it was saved from",
            found=", ".join(faults[:3]) + more,
            remedy="build the model with the settings of that run (the checkpoint's config)",
        )


def _check_shapes(schedule: LRScheduler, saved: Mapping[str, Any]) -> None:
    """``LambdaLR`` fails without shapes, and a shape would mix its own numbers with those of another kind.

    Shapes that are functions are not saved (None): such a schedule keeps its own.
    """
    own, found = schedule.state_dict().get("lr_lambdas"), saved.get("lr_lambdas")
    if own is None:
        return
    fits = isinstance(found, list) and len(found) == len(own)
    if not fits or any(ours and theirs and ours.keys() != theirs.keys() for ours, theirs in zip(own, found or ())):
        raise bad_input(
            "checkpoint",
            expected=f"the state of a schedule with {_shown(own)}",
            found=f"that of one with {_shown(found) if isinstance(found, list) else 'no lr_lambdas'}",
            remedy="build the schedule of that run, or leave scheduler_state_dict out to begin it anew",
        )


def _shown(shapes: list[dict[str, Any] | None]) -> str:
    names = ", ".join(dict.fromkeys(name for shape in shapes for name in shape or ())) or "functions"
    return f"{names} in {len(shapes)} groups"


def _check_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in saved.get("param_groups", [])]
    if own != found:
        raise bad_input(
            "checkpoint",
            expected=f"an optimizer with groups of {', '.join(map(str, own))} parameters",
            found=f"groups of {', '.join(map(str, found)) or 'none'}",
            remedy="build the groups as in that run, or leave optimizer_state_dict out to begin with new moments",
        )
    # Versions of torch add options, so one side alone may have more of them.
    wanted = {key for group in optimizer.param_groups for key in group if key in optimizer.defaults}
    known = {key for group in saved["param_groups"] for key in group} - {"params", "param_names", "initial_lr", "clip"}
    if wanted - known and known - wanted:
        raise bad_input(
            "checkpoint",
            expected=f"the state of {type(optimizer).__name__}",
            found=f"that of an optimizer with {', '.join(sorted(known - wanted)[:3])}",
            remedy="build the optimizer of that run, or leave optimizer_state_dict out to begin with new moments",
        )


def _check_schedule(schedule: LRScheduler, saved: Mapping[str, Any]) -> None:
    own = set(schedule.state_dict())
    more = sorted(set(saved) - own, key=lambda name: (name.startswith("_"), name))
    if own - set(saved) and more:  # as above
        raise bad_input(
            "checkpoint",
            expected=f"the state of {type(schedule).__name__}",
            found=f"that of a schedule with {', '.join(more[:3])}",
            remedy="build the schedule of that run, or leave scheduler_state_dict out to begin at its first step",
        )
