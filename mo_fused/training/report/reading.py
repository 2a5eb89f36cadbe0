"""Reads the folder of a run: whole, cut off by a crash, empty, or written by an older version."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mo_fused.training.config_file import read_yaml
from mo_fused.training.errors import InputError, bad_input
from mo_fused.training.report.layers import Layers, read_layers
from mo_fused.training.report.lines import Lines, counted, last_of_each, number, step_of

NUMBERS = (
    "loss",
    "val_loss",
    "val_metric",
    "lr",
    "grad_norm",
    "clip_coef",
    "update_norm",
    "param_norm",
    "update_ratio",
    "loss_scale",
    "skipped",
    "memory_device",
    "memory_host",
    "samples_per_second",
    "tokens_per_second",
    "step_seconds",
    "data_share",
    "mean_length",
)
"""The keys of ``metrics.jsonl`` that are read, beside ``step`` and ``lrs``."""
_KNOWN = {*NUMBERS, "step", "lrs", "epoch", "skipped_steps", "time"}
_RUN_FILES = ("metrics.jsonl", "config.yaml", "details.jsonl", "events.jsonl", "changes.jsonl")


@dataclass
class Run:
    """What a run's folder holds.

    Attributes:
        name: the folder's.
        steps: ``(n,)``, rising strictly.
        numbers: ``(n,)`` for each key that has a finite value somewhere, nan where there is none; ``lrs.0`` ... are the
            rates of the groups where they differ.
        nonfinite: for each key, the steps at which its value was not finite.
        layers: the norms of the parameters.
        events: what the watchers found, each with a ``step``.
        config: ``config.yaml``; ``None`` if it is missing or cannot be read.
        changes: the records of ``changes.jsonl``.
        notes: what was not read, a sentence each.
    """

    name: str
    path: Path
    steps: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    numbers: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    nonfinite: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    layers: Layers = field(default_factory=Layers)
    events: list[dict[str, Any]] = field(default_factory=list)
    config: dict[Any, Any] | None = None
    changes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> npt.NDArray[np.int64]:
        """The steps that changed nothing."""
        return self.steps[self.numbers["skipped"] == 1.0] if "skipped" in self.numbers else self.steps[:0]


def read_run(path: str | Path) -> Run:
    """What the run's folder ``path`` holds, as far as it can be read; :attr:`Run.notes` says what could not.

    Raises:
        InputError: ``path`` is no folder of a run.
    """
    path = Path(path)
    if not any((path / name).is_file() for name in _RUN_FILES):
        found = "a folder without metrics.jsonl" if path.is_dir() else "a file" if path.exists() else "no such folder"
        raise bad_input(
            f"{path}",
            expected="the folder of a run",
            found=found,
            remedy="name the folder that `mo-fused train` has printed, such as runs/lm-20260101-120000",
        )
    run = Run(printable(path.resolve().name), path)
    _read_metrics(run)
    run.layers, notes = read_layers(path / "details.jsonl")
    run.notes += notes
    run.events = _read_events(run)
    changes = Lines(path / "changes.jsonl")
    run.changes = list(changes)
    run.notes += changes.notes
    if (path / "config.yaml").exists():
        try:
            run.config = read_yaml(path / "config.yaml")
        except InputError as error:
            run.notes.append(f"config.yaml: not read ({error})")
    else:
        run.notes.append("config.yaml: no such file in this run")
    return run


def printable(text: object) -> str:
    """Any text from a file, or a file's name, as one that can be written in UTF-8."""
    return str(text).encode("utf-8", "replace").decode()


class _Columns:
    """Grows a column of floats for each key that turns up, nan where a record has none."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self.nonfinite: dict[str, array[int]] = {}
        self.unreadable: dict[str, int] = {}

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        for key in NUMBERS:
            if (value := row.get(key)) is not None:
                self._put(key, value, step)
            elif row.get(f"{key}_nonfinite") is True:
                self.nonfinite.setdefault(key, array("q")).append(step)
        rates = row.get("lrs")
        if isinstance(rates, list):
            for group, rate in enumerate(rates):
                self._put(f"lrs.{group}", rate, step)
        self.steps.append(step)

    def _put(self, key: str, value: object, step: int) -> None:
        found = number(value)
        if found is None:
            self.unreadable[key] = self.unreadable.get(key, 0) + 1
        elif math.isfinite(found):
            column = self.columns.setdefault(key, array("d"))
            column.extend([math.nan] * (len(self.steps) - len(column)))
            column.append(found)
        elif value is not None:
            self.nonfinite.setdefault(key, array("q")).append(step)

    def whole(self, key: str) -> npt.NDArray[np.float64]:
        values = np.full(len(self.steps), math.nan)
        values[: len(self.columns[key])] = self.columns[key]
        return values


def _read_metrics(run: Run) -> None:
    lines = Lines(run.path / "metrics.jsonl")
    columns = _Columns()
    without_step = 0
    seen: set[str] = set()
    for row in lines:
        step = step_of(row)
        if step is None:
            without_step += 1
            continue
        columns.add(step, row)
        seen |= row.keys()
    run.notes += lines.notes
    steps = np.array(columns.steps, dtype=np.int64)
    kept = last_of_each(steps)
    run.steps = steps[kept]
    run.numbers = {
        key: column[kept] for key in columns.columns if not np.isnan((column := columns.whole(key))[kept]).all()
    }
    run.nonfinite = {key: np.unique(np.array(at, dtype=np.int64)) for key, at in columns.nonfinite.items()}
    if without_step:
        run.notes.append(f"metrics.jsonl: {counted(without_step, 'record')} without a step not read")
    if not kept.all():
        gone = steps[~kept]
        run.notes.append(
            f"metrics.jsonl: {counted(len(gone), 'record')} of steps {gone.min()} to {gone.max()} not shown, since "
            "later lines go back and do these steps again"
        )
    for key, count in columns.unreadable.items():
        run.notes.append(f"metrics.jsonl: {key} is no number in {counted(count, 'record')}")
    if unknown := sorted(key for key in seen - _KNOWN if not key.endswith("_nonfinite")):
        run.notes.append(f"metrics.jsonl: unknown to this version and not shown: {', '.join(map(printable, unknown))}")
    if not len(run.steps):
        run.notes.append("metrics.jsonl: no step was recorded")
    elif missing := [key for key in NUMBERS if key not in seen]:
        run.notes.append(f"metrics.jsonl: nothing of {', '.join(missing)} (not recorded in this run)")


def _read_events(run: Run) -> list[dict[str, Any]]:
    lines = Lines(run.path / "events.jsonl")
    # A run gone on with finds again what it found before in the same steps.
    events: dict[str, dict[str, Any]] = {}
    without_step = 0
    for row in lines:
        if step_of(row) is None:
            without_step += 1
        else:
            events[json.dumps(row, sort_keys=True)] = row
    run.notes += lines.notes
    if without_step:
        run.notes.append(f"events.jsonl: {counted(without_step, 'event')} without a step not read")
    return list(events.values())
