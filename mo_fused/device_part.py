"""The rows of one device: their table, their statistics, and the phases of a step in order. Nothing here waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import dispatch, stats
from .backends import cuda, triton
from .device_table import DeviceTable, Signature
from .distributed.exchange import ROW_SUMS, shifted
from .distributed.factored import CutMatrices
from .factored import Tiling
from .host_copy import HostCopy
from .request import Request
from .stats import RESULT_AT, RESULT_WIDTH, RING, ROW, ROW_WIDTH
from .table import ACTIVE, STAT_COLUMNS
from .tracing import phase

if TYPE_CHECKING:
    from .distributed.ranks import Share

_PARTIAL = 5
_UPDATE_NORMS = ROW_SUMS[3:]
_BACKENDS = {"triton": triton, "cuda": cuda}


class DeviceStats:
    """One slot of a device's ring of statistics: a Result and the columns of every chunk."""

    def __init__(self, table: DeviceTable, slot: int) -> None:
        self._table = table
        self.tensor = table.stats[slot]
        self.address: int = self.tensor.data_ptr()
        self.generation = 0
        self.measured = self.updated = False
        self._active = np.zeros(0, dtype=bool)
        self._told: tuple[Tensor, Tensor, Tensor] | None = None

    def claim(self, measured: bool, updated: bool) -> None:
        """Takes the slot for a new step; statistics of the step that had it become stale."""
        self.generation += 1
        self.measured, self.updated = measured, updated
        self._told = None
        self._active = (self._table.rows["flags"] & ACTIVE).astype(bool)

    def field(self, name: str) -> Tensor:
        """A 0-dim float64 on the device; a copy, because the slot is written again four steps later."""
        if self._told is not None and name in _UPDATE_NORMS:
            return self._told[2][_UPDATE_NORMS.index(name)]
        return self.tensor[RESULT_AT[name]].clone()

    def per_row(self) -> np.ndarray[Any, Any]:
        """The RowStats of every row, summed from its chunks on the host (this waits for the device)."""
        return self.per_row_later()()

    def per_row_later(self) -> Callable[[], np.ndarray[Any, Any]]:
        """What :meth:`per_row` gives now, whenever the result is called, which waits for a copy queued here alone."""
        copies = [HostCopy(part) for part in (self.tensor, *(self._told or ())[:2])]
        active, at, measured, updated = self._active, self._table.row_of_chunk, self.measured, self.updated
        return lambda: self._summed([one.read().numpy() for one in copies], active, at, measured, updated)

    @staticmethod
    def _summed(
        parts: Sequence[np.ndarray[Any, Any]],
        active: np.ndarray[Any, Any],
        at: np.ndarray[Any, Any],
        measured: bool,
        updated: bool,
    ) -> np.ndarray[Any, Any]:
        """``parts``: a slot, and what :meth:`tell` told, if it did."""
        values, *told = parts
        scale = values[RESULT_AT["grad_scale"]]
        columns = dict(zip(STAT_COLUMNS, values[RESULT_WIDTH:].reshape(len(STAT_COLUMNS), -1), strict=True))
        rows = np.zeros((len(active), ROW_WIDTH))
        out = dict(zip(ROW, rows.T, strict=True))
        out["active"][:] = active
        if measured:
            top = np.full(len(rows), -(1 << 20))
            np.maximum.at(top, at, np.where(columns["sumsq"] != 0, columns["exponent"], -(1 << 20)).astype(np.int64))
            top = np.where(top == -(1 << 20), 0, top)
            with np.errstate(all="ignore"):
                shift = np.clip(columns["exponent"].astype(np.int64) - top[at], -4000, 0)
                sums = np.bincount(at, np.ldexp(columns["sumsq"], shift), minlength=len(rows))
                out["grad_norm"][:] = np.ldexp(np.sqrt(sums), top // 2) / scale
                np.maximum.at(out["grad_amax"], at, columns["amax"])  # NaN stays
                out["grad_amax"] /= scale
            out["nonfinite"][:] = np.bincount(at, columns["nonfinite"], minlength=len(rows))
            out["zeros"][:] = np.bincount(at, columns["zeros"], minlength=len(rows))
        if updated:
            for name, column in (("update_norm", "update"), ("stored_update_norm", "stored"), ("param_norm", "param")):
                out[name][:] = np.sqrt(np.bincount(at, columns[column], minlength=len(rows)))
        if told:
            sums, largest = told
            for k, name in enumerate(ROW_SUMS):
                out[name][:] = sums[:, k]
            out["grad_amax"][:] = largest
        return rows

    def pieces(self) -> stats.Pieces:
        """The chunks of every row; whole rows where ranks have told each other about theirs."""
        if self._told is not None:
            sums, largest, _ = self._told
            update, stored = (sums[:, ROW_SUMS.index(name)] for name in ("update_norm", "stored_update_norm"))
            values = torch.stack([largest, update, stored])
            return stats.Pieces(values, (0, 1, 2), np.arange(len(self._active)), self._active)
        at = (STAT_COLUMNS.index("amax"), STAT_COLUMNS.index("update"), STAT_COLUMNS.index("stored"))
        values = self.tensor[RESULT_WIDTH:].view(len(STAT_COLUMNS), -1)
        return stats.Pieces(values, at, self._table.row_of_chunk, self._active)

    def row_sums(self) -> tuple[Tensor, Tensor]:
        """What its rows add up to: ROW_SUMS of ``distributed.exchange`` ``(n, 6)``, largest magnitudes ``(n,)``.

        On the device; nothing waits.
        """
        values = self.tensor
        n, scale = len(self._active), values[RESULT_AT["grad_scale"]]
        columns = dict(zip(STAT_COLUMNS, values[RESULT_WIDTH:].reshape(len(STAT_COLUMNS), -1), strict=True))
        at = torch.from_numpy(self._table.row_of_chunk.astype(np.int64)).to(values.device, non_blocking=True)
        active = torch.from_numpy(self._active.copy()).to(values.device, non_blocking=True)
        nothing = torch.zeros_like(columns["sumsq"])

        def of_rows(x: Tensor) -> Tensor:
            return torch.zeros(n, dtype=torch.float64, device=values.device).index_add_(0, at, x)

        largest = torch.zeros(n, dtype=torch.float64, device=values.device)
        found = [nothing.new_zeros(n)] * 3
        if self.measured:
            amax = columns["amax"] / scale
            largest.scatter_reduce_(0, at, amax.nan_to_num(nan=0.0, posinf=math.inf), "amax")
            power = torch.frexp(torch.where(largest.isfinite(), largest, 0.0))[1].double()
            norms = columns["sumsq"].sqrt() / scale  # times 2 to half of the exponent
            norm = of_rows(shifted(norms, columns["exponent"] / 2 - power[at]).square()).sqrt()
            found = [shifted(norm, power), of_rows(columns["nonfinite"]), of_rows(columns["zeros"])]
            largest = torch.where(of_rows(amax.isnan().double()) > 0, math.nan, largest)
        names = ("update", "stored", "param")
        of_update = [of_rows(columns[c]).sqrt() if self.updated else nothing.new_zeros(n) for c in names]
        rows = torch.stack([*found, *of_update], dim=1)
        return torch.where(active.reshape(-1, 1), rows, 0.0), torch.where(active, largest, 0.0)

    def tell(self, sums: Tensor, largest: Tensor, norms: Tensor) -> None:
        """Values over whole parameters: of each row as :meth:`row_sums`, and the three norms of the update."""
        self._told = sums, largest, norms


def _as_flag(value: Tensor | float | None) -> Tensor | float | None:
    """found_inf as 0 or 1: a small float64 would become 0 in float32."""
    if isinstance(value, Tensor):
        return value if value.dtype == torch.float32 else value != 0
    return None if value is None else float(value != 0)


class DevicePart:
    """What a step does with the rows of one device."""

    def __init__(
        self,
        rows: np.ndarray[Any, Any],
        signatures: Sequence[Signature],
        layouts: dict[int, list[int]],
        groups: int,
        device: torch.device,
        backend: str,
        tiling: Tiling | None = None,
    ) -> None:
        self.device = device
        self._backend: Any = _BACKENDS[backend]
        multiprocessors = dispatch.multiprocessors(device)
        # Made in an evaluation loop or not, the tensors have to be writable later.
        with torch.inference_mode(False):
            self.table = DeviceTable(
                rows, signatures, layouts, groups, device, multiprocessors, self._backend.SPLIT, tiling
            )
            self._partial = torch.zeros(_PARTIAL, dtype=torch.float64, device=device)
        self.share: Share | None = None
        """Whom the parameters of this part are shared with: all of them with the same ranks."""
        self._ring = [DeviceStats(self.table, slot) for slot in range(RING)]
        self._turn = 0
        self.cut: CutMatrices | None = None
        """Those of Adafactor's rows that are parts of larger parameters."""
        self.captured = False
        """A CUDA graph refers to this part's memory, which therefore has to stay."""

    @property
    def stats(self) -> DeviceStats:
        """The slot of the present step."""
        return self._ring[self._turn]

    def begin(self, ask: Request, first: bool) -> None:
        """Sends what has changed and takes the next slot. ``first``: gradients are measured before the update."""
        self._first = first
        self._late_report = None
        if ask.report is not None and not self._here(ask.report):
            self._late_report = ask.report
        self._ask = replace(
            ask,
            skip_nonfinite=ask.skips_nonfinite,
            grad_scale=self._brought(ask.grad_scale),
            found_inf=self._brought(_as_flag(ask.found_inf)),
            report=ask.report if self._late_report is None else None,
        )
        self.table.settings[0, 0] = math.nan if ask.max_grad_norm is None else ask.max_grad_norm
        with phase("send"), dispatch.on_device(self.device):
            self._capturing = dispatch.is_capturing(self.device)
            self.captured |= self._capturing
            self.table.send(self._capturing)
        self._turn = (self._turn + 1) % RING
        self.stats.claim(first or ask.measured, ask.stats)

    def _here(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and tensor.dtype == torch.float32

    def _brought(self, value: Tensor | float | None) -> Tensor | None:
        if value is None:
            return None
        if not isinstance(value, Tensor):  # torch's GradScaler sets found_inf = 0 where there is no gradient
            return torch.full((), float(value), dtype=torch.float32, device=self.device)
        if self._here(value):
            return value
        return value.to(self.device, torch.float32, non_blocking=True)

    def measure(self, count_zeros: bool = False) -> None:
        """Pass 1: statistics of every gradient. ``count_zeros``: of its zero elements too."""
        with phase("norm"), dispatch.on_device(self.device):
            self._backend.measure(self.table, self.stats.address, count_zeros)

    def partial(self) -> Tensor:
        """What these gradients add to the totals: sum of squares, its exponent, largest magnitude, counts.

        Shape ``(5,)``, float64.
        """
        with dispatch.on_device(self.device):
            self._backend.partial(self.table, self.stats.address, self._partial)
        return self._partial

    def finish(
        self,
        extras: Sequence[Tensor] | Tensor = (),
        norm: Tensor | None = None,
        found_inf: Tensor | None = None,
        elsewhere: bool = False,
    ) -> None:
        """The decision and the scalars. ``extras``: the partials of gradients that are elsewhere.

        ``norm``: the total norm where it is known already (0-dim float64 on this device). ``found_inf``: what somebody
        has found, in the place of what :meth:`begin` was asked. ``elsewhere``: the extras contain this device's
        gradients already, which are not added once more.
        """
        if found_inf is not None:
            self._ask = replace(self._ask, found_inf=self._brought(_as_flag(found_inf)))
        there = None
        if isinstance(extras, Tensor):
            there = extras.to(self.device, non_blocking=True)
        elif extras:
            there = torch.stack([e.to(self.device, non_blocking=True) for e in extras])
        with phase("finish"), dispatch.on_device(self.device):
            self._backend.finish(self.table, self.stats.address, self._ask, self._first, there, norm, elsewhere)
        if self._late_report is not None:
            self._late_report.copy_(self.stats.tensor[RESULT_AT["found_inf"]])

    def scale_gradients(self) -> None:
        """Multiplies each gradient by its row's factor, in place."""
        with phase("scale"), dispatch.on_device(self.device):
            self._backend.scale_gradients(self.table, self.stats.address)

    def update(self) -> None:
        """Pass 2, and what follows from its sums."""
        ask, table, at = self._ask, self.table, self.stats.address
        sums = 0 if not ask.stats else 1 if self._first else 2
        with phase("update"), dispatch.on_device(self.device):
            if table.tiling is not None:
                if self.cut is not None:
                    self.cut.exchange_sums()
                self._backend.factors(table, at)
                if self.cut is not None:
                    self.cut.exchange_updates()
            self._backend.update(table, at, ask, sums)
            if ask.clip_in_place:
                self._backend.scale_gradients(table, at)
            if sums:
                # The step before a replay is the replay before.
                before = self.stats if self._capturing else self._ring[self._turn - 1]
                self._backend.update_norms(table, at, before.address if before.updated else 0, sums == 2)

    def measures_first(self, ask: Request) -> bool:
        """Whether gradients are read before the update: something is decided by them, or float64 needs care."""
        table = self.table
        costly = table.wide_gradients or table.tiling is not None or table.masters or table.quantised
        return ask.gated or (ask.stats and costly)

    @property
    def measures_always(self) -> bool:
        """The first pass is part of the rule."""
        return self.table.tiling is not None
