"""The offloaded rows of a table, and one step of them: a job, whose parts go through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import dispatch, reference
from ..backends import eager
from ..device_gradients import measuring
from ..device_part import DevicePart
from ..request import Request
from ..stats import ROW, StatsBuffer
from ..table import ACTIVE, GRAD, MEASURED, PARAM, PREPARED, SUMS, UPDATE, Table, column_of
from ..team import team_size
from . import pieces
from .files import OnDisk
from .pieces import OffloadedRow, Operand, Piece, Segment
from .ring import Slot
from .streams import Copy, Lanes, Mark

if TYPE_CHECKING:
    from ..optim.planning import Row
    from .engine import Offload


class OffloadedRows:
    """Made with the table whose rows these are."""

    def __init__(
        self, offload: Offload, rows: Sequence[Row], table: Table, place: Callable[[str], int], groups: int
    ) -> None:
        self.offload = offload
        self.table = table
        self.rows = [_offloaded(offload, i, row, place) for i, row in enumerate(rows) if row.home is not None]
        self.indices = np.array([r.index for r in self.rows], dtype=np.int64)
        self.eager = any(r.row.backend == "eager" for r in self.rows)
        self.pieces = pieces.cut(self.rows, table)
        offload.largest_piece = max([offload.largest_piece, *(piece.size for piece in self.pieces)])
        self.on_devices: list[DevicePart] = []
        """Where gradients lie that are measured there."""
        self._of_device: list[tuple[DevicePart, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._find_devices(groups)

    # -- the norm of gradients that are on a device -------------------------------------------------------------------

    def _find_devices(self, groups: int) -> None:
        places: dict[tuple[torch.device, str], list[OffloadedRow]] = {}
        for r in self.rows:
            if r.row.measured_by in dispatch.ON_DEVICE:
                places.setdefault((r.row.param.device, r.row.measured_by), []).append(r)
        for (device, backend), found in places.items():
            index = np.array([r.index for r in found], dtype=np.int64)
            own = self.table.rows[index].copy()  # their groups, sizes, dtypes; no states
            own["layout"] = 0
            codes = own["dtype"][:, GRAD].tolist()
            layouts = {i: r.row.plan.layout for i, r in enumerate(found) if r.row.plan and r.row.plan.layout}
            part = DevicePart(own, [(c, c, -1, -1, -1) for c in codes], layouts, groups, device, backend)
            self.on_devices.append(part)
            self._of_device.append((part, index, own))

    @property
    def elsewhere(self) -> np.ndarray[Any, Any]:
        """Rows of the table whose gradients are measured on a device."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(index for _, index, _ in self._of_device)])

    def measure_on_devices(self) -> list[Tensor]:
        """Starts to measure the gradients on devices; what each adds to the totals (see DevicePart.partial)."""
        out = []
        for part, index, own in self._of_device:
            now = self.table.rows[index]
            own["grad"], own["flags"] = now["grad"], now["flags"] & ACTIVE
            part.begin(measuring(), first=True)
            part.measure()
            out.append(part.partial())
            part.finish()
        return out

    def note_measured(self, out: StatsBuffer, scale: float) -> None:
        """Puts what devices have measured into the host's statistics (this waits for them)."""
        for part, index, _ in self._of_device:
            values = part.stats.per_row()
            out.rows[index] = values
            out.rows[index, : ROW.index("grad_amax") + 1] /= scale

    def has_moved(self) -> bool:
        """Whether a state in a file is not there any more: somebody has put a tensor in its place."""
        return any(isinstance(r.row.state, OnDisk) and not r.row.state.holds(r.row.slots) for r in self.rows)

    # -- the step -----------------------------------------------------------------------------------------------------

    def wait_for_taken(self, grads: Sequence[Tensor | None]) -> None:
        """The host is about to read gradients that were taken from their parameters."""
        for r in self.rows:
            found = self.offload.copied(r.row.param, grads[r.index])
            if found is not None and found.taken:
                for mark in found.marks:
                    mark.wait()

    def step(
        self,
        grads: Sequence[Tensor | None],
        ask: Request,
        out: StatsBuffer,
        groups: Sequence[dict[str, Any]],
        bulk: Callable[[], None],
    ) -> None:
        """Updates the rows after the finish. ``bulk``: updates those that are not offloaded, when these are done."""
        job = Job(self, grads, ask, out, bulk)
        job.start()
        if ask.clip_in_place:
            self._scale_gradients(grads, out, groups)

    def _scale_gradients(
        self, grads: Sequence[Tensor | None], out: StatsBuffer, groups: Sequence[dict[str, Any]]
    ) -> None:
        """Writes clipped gradients back where they are, once where several parameters have one and the same."""
        offloaded = set(self.indices.tolist())
        scaled = {g.data_ptr() for i, g in enumerate(grads) if g is not None and i not in offloaded}  # by the others
        coef, divisor = out["clip_coef"], float(self.table.control["grad_scale"][0])
        for r in self.rows:
            grad = grads[r.index]
            if grad is None or grad.data_ptr() in scaled:
                continue
            scaled.add(grad.data_ptr())
            scale = (coef if groups[r.row.group].get("clip", True) else 1.0) / divisor
            if scale != 1.0:
                reference.scale_gradient(grad, scale)


