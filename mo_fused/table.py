"""The pointer table of a step: validation, rows, chunks, and noticing what has changed since the last step.

Rows are cached. Every step looks at every tensor again (address and a hash of dtype, device, sizes and strides), so a
changed ``p.data``, gradient or state tensor, a replaced state or parameter group is seen; only what changed is written.
"""

from __future__ import annotations

from functools import lru_cache
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import dispatch, errors, team
from .distributed import shards
from .factored import FACTORED, TILE, Tiling
from .layout import walking_order

OPERANDS = 6  # param, grad, state0..2, the rest of the weights
PARAM, GRAD, STATE0, MASTER = 0, 1, 2, 5  # places among the operands
SCALE0 = OPERANDS  # places of scales of quantised states, behind the operands

# Mirrors of the structs in csrc/abi.h and csrc/scan.h; check_abi compares the sizes with the library's.
ROW = np.dtype(
    [
        ("param", "u8"),
        ("grad", "u8"),
        ("state", "u8", (3,)),
        ("step", "u8"),
        ("layout", "u8"),
        ("numel", "i8"),
        ("dtype", "u1", (7,)),
        ("master_mode", "u1"),
        ("group", "i4"),
        ("flags", "i4"),
        ("first_chunk", "i8"),
        ("chunks", "i8"),
        ("scalars", "i8"),
        ("fresh", "u8"),
        ("factored", "u8"),
        ("master", "u8"),
        ("stream", "u8"),
        ("scale", "u8", (3,)),
        ("block", "i8"),
        ("offset", "i8"),
        ("reserved", "u8", (10,)),
    ]
)
CHUNK = np.dtype([("start", "i8"), ("row", "i4"), ("length", "i4")])
HYPER = np.dtype(
    [
        (name, "f8")
        for name in (
            "lr",
            "beta1",
            "beta2",
            "eps",
            "weight_decay",
            "momentum",
            "dampening",
            "clip",
            "maximize",
            "decoupled",
            "amsgrad",
            "nesterov",
            "eps2",
            "threshold",
            "step_kind",
            "factor_flags",
        )
    ]
)
CONTROL = np.dtype(
    [
        ("max_grad_norm", "f8"),
        ("grad_scale", "f8"),
        ("found_inf", "f8"),
        ("extra_sumsq", "f8"),
        ("extra_exponent", "f8"),
        ("extra_amax", "f8"),
        ("extra_nonfinite", "f8"),
        ("extra_zeros", "f8"),
        ("phases", "i4"),
        ("rule", "i4"),
        ("skip_nonfinite", "i4"),
        ("update_stats", "i4"),
        ("clip_in_place", "i4"),
        ("threads", "i4"),
        ("grad_stats_in_update", "i4"),
        ("reserved", "i4"),
    ]
)
STEP_TABLE = np.dtype(
    [(n, "u8") for n in ("rows", "chunks", "batches", "hyper")]
    + [(n, "i8") for n in ("n_rows", "n_chunks", "n_batches", "n_groups")]
    + [(n, "u8") for n in ("scalars", "chunk_stats", "row_stats", "result", "control")]
    + [(n, "u8") for n in ("tiles", "update_sums", "param_sums")]
)
RECORD = np.dtype(
    [
        ("address", "u8"),
        ("layout", "u8"),
        ("numel", "i8"),
        ("dtype", "i4"),
        ("device", "i4"),
        ("contiguous", "i4"),
        ("plain", "i4"),
    ]
)
DEVICE_STEP = np.dtype(
    [(n, "u8") for n in ("rows", "settings", "chunks", "programs", "scalars", "stats")]
    + [(n, "i8") for n in ("n_rows", "n_chunks", "n_programs")]
    + [(n, "u8") for n in ("grad_scale", "found_inf", "report", "extras", "norm", "partial", "before", "stream")]
    + [("n_extras", "i8")]
    + [(n, "u8") for n in ("tiles", "update_sums", "param_sums", "runs")]
    + [("n_runs", "i8")]
    + [(n, "i4") for n in ("device", "phases", "rule", "measured", "clipping", "skip_nonfinite", "sums")]
    + [(n, "i4") for n in ("from_tensors", "wide", "elsewhere")]
)
SETTINGS_WORDS = 32
DEVICE_CHUNK_WORDS = 4
DEVICE_SCALARS = 16
STAT_COLUMNS = ("sumsq", "exponent", "amax", "nonfinite", "zeros", "clips", "update", "stored", "param")
LAYOUT_WORDS = 1 + 8 + OPERANDS * 8 + OPERANDS
CHUNK_ELEMENTS = 16384
BATCHES = 128
ROW_SCALARS_SIZE = 96
CHUNK_STATS_SIZE = 64

