"""A short trial of a whole run before it begins: what would go wrong later is seen now, and nothing is changed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mo_fused.dispatch import is_cuda
from mo_fused.errors import bad_option
from mo_fused.training import findings
from mo_fused.training.findings import Finding
from mo_fused.training.gradient_watch import GradientWatch
from mo_fused.training.snapshot import kept_state
from mo_fused.training.start_loss import StartWatch, judge_start
from mo_fused.training.trial import Watch, host_peak, peak_memory, peak_rate, reset_peak
from mo_fused.training.trial_checkpoints import TrialCheckpoints

if TYPE_CHECKING:
    from mo_fused.training.trainer import Trainer


@dataclass(frozen=True)
class Preflight:
    """What a trial run has shown; printed, it is a report.

    ``seconds_per_step`` is the median after the first few steps, ``total_seconds`` the estimate for the steps that are
    left of the whole run with their validations and checkpoints; both None where they are not known.
    ``device_memory`` is what tensors took at most on the CUDA device (None on the CPU), ``host_memory`` what the
    process had in memory at most (without a CUDA device: since the trial began); both in bytes.
    """

    steps: int
    losses: tuple[float, ...]
    findings: tuple[Finding, ...]
    seconds_per_step: float | None
    total_seconds: float | None
    device_memory: int | None
    host_memory: int
    checkpoint_bytes: int | None
    checkpoint_seconds: float | None

    @property
    def ok(self) -> bool:
        """Whether nothing was found that the run should not begin with; warnings are allowed."""
        return all(finding.level != "problem" for finding in self.findings)

    def __getitem__(self, check: str) -> Finding:
        """The finding of one check, for instance ``report["loss falls"]``."""
        return next(finding for finding in self.findings if finding.check == check)

    def __str__(self) -> str:
        problems = sum(finding.level == "problem" for finding in self.findings)
        warnings = sum(finding.level == "warning" for finding in self.findings)
        verdict = "ready" if self.ok else "not ready"
        head = f"preflight, {self.steps} steps: {verdict} ({problems} problems, {warnings} warnings)"
        return "\n".join([head, *map(str, self.findings)])


def preflight(
    trainer: Trainer,
    loader: Iterable[Any],
    steps: int = 50,
    *,
    classes: int | None = None,
    total_steps: int | None = None,
) -> Preflight:
    """:meth:`Trainer.preflight`, which says what it does."""
    if steps < 1:
        raise bad_option("steps", "1 or more", steps, "give the length of the trial, 50 for instance")
    if classes is not None and classes < 2:
        raise bad_option("classes", "2 or more", classes, "leave it out where the loss is no cross-entropy")
    if total_steps is not None and total_steps < 1:
        raise bad_option("total_steps", "1 or more", total_steps, "leave it out to take the schedule's")
    begun_at = trainer.step
    whole = total_steps or _steps_of(trainer.schedule)
    peak = peak_rate(trainer.optimizer.param_groups[0])
    with ExitStack() as stack:
        stack.enter_context(kept_state(trainer, loader))
        monitor = trainer.monitor
        if hasattr(monitor, "for_trial"):
            monitor = monitor.for_trial()  # type: ignore[union-attr]
        watch = trainer.monitor = Watch(monitor)
        checkpoints = None
        if not trainer._processes.sharded:
            trainer.checkpoints = checkpoints = stack.enter_context(TrialCheckpoints.beside(trainer.checkpoints))
        validation = _timed_validation(trainer, watch)
        gradients = stack.enter_context(GradientWatch(trainer, watch))
        start = stack.enter_context(StartWatch(trainer, classes))
        reset_peak(trainer.device)
        done = trainer.fit(loader, begun_at + steps) - begun_at
        device_memory = peak_memory(trainer.device) if is_cuda(trainer.device) else None
        measured = [info["measured"].get("skipped", False) for info in watch.infos]
        skipped = [step for step, one in enumerate(measured, 1) if bool(one)]
        losses = watch.losses
        found = [
            findings.finite(losses, gradients, _bad_parameters(trainer), skipped, trainer.precision.scaler is not None),
            findings.gradients(gradients),
            findings.falls(losses, [float(info["lr"]) for info in watch.infos], peak),
            judge_start(losses, start, begun_at),
            findings.logging(monitor, watch, done),
            findings.checkpoint(checkpoints, trainer._processes.rank),
            findings.memory(trainer.device, device_memory),
        ]
    times = watch.seconds()
    per_step = statistics.median(times) if times else None
    total = None
    if per_step is not None and whole is not None:
        left = max(0, whole - trainer.step)
        every, saves = trainer.validate_every, trainer.checkpoints.every if trainer.checkpoints is not None else 0
        total = left * per_step
        if validation:
            total += statistics.median(validation) * (left // every if every else 1)
        if checkpoints is not None and checkpoints.seconds is not None and trainer.checkpoints is not None:
            total += checkpoints.seconds * (left // saves if saves else 1)
    found.append(findings.duration(per_step, total, whole, trainer.step))
    return Preflight(
        steps=done,
        losses=tuple(losses),
        findings=tuple(found),
        seconds_per_step=per_step,
        total_seconds=total,
        device_memory=device_memory,
        host_memory=host_peak(),
        checkpoint_bytes=None if checkpoints is None else checkpoints.bytes,
        checkpoint_seconds=None if checkpoints is None else checkpoints.seconds,
    )


def _timed_validation(trainer: Trainer, watch: Watch) -> list[float]:
    """Seconds of each validation to come; they are no part of a step."""
    seconds: list[float] = []
    validate: Callable[[], Mapping[str, float]] | None = trainer.validate
    if validate is None:
        return seconds

    def timed() -> Mapping[str, float]:
        begun = time.perf_counter()
        values = validate()
        seconds.append(time.perf_counter() - begun)
        watch.aside += seconds[-1]
        return values

    trainer.validate = timed
    return seconds


def _bad_parameters(trainer: Trainer) -> list[str]:
    named = trainer._processes.module.named_parameters()
    return [name for name, parameter in named if not bool(parameter.detach().isfinite().all())]


def _steps_of(schedule: Any) -> int | None:
    """The number of steps that a schedule is made for, where it says so."""
    shapes = getattr(schedule, "lr_lambdas", None) or [None]
    for holder, name in ((schedule, "total_steps"), (shapes[0], "total_steps"), (schedule, "T_max")):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