def _offloaded(offload: Offload, index: int, row: Row, place: Callable[[str], int]) -> OffloadedRow:
    p, home = row.param, row.home
    assert home is not None and row.plan is not None
    can_be_cut = row.dense and not row.factored and row.backend != "eager"
    staged = offload.stages(p) or not row.dense or row.backend == "eager"
    operands = []
    if staged:
        item = row.grad_dtype.itemsize
        operands.append(Operand(PARAM, "param", p.numel() * p.element_size(), p.numel()))
        operands.append(Operand(GRAD, "grad", p.numel() * item, p.numel()))
    if isinstance(row.state, OnDisk):
        for key in row.slots:
            operands.append(Operand(place(key), key, row.state.extents[key].size, p.numel()))
    return OffloadedRow(index, row, tuple(operands), staged, can_be_cut)


class Job:
    """The update of one step. It has copies of everything that the next step will write."""

    def __init__(
        self,
        rows: OffloadedRows,
        grads: Sequence[Tensor | None],
        ask: Request,
        out: StatsBuffer,
        bulk: Callable[[], None],
    ) -> None:
        self.rows = rows
        self.offload = rows.offload
        self.grads = list(grads)
        """Where they are read: on the host where they were copied, else where they are."""
        self.copied: dict[int, Sequence[Mark]] = {}
        for r in rows.rows:
            found = self.offload.copied(r.row.param, grads[r.index])
            if found is not None:
                self.grads[r.index], self.copied[r.index] = found.value, found.marks
                if self.offload.in_background:
                    found.free_source()
        self.out = out
        self.table = rows.table
        self._bulk = bulk
        self.records = rows.table.rows.copy()
        self._flags = self.records["flags"].copy()
        self.records["flags"] = 0
        staged = [r.index for r in rows.rows if r.staged]
        self.records["layout"][staged] = 0
        self.control = rows.table.control.copy()
        self.control["clip_in_place"] = 0
        self.call = rows.table.step.copy()
        self.call["rows"], self.call["control"] = self.records.ctypes.data, self.control.ctypes.data
        self._gated = ask.gated
        self.fresh = {r.index: r.row.fresh for r in rows.rows}
        # Addresses keep nothing alive, and somebody may give a parameter other memory before its turn comes.
        self._kept = [(r.row.param.detach(), *(dict.get(r.row.state, key) for key in r.row.slots)) for r in rows.rows]
        self.threads = torch.get_num_threads()
        self._left = 0
        self.now: dict[torch.device, Sequence[Mark]] = {}

    def start(self) -> None:
        """Hands the pieces to the pipeline, those of the last parameters first: their gradients are there first."""
        work = [
            PieceOfJob(self, piece)
            for piece in reversed(self.rows.pieces)
            if any(self.grads[s.of.index] is not None for s in piece.segments)
        ]
        self._left = len(work)
        for part in work:
            for s in part.segments:
                if s.of.staged:
                    device = s.of.row.param.device
                    if device not in self.now:
                        self.now[device] = self.offload.lanes(device).now()
        if work:
            self.offload.work(work)
        else:
            self._finish()

    def run(self, piece: Piece, part: PieceOfJob) -> None:
        """One native call for the rows of a piece."""
        native = dispatch.native()
        assert native is not None
        for place, row, address in part.addresses:  # another piece of the same row may have been fetched already
            column, at = column_of(self.records, place)
            column[row if at is None else (row, at)] = address
        index = [s.of.index for s in part.segments]
        self.records["flags"][index] = self._flags[index]
        measured = self._gated and part.segments[0].of.row.measured_by not in dispatch.ON_DEVICE
        self.control["phases"] = UPDATE | PREPARED | (MEASURED if measured else 0)
        batches = len(piece.batches) - 1
        self.control["threads"] = team_size(piece.threads, batches, self.threads)
        self.call["batches"], self.call["n_batches"] = piece.batches.ctypes.data, batches
        native.cpu_step(self.call.ctypes.data)
        self.records["flags"][index] = 0

    def done(self) -> None:
        """A piece has been updated."""
        self._left -= 1
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        self._bulk()
        if self.rows.eager:
            eager.sum_up(self.table, self.out)
            return
        native = dispatch.native()
        assert native is not None
        self.records["flags"] = self._flags
        self.control["phases"], self.control["threads"] = PREPARED | SUMS, 1
        self.call["n_batches"] = 0
        native.cpu_step(self.call.ctypes.data)


