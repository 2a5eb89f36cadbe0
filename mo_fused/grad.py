"""Gradient norms and health as direct utilities, for any parameters and any optimizer."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.clip_grad import clip_grad_norm_ as _torch_clip_grad_norm_  # whatever its name means later

from . import dispatch
from .device_gradients import DeviceGradients, on_one_device
from .distributed import shards
from .distributed.gradients import SharedGradients
from .host_gradients import HostGradients
from .stats import GradStats
from .table import FINISH, MEASURE, SCALE
from .tracing import not_compiled

_INF = float("inf")


@not_compiled
def grad_stats(tensors: Tensor | Iterable[Tensor]) -> GradStats:
    """Norm, largest magnitude, non-finite and zero elements of many gradients, in one read of each.

    Args:
        tensors: a tensor or an iterable of tensors. Of a parameter (or any leaf that requires grad) its ``.grad`` is
            measured, of other tensors their values. Any shapes, strides, dtypes and devices. Of DTensors whole tensors
            are measured: every rank of their meshes has to call this, with the same tensors in the same order.

    Returns:
        GradStats; a parameter without gradient counts as empty. For gradients on a GPU this waits for it once.
    """
    items = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    grads: list[Tensor | None] = [
        t.grad if isinstance(t, torch.nn.Parameter) or (t.requires_grad and t.is_leaf) else t.detach() for t in items
    ]
    with torch.no_grad():
        if shards.any_dtensor(items):
            return SharedGradients(items, grads).stats()
        total, amax, rows = _measured_rows(grads)
    norms, amaxes, nonfinite, zeros = ([r[k] for r in rows] for k in range(4))
    device = next((g.device for g in grads if g is not None), torch.device("cpu"))

    def tensor(value: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=device)

    return GradStats(
        total_norm=tensor(total, torch.float64),
        amax=tensor(amax, torch.float64),
        nonfinite=tensor(sum(nonfinite), torch.int64),
        zeros=tensor(sum(zeros), torch.int64),
        norms=tensor(norms, torch.float64),
        amaxes=tensor(amaxes, torch.float64),
        nonfinites=tensor(nonfinite, torch.int64),
        zero_counts=tensor(zeros, torch.int64),
    )


def _measured_rows(grads: list[Tensor | None]) -> tuple[float, float, list[tuple[float, float, int, int]]]:
    """(total norm, largest magnitude, (norm, largest magnitude, non-finite, zero elements) of each)."""
    there = [g for g in grads if g is not None]
    device = on_one_device(there)
    if device is None:
        measured = HostGradients(grads)
        measured.run(MEASURE)
        return measured.total, measured.amax, measured.rows()
    stats = device.measure(count_zeros=True)
    values = iter(stats.per_row()[:, :4].tolist())
    rows = [(0.0, 0.0, 0, 0) if g is None else _row(next(values)) for g in grads]
    return float(stats.field("grad_norm")), float(stats.field("grad_amax")), rows


def _row(values: list[float]) -> tuple[float, float, int, int]:
    return values[0], values[1], int(values[2]), int(values[3])


def _as_list(tensors: Tensor | Iterable[Tensor], stacklevel: int) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    items = list(tensors)
    if not items and (isinstance(tensors, types.GeneratorType) or hasattr(tensors, "__next__")):
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=stacklevel)
    return items


def _served(grads: list[Tensor], norm_type: float) -> bool:
    """Whether the host computes the norm; what is neither its own nor one device's goes to torch."""
    return norm_type in (2.0, _INF) and all(
        type(g) in (Tensor, torch.nn.Parameter)
        and g.layout is torch.strided
        and g.dtype in dispatch.FLOATS
        and dispatch.is_cpu(g)
        for g in grads
    )


def _norm_dtype(grads: list[Tensor]) -> torch.dtype:
    dtype, *others = {g.dtype for g in grads}
    for other in others:
        dtype = torch.promote_types(dtype, other)
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype == torch.float16:
        dtype = torch.float32  # fp16 ends at 65504: a finite norm would be returned as infinity
    return dtype


def _norm_tensor(value: float, grads: list[Tensor]) -> Tensor:
    return torch.tensor(value, dtype=_norm_dtype(grads), device=grads[0].device)


def _device_norm(
    device: DeviceGradients, grads: list[Tensor], norm_type: float, error_if_nonfinite: bool, max_norm: float | None
) -> Tensor:
    """The norm as a tensor on the gradients' device; only ``error_if_nonfinite`` waits for it."""
    norm = device.measure(max_norm).field("grad_norm" if norm_type == 2.0 else "grad_amax")
    if error_if_nonfinite:
        _check_finite(float(norm), norm_type)
    return norm.to(_norm_dtype(grads))


def _shared_norm(
    owners: list[Tensor], grads: list[Tensor | None], norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """The norm over whole tensors, the same on every rank, as a plain tensor."""
    shared = SharedGradients(owners, grads)
    norm, amax = shared.norms()
    found = norm if norm_type == 2.0 else amax
    if error_if_nonfinite:
        _check_finite(float(found), norm_type)
    dtype = _norm_dtype(shared.here) if shared.here else torch.float32
    if isinstance(found, Tensor):
        return found.to(dtype)
    return torch.tensor(found, dtype=dtype, device=shared.device)


def _check_finite(norm: float, norm_type: float) -> None:
    if not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )


@not_compiled
@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.get_total_norm in one read of each tensor. On a GPU it does not wait, except to raise an error.

    Args:
        tensors: a tensor or an iterable of tensors.
        norm_type: 2 and inf are native; every other p-norm goes to torch.
        error_if_nonfinite: a norm that is inf or NaN is an error.
        foreach: passed on where torch does the work.

    Returns:
        0-dim tensor on the first tensor's device, in the promoted dtype of the tensors (float32 where that is float16,
        whose range is too small for a norm). Sums of squares neither overflow nor vanish on the way; empty tensors add
        nothing. Of DTensors the norm is that of the whole tensors, on every rank the same, in a plain tensor: every
        rank of their meshes has to call this, with the same tensors in the same order.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
    """
    grads = _as_list(tensors, 3)
    norm_type = float(norm_type)
    if not grads:
        return torch.tensor(0.0)
    if norm_type in (2.0, _INF) and shards.any_dtensor(grads):
        return _shared_norm(grads, list(grads), norm_type, error_if_nonfinite)
    device = on_one_device(grads) if norm_type in (2.0, _INF) else None
    if device is not None:
        return _device_norm(device, grads, norm_type, error_if_nonfinite, None)
    if not _served(grads, norm_type):
        return torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    measured = HostGradients(list(grads))
    measured.run(MEASURE)
    norm = measured.total if norm_type == 2.0 else measured.amax
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    return _norm_tensor(norm, grads)


@not_compiled
@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """torch.nn.utils.clip_grads_with_norm_: scales gradients by min(1, max_norm / (total_norm + 1e-6)), in place.

    Gradients are written only when that is below 1 (or NaN).

    Args:
        parameters: a tensor or an iterable of tensors whose ``.grad`` is scaled.
        max_norm: the largest norm allowed.
        total_norm: 0-dim tensor, the present norm.
        foreach: passed on where torch does the work.
    """
    items = _as_list(parameters, 3)
    grads = [p.grad for p in items if p.grad is not None]
    if not grads:
        return
    if shards.any_dtensor(grads):  # every rank scales what it has, sums that are not yet added up too
        torch.autograd.graph.increment_version([g for g in grads if shards.is_dtensor(g)])
        grads, total_norm = [shards.present(g) for g in grads], shards.whole(total_norm)
    device = on_one_device(grads) if type(total_norm) is Tensor else None
    if device is not None and device.writable:
        device.use_norm(total_norm, float(max_norm))
        device.scale()
        torch.autograd.graph.increment_version(grads)
        return
    if not _served(grads, 2.0) or type(total_norm) is not Tensor:
        torch.nn.utils.clip_grads_with_norm_(items, max_norm, total_norm, foreach)
        return
    HostGradients(list(grads)).scale(float(total_norm), float(max_norm))


@not_compiled
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_: reads each gradient once, and writes it only when it clips.

    With this package's optimizers ``max_grad_norm=`` does the same without writing at all. On a GPU nothing waits, but
    for ``error_if_nonfinite``.

    Args:
        parameters: a tensor or an iterable of tensors whose ``.grad`` is clipped in place.
        max_norm: the largest norm allowed.
        norm_type: 2 and inf are native; every other p-norm goes to torch.
        error_if_nonfinite: a norm that is inf or NaN is an error, and gradients are left as they are.
        foreach: passed on where torch does the work.

    Returns:
        The norm before clipping, as :func:`get_total_norm`.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
    """
    items = _as_list(parameters, 3)
    of_each = [p.grad for p in items]
    norm_type, max_norm = float(norm_type), float(max_norm)
    if norm_type in (2.0, _INF) and shards.any_dtensor(items):
        norm = _shared_norm(items, of_each, norm_type, error_if_nonfinite)
        # Where the host knows that nothing is to be scaled, nothing is looked at again.
        if not dispatch.is_cpu(norm) or not max_norm / (float(norm) + 1e-6) >= 1.0:
            clip_grads_with_norm_(items, max_norm, norm, foreach)
        return norm
    grads = [g for g in of_each if g is not None]
    if not grads:
        return torch.tensor(0.0)
    device = on_one_device(grads) if norm_type in (2.0, _INF) else None
    if device is not None and device.writable:
        norm = _device_norm(device, grads, norm_type, error_if_nonfinite, max_norm if norm_type == 2.0 else None)
        if norm_type != 2.0:
            device.use_norm(norm, max_norm)
        device.scale()
        torch.autograd.graph.increment_version(grads)
        return norm
    if not _served(grads, norm_type):
        return _torch_clip_grad_norm_(items, max_norm, norm_type, error_if_nonfinite, foreach)
    measured = HostGradients(list(grads))
    if norm_type == 2.0 and not error_if_nonfinite and not measured.others and measured.writable:
        measured.run(MEASURE | FINISH | SCALE, max_norm)
        if measured.buffer["clip_coef"] != 1.0:
            torch.autograd.graph.increment_version(grads)
        return _norm_tensor(measured.total, grads)
    measured.run(MEASURE)
    found = measured.total if norm_type == 2.0 else measured.amax
    if error_if_nonfinite:
        _check_finite(found, norm_type)
    measured.scale(found, max_norm)
    return _norm_tensor(found, grads)