ACTIVE, FRESH, STEP_F64, GRAD_SHARED, SCALES_SHARED, PARAM_UNKNOWN = 1, 2, 4, 8, 16, 32
NO_RULE = 2  # of a table of gradients alone
MEASURE, FINISH, UPDATE, SCALE, DEFERRED, PREPARED, MEASURED, SUMS = 1, 2, 4, 8, 16, 32, 64, 128
FACTORS, SIZED = 256, 512


def check_abi(sizes: dict[str, int]) -> None:
    """Refuses a library whose structs are not the ones above (a stale build beside newer Python files)."""
    own = {
        "Row": ROW.itemsize,
        "Layout": LAYOUT_WORDS * 8,
        "Chunk": CHUNK.itemsize,
        "Hyper": HYPER.itemsize,
        "ChunkStats": CHUNK_STATS_SIZE,
        "RowStats": 64,
        "Result": 128,
        "RowScalars": ROW_SCALARS_SIZE,
        "Control": CONTROL.itemsize,
        "StepTable": STEP_TABLE.itemsize,
        "DeviceChunk": DEVICE_CHUNK_WORDS * 8,
        "Settings": SETTINGS_WORDS * 8,
        "DeviceScalars": DEVICE_SCALARS * 8,
        "DeviceStep": DEVICE_STEP.itemsize,
        "Factored": FACTORED.itemsize,
        "Tile": TILE.itemsize,
        "stat_columns": len(STAT_COLUMNS),
        "TensorRecord": RECORD.itemsize,
        "chunk_elements": CHUNK_ELEMENTS,
        "max_dims": 8,
    }
    if sizes != own:
        wrong = sorted(k for k in own if sizes.get(k) != own[k])
        raise errors.native_layout(f"another layout of {', '.join(wrong) or 'its records'}")


@lru_cache(maxsize=1)
def _interface() -> Any:
    """torch's C exchange interface (2.10 and newer), through which csrc/scan.cpp reads tensors."""
    return None if dispatch.native() is None else getattr(Tensor, "__dlpack_c_exchange_api__", None)


def _exchange() -> tuple[Any, type, type, type | None] | None:
    """What csrc/scan.cpp needs to know of torch."""
    capsule = _interface()
    return None if capsule is None else (capsule, Tensor, torch.nn.Parameter, shards.dtensor_type())


def scan(items: list[Any], out: np.ndarray[Any, Any]) -> int:
    """Writes a RECORD for every tensor of the list; returns how many are neither None nor plain tensors.

    Of a DTensor it is the record of its local tensor.
    """
    exchange = _exchange()
    if exchange is not None:
        native = dispatch.native()
        assert native is not None
        return int(native.scan(exchange, items, out.ctypes.data))
    for i, tensor in enumerate(items):
        out[i] = _record(tensor)
    return int((out["layout"] == 1).sum())


ROWS_CHANGED, STRIDED_GRADIENT, MISSING_GRADIENT = 1, 2, 4


def refresh_rows(
    rows: np.ndarray[Any, Any],
    params: list[Tensor],
    states: list[dict[str, Any]],
    keys: tuple[str, ...],
    has_step: bool,
    seen: np.ndarray[Any, Any],
    flags: np.ndarray[Any, Any],
    places: np.ndarray[Any, Any],
    given: dict[int, Tensor] | None = None,
) -> tuple[list[Tensor | None], int]:
    """Writes the present addresses and flags of all rows (csrc/scan.h): the gradients, and what was noticed.

    ``given``: by row, gradients that stand for those of the parameters.

    ROWS_CHANGED says that more than addresses changed since ``seen`` and the rows have to be planned again.
    """
    exchange = _exchange()
    if exchange is not None:
        native = dispatch.native()
        assert native is not None
        grads: list[Tensor | None] = [None] * len(params)
        for i, grad in (given or {}).items():
            grads[i] = grad
        where = (seen.ctypes.data, flags.ctypes.data, places.ctypes.data, rows.ctypes.data)
        return grads, int(native.refresh_rows(exchange, params, states, keys, has_step, grads, *where))
    grads = [(given or {}).get(i, p.grad) for i, p in enumerate(params)]
    now = np.zeros(seen.shape, dtype=RECORD)
    operands: list[list[Any]] = [params, grads, *([s.get(k) for s in states] for k in keys)]
    for at, items in enumerate(operands):
        scan(items, now[at])
    active = now["layout"][1] != 0
    same = (now["layout"] == seen) | (seen == 0)
    same[1] |= ~active
    if not same.all():
        return grads, ROWS_CHANGED
    address = np.where(seen == 0, np.uint64(0), now["address"])
    rows["param"], rows["grad"] = address[0], now["address"][1]
    slots = len(keys) - has_step
    for k in range(slots):
        there = seen[2 + k] != 0
        column, which = column_of(rows, int(places[k]))
        column[there if which is None else (there, which)] = address[2 + k][there]
    if has_step:
        rows["step"] = address[2 + slots]
    rows["flags"] = flags | np.where(active, ACTIVE, 0)
    strided = 0 if now["contiguous"][1][active].all() else STRIDED_GRADIENT
    return grads, strided | (0 if active.all() else MISSING_GRADIENT)