class PieceOfJob:
    """One piece of one step: a :class:`mo_fused.offload.pipeline.Part`."""

    def __init__(self, job: Job, piece: Piece) -> None:
        self._job = job
        self._piece = piece
        self.segments = [s for s in piece.segments if job.grads[s.of.index] is not None]
        self.addresses: list[tuple[int, int, int]] = []
        """Of operands that are not where the table says: place, row, address."""
        self._results: dict[Lanes, list[Copy]] = {}
        self._memory: Tensor

    def fetch(self, slot: Slot) -> Sequence[Mark]:
        """Starts to bring what is staged into the slot, and finds out where everything is."""
        job, offload = self._job, self._job.offload
        self._memory = memory = slot.take(offload.largest_piece)
        base = memory.data_ptr()
        down: dict[Lanes, list[Copy]] = {}
        reads: list[tuple[Any, np.ndarray[Any, Any], int]] = []
        marks: list[Mark] = []
        for s in self.segments:
            of, p = s.of, s.of.row.param
            grad = job.grads[of.index]
            assert grad is not None
            lanes = offload.lanes(p.device) if of.staged else None
            after = job.copied.get(of.index)
            marks += after or ()
            for operand, offset in zip(of.operands, s.offsets, strict=True):
                address = base + offset - of.span(operand, s.start, s.count)[0]
                if operand.place == GRAD:
                    if after is not None and s.of.row.dense and s.of.row.backend != "eager":
                        address = grad.data_ptr()  # it is used where it is
                    elif after is not None:  # from the host to the host
                        copy = (self._view(s, offset, grad.dtype), self._elements(s, grad))
                        marks.append(offload.pipeline.reader.copy([copy], [*slot.busy, *after]))
                    else:
                        assert lanes is not None
                        down.setdefault(lanes, []).append((self._view(s, offset, grad.dtype), self._elements(s, grad)))
                elif operand.place == PARAM:
                    assert lanes is not None
                    view, own = self._view(s, offset, p.dtype), self._elements(s, p)
                    down.setdefault(lanes, []).append((view, own))
                    self._results.setdefault(lanes, []).append((own, view))
                else:
                    reads.append(self._on_disk(s, operand, offset))
                self.addresses.append((operand.place, of.index, address))
        for lanes, copies in down.items():
            marks.append(lanes.down.copy(copies, [*slot.busy, *job.now[lanes.device]]))
        if reads:
            marks.append(offload.pipeline.reader.run(lambda: _read(reads), slot.busy))
        return marks

    def _view(self, s: Segment, offset: int, dtype: torch.dtype) -> Tensor:
        """The place of parameter or gradient in the slot, in the shape in which it is copied."""
        flat = self._memory[offset : offset + s.count * dtype.itemsize].view(dtype)
        return flat if s.of.can_be_cut else flat.as_strided(s.of.row.param.shape, s.of.row.order)

    @staticmethod
    def _elements(s: Segment, value: Tensor) -> Tensor:
        """The segment's elements of a parameter or gradient, in the shape in which they are copied."""
        value = value.detach()
        return value.as_strided((s.count,), (1,), value.storage_offset() + s.start) if s.of.can_be_cut else value

    def _on_disk(self, s: Segment, operand: Operand, offset: int) -> tuple[Any, np.ndarray[Any, Any], int]:
        entry = s.of.row.state
        assert isinstance(entry, OnDisk)
        first, last = s.of.span(operand, s.start, s.count)
        extent = entry.extents[operand.key]
        return extent.file, self._memory[offset : offset + last - first].numpy(), extent.offset + first

    def update(self, slot: Slot) -> None:
        """Updates the elements of the piece, in the slot and where they are."""
        if self.segments[0].of.row.backend == "eager":
            for s in self.segments:
                self._update_eagerly(s)
        else:
            self._job.run(self._piece, self)
        self._job.done()

    def _update_eagerly(self, s: Segment) -> None:
        row = s.of.row
        offsets = {o.key: at for o, at in zip(s.of.operands, s.offsets, strict=True)}
        grad = self._job.grads[s.of.index]
        assert grad is not None
        values: dict[str, Any] = {"step": row.state["step"]} if row.has_step else {}
        for key in row.slots:
            if key in offsets:
                assert isinstance(row.state, OnDisk)
                extent = row.state.extents[key]
                flat = self._memory[offsets[key] : offsets[key] + extent.size].view(extent.dtype)
                values[key] = flat.as_strided(extent.shape, extent.strides)
            else:
                values[key] = row.state[key]
        param, fresh = self._view(s, offsets["param"], row.param.dtype), self._job.fresh[s.of.index]
        stand_in = replace(row, param=param, state=values, fresh=fresh)
        there = self._view(s, offsets["grad"], grad.dtype)
        eager.update_row(self._job.table, stand_in, s.of.index, there, self._job.out)

    def send(self, slot: Slot) -> Sequence[Mark]:
        """Starts to bring parameters to their device, and states to their file."""
        marks: list[Mark] = [lanes.up.copy(copies) for lanes, copies in self._results.items()]
        self._results = {}
        writes = [
            self._on_disk(s, operand, offset)
            for s in self.segments
            for operand, offset in zip(s.of.operands, s.offsets, strict=True)
            if operand.place not in (PARAM, GRAD)
        ]
        if writes:
            marks.append(self._job.offload.pipeline.writer.run(lambda: _write(writes)))
        return marks


def _read(reads: Sequence[tuple[Any, np.ndarray[Any, Any], int]]) -> None:
    for file, into, offset in reads:
        file.read(into, offset)


def _write(writes: Sequence[tuple[Any, np.ndarray[Any, Any], int]]) -> None:
    for file, data, offset in writes:
        file.write(data, offset)
