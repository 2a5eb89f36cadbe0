"""The table of a step on a device: rows and settings as the host knows them, what was sent, and who works on what.

The host's arrays are compared with what the device holds, and only rows that differ are sent again. Work is cut into
chunks, chunks are dealt out to programs, and programs of one dtype signature (and one kind of addressing) are a launch.
Records are described in ``triton_kernels/_chunk.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import dispatch, errors
from .factored import FACTORED, Tiling
from .stats import RESULT_WIDTH, RING
from .table import DEVICE_SCALARS, LAYOUT_WORDS, ROW, SETTINGS_WORDS, STAT_COLUMNS

Signature = tuple[int, int, int, int, int]
"""Codes of the dtypes of parameter, gradient and state slots (csrc/abi.h); -1: the row has no such operand."""

SOURCE_F64 = 1 << 60

MIN_CHUNK = 2048
CHUNKS = 4096
"""A chunk is the power of two of elements that makes about this many of all the work (and at least MIN_CHUNK)."""
PROGRAMS_PER_MULTIPROCESSOR = 16
CHUNK_COST = 1024
"""What starting on a chunk costs, in elements: tiny tensors share a program by it."""


@dataclass(frozen=True)
class Launch:
    """Chunks of one dtype signature and one kind of addressing, or, for kernels that tell those apart by themselves,
    chunks of one compute type."""

    signature: Signature
    aligned: bool
    """Every operand of every row begins at a multiple of 16 bytes."""
    strided: bool
    """Rows have Layout records: their operands are not dense in one order."""
    programs: int
    programs_at: int
    """Device address of the edges of the programs' runs of chunks."""
    wide: bool
    """The parameters are float64, and so is the arithmetic."""
    mode: int = 0
    """MasterMode of csrc/abi.h."""
    block: int = 0
    """Elements of a block of quantised moments; 0: they are not quantised."""


@dataclass(frozen=True)
class Work:
    """Chunks in the order of the launches that share them."""

    chunks_at: int
    """Device address of the chunks."""
    launches: list[Launch]
    tensors: list[Tensor]
    """What the addresses belong to."""


class Mirror:
    """An array of the host and its copy on the device. Sent is what lies from the first to the last changed record."""

    def __init__(self, host: np.ndarray[Any, Any], device: torch.device) -> None:
        self._words = host.view(np.int64).reshape(len(host), -1) if len(host) else np.zeros((0, 1), dtype=np.int64)
        self._sent = np.full_like(self._words, -1)
        self.tensor = torch.zeros(self._words.shape, dtype=torch.int64, device=device)
        self._pinned: Tensor | None = None
        self._captured: list[Tensor] = []
        self._prepare()
        self.sent_records = 0

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def _prepare(self) -> None:
        """Memory for a capture, in which none can be allocated."""
        if self._pinned is None and not dispatch.is_cpu(self.tensor):
            self._pinned = torch.empty(self._words.shape, dtype=torch.int64, device="cpu", pin_memory=True)

    def send(self, capturing: bool) -> bool:
        """Brings the device up to date, in the order of the current stream; whether there was anything to send.

        A captured step sends everything: a replay must not depend on what other steps have sent since.
        """
        if capturing:
            self._send_captured()
            return True
        self._prepare()
        if self._captured:  # a replay may have written what it was captured with since
            self._sent[:] = -1
        differ = self._words != self._sent
        if not differ.any():
            return False
        rows = np.flatnonzero(differ.any(axis=1))
        first, last = int(rows[0]), int(rows[-1]) + 1
        self._sent[first:last] = self._words[first:last]
        self.sent_records += last - first
        changed = torch.from_numpy(self._words[first:last])
        if dispatch.is_cpu(self.tensor):
            self.tensor[first:last] = changed
        else:
            self.tensor[first:last].copy_(changed.pin_memory(), non_blocking=True)
        return True

    def _send_captured(self) -> None:
        if self._pinned is None:
            raise errors.captured_twice()
        # Every replay copies from this memory, so it is never written again.
        staging, self._pinned = self._pinned, None
        self._captured.append(staging)
        staging.numpy()[:] = self._words
        self._sent[:] = self._words
        self.tensor.copy_(staging, non_blocking=True)


