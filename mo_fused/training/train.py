"""The loop behind ``mo-fused train``."""

from __future__ import annotations

import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mo_fused import __version__
from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.changes import check_changes, record_changes
from mo_fused.training.checkpoints import Checkpoints
from mo_fused.training.config import TrainConfig
from mo_fused.training.device import choose_device
from mo_fused.training.errors import InputError, bad_input
from mo_fused.training.layers_watch import LayerNorms, layer_norms
from mo_fused.training.monitor import Monitor
from mo_fused.training.profiling import StepProfiler, profile_steps
from mo_fused.training.progress import Progress
from mo_fused.training.run_folder import RunFolder
from mo_fused.training.seeding import seed_everything
from mo_fused.training.sinks import JsonLines
from mo_fused.training.tasks import Task, build_task
from mo_fused.training.trainer import Trainer
from mo_fused.training.trial import is_out_of_memory
from mo_fused.training.watchers import (
    DeadGradient,
    LossSpike,
    NonFinite,
    NormOutlier,
    Plateau,
    ScaleCollapse,
    Watcher,
)


@dataclass(frozen=True)
class RunResult:
    """How a run ended. Losses are means; ``val_loss`` and ``val_metric`` are None when none was measured.

    ``seconds`` are this process's, ``steps_done`` those of the whole run; ``stopped_by`` is the signal that ended it.
    """

    run_dir: Path
    steps_done: int
    stopped_by: int | None
    diverged: bool
    train_loss: float
    val_loss: float | None
    val_metric: float | None
    seconds: float

    @property
    def status(self) -> int:
        """Exit status: 0 finished, 1 the loss was not finite, 130 stopped by Ctrl-C, 143 by SIGTERM."""
        return 128 + self.stopped_by if self.stopped_by is not None else 1 if self.diverged else 0


def run(config: TrainConfig) -> RunResult:
    """Train as ``config`` says, write the run folder, print what happens to standard output (the bar: standard error).

    A folder that holds an earlier run is gone on with, from its newest checkpoint; the run then ends in the same bits
    as one that was never stopped.

    Ctrl-C (and SIGTERM) ends the run after the step that it meets, with a checkpoint; a second one ends it at once. The
    run also ends when the loss is no longer finite, because no later step can mend the weights then.

    Raises:
        InputError: a setting, the data, the device or the folder cannot be used, or a package is missing. Nothing has
            been written then.
    """
    tqdm = _train_packages()
    device = choose_device(config.device)
    task = build_task(config, device)
    seed_everything(config.seed)  # after what building draws, or importing for the first time
    optimizer, schedule = _optimizer(config, task)
    folder = RunFolder(config.task, config.run_dir, resume=True)
    # Off a terminal each refresh is a line of a log file: a few are enough.
    pace = 0.2 if sys.stderr.isatty() else 15.0
    bar = tqdm(total=config.steps, desc=config.task, unit="step", mininterval=pace, dynamic_ncols=True, delay=0)
    monitor: Monitor | None = None
    try:
        settings = {**asdict(config), "device": str(device), "run_dir": str(folder.path), **_facts(task)}
        check_changes(folder, settings)
        trainer = _trainer(config, task, optimizer, schedule, folder)
        source = trainer.resume() if folder.resumed else None  # before anything is written: it may refuse
        changed = record_changes(folder, settings)
        folder.write_config(settings)
        progress = Progress(bar, task)
        profiler = profile_steps(config.profile, folder.path) if config.profile else None
        monitor = _monitor(trainer, progress, folder, profiler, config.steps)
        print(f"{config.task}: {task.summary}")
        per_step = _per_step(config, task)
        print(f"{config.optimizer} {config.preset.optimizer} on {device}, {config.steps} steps of {per_step}")
        print("\n".join([f"run folder {folder.path}", *changed]))
        if source is not None:
            print(f"resumed at step {trainer.step} from {source}")
            if trainer.step < config.steps and (ended := _schedule_end(schedule)) < config.steps:
                print(f"the schedule was made for {ended} steps: after them the rate stays at its last")
        sys.stdout.flush()
        started, before = time.perf_counter(), trainer.step
        bar.update(before)  # steps of earlier processes
        with _interruptible(trainer.stop) as stopped_by, _memory_errors():
            trainer.fit(task.loader, config.steps)
        monitor.close()
        trace = None if profiler is None else profiler.close()
        seconds = time.perf_counter() - started
    except BaseException:
        if monitor is not None:
            monitor.close()
        folder.discard()
        raise
    finally:
        bar.close()
        folder.close()
    finished = trainer.step >= config.steps
    result = RunResult(
        run_dir=folder.path,
        steps_done=trainer.step,
        stopped_by=stopped_by[0] if stopped_by and not finished else None,
        diverged=progress.diverged_at is not None,
        train_loss=progress.train_loss,
        val_loss=progress.validation.get("val_loss"),
        val_metric=progress.validation.get("val_metric"),
        seconds=seconds,
    )
    print(_summary(config, task, progress, result, trainer.step - before, trace), flush=True)
    return result


