"""The Triton backend: launches the kernels of mo_fused.triton_kernels over a device table. Nothing here waits.

Launches of a step, whatever the number of tensors and groups: one of statistics (when something needs them before the
update) and one of the update per dtype signature and kind of addressing, one finish; with ``clip_in_place`` one more
per signature and kind of addressing, with ``stats`` one more in all. Adafactor always has the first, reads gradients
once more per signature before the update, and makes factors (per compute type) and step sizes in launches of their own.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .. import dispatch
from ..device_table import DeviceTable, Launch, Signature, Work
from ..request import Request

SPLIT = True
THREADS = 128
ROWS = 64
TILE = 512
BYTES = {0: 4, 1: 2, 2: 2, 3: 8, 6: 1, 7: 1, 8: 1, 9: 1, -1: 1}
F16, F64 = 2, 3
ADAFACTOR = 3
FACTOR_THREADS = 512
"""Of a block that makes the factors of a matrix, of which there may be one alone with 100 000 rows."""


@lru_cache(maxsize=1)
def kernels() -> SimpleNamespace:
    """The kernels, imported when they are first needed."""
    from ..triton_kernels.adafactor_kernel import adafactor_kernel
    from ..triton_kernels.adamw_kernel import adamw_kernel
    from ..triton_kernels.factor_sums_kernel import factor_sums_kernel
    from ..triton_kernels.factored_rms_kernel import factored_rms_kernel
    from ..triton_kernels.factors_kernel import factors_kernel
    from ..triton_kernels.finish_kernel import finish_kernel
    from ..triton_kernels.grad_stats_kernel import grad_stats_kernel
    from ..triton_kernels.partial_kernel import partial_kernel
    from ..triton_kernels.scale_grad_kernel import scale_grad_kernel
    from ..triton_kernels.sgd_kernel import sgd_kernel
    from ..triton_kernels.sizes_kernel import sizes_kernel
    from ..triton_kernels.update_norms_kernel import update_norms_kernel

    return SimpleNamespace(
        adafactor=adafactor_kernel,
        adamw=adamw_kernel,
        factor_sums=factor_sums_kernel,
        factored_rms=factored_rms_kernel,
        factors=factors_kernel,
        finish=finish_kernel,
        grad_stats=grad_stats_kernel,
        partial=partial_kernel,
        scale_grad=scale_grad_kernel,
        sgd=sgd_kernel,
        sizes=sizes_kernel,
        update_norms=update_norms_kernel,
    )


@cache
def shape(signature: Signature, aligned: bool, sums: bool) -> dict[str, Any]:
    """WIDTH, BLOCK and launch options: each thread takes 16 bytes of the widest operand at a time.

    16-bit tensors go by 8 bytes where eight elements of every operand would not fit into 80 registers: with statistics
    (sums in float64), with addresses that are not aligned, and with more than four operands. Conversions of fp16 take
    as much as one operand more. A tile has at least 256 elements: whole blocks of quantised moments.
    """
    widest = max(BYTES[code] for code in signature)
    held = sum(code >= 0 for code in signature) + (F16 in signature)
    width = 16 // max(widest, 4 if sums or not aligned or held > 4 else 1)
    return {"WIDTH": width, "BLOCK": THREADS * width, **fixed_options()}


@lru_cache(maxsize=1)
def fixed_options() -> dict[str, Any]:
    """Nothing is ever fused; a block has 128 threads whatever the width of a warp."""
    return {"num_warps": THREADS // dispatch.warp_size(), "enable_fp_fusion": False}


@cache
def param_sum_shape(param: int) -> dict[str, int]:
    """How a parameter's sum of squares is added up: it follows from the parameter's dtype (its code) alone."""
    block = 512 if BYTES[param] > 2 else 1024
    fold = 2 if param == F64 else 4
    return {"FOLD": fold, "BLOCK": block}


@cache
def tile_shape(signature: Signature, aligned: bool, param: int | None = None) -> dict[str, Any]:
    """WIDTH, BLOCK and launch options of a pass over tiles: each thread takes 16 bytes of the widest operand at a time.

    16-bit tensors go by 8 bytes where addresses are not aligned. ``param``: BLOCK is that of the parameter's sum.
    """
    widest = max(BYTES[code] for code in signature)
    width = min(16 // max(widest, 1 if aligned else 4), 8)
    block = THREADS * 2 * width if param is None else param_sum_shape(param)["BLOCK"]
    return {"WIDTH": width, "BLOCK": block, **fixed_options()}


_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Every launch of this backend: on the current device and its current stream.

    The first one goes through Triton, which compiles; from then on the compiled kernel is called by itself, in a
    quarter of the host's time. Values of ``args`` never make another kernel.
    """
    from triton.runtime import driver

    if not hasattr(kernel, "device_caches"):  # the interpreter's
        kernel[(programs,)](*args, **options)
        return
    key = (id(kernel), driver.active.get_current_device(), *options.values())
    found = _compiled.get(key)
    if found is not None:
        compiled, constants = found
        compiled[(programs, 1, 1)](*args, *constants)
        return
    compiled = kernel[(programs,)](*args, **options)
    if getattr(compiled, "function", None) is not None:
        _compiled[key] = compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])


