"""Reads ``details.jsonl``: the norms of every parameter in the steps that were recorded in detail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mo_fused.training.report.lines import Lines, counted, last_of_each, number, step_of

NORMS = ("grad_norm", "update_norm")


@dataclass
class Layers:
    """Norms by parameter and step.

    Attributes:
        names: of the ``p`` parameters, in the model's order.
        steps: ``(d,)``, rising: the steps that were recorded in detail.
        norms: ``(p, d)`` for each key of :data:`NORMS`; nan where there is none, inf where it was not finite.
    """

    names: list[str] = field(default_factory=list)
    steps: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    norms: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)


def read_layers(path: Path) -> tuple[Layers, list[str]]:
    """The norms in a ``details.jsonl``, and what of it was not read."""
    lines = Lines(path)
    index: dict[str, int] = {}
    steps: list[int] = []
    found: list[dict[int, tuple[float, ...]]] = []
    bad = 0
    for row in lines:
        step, parameters = step_of(row), row.get("parameters")
        if step is None or not isinstance(parameters, Mapping):
            bad += 1
            continue
        values = {
            index.setdefault(name, len(index)): tuple(_norm(entry, key) for key in NORMS)
            for name, entry in parameters.items()
            if isinstance(entry, Mapping)
        }
        steps.append(step)
        found.append(values)
    notes = lines.notes
    if bad:
        notes.append(f"{path.name}: {counted(bad, 'record')} without step or parameters not read")
    order = np.array(steps, dtype=np.int64)
    kept = np.flatnonzero(last_of_each(order))
    if len(kept) < len(order):
        notes.append(
            f"{path.name}: {counted(len(order) - len(kept), 'record')} replaced by later ones of the same steps"
        )
    norms = {key: np.full((len(index), len(kept)), math.nan) for key in NORMS}
    for column, at in enumerate(kept.tolist()):
        for parameter, values_of in found[at].items():
            for key, value in zip(NORMS, values_of, strict=True):
                norms[key][parameter, column] = value
    return Layers(list(index), order[kept], norms), notes


def _norm(entry: Mapping[str, Any], key: str) -> float:
    value = number(entry.get(key))
    if value is None:
        return math.nan
    # A number that is not finite is null in the file, and stands out by its flag or by the count of such elements.
    count = number(entry.get("nonfinite"))
    if entry.get(f"{key}_nonfinite") is True or (
        key == "grad_norm" and math.isnan(value) and count is not None and count > 0
    ):
        return math.inf
    return value if math.isfinite(value) or entry.get(key) is None else math.inf
