"""What ``mo-fused train`` shows while it runs, and what its summary needs."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from mo_fused.training.sinks import Sink
from mo_fused.training.sinks.console import line
from mo_fused.training.tasks import Task

EVERY = 50  # steps from one line to the next
RECENT = 20  # steps that the reported training loss is averaged over: a single batch's loss is too noisy to compare


class Progress(Sink):
    """A sink of the run's monitor: moves the bar, prints validations and findings, and asks for the end of the run when
    the loss is no longer finite.

    Args:
        bar: tqdm's, at the step that the run begins with.
        task: names its metric.

    Attributes:
        losses: of the last :data:`RECENT` steps.
        validation: the last one's values.
        diverged_at: the first step whose loss was not finite.
        skipped: steps that changed nothing.
        findings: what the watchers found, in this process.
        on_divergence: called once, without arguments.
    """

    def __init__(self, bar: Any, task: Task) -> None:
        self.bar, self.task = bar, task
        self.losses: deque[float] = deque(maxlen=RECENT)
        self.validation: dict[str, float] = {}
        self.diverged_at: int | None = None
        self.skipped = 0
        self.findings = 0
        self.on_divergence: Callable[[], object] | None = None

    @property
    def train_loss(self) -> float:
        return statistics.fmean(self.losses) if self.losses else math.nan

    def take_up(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count what an earlier process of this run has logged."""
        for row in rows:
            if row.get("loss") is not None:
                self.losses.append(row["loss"])
            self._note_validation(row)
            self.skipped += bool(row.get("skipped"))

    def write(self, record: dict[str, Any]) -> None:
        """A step's numbers."""
        loss, norm, rate = (float(record.get(key) or 0.0) for key in ("loss", "grad_norm", "lr"))
        self.losses.append(loss)
        self.bar.set_postfix_str(f"loss {loss:.3f}, lr {rate:.2e}, grad_norm {norm:.2f}", refresh=False)
        self.bar.update(1)
        self.skipped += bool(record.get("skipped"))
        if self._note_validation(record):
            reached = f"training loss {self.train_loss:.3f}, validation loss {self.validation['val_loss']:.3f}"
            metric = f", {self.task.metric} {self.validation['val_metric']:.4f}"
            self.print(f"step {record['step']}: {reached}{metric}")
        elif record["step"] % EVERY == 0:
            self.print(f"step {record['step']}: {line(record)}")
        if not math.isfinite(loss) and self.diverged_at is None:
            self.diverged_at = int(record["step"])
            if self.on_divergence is not None:
                self.on_divergence()

    def event(self, event: dict[str, Any]) -> None:
        """A watcher's finding."""
        self.findings += 1
        self.print(f"step {event['step']}: {event['watcher']}: {event['message']}")

    def _note_validation(self, row: Mapping[str, Any]) -> bool:
        if row.get("val_loss") is None:
            return False
        self.validation = {key: float(row[key]) for key in ("val_loss", "val_metric") if row.get(key) is not None}
        return True

    def print(self, line: str) -> None:
        """A line above the bar; nowhere, once the reader of the output has gone (``| head``): the run goes on."""
        with suppress(BrokenPipeError):
            self.bar.write(line)
            sys.stdout.flush()