def cut(numel: np.ndarray[Any, Any], chunk: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows of these sizes in pieces of ``chunk`` elements: (row of each chunk, its first element)."""
    counts = -(-numel // chunk)
    first = np.cumsum(counts) - counts
    row = np.repeat(np.arange(len(numel)), counts)
    return row, (np.arange(len(row)) - np.repeat(first, counts)) * chunk


def chunk_elements(total: int) -> int:
    """Elements of a chunk: it follows from the work alone, so that no sum depends on the number of multiprocessors."""
    return max(MIN_CHUNK, 1 << max(0, (-(-total // CHUNKS) - 1)).bit_length())


def deal(lengths: np.ndarray[Any, Any], multiprocessors: int) -> np.ndarray[Any, Any]:
    """Edges of the programs' runs of chunks: runs of about equal cost, at most 16 a multiprocessor."""
    cost = np.cumsum(lengths + CHUNK_COST)
    programs = min(len(lengths), multiprocessors * PROGRAMS_PER_MULTIPROCESSOR)
    targets = cost[-1] * np.arange(1, programs) / programs
    inner = np.searchsorted(cost, targets, side="right")
    return np.unique(np.concatenate([[0], inner, [len(lengths)]])).astype(np.int32)


class DeviceTable:
    """Rows of one device and everything that its kernels read.

    Args:
        rows: this device's part of the row records, which the optimizer goes on writing to; shape ``(n,)``.
        signatures: of each row.
        layouts: words of a Layout record by row, for rows whose operands are not dense in one order.
        groups: number of parameter groups.
        device: where the rows' tensors are.
        multiprocessors: of that device.
        split: whether each signature and kind of addressing needs a launch of its own. Else only the compute type does.
        tiling: of the rows' parameters, for Adafactor; statistics are those of its tiles then.
    """

    def __init__(
        self,
        rows: np.ndarray[Any, Any],
        signatures: Sequence[Signature],
        layouts: dict[int, list[int]],
        groups: int,
        device: torch.device,
        multiprocessors: int,
        split: bool = True,
        tiling: Tiling | None = None,
    ) -> None:
        assert rows.dtype == ROW
        self.tiling = tiling
        self.device = device
        self.rows = rows
        self._multiprocessors = multiprocessors
        words = np.array(list(layouts.values()) or [[0] * LAYOUT_WORDS], dtype=np.int64)
        self._layouts = self._to_device(words)
        for at, row in enumerate(layouts):
            rows["layout"][row] = self._layouts[at].data_ptr()
        of_rows = list(zip(signatures, rows["master_mode"].tolist(), rows["block"].tolist(), strict=True))
        self._kinds = sorted(set(of_rows))
        place = {kind: i for i, kind in enumerate(self._kinds)}
        self._kind = np.array([place[kind] for kind in of_rows], dtype=np.int64)
        self._strided = rows["layout"] != 0
        self._split = split
        # Under parameters of another dtype everything is computed in float32.
        self._wide = np.array([s[0] == 3 for s in signatures], dtype=bool)
        self.masters = any(mode != 0 for _, mode, _ in self._kinds)
        self.quantised = any(block != 0 for _, _, block in self._kinds)
        self.wide_gradients = any(s[1] == 3 for s, _, _ in self._kinds)
        size = chunk_elements(int(rows["numel"].sum()))
        self._linear_row, self._linear_start = cut(rows["numel"], size)
        self._linear_length = np.minimum(size, rows["numel"][self._linear_row] - self._linear_start)
        self.row_of_chunk, self._start, self._length = self._linear_row, self._linear_start, self._linear_length
        if tiling is not None:
            self._place_tiles(tiling)
        self.n_chunks = len(self._start)

        self.settings = np.zeros((1 + groups, SETTINGS_WORDS), dtype=np.float64)
        self.sources = self.settings.view(np.int64)[:, 16:]
        self._rows_mirror = Mirror(rows, device)
        self._settings_mirror = Mirror(self.settings, device)
        self.scalars = torch.zeros((max(1, len(rows)), DEVICE_SCALARS), dtype=torch.float64, device=device)
        width = RESULT_WIDTH + len(STAT_COLUMNS) * self.n_chunks
        self.stats = torch.zeros((RING, width), dtype=torch.float64, device=device)
        self._addressing: np.ndarray[Any, Any] | None = None
        self._captured_work: list[Work] = []
        self.work = self.linear = Work(0, [], [])
        """Chunks (of Adafactor: tiles) that have statistics, and runs of elements for what needs none."""

    def _place_tiles(self, tiling: Tiling) -> None:
        """Tiles, scratch and sums of Adafactor. Records are those of csrc/abi.h."""
        n = len(self.rows)
        self.row_of_chunk, self._start, self._length = (
            np.repeat(np.arange(n), tiling.counts),
            tiling.start,
            tiling.length,
        )
        self.rows["first_chunk"], self.rows["chunks"] = np.cumsum(tiling.counts) - tiling.counts, tiling.counts
        self.scratch = torch.zeros(tiling.scratch_bytes, dtype=torch.uint8, device=self.device)
        tiling.place(self.scratch.data_ptr())
        self._factored = self._to_device(tiling.factored.view(np.int64).reshape(n, -1))
        self.rows["factored"] = self._factored.data_ptr() + np.arange(n, dtype=np.uint64) * FACTORED.itemsize
        self.tiles = self._to_device(tiling.tiles.view(np.int64).reshape(-1, 4))
        self.sums = torch.zeros((2, max(1, len(tiling.tiles))), dtype=torch.float64, device=self.device)
        """Of each tile: squares of the update before it is limited; of the parameter as the last step left it."""
        runs = tiling.runs_of_matrices()
        self.n_runs = len(runs)
        self.wide_runs: list[bool] = np.unique(self._wide[runs[:, 0]]).tolist()
        """Which compute types they are of."""
        self.runs = self._to_device(runs)
        """(row, first matrix, number of matrices, 0) that one program makes the factors of; shape ``(n_runs, 4)``."""

    @property
    def rows_at(self) -> int:
        """Device address of the rows; like the others, for the kernels."""
        return self._rows_mirror.address

    @property
    def row_words(self) -> Tensor:
        """The rows on the device as int32, shape ``(n, 64)``."""
        return self._rows_mirror.tensor.view(torch.int32)

    @property
    def settings_at(self) -> int:
        return self._settings_mirror.address

    @property
    def scalars_at(self) -> int:
        return self.scalars.data_ptr()

    @property
    def sent_rows(self) -> int:
        """How many rows were sent since the table was made."""
        return self._rows_mirror.sent_records

    @property
    def from_tensors(self) -> bool:
        """Some hyper-parameter is to be read from a tensor on the device."""
        return bool(self.sources[1:].any())

    def send(self, capturing: bool = False) -> None:
        """Brings the device up to date after the host's rows or settings were written.

        ``capturing``: this step becomes part of a CUDA graph; what it refers to lives as long as this table.
        """
        if self._rows_mirror.send(capturing):
            self._arrange()
        self._settings_mirror.send(capturing)
        if capturing:
            self._captured_work += [self.work, self.linear]

    def _arrange(self) -> None:
        """Decides on the launches again when a tensor came to lie, or no longer lies, at a multiple of 16 bytes."""
        r = self.rows
        if not self._split:
            self._deal_out(self._wide.astype(np.int64) << 2)
            return
        addresses = r["param"] | r["grad"] | r["state"][:, 0] | r["state"][:, 1] | r["state"][:, 2] | r["master"]
        aligned = ((addresses & 15) == 0) & ~self._strided
        if self.tiling is not None:  # rows of a matrix begin at multiples of 16 bytes too
            aligned &= self.tiling.factored["cols"] * self.tiling.factored["factored"] % 8 == 0
        self._deal_out((self._kind * 2 + self._strided) * 2 + aligned)

    def _deal_out(self, kind: np.ndarray[Any, Any]) -> None:
        """Launches for rows of these kinds, from the programs' runs of chunks."""
        if self._addressing is not None and np.array_equal(kind, self._addressing):
            return
        self._addressing = kind
        self.work = self._dealt(kind, self.row_of_chunk, self._start, self._length)
        self.linear = self.work
        if self.tiling is not None:
            self.linear = self._dealt(kind, self._linear_row, self._linear_start, self._linear_length)

    def _dealt(
        self,
        kind: np.ndarray[Any, Any],
        row: np.ndarray[Any, Any],
        start: np.ndarray[Any, Any],
        length: np.ndarray[Any, Any],
    ) -> Work:
        of_chunk = kind[row]
        order = np.argsort(of_chunk, kind="stable")
        chunks = np.stack([start, row, length, np.arange(len(row))], axis=1)[order]
        edges: list[np.ndarray[Any, Any]] = []
        plans: list[tuple[int, int]] = []  # kind, programs
        for k in np.unique(of_chunk).tolist():
            mine = np.flatnonzero(of_chunk[order] == k)
            runs = deal(length[order][mine], self._multiprocessors)
            edges.append(runs + np.int32(mine[0]))
            plans.append((k, len(runs) - 1))
        chunks_tensor = self._to_device(chunks.astype(np.int64))
        edges_tensor = self._to_device(np.concatenate(edges) if edges else np.zeros(1, dtype=np.int32))
        launches: list[Launch] = []
        at = edges_tensor.data_ptr()
        for k, programs in plans:
            if self._split:
                signature, mode, block = self._kinds[k >> 2]
                wide = signature[0] == 3
                launches.append(Launch(signature, bool(k & 1), bool(k & 2), programs, at, wide, mode, block))
            else:
                launches.append(Launch((-1, -1, -1, -1, -1), False, False, programs, at, bool(k >> 2)))
            at += 4 * (programs + 1)
        return Work(chunks_tensor.data_ptr(), launches, [chunks_tensor, edges_tensor])

    def _to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device == tensor.device:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)  # pageable memory would make the host wait