def _monitor(
    trainer: Trainer, progress: Progress, folder: RunFolder, profiler: StepProfiler | None, steps: int
) -> Monitor:
    """Gives the trainer its monitor, with the log cut back to the trainer's step where the run goes on."""
    lines = JsonLines(folder)
    if folder.resumed:
        folder.cut_metrics(trainer.step)
        lines.cut(trainer.step)
        progress.take_up(folder.read_metrics())
    watchers: list[Any] = [kind(action="log") for kind in (LossSpike, NonFinite, NormOutlier, Plateau, ScaleCollapse)]
    if isinstance(trainer.optimizer, FusedOptimizer):  # others don't tell what is looked at
        watchers.append(DeadGradient(action="log"))
    if profiler is not None:
        watchers.append(_Profiled(profiler))
    if trainer.step == 0:
        watchers.append(_Closed(layer_norms(trainer.optimizer, model=trainer.model, write=progress.print)))
    monitor = Monitor(
        trainer.optimizer,
        [progress, lines],
        watchers,
        # Twenty columns of the report's heat map, or more.
        detail_every=min(500, max(1, steps // 20)),
        model=trainer.model,
        scaler=trainer.precision.scaler,
    )
    monitor.skipped_steps = progress.skipped
    progress.on_divergence = lambda: trainer.stop(save=False)
    trainer.monitor = monitor
    return monitor


class _Closed(Watcher):
    """Ends what looks at the first layers' norms together with the monitor."""

    def __init__(self, norms: LayerNorms) -> None:
        super().__init__(action="log")
        self.norms = norms

    def close(self) -> None:
        self.norms.close()


class _Profiled(Watcher):
    """Tells the profiler of each step."""

    def __init__(self, profiler: StepProfiler) -> None:
        super().__init__(action="log")
        self.profiler = profiler

    def on_step(self, monitor: Any, loss: Any, batch_info: Mapping[str, Any]) -> None:
        self.profiler.step()


def _optimizer(config: TrainConfig, task: Task) -> tuple[Optimizer, LRScheduler]:
    preset = config.preset
    ours = {"skip_nonfinite": True, "stats": True} if config.optimizer == "mo_fused" else {}
    try:
        optimizer = preset.build_optimizer(task.model, config.optimizer, **ours)
    except (ValueError, RuntimeError) as error:  # for instance a MO_FUSED_BACKEND that cannot be had
        raise InputError(f"--optimizer {config.optimizer}: {error}") from error
    try:
        return optimizer, preset.build_schedule(optimizer, config.schedule_steps)
    except ValueError as error:
        raise InputError(f"schedule {config.schedule}: {error}") from error


def _trainer(
    config: TrainConfig, task: Task, optimizer: Optimizer, schedule: LRScheduler, folder: RunFolder
) -> Trainer:
    return Trainer(
        task.model,
        optimizer,
        task.loss_fn,
        schedule=schedule,
        precision=config.precision,
        accumulate=config.accumulate,
        checkpoints=Checkpoints(
            folder.checkpoints,
            every=config.checkpoint_every,
            keep=config.keep_checkpoints,
            best="val_metric",
            higher_is_better=task.higher_is_better,
        ),
        validate=task.validate,
        validate_every=config.validate_every,
        max_grad_norm=config.preset.max_grad_norm if config.optimizer == "torch" else None,
        config=asdict(config),
    )


def _schedule_end(schedule: LRScheduler) -> float:
    """Steps that the schedule has been made for; infinity for one without an end."""
    return min(getattr(shape, "total_steps", math.inf) for shape in getattr(schedule, "lr_lambdas", [None]))


def _per_step(config: TrainConfig, task: Task) -> str:
    batches = f"{config.accumulate} batches of " if config.accumulate > 1 else ""
    return batches + (
        f"{task.samples_per_batch} samples" if task.tokens_per_batch is None else f"{task.tokens_per_batch} tokens"
    )


def _summary(
    config: TrainConfig, task: Task, progress: Progress, result: RunResult, steps: int, trace: Path | None
) -> str:
    """The last lines; ``steps`` were done by this process."""
    unit, each = "samples", task.samples_per_batch
    if task.tokens_per_batch is not None:
        unit, each = "tokens", task.tokens_per_batch
    rate = steps * each * config.accumulate / max(result.seconds, 1e-9)
    validation = "not measured"
    if result.val_loss is not None:
        validation = f"{result.val_loss:.4f}, {task.metric} {result.val_metric or 0.0:.4f}"
        best = task.data.get("best_auc")
        validation += f" (best possible {best:.4f})" if isinstance(best, float) else ""
    recent = f"mean of the last {len(progress.losses)} steps"
    lines = []
    if progress.skipped:
        lines.append(f"{progress.skipped} steps with a gradient that was not finite were skipped")
    lines.append(f"{result.seconds:.1f} s, {rate:,.0f} {unit}/s; run folder {result.run_dir}")
    if trace is not None:
        lines.append(f"profile {trace} (opens in Perfetto and TensorBoard)")
    lines.append(f"to see it: mo-fused report {result.run_dir}; what is wrong: mo-fused diagnose {result.run_dir}")
    if result.steps_done:
        lines.append(f"training loss {result.train_loss:.4f} ({recent}), validation loss {validation}")
    if result.stopped_by is not None:
        by = "Ctrl-C" if result.stopped_by == signal.SIGINT else signal.Signals(result.stopped_by).name
        lines.append(f"go on with: mo-fused train --resume {result.run_dir}")
        lines.append(f"stopped by {by} at step {result.steps_done} of {config.steps}")
    elif progress.diverged_at is not None:
        lines.append(
            f"ended early: expected a finite loss; found none at step {progress.diverged_at} of {config.steps}. "
            f"Try a lower --lr than {config.lr:g}."
        )
    else:
        lines.append(f"finished: {result.steps_done} steps")
    return "\n".join(lines)


@contextmanager
def _interruptible(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Calls ``stop`` at the first SIGINT (Ctrl-C) or SIGTERM, and lists it; a second one does what it always does.

    Signals can be caught in the main thread only; in any other one the list stays empty.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, _frame: object) -> None:
        asked.append(number)
        stop()
        restore()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield asked
    finally:
        restore()


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turns "out of memory", which the CPU reports as any RuntimeError, into advice."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise bad_input(
            "--batch-size",
            expected="a batch that fits into memory",
            found=str(error).splitlines()[0],
            remedy="give a smaller --batch-size",
        ) from error


def _train_packages() -> Callable[..., Any]:
    """tqdm's bar, once it is sure that everything a run needs can be imported."""
    missing: list[str] = []
    try:
        import yaml  # noqa: F401
    except ImportError:
        missing.append("PyYAML")
    try:
        from tqdm import tqdm
    except ImportError:
        missing.append("tqdm")
    if missing:
        raise bad_input(
            "mo-fused train",
            expected="the packages tqdm and PyYAML",
            found=f"no {' and no '.join(missing)}",
            remedy='run: pip install "mo_fused[train]"',
        )
    bar: Callable[..., Any] = tqdm
    return bar


def _facts(task: Task) -> dict[str, Any]:
    """What a reader of the run needs besides the settings."""
    return {
        "data": task.data,
        "environment": {
            "mo_fused": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpu_count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        },
    }
