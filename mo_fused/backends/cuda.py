"""The CUDA backend: one native call for each phase of a step over a device table. Nothing here waits.

Launches of a step, whatever the number of tensors, groups and dtypes: one of statistics, one finish, one update (a
second of each pass where there are float64 parameters too); with ``clip_in_place`` and with ``stats`` one more each.
Adafactor's update is four: factors, the sums of the update's squares, step sizes, the update itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from .. import dispatch
from ..device_table import DeviceTable, Work
from ..request import Request
from ..table import DEVICE_STEP

SPLIT = False
MEASURE, PARTIAL, FINISH, UPDATE, SCALE, NORMS = 1, 2, 4, 8, 16, 32
FACTORS, FACTORED_RMS, SIZES = 64, 128, 256  # of Adafactor, before its update (csrc/cuda/step.h)


def launch(step: np.ndarray[Any, Any]) -> None:
    """Every call of this backend: launches on the step's device, on that device's current stream."""
    native = dispatch.native()
    assert native is not None  # dispatch chose this backend
    native.cuda_step(step.ctypes.data)


def _step(table: DeviceTable, stats_at: int, phases: int) -> np.ndarray[Any, Any]:
    step = np.zeros(1, dtype=DEVICE_STEP)
    record = step[0]
    record["rows"], record["settings"] = table.rows_at, table.settings_at
    record["scalars"], record["stats"] = table.scalars_at, stats_at
    record["n_rows"], record["n_chunks"] = len(table.rows), table.n_chunks
    record["stream"], record["device"] = dispatch.stream(table.device), table.device.index or 0
    record["phases"] = phases
    if table.tiling is not None:
        record["tiles"], record["runs"], record["n_runs"] = table.tiles.data_ptr(), table.runs.data_ptr(), table.n_runs
        record["update_sums"], record["param_sums"] = table.sums[0].data_ptr(), table.sums[1].data_ptr()
    return step


def _over_chunks(work: Work, step: np.ndarray[Any, Any]) -> None:
    record = step[0]
    record["chunks"] = work.chunks_at
    for one in work.launches:
        record["programs"], record["n_programs"], record["wide"] = one.programs_at, one.programs, one.wide
        launch(step)


def measure(table: DeviceTable, stats_at: int, count_zeros: bool = False) -> None:
    """Statistics of every gradient, chunk by chunk; zeros are always counted."""
    _over_chunks(table.work, _step(table, stats_at, MEASURE))


def partial(table: DeviceTable, stats_at: int, out: Tensor) -> None:
    """This device's share of the gradients' totals: five float64."""
    step = _step(table, stats_at, PARTIAL)
    step["partial"] = out.data_ptr()
    launch(step)


def finish(
    table: DeviceTable,
    stats_at: int,
    ask: Request,
    measured: bool,
    extras: Tensor | None = None,
    norm: Tensor | None = None,
    elsewhere: bool = False,
) -> None:
    """Total norm, coefficient, skip decision, step counters and row scalars.

    ``elsewhere``: the totals are those of ``extras`` alone.
    """
    step = _step(table, stats_at, FINISH)
    record = step[0]
    record["rule"], record["measured"], record["clipping"] = ask.rule, measured, ask.max_grad_norm is not None
    record["skip_nonfinite"], record["from_tensors"] = ask.skips_nonfinite, table.from_tensors
    for name, value in (
        ("grad_scale", ask.grad_scale),
        ("found_inf", ask.found_inf),
        ("report", ask.report),
        ("extras", extras),
        ("norm", norm),
    ):
        record[name] = value.data_ptr() if isinstance(value, Tensor) else 0
    record["n_extras"], record["elsewhere"] = 0 if extras is None else len(extras), elsewhere
    launch(step)


def factors(table: DeviceTable, stats_at: int) -> None:
    """Of Adafactor, before the update: means and roots of rows and columns, the squares of the update's tiles."""
    step = _step(table, stats_at, FACTORS)
    launch(step)
    step["phases"] = FACTORED_RMS
    _over_chunks(table.work, step)


def update(table: DeviceTable, stats_at: int, ask: Request, sums: int) -> None:
    """The rule, over everything. ``sums``: 0 none, 1 those of the update, 2 also those of the gradient.

    Of Adafactor, step sizes and what comes after them: see :func:`factors`.
    """
    step = _step(table, stats_at, UPDATE)
    step["rule"], step["sums"] = ask.rule, sums
    if table.tiling is not None:
        step["phases"] = SIZES
        launch(step)
        step["phases"] = UPDATE
    _over_chunks(table.work, step)


def scale_gradients(table: DeviceTable, stats_at: int) -> None:
    """Multiplies each gradient by its row's factor, in place."""
    _over_chunks(table.linear, _step(table, stats_at, SCALE))


def update_norms(table: DeviceTable, stats_at: int, before_at: int, gradients: bool) -> None:
    """Norms of the update and of the parameters, after an update with sums."""
    step = _step(table, stats_at, NORMS)
    step["before"], step["sums"] = before_at, 2 if gradients else 1
    launch(step)
