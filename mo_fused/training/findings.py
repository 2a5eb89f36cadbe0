"""What a trial run has shown, check by check: seen, and what to do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mo_fused.training.trial import host_peak, readable_bytes, readable_seconds

if TYPE_CHECKING:
    from mo_fused.training.gradient_watch import GradientWatch
    from mo_fused.training.trial import Watch
    from mo_fused.training.trial_checkpoints import TrialCheckpoints

_NAMED = 5  # names in one line


@dataclass(frozen=True)
class Finding:
    """One check. ``level`` is "ok", "warning" (may be right; look at it) or "problem" (the run would not work)."""

    check: str
    level: str
    seen: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.check}: {self.seen}{'. To do: ' + self.do if self.do else ''}"


def finite(
    losses: Sequence[float], watch: GradientWatch, bad_parameters: Sequence[str], skipped: Sequence[int], scaled: bool
) -> Finding:
    """Losses, gradients and parameters: whether all of them are finite, and which are the first that are not.

    Args:
        losses: of each step.
        watch: the gradients.
        bad_parameters: names of those that are not finite in the end.
        skipped: the steps (from 1) that were.
        scaled: there is a loss scale. It settles by overflows, so those before the last quarter of the steps are none
            of this.
    """
    faults = []
    bad_losses = [step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)]
    if bad_losses:
        faults.append(f"the loss is {losses[bad_losses[0] - 1]} at trial step {bad_losses[0]}")
    bad = {n: [name for name, value in step.items() if not math.isfinite(value)] for n, step in watch.steps.items()}
    bad = {step: names for step, names in bad.items() if names}
    late = [step for step in (*bad, *skipped) if step > len(losses) - max(1, len(losses) // 4)]
    settled = scaled and not bad_losses and not late
    if bad and not settled:
        step, names = next(iter(bad.items()))
        faults.append(f"gradients are not finite in {len(bad)} steps, first at trial step {step}: {_names(names)}")
    if bad_parameters:
        faults.append(f"parameters are not finite: {_names(bad_parameters)}")
    if skipped and not settled:
        faults.append(f"{len(skipped)} of {len(losses)} steps were skipped")
    if not faults:
        note = f"; {len(skipped)} steps skipped while the loss scale settled" if skipped else ""
        return Finding("finite values", "ok", f"losses, gradients and parameters of {len(losses)} steps{note}")
    do = (
        "look for log or division at 0 and empty means in the loss and in the data; lower the rate or clip "
        '(max_grad_norm); in fp16 use precision="bf16"'
    )
    return Finding("finite values", "problem", "; ".join(faults), do)


def gradients(watch: GradientWatch) -> Finding:
    """Parameters that nothing reaches."""
    if watch.unseen is not None:
        return Finding("gradients", "ok", f"not looked at: {watch.unseen}")
    steps, names = list(watch.steps.values()), watch.names()
    if not steps:
        return Finding("gradients", "problem", "no step was taken", "see the values that are not finite")
    if not names:
        seen = f"the optimizer holds no parameter of the model that needs a gradient ({watch.frozen} are frozen)"
        return Finding("gradients", "problem", seen, "build the optimizer from this model's parameters")
    none = [name for name in names if not any(name in step for step in steps)]
    zero = [name for name in names if name not in none and not any(step.get(name, 0.0) != 0.0 for step in steps)]
    faults = []
    if none:
        faults.append(f"{len(none)} of {len(names)} parameters got no gradient: {_names(none)}")
    if zero:
        faults.append(f"{len(zero)} of {len(names)} had a gradient of exactly zero in every step: {_names(zero)}")
    if watch.left_out:
        faults.append(f"{watch.left_out} that need a gradient are not in the optimizer")
    if not faults:
        frozen = f", {watch.frozen} are frozen" if watch.frozen else ""
        return Finding("gradients", "ok", f"all {len(names)} trained parameters got some{frozen}")
    do = (
        "no gradient: the loss does not use the parameter (detach, a branch not taken); zero: dead units, a zero "
        "factor, underflow; freeze what is not to be trained (requires_grad_(False))"
    )
    return Finding("gradients", "problem" if len(none) + len(zero) == len(names) else "warning", "; ".join(faults), do)


def falls(losses: Sequence[float], rates: Sequence[float], peak: float) -> Finding:
    """The median of the first fifth of the losses against that of the last fifth (at least three steps each).

    Their difference counts where it is more than twice its standard error, taken from the median absolute deviations.
    """
    check = "loss falls"
    size = max(3, len(losses) // 5)
    highest = max(rates, default=0.0)
    low = f"; the rate was at most {highest:.3g}, {highest / peak:.0%} of its peak" if 0 <= highest < 0.5 * peak else ""
    if len(losses) < 2 * size:
        return Finding(check, "ok", f"not looked at: {len(losses)} steps are too few (6 are needed)")
    first, last = losses[:size], losses[-size:]
    if not all(map(math.isfinite, [*first, *last])):
        return Finding(check, "problem", "losses are not finite", "see the values that are not finite")
    before, after = statistics.median(first), statistics.median(last)
    error = 1.2533 * math.hypot(_deviation(first, before), _deviation(last, after)) / math.sqrt(size)
    seen = f"median {before:.6g} in the first {size} steps, {after:.6g} in the last {size}{low}"
    if abs(before - after) <= 1e-6 * max(abs(before), 1e-30):
        do = f"the loss does not move: the rate ({highest:.3g}) is too low, or nothing that is trained has a part in it"
        return Finding(check, "problem", seen, do)
    if before - after > 2 * error:
        return Finding(check, "ok", seen)
    if after - before > 2 * error:
        do = "it rises: lower the rate, warm up longer, or look for a sign or labels that are wrong"
        return Finding(check, "problem", seen, do)
    do = "not to be told from noise: run more steps" + (", beyond the warm-up" if low else ", or raise the rate")
    return Finding(check, "warning", seen, do)


def logging(monitor: Any, watch: Watch, done: int) -> Finding:
    """Whether the monitor has taken every step."""
    if monitor is None:
        return Finding("logging", "ok", "not looked at: the trainer has no monitor")
    seen = f"{type(monitor).__name__} took {watch.told} of {done} steps"
    if watch.error is not None:
        do = "mend the monitor: in the run this error ends the training"
        return Finding("logging", "problem", f"{seen}; {watch.error}", do)
    return Finding("logging", "ok", seen)


def checkpoint(trial: TrialCheckpoints | None, rank: int) -> Finding:
    """Whether one could be written and read back the same."""
    if trial is None:
        return Finding("checkpoint", "ok", "not looked at: the model is sharded, and the trainer saves none")
    if rank:
        return Finding("checkpoint", "ok", "not looked at: the first process writes them")
    if trial.folder_error is not None:
        return Finding("checkpoint", "problem", trial.folder_error, "name a folder that can be written")
    if trial.error is not None:
        do = "make room on the disk, and keep plain values and tensors in config and in the loader's state"
        return Finding("checkpoint", "problem", trial.error, do)
    if trial.seconds is None or trial.bytes is None:
        return Finding("checkpoint", "warning", "none was written", "see the values that are not finite, and the loss")
    seen = f"written in {readable_seconds(trial.seconds)}, {readable_bytes(trial.bytes)}, read back bit for bit"
    return Finding("checkpoint", "ok", seen)


def memory(device: torch.device, on_device: int | None) -> Finding:
    """Peak memory: of the device's tensors, and of the process on the host."""
    host = f"{readable_bytes(host_peak())} of the process on the host"
    if on_device is None:
        return Finding("memory", "ok", f"at most {host}")
    whole = torch.cuda.get_device_properties(device).total_memory
    seen = f"at most {readable_bytes(on_device)} of {readable_bytes(whole)} in tensors on {device}, {host}"
    if on_device > 0.92 * whole:
        do = "little is left for longer batches and fragments: take a smaller batch and accumulate"
        return Finding("memory", "warning", seen, do)
    return Finding("memory", "ok", seen)


def duration(per_step: float | None, total: float | None, steps: int | None, done: int) -> Finding:
    """Seconds a step, and what that makes for the rest of the run."""
    if per_step is None:
        return Finding("time", "ok", "not looked at: one step is too few")
    seen = f"{readable_seconds(per_step)} a step"
    if total is None:
        return Finding("time", "ok", f"{seen} (give total_steps= for an estimate of the whole run)")
    left = f"the {steps} steps" if not done else f"the {max(0, (steps or 0) - done)} steps left of {steps}"
    return Finding("time", "ok", f"{seen}, about {readable_seconds(total)} for {left} with validation and checkpoints")


def _deviation(values: Sequence[float], middle: float) -> float:
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
