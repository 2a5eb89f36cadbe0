"""The loop behind ``mo-fused train``."""

from __future__ import annotations

import math
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mo_fused import __version__
from mo_fused.training.config import TrainConfig
from mo_fused.training.device import choose_device
from mo_fused.training.errors import InputError, bad_input
from mo_fused.training.run_folder import RunFolder
from mo_fused.training.schedules import warmup_cosine
from mo_fused.training.stepper import Measured, build_stepper
from mo_fused.training.tasks import Task, build_task

_RECENT = 20  # steps that the reported training loss is averaged over: a single batch's loss is too noisy to compare


@dataclass(frozen=True)
class RunResult:
    """How a run ended. Losses are means in nats per token; ``val_loss`` is None when none was measured."""

    run_dir: Path
    steps_done: int
    interrupted: bool
    diverged: bool
    train_loss: float
    val_loss: float | None
    seconds: float

    @property
    def status(self) -> int:
        """Exit status: 0 finished, 1 the loss was not finite, 130 stopped by Ctrl-C."""
        return 130 if self.interrupted else 1 if self.diverged else 0


@dataclass
class _Pending:
    """A step whose numbers are still on the device. They are read one step later, in one transfer."""

    step: int
    lr: float
    measured: Measured
    seconds: float = 0.0
    val_loss: float | None = None

    def read(self) -> dict[str, float | bool | None]:
        names = list(self.measured)
        values = torch.cat([self.measured[name].reshape(1) for name in names]).tolist()
        row: dict[str, float | bool | None] = dict(zip(names, values, strict=True))
        row["skipped"] = bool(row.get("skipped", False))
        return {**row, "step": self.step, "lr": self.lr, "step_seconds": self.seconds, "val_loss": self.val_loss}


@dataclass
class _Log:
    """Hands finished rows to the run folder and the progress bar, and keeps what the summary needs."""

    folder: RunFolder
    bar: Any
    tokens_per_step: int
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    pending: _Pending | None = None
    val_loss: float | None = None
    diverged_at: int | None = None
    skipped: int = 0

    def flush(self) -> bool:
        """Write the step that waits, if one does. True: the optimizer skipped it."""
        pending, self.pending = self.pending, None
        if pending is None:
            return False
        row = pending.read()
        row["tokens_per_second"] = self.tokens_per_step / pending.seconds
        self.folder.write_metrics(row)
        loss, norm = (float(row[key] or 0.0) for key in ("loss", "grad_norm"))
        self.losses.append(loss)
        self.bar.set_postfix_str(f"loss {loss:.3f}, lr {pending.lr:.2e}, grad_norm {norm:.2f}", refresh=False)
        self.bar.update(1)
        if pending.val_loss is not None:
            self.val_loss = pending.val_loss
            reached = f"training loss {self.train_loss:.3f}, validation loss {self.val_loss:.3f}"
            self.bar.write(f"step {pending.step}: {reached}")
            sys.stdout.flush()
        if not math.isfinite(loss) and self.diverged_at is None:
            self.diverged_at = pending.step
        self.skipped += bool(row["skipped"])
        return bool(row["skipped"])

    @property
    def train_loss(self) -> float:
        return statistics.fmean(self.losses) if self.losses else math.nan


