"""The Triton backend: launches the kernels of mo_fused.triton_kernels over a device table. Nothing here waits.

Launches of a step, whatever the number of tensors and groups: one of statistics (when something needs them before the
update) and one of the update per dtype signature and kind of addressing, one finish; with ``clip_in_place`` one more
per signature and kind of addressing, with ``stats`` one more in all.
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
BYTES = {0: 4, 1: 2, 2: 2, 3: 8, -1: 1}
F16 = 2


@lru_cache(maxsize=1)
def kernels() -> SimpleNamespace:
    """The kernels, imported when they are first needed."""
    from ..triton_kernels.adamw_kernel import adamw_kernel
    from ..triton_kernels.finish_kernel import finish_kernel
    from ..triton_kernels.grad_stats_kernel import grad_stats_kernel
    from ..triton_kernels.partial_kernel import partial_kernel
    from ..triton_kernels.scale_grad_kernel import scale_grad_kernel
    from ..triton_kernels.sgd_kernel import sgd_kernel
    from ..triton_kernels.update_norms_kernel import update_norms_kernel

    return SimpleNamespace(
        adamw=adamw_kernel,
        finish=finish_kernel,
        grad_stats=grad_stats_kernel,
        partial=partial_kernel,
        scale_grad=scale_grad_kernel,
        sgd=sgd_kernel,
        update_norms=update_norms_kernel,
    )


@cache
def shape(signature: Signature, aligned: bool, sums: bool) -> dict[str, Any]:
    """WIDTH, BLOCK and launch options: each thread takes 16 bytes of the widest operand at a time.

    16-bit tensors go by 8 bytes where eight elements of every operand would not fit into 80 registers: with statistics
    (sums in float64), with addresses that are not aligned, and with more than four operands. Conversions of fp16 take
    as much as one operand more.
    """
    widest = max(BYTES[code] for code in signature)
    held = sum(code >= 0 for code in signature) + (F16 in signature)
    width = 16 // max(widest, 4 if sums or not aligned or held > 4 else 1)
    return {"WIDTH": width, "BLOCK": THREADS * width, **fixed_options()}


@lru_cache(maxsize=1)
def fixed_options() -> dict[str, Any]:
    """Nothing is ever fused; a block has 128 threads whatever the width of a warp."""
    return {"num_warps": THREADS // dispatch.warp_size(), "enable_fp_fusion": False}


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
    """Statistics of every gradient, chunk by chunk."""
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
) -> None:
    """Total norm, coefficient, skip decision, step counters and row scalars."""
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
        table.n_chunks,
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
    """The rule, over everything. ``sums``: 0 none, 1 those of the update, 2 also those of the gradient."""
    for one in table.work.launches:
        p, g, first, second, third = one.signature
        common: dict[str, Any] = {
            "P": p,
            "G": g,
            "ALIGNED": one.aligned,
            "STRIDED": one.strided,
            "SUMS": sums,
            **shape(one.signature, one.aligned, sums != 0),
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
