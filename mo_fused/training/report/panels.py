"""Which numbers are drawn, in which chart, and what is marked on them; the page and the picture draw the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mo_fused.training.report.lines import counted
from mo_fused.training.report.reading import Run, printable
from mo_fused.training.report.series import Mark, marks

MAX_GROUPS = 12
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Of the runs; told apart by colour-blind readers too (Okabe and Ito, 2008, without the yellow)."""


@dataclass(frozen=True)
class Panel:
    """A chart of the numbers ``keys``, times ``factor``; of ``marked`` ones, marks are set on the first."""

    title: str
    keys: tuple[str, ...]
    log: bool = False
    factor: float = 1.0
    marked: bool = False
    from_zero: bool = True


PANELS = (
    Panel("Loss", ("loss", "val_loss"), marked=True, from_zero=False),
    Panel("Validation metric", ("val_metric",), from_zero=False),
    Panel("Learning rate", ("lr",)),
    Panel("Gradient norm before clipping", ("grad_norm",), log=True, marked=True),
    Panel("Clip coefficient", ("clip_coef",)),
    Panel("Norms of update and parameters", ("update_norm", "param_norm"), log=True),
    Panel("Update ratio (update norm / parameter norm)", ("update_ratio",), log=True),
    Panel("Loss scale", ("loss_scale",), log=True),
    Panel("Peak memory, GiB", ("memory_device", "memory_host"), factor=2.0**-30),
    Panel("Tokens per second", ("tokens_per_second",)),
    Panel("Samples per second", ("samples_per_second",)),
    Panel("Seconds a step", ("step_seconds",)),
    Panel("Share of the time spent waiting for data", ("data_share",)),
    Panel("Mean length of a sample", ("mean_length",)),
)
KINDS = {"spike": "loss spike", "event": "other finding", "skipped": "skipped step", "nonfinite": "not finite"}
"""What is marked, and what it is called."""


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """The panels for which some run has a number."""
    found = {key for run in runs for key in run.numbers}
    return [panel for panel in PANELS if found.intersection(keys_of(panel, runs))]


def keys_of(panel: Panel, runs: Sequence[Run]) -> tuple[str, ...]:
    """The panel's keys, with the rates of the groups, the first :data:`MAX_GROUPS`, where they differ."""
    if panel.keys != ("lr",):
        return panel.keys
    groups = {key for run in runs for key in run.numbers if key.startswith("lrs.")}
    return ("lr", *sorted(groups, key=lambda key: int(key[4:]))[:MAX_GROUPS])


def marks_of(run: Run, panel: Panel) -> dict[str, list[Mark]]:
    """The marks on a panel's first curve, by the names of :data:`KINDS`."""
    key = panel.keys[0]
    if not panel.marked or key not in run.numbers:
        return {}
    spikes = [event for event in run.events if event.get("watcher") == "LossSpike"]
    others = [event for event in run.events if event.get("watcher") != "LossSpike"]
    skipped, nonfinite = run.skipped, run.nonfinite.get(key, run.steps[:0])
    places = {
        "spike": ([event["step"] for event in spikes], [_says(event) for event in spikes]),
        "event": ([event["step"] for event in others], [_says(event) for event in others]),
        "skipped": (skipped, [f"step {step} changed nothing" for step in skipped.tolist()]),
        "nonfinite": (nonfinite, [f"{key} was not finite at step {step}" for step in nonfinite.tolist()]),
    }
    values = run.numbers[key] * panel.factor
    return {
        kind: found
        for kind, (steps, texts) in places.items()
        if (found := marks(np.asarray(steps, dtype=np.int64), texts, run.steps, values))
    }


def says(mark: Mark, kind: str) -> str:
    """A mark in words."""
    if mark.count == 1:
        return mark.text
    return f"{counted(mark.count, KINDS[kind])} from {mark.step:,} to {mark.last:,}; among them: {mark.text}"


def _says(event: dict[str, object]) -> str:
    return printable(f"{event.get('watcher', 'watcher')}: {event.get('message', '')}")
