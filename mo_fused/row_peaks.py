"""The largest statistics of every parameter over some steps, gathered where they are and read later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .host_copy import HostCopy
from .stats import Pieces, StepStats


class Peak(NamedTuple):
    """A parameter over some steps. Zero means exactly zero in all of them; NaN, that one was NaN."""

    steps: int
    """Steps in which it had a gradient."""
    grad: float
    """Above 0 if some element of its gradient was not zero."""
    update: float
    """Above 0 if the rule asked for a change."""
    stored: float
    """Above 0 if rounding to the parameter's dtype left one."""


class RowPeaks:
    """One small operation a step on each device, and no wait: ``torch.maximum`` over the step's own statistics."""

    def __init__(self) -> None:
        self._rows: object = None
        self._held: list[Tensor] = []
        self._counts: list[np.ndarray[Any, Any]] = []
        self._last: StepStats | None = None
        self._where: list[Pieces] = []
        self._masks: dict[tuple[int, bytes], Tensor] = {}

    def add(self, stats: StepStats) -> bool:
        """Adds a step; False where it cannot be, because the rows are not those of the steps before.

        What was gathered before is gone then, and the next steps count anew.
        """
        pieces = [buffer.pieces() for buffer in stats._fresh()] if stats._rows is not None else []
        begun = bool(self._held)
        known = begun and stats._rows is self._rows
        if not known:
            self._rows, self._masks = stats._rows, {}
            self._held = [torch.zeros_like(one.values) for one in pieces]
            self._counts = [np.zeros(len(one.active), dtype=np.int64) for one in pieces]
        for i, one in enumerate(pieces):
            values = one.values
            if not one.active.all():
                values = torch.where(self._mask(i, one), values, 0.0)
            torch.maximum(self._held[i], values, out=self._held[i])
            self._counts[i] += one.active
        self._last, self._where = stats, pieces
        return known or not begun

    def _mask(self, buffer: int, one: Pieces) -> Tensor:
        key = (buffer, one.active.tobytes())
        if key not in self._masks:
            if len(self._masks) > 64:
                self._masks.clear()
            mask = torch.from_numpy(one.active[one.row])
            self._masks[key] = mask.to(one.values.device, non_blocking=True)
        return self._masks[key]

    def take(self) -> TakenPeaks:
        """What was gathered, on its way to the host; the next step begins anew."""
        assert self._last is not None
        taken = TakenPeaks(self._held, self._counts, self._where, self._last._names())
        self._held = []
        return taken


class TakenPeaks:
    """Peaks on their way to the host."""

    def __init__(
        self,
        held: Sequence[Tensor],
        counts: Sequence[np.ndarray[Any, Any]],
        where: Sequence[Pieces],
        names: Sequence[Any],
    ) -> None:
        self._names = names
        self._counts = np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)
        self._places = [(one.at, one.row, len(one.active)) for one in where]
        self._copies = [HostCopy(values) for values in held]

    def read(self) -> dict[Any, Peak]:
        """By name or position as ``per_param()``. Parameters whose whole this process doesn't know are left out."""
        parts = []
        for copy, (at, row, rows) in zip(self._copies, self._places, strict=True):
            values = copy.read()
            peaks = np.zeros((rows, 3))
            for column, line in enumerate(at):
                with np.errstate(invalid="ignore"):  # NaN stays NaN
                    np.maximum.at(peaks[:, column], row, values[line].numpy())
            parts.append(peaks)
        found = np.concatenate(parts).tolist() if parts else []
        counts = self._counts.tolist()
        return {key: Peak(counts[row], *found[row]) for key, row, whole in self._names if whole}
