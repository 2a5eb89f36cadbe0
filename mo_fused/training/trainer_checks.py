"""What a trainer refuses before it begins, each with one clear message."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from mo_fused.errors import bad_option
from mo_fused.training.checkpoints import Checkpoints
from mo_fused.training.errors import bad_input
from mo_fused.training.processes import Processes


def check_parts(model: nn.Module, optimizer: Optimizer, loss_fn: Any, schedule: Any, monitor: Any) -> None:
    """Raises ValueError for a part that the loop cannot call."""
    if isinstance(optimizer, LBFGS):
        raise bad_option("optimizer", "one that steps without a closure", "LBFGS", "write this loop yourself")
    if not callable(loss_fn) or isinstance(loss_fn, nn.modules.loss._Loss):
        remedy = "give lambda model, batch: criterion(model(batch[0]), batch[1])"
        raise bad_option("loss_fn", "a function of (model, batch)", type(loss_fn).__name__, remedy)
    if schedule is not None and getattr(schedule, "optimizer", None) is not optimizer:
        found = "one of another" if hasattr(schedule, "optimizer") else type(schedule).__name__
        remedy = "build it from the optimizer that you pass"
        raise bad_option("schedule", "a schedule of this optimizer", found, remedy)
    if isinstance(schedule, ReduceLROnPlateau):
        expected = "one that is stepped without a value"
        raise bad_option("schedule", expected, "ReduceLROnPlateau", "step it yourself, in validate")
    if monitor is not None and not callable(getattr(monitor, "step", None)):
        expected = "an object with step(loss, batch_info)"
        raise bad_option("monitor", expected, type(monitor).__name__, "give it such a method")


def check_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy; raises ValueError for what has no state to keep."""
    parts = dict(extra or {})
    for name, part in parts.items():
        if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
            expected = "objects with state_dict() and load_state_dict()"
            raise bad_option("extra", expected, f"{name}: {type(part).__name__}", "give plain values as config")
    return parts


def check_held(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises InputError for parameters that are trained and that no checkpoint of ``model`` would hold."""
    own = {id(parameter) for parameter in model.parameters()}
    others = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in own]
    if others:
        shapes = ", ".join(str(tuple(one.shape)) for one in others[:3]) + (" ..." if len(others) > 3 else "")
        raise bad_input(
            "optimizer",
            expected="parameters of the model alone, which is what a checkpoint holds",
            found=f"{len(others)} others, of shapes {shapes}",
            remedy="put the modules together (nn.ModuleDict), build the optimizer from that, or leave checkpoints out",
        )


def check_steps(steps: Any, done: int, optimizer: Optimizer, schedule: Any) -> None:
    """Raises ValueError unless ``steps`` is a number of steps that the schedule has, for groups that it knows."""
    try:
        operator.index(steps)
    except TypeError:
        raise bad_option("steps", "a whole number", steps, "give the optimizer steps of the whole run") from None
    if isinstance(schedule, OneCycleLR) and steps - done > schedule.total_steps - schedule.last_epoch:
        left = schedule.total_steps - schedule.last_epoch
        expected = f"at most {done + left}, where this OneCycleLR of {schedule.total_steps} steps ends"
        raise bad_option("steps", expected, steps, "build it with more total_steps")
    known, groups = getattr(schedule, "base_lrs", None), len(optimizer.param_groups)
    if isinstance(known, list) and len(known) != groups:
        expected = f"one for the optimizer's {groups} groups"
        raise bad_option("schedule", expected, f"one for {len(known)}", "build it after add_param_group")


def check_folder(checkpoints: Checkpoints, processes: Processes) -> None:
    """Raises InputError where a run that was not resumed would mix its checkpoints with an earlier run's.

    The newest file of the folder would stay the earlier run's, and be what the next resume takes.
    """
    steps = processes.from_first(checkpoints.steps() if processes.rank == 0 else None)  # all raise, or none
    if steps:
        raise bad_input(
            f"checkpoints in {checkpoints.folder}",
            expected="none, since this run begins anew",
            found=f"those of an earlier run, up to step {steps[-1]}",
            remedy="call resume() before fit to go on with it, or give another folder",
        )