def run(config: TrainConfig) -> RunResult:
    """Train as ``config`` says, write the run folder, print what happens to standard output (the bar: standard error).

    Ctrl-C ends the run after the step that it meets; a second one ends it at once. The run also ends when the loss is
    no longer finite, because no later step can mend the weights then.

    Raises:
        InputError: a setting, the text, the device or the folder cannot be used, or a package is missing. Nothing has
            been written then.
    """
    tqdm = _train_packages()
    device = choose_device(config.device)
    task = build_task(config, device)
    optimizer, step_once = _stepper(config, task)
    folder = RunFolder(config.task, config.run_dir)
    try:
        folder.write_config({**asdict(config), "device": str(device), "run_dir": str(folder.path), **_facts(task)})
        print(f"{config.task}: {task.summary}")
        print(f"{config.optimizer} AdamW on {device}, {config.steps} steps of {task.tokens_per_step} tokens")
        print(f"run folder {folder.path}", flush=True)
        # Off a terminal each refresh is a line of a log file: a few are enough.
        pace = 0.2 if sys.stderr.isatty() else 15.0
        with tqdm(total=config.steps, desc=config.task, unit="step", mininterval=pace, dynamic_ncols=True) as bar:
            log = _Log(folder, bar, task.tokens_per_step)
            started = time.perf_counter()
            with _interruptible() as stop, _memory_errors():
                steps_done = _loop(config, task, optimizer, step_once, log, stop)
            seconds = time.perf_counter() - started
    except BaseException:
        folder.discard()
        raise
    finally:
        folder.close()
    result = RunResult(
        run_dir=folder.path,
        steps_done=steps_done,
        interrupted=stop.is_set() and steps_done < config.steps,
        diverged=log.diverged_at is not None,
        train_loss=log.train_loss,
        val_loss=log.val_loss,
        seconds=seconds,
    )
    print(_summary(config, task, log, result), flush=True)
    return result


def _loop(
    config: TrainConfig,
    task: Task,
    optimizer: Optimizer,
    step_once: Callable[[], Measured],
    log: _Log,
    stop: threading.Event,
) -> int:
    """Step until the end, Ctrl-C or a loss that is not finite; returns the number of steps done."""
    schedule = warmup_cosine(optimizer, config.schedule_steps, config.warmup_steps, config.min_lr_ratio)
    done = 0
    try:
        while done < config.steps and not stop.is_set() and log.diverged_at is None:
            begin = time.perf_counter()
            lr = float(optimizer.param_groups[0]["lr"])
            loss = task.training_loss()
            loss.backward()  # type: ignore[no-untyped-call]
            measured: dict[str, Tensor] = {"loss": loss.detach(), **step_once()}
            optimizer.zero_grad()
            done += 1
            # The step before this one is read only now, with this one queued: the device is never waited for. So a
            # skipped step shows one step late, and the schedule makes up for it by staying where it is once.
            if not log.flush():
                schedule.step()
            log.pending = _Pending(done, lr, measured, time.perf_counter() - begin)
            if (done % config.validate_every == 0 or done == config.steps) and not stop.is_set():
                log.pending.val_loss = task.validation_loss()
    finally:
        log.flush()
    return done


def _stepper(config: TrainConfig, task: Task) -> tuple[Optimizer, Callable[[], Measured]]:
    try:
        return build_stepper(config, task.model)
    except (ValueError, RuntimeError) as error:  # for instance a MO_FUSED_BACKEND that cannot be had
        raise InputError(f"--optimizer {config.optimizer}: {error}") from error


def _summary(config: TrainConfig, task: Task, log: _Log, result: RunResult) -> str:
    rate = result.steps_done * task.tokens_per_step / max(result.seconds, 1e-9)
    validation = "not measured" if result.val_loss is None else f"{result.val_loss:.4f}"
    recent = f"mean of the last {len(log.losses)} steps"
    lines = [f"{result.seconds:.1f} s, {rate:,.0f} tokens/s; run folder {result.run_dir}"]
    if result.steps_done:
        lines.insert(0, f"training loss {result.train_loss:.4f} ({recent}), validation loss {validation}")
    if log.skipped:
        lines.insert(0, f"{log.skipped} steps with a gradient that was not finite were skipped")
    if result.interrupted:
        lines.append(f"stopped by Ctrl-C at step {result.steps_done} of {config.steps}")
    elif log.diverged_at is not None:
        lines.append(
            f"ended early: expected a finite loss; found none at step {log.diverged_at} of {config.steps}. "
            f"Try a lower --lr than {config.lr:g}."
        )
    else:
        lines.append(f"finished: {result.steps_done} steps")
    return "\n".join(lines)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one raises KeyboardInterrupt as usual.

    Signals can be caught in the main thread only; in any other one the event is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_interrupt(_signal: int, _frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turns "out of memory", which the CPU reports as any RuntimeError, into advice."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
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