def _chosen(work: Work, one: Launch) -> tuple[int, int]:
    return work.chunks_at, one.programs_at


def measure(table: DeviceTable, stats_at: int, count_zeros: bool = False) -> None:
    """Statistics of every gradient, chunk by chunk; for Adafactor tile by tile, with norms of rows and columns."""
    if table.tiling is not None:
        return _factor_sums(table, stats_at)
    for one in table.work.launches:
        g = one.signature[1]
        launch(
            kernels().grad_stats,
            one.programs,
            table.rows_at,
            table.settings_at,
            *_chosen(table.work, one),
            stats_at,
            table.n_chunks,
            G=g,
            ALIGNED=one.aligned,
            STRIDED=one.strided,
            COUNT_ZEROS=count_zeros,
            **shape((g, -1, -1, -1, -1), one.aligned, False),
        )


def partial(table: DeviceTable, stats_at: int, out: Tensor) -> None:
    """This device's share of the gradients' totals: five float64."""
    launch(kernels().partial, 1, stats_at, table.n_chunks, out.data_ptr(), TILE=TILE, **fixed_options())


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
    rows = len(table.rows)
    given = extras if norm is None else norm
    launch(
        kernels().finish,
        max(1, -(-rows // ROWS)),
        table.rows_at,
        table.settings_at,
        table.scalars_at,
        stats_at,
        rows,
        0 if elsewhere else table.n_chunks,
        _address(ask.grad_scale),
        _address(ask.found_inf),
        _address(ask.report),
        _address(given),
        0 if extras is None else len(extras),
        RULE=ask.rule,
        MEASURED=measured,
        NORM_GIVEN=norm is not None,
        CLIPPING=ask.max_grad_norm is not None,
        SKIP_NONFINITE=ask.skips_nonfinite,
        FROM_TENSORS=table.from_tensors,
        ROWS=ROWS,
        TILE=TILE,
        **fixed_options(),
    )


def _address(value: Tensor | float | None) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else 0


def update(table: DeviceTable, stats_at: int, ask: Request, sums: int) -> None:
    """The rule, over everything. ``sums``: 0 none, 1 those of the update, 2 also those of the gradient.

    Of Adafactor, step sizes and what comes after them: see :func:`factors`.
    """
    if ask.rule == ADAFACTOR:
        return _adafactor(table, stats_at, sums)
    for one in table.work.launches:
        p, g, first, second, third = one.signature
        common: dict[str, Any] = {
            "P": p,
            "G": g,
            "ALIGNED": one.aligned,
            "STRIDED": one.strided,
            "MODE": one.mode,
            "QBLOCK": one.block,
            "SUMS": sums,
            # Weights in two parts and quantised moments take as much as sums do.
            **shape(one.signature, one.aligned, sums != 0 or one.mode != 0 or one.block != 0),
        }
        adam = ask.rule == 0
        slots = {"M": first, "V": second, "W": third} if adam else {"B": first}
        launch(
            kernels().adamw if adam else kernels().sgd,
            one.programs,
            table.rows_at,
            table.settings_at,
            *_chosen(table.work, one),
            table.scalars_at,
            stats_at,
            table.n_chunks,
            **common,
            **slots,
        )


def _factor_sums(table: DeviceTable, stats_at: int) -> None:
    for one in table.work.launches:
        p, g, _, columns, _ = one.signature
        launch(
            kernels().factor_sums,
            one.programs,
            table.rows_at,
            table.settings_at,
            *_chosen(table.work, one),
            table.tiles.data_ptr(),
            table.sums[1].data_ptr(),
            stats_at,
            table.n_chunks,
            P=p,
            G=g,
            FACTORED=columns >= 0,
            ALIGNED=one.aligned,
            STRIDED=one.strided,
            LANES=THREADS if BYTES[g] == 2 else 2 * THREADS,
            WIDTH=16 // BYTES[g],
            ROWS=2 if one.wide else 4,
            COLS=256 if BYTES[g] == 2 else 128,
            **param_sum_shape(p),
            **fixed_options(),
        )


def factors(table: DeviceTable, stats_at: int) -> None:
    """Of Adafactor, before the update: means and roots of rows and columns, the squares of the update's tiles."""
    for wide in table.wide_runs:
        launch(
            kernels().factors,
            table.n_runs,
            table.rows_at,
            table.runs.data_ptr(),
            table.scalars_at,
            stats_at,
            WIDE=wide,
            BLOCK=4 * FACTOR_THREADS,
            **{**fixed_options(), "num_warps": FACTOR_THREADS // dispatch.warp_size()},
        )
    for one in table.work.launches:
        p, g, second, columns, _ = one.signature
        factored = columns >= 0
        launch(
            kernels().factored_rms,
            one.programs,
            table.rows_at,
            *_chosen(table.work, one),
            table.tiles.data_ptr(),
            table.sums[0].data_ptr(),
            table.scalars_at,
            stats_at,
            P=p,
            G=g,
            FACTORED=factored,
            ALIGNED=one.aligned,
            STRIDED=one.strided,
            **tile_shape((g, -1 if factored else second, -1, -1, -1), one.aligned),
        )


def _adafactor(table: DeviceTable, stats_at: int, sums: int) -> None:
    """Each row's step size, the update."""
    launch(
        kernels().sizes,
        len(table.rows),
        table.rows_at,
        table.settings_at,
        table.sums[0].data_ptr(),
        table.sums[1].data_ptr(),
        table.scalars_at,
        stats_at,
        FROM_TENSORS=table.from_tensors,
        TILE=TILE,
        **fixed_options(),
    )
    for one in table.work.launches:
        p, g, second, columns, first = one.signature
        factored = columns >= 0
        operands = (p, g, -1 if factored else second, -1, first)
        launch(
            kernels().adafactor,
            one.programs,
            table.rows_at,
            table.settings_at,
            *_chosen(table.work, one),
            table.tiles.data_ptr(),
            table.sums[1].data_ptr(),
            table.scalars_at,
            stats_at,
            table.n_chunks,
            P=p,
            G=g,
            M=first,
            FACTORED=factored,
            ALIGNED=one.aligned,
            STRIDED=one.strided,
            SUMS=sums,
            **{**param_sum_shape(p), **tile_shape(operands, one.aligned, p)},
        )


def scale_gradients(table: DeviceTable, stats_at: int) -> None:
    """Multiplies each gradient by its row's factor, in place."""
    for one in table.linear.launches:
        g = one.signature[1]
        options = {k: v for k, v in shape((g, -1, -1, -1, -1), one.aligned, False).items() if k != "WIDTH"}
        launch(
            kernels().scale_grad,
            one.programs,
            table.rows_at,
            *_chosen(table.linear, one),
            table.scalars_at,
            stats_at,
            G=g,
            ALIGNED=one.aligned,
            STRIDED=one.strided,
            **options,
        )


def update_norms(table: DeviceTable, stats_at: int, before_at: int, gradients: bool) -> None:
    """Norms of the update and of the parameters, after an update with sums."""
    launch(
        kernels().update_norms,
        1,
        stats_at,
        before_at,
        table.n_chunks,
        GRADIENTS=gradients,
        TILE=TILE,
        **fixed_options(),
    )