def column_of(rows: np.ndarray[Any, Any], place: int) -> tuple[np.ndarray[Any, Any], int | None]:
    """Where rows keep the address of an operand or a scale: a field, and which of its elements."""
    if place >= SCALE0:
        return rows["scale"], place - SCALE0
    name = {PARAM: "param", GRAD: "grad", MASTER: "master"}.get(place)
    return (rows["state"], place - STATE0) if name is None else (rows[name], None)


def same_items(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the same objects (tensors cannot be compared with ==)."""
    native = dispatch.native()
    if native is not None:
        return bool(native.same_items(a, b))
    return len(a) == len(b) and all(map(is_, a, b))


def _record(tensor: Tensor | None) -> tuple[int, int, int, int, int, int, int]:
    if tensor is None:
        return (0, 0, 0, -1, 0, 0, 0)
    tensor = shards.local(tensor)
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return (0, 1, 0, -1, 0, 0, 0)
    key = (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())
    return (
        tensor.data_ptr(),
        (hash(key) & 0xFFFFFFFFFFFFFFFF) | 3,
        tensor.numel(),
        dispatch.FLOATS.get(tensor.dtype, -1),
        dispatch.device_code(tensor.device),
        int(tensor.is_contiguous() and tensor.numel() != 1),
        1,
    )


class Table:
    """Arrays of one native call, and the addresses of them. Everything lives as long as the table.

    Args:
        rows: records with numel and dtypes set, shape ``(n,)``; kept, not copied.
        layouts: words of a Layout record by row, for rows whose operands are not dense in one order.
        groups: number of parameter groups.
        tiling: of the rows' parameters, for Adafactor; the chunks are its tiles then.
    """

    def __init__(
        self, rows: np.ndarray[Any, Any], layouts: dict[int, list[int]], groups: int, tiling: Tiling | None = None
    ) -> None:
        n = len(rows)
        self.rows = rows
        self._layouts = np.zeros((max(1, len(layouts)), LAYOUT_WORDS), dtype=np.int64)
        for at, (row, words) in enumerate(layouts.items()):
            self._layouts[at] = words
            self.rows["layout"][row] = self._layouts[at].ctypes.data
        self.tiling = tiling
        self._cut()
        self.hyper = np.zeros(max(1, groups), dtype=HYPER)
        self.control = np.zeros(1, dtype=CONTROL)
        self._scalars = np.zeros(max(1, n) * ROW_SCALARS_SIZE, dtype=np.uint8)
        self._chunk_stats = np.zeros(max(1, len(self.chunks)) * CHUNK_STATS_SIZE, dtype=np.uint8)
        step = np.zeros(1, dtype=STEP_TABLE)
        step["rows"], step["chunks"], step["batches"] = (a.ctypes.data for a in (self.rows, self.chunks, self.batches))
        step["hyper"], step["control"] = self.hyper.ctypes.data, self.control.ctypes.data
        step["scalars"], step["chunk_stats"] = self._scalars.ctypes.data, self._chunk_stats.ctypes.data
        step["n_rows"], step["n_chunks"] = n, len(self.chunks)
        step["n_batches"], step["n_groups"] = len(self.batches) - 1, groups
        if tiling is not None:
            scratch = np.empty(tiling.scratch_bytes + 64, dtype=np.uint8)
            self.scratch = scratch[-scratch.ctypes.data % 64 :][: tiling.scratch_bytes]
            tiling.place(self.scratch.ctypes.data)
            self.rows["factored"] = tiling.factored.ctypes.data + np.arange(n, dtype=np.uint64) * FACTORED.itemsize
            self.sums = np.zeros((2, max(1, len(self.chunks))))
            step["tiles"], step["update_sums"] = tiling.tiles.ctypes.data, self.sums[0].ctypes.data
            step["param_sums"] = self.sums[1].ctypes.data
        self.step = step
        self.address: int = step.ctypes.data
        self.key = b""
        """By which :func:`gradient_table` finds it again; empty for others."""
        self.reset_control()

    def _cut(self) -> None:
        """Chunks of at most CHUNK_ELEMENTS, and batches of chunks: what a thread takes at a time.

        Tiny tensors share a batch that costs about as much as a chunk. Of large ones a batch takes about 1/128 of
        everything: threads that work far apart, each on consecutive pages, get a tenth more out of the memory. With
        more than 16 threads there are more batches, so that none waits long for the others' last.
        """
        numel, tiling = self.rows["numel"], self.tiling
        counts = -(-numel // CHUNK_ELEMENTS) if tiling is None else tiling.counts
        first = np.cumsum(counts) - counts
        self.rows["first_chunk"], self.rows["chunks"] = first, counts
        total = int(counts.sum())
        self.chunks = np.zeros(total, dtype=CHUNK)
        row = np.repeat(np.arange(len(numel)), counts)
        self.chunks["row"] = row
        if tiling is not None:
            self.chunks["start"], self.chunks["length"] = tiling.start, tiling.length
        else:
            self.chunks["start"] = start = (np.arange(total) - np.repeat(first, counts)) * CHUNK_ELEMENTS
            self.chunks["length"] = np.minimum(CHUNK_ELEMENTS, numel[row] - start) if total else 0
        length = self.chunks["length"].astype(np.int64)
        self.useful_threads = team.useful_threads(int(length.sum()), total)
        pieces = max(BATCHES, team.BATCHES_PER_THREAD * team.team_size(self.useful_threads, total))
        cost = length + np.where(length < CHUNK_ELEMENTS, team.CHUNK_COST, 0)
        batch = (np.cumsum(cost) - cost) // (CHUNK_ELEMENTS * max(1, int(cost.sum()) // (CHUNK_ELEMENTS * pieces)))
        edges = np.flatnonzero(np.diff(batch)) + 1 if total else np.zeros(0, dtype=np.int64)
        self.batches = np.concatenate([[0], edges, [total]] if total else [[0]]).astype(np.int32)

    def reset_control(self) -> None:
        self.control[0] = (float("nan"), 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 2, 0, 0, 0, 1, 0, 0)

    def set_outputs(self, result: int, row_stats: int) -> None:
        self.step["result"], self.step["row_stats"] = result, row_stats


def gradient_table(grads: list[Tensor], kept: dict[bytes, Table] | None = None) -> tuple[Table, list[int]]:
    """A table of gradients alone, for the utilities: (table, positions of the tensors that it cannot serve).

    ``kept``: tables for gradients without gaps, by their layouts, of which a fitting one is taken out and used.
    """
    records = np.zeros(len(grads), dtype=RECORD)
    scan(grads, records)
    if kept and (found := kept.pop(records["layout"].tobytes(), None)) is not None:
        found.rows["grad"] = records["address"]
        found.reset_control()
        return found, []
    cpu = dispatch.device_code(torch.device("cpu"))
    served = (records["plain"] == 1) & (records["dtype"] >= 0) & (records["device"] == cpu)
    layouts: dict[int, list[int]] = {}
    # Lazily negated views are strided (the imaginary part of a conjugate); one element is always contiguous.
    for i in np.flatnonzero(served & (records["contiguous"] == 0)).tolist():
        order = walking_order([None, grads[i], None, None, None], written=())
        if grads[i].is_neg() or order.problem:
            served[i] = False
        elif order.layout is not None:
            layouts[i] = order.layout
    chosen = np.flatnonzero(served)
    place = {int(i): row for row, i in enumerate(chosen)} if layouts else {}
    rows = np.zeros(len(chosen), dtype=ROW)
    rows["numel"] = records["numel"][chosen]
    rows["dtype"][:, GRAD] = records["dtype"][chosen]
    table = Table(rows, {place[i]: words for i, words in layouts.items()}, 1)
    table.rows["grad"] = records["address"][chosen]
    table.rows["flags"] = ACTIVE
    table.hyper["clip"] = 1.0
    if kept is not None and served.all() and records["contiguous"].all():
        table.key = records["layout"].tobytes()
    return table, np.flatnonzero(~served).tolist()
