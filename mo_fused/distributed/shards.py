"""What of a tensor is in this process: a DTensor (FSDP2, tensor parallelism) has a local part, any other is all there.

A DTensor cannot exist before ``torch.distributed.tensor`` is imported, which takes a while: nothing here imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import errors

_PLAIN = (Tensor, torch.nn.Parameter)


_found: type | None = None


def dtensor_type() -> type | None:
    """``torch.distributed.tensor.DTensor`` if anything has imported it, else None."""
    global _found
    if _found is None:
        _found = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return _found


def is_dtensor(t: Any) -> bool:
    """Whether a tensor is a DTensor."""
    kind = type(t)
    if kind in _PLAIN:
        return False
    found = dtensor_type()
    return found is not None and (kind is found or isinstance(t, found))


def any_dtensor(tensors: Iterable[Any]) -> bool:
    """Whether there is a DTensor among many tensors, most of which are plain."""
    return dtensor_type() is not None and any(is_dtensor(t) for t in tensors if type(t) not in _PLAIN)


def unsettled(params: Sequence[Any]) -> list[Tensor]:
    """Of many DTensors those with a gradient that cannot be used as it is, or is none of a DTensor."""
    kind: Any = dtensor_type()
    looked_at = [
        p
        for p in params
        if (grad := p.grad) is not None
        and (type(grad) is not kind or grad._spec is not p._spec or type(grad._local_tensor) not in _PLAIN)
    ]
    return [p for p in looked_at if not is_settled(p, p.grad)]


def lie_alike(owners: Sequence[Any], grads: Sequence[Any]) -> bool:
    """Whether gradients of many parameters are all as :func:`is_settled` says; a quick look, which may say no."""
    kind: Any = dtensor_type()
    for owner, grad in zip(owners, grads, strict=True):
        if type(owner) is not kind:
            if type(owner) not in _PLAIN:
                return False
        elif grad is not None and (
            type(grad) is not kind or grad._spec is not owner._spec or type(grad._local_tensor) not in _PLAIN
        ):
            return False
    return True


def local(t: Any) -> Any:
    """What of a tensor is in this process: of a DTensor its local tensor, without autograd; anything else as it is."""
    return t._local_tensor if is_dtensor(t) else t


def present(t: Any) -> Any:
    """As :func:`local`; waits for a collective that is still working on it."""
    here = local(t)
    return here if type(here) in _PLAIN or not hasattr(here, "wait") else here.wait()


def whole(t: Any) -> Any:
    """All of a DTensor as a plain tensor (this communicates); anything else as it is."""
    if not is_dtensor(t):
        return t
    if t.dtype == torch.int16:  # neither gloo nor NCCL sends them
        return t.to(torch.int32).full_tensor().to(torch.int16)
    return t.full_tensor()


def settled(p: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a DTensor as a DTensor that lies as the parameter does, whose local tensor is there.

    Gradients of replicated parameters may still be sums over ranks that nobody has added up (Partial placements): all
    ranks have to ask for them then.

    Raises:
        RuntimeError: it belongs to another mesh, or its parts have other sizes.
    """
    if grad.device_mesh != p.device_mesh:  # type: ignore[attr-defined]
        raise errors.grad_mismatch("mesh", "a DTensor", p.device_mesh, grad.device_mesh)  # type: ignore[attr-defined]
    if grad._spec is not p._spec and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    if local(grad).shape != local(p).shape:
        sizes = tuple(local(p).shape), tuple(local(grad).shape)
        raise errors.grad_mismatch("local shape", "a DTensor", *sizes)
    return grad if type(local(grad)) in _PLAIN else like(p, present(grad), p.shape)


def is_partial(t: Tensor) -> bool:
    """Whether a tensor is a DTensor whose local tensors have to be added up."""
    return is_dtensor(t) and any(x.is_partial() for x in t.placements)  # type: ignore[attr-defined]


def added_up(t: Tensor) -> Tensor:
    """A DTensor whose local tensor is there and is not a part of a sum (this communicates where it is)."""
    if is_partial(t):
        from torch.distributed.tensor import Replicate

        t = t.redistribute(t.device_mesh, [Replicate() if x.is_partial() else x for x in t.placements])  # type: ignore[attr-defined]
    return t if type(local(t)) in _PLAIN else like(t, present(t), t.shape)


def is_settled(p: Tensor, grad: Tensor) -> bool:
    """Whether the gradient of a DTensor can be used as it is."""
    return (
        is_dtensor(grad)
        and (grad._spec is p._spec or _same_place(p, grad))  # type: ignore[attr-defined]
        and type(grad._local_tensor) in _PLAIN  # type: ignore[attr-defined]
        and grad._local_tensor.shape == local(p).shape  # type: ignore[attr-defined]
    )


def _same_place(p: Any, grad: Any) -> bool:
    return grad.placements == p.placements and grad.device_mesh == p.device_mesh  # type: ignore[no-any-return]


def is_elsewhere(p: Tensor) -> bool:
    """Whether this process has no part in the parameter's mesh, and so nothing to step."""
    return is_dtensor(p) and p.device_mesh.get_coordinate() is None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cut:
    """How a DTensor is cut into the parts that the ranks of its mesh hold."""

    dims: tuple[int, ...]
    """Dimensions of the tensor along which it is cut."""
    in_order: bool
    """The local part is a run of slices of dimension 0, so of consecutive elements of the whole, or it is the whole."""
    offset: int
    """Index in the whole of the first element here; where parts are not in order, a number apart for each part."""
    replicas: int
    """Ranks that hold the same part."""
    slices: int = 0
    """Slices of dimension 0 here, where it alone is cut."""


_WHOLE = Cut(dims=(), in_order=True, offset=0, replicas=1)


def cut_of(p: Tensor) -> Cut:
    """How a parameter is cut; a plain tensor is not."""
    if not is_dtensor(p):
        return _WHOLE
    mesh, placements = p.device_mesh, tuple(p.placements)  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    found = _cut(tuple(p.shape), tuple(mesh.shape), placements, None if coordinate is None else tuple(coordinate))
    if found.dims == (0,) and found.in_order and coordinate is not None and found.slices != local(p).shape[0]:
        return replace(found, in_order=False)  # somebody has cut it in another way
    return found


@lru_cache(maxsize=4096)
def _cut(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Any, ...], coordinate: tuple[int, ...] | None
) -> Cut:
    dims = tuple(sorted({_dim(x, shape) for x in placements if hasattr(x, "dim")}))
    replicas, part = 1, 0
    for n, x, at in zip(mesh, placements, coordinate or [0] * len(mesh), strict=True):
        if hasattr(x, "dim"):
            part = part * n + at
        else:
            replicas *= n
    numel = torch.Size(shape).numel()
    if coordinate is None or not dims:
        return Cut(dims, True, 0, replicas)
    if dims != (0,):
        return Cut(dims, False, part * numel, replicas)
    slices = _slices(
        shape[0], [(n, x, at) for n, x, at in zip(mesh, placements, coordinate, strict=True) if hasattr(x, "dim")]
    )
    first = int(slices[0]) if len(slices) else 0
    in_order = not len(slices) or int(slices[-1]) - first + 1 == len(slices)
    width = numel // max(1, shape[0])
    return Cut(dims, in_order, first * width if in_order else part * numel, replicas, len(slices))


def _dim(placement: Any, shape: tuple[int, ...]) -> int:
    return int(placement.dim) % max(1, len(shape))


def _slices(size: int, cuts: Sequence[tuple[int, Any, int]]) -> Tensor:
    """One rank's slices of a dimension that is cut several times: (ranks, placement, rank among them) each.

    Of a dimension that tensor parallelism has cut before FSDP, meshes name FSDP first: its placement is strided, and
    what it cuts is what the later ones have left.
    """
    found = torch.arange(size)
    strided = [c for c in cuts if int(getattr(c[1], "split_factor", 1)) > 1]
    for ranks, _, rank in [*(c for c in cuts if c not in strided), *reversed(strided)]:
        chunks = found.chunk(ranks) if len(found) else ()
        found = chunks[rank] if rank < len(chunks) else found[:0]
    return found


_AVERAGED = {"row_var": -1, "col_var": -2}
"""Slots that are means over a dimension of the parameter, and have one element along it, which all parts need."""


def zeros(p: Tensor, shape: Sequence[int], dtype: torch.dtype, key: str = "") -> Tensor:
    """A state of zeros beside a parameter: of a DTensor a DTensor, of any other a plain tensor.

    ``shape`` is that of the whole, ``key`` the state's name.
    """
    if not is_dtensor(p):
        return torch.zeros(tuple(shape), dtype=dtype, device=p.device)
    here = list(shape)
    for dim in {x.dim % p.dim() for x in placements_of(p, shape, key) if hasattr(x, "dim")}:
        here[dim] = local(p).shape[dim]
    return like(p, torch.zeros(here, dtype=dtype, device=local(p).device), shape, key)


def like(p: Tensor, here: Tensor, shape: Sequence[int], key: str = "") -> Tensor:
    """A local tensor as this process's part of a state of this shape. Next to a plain parameter the tensor as it is."""
    if not is_dtensor(p):
        return here
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size(shape)
    meta = TensorMeta(shape, _row_major(shape), here.dtype)
    spec = DTensorSpec(p.device_mesh, placements_of(p, shape, key), tensor_meta=meta)  # type: ignore[attr-defined]
    # Not from_local: parameters that FSDP2 keeps on the host lie beside the device of their mesh.
    return DTensor(here.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def placements_of(p: Tensor, shape: Sequence[int], key: str = "") -> tuple[Any, ...]:
    """The placements of a state beside a DTensor: cut where the parameter is, along dimensions that have its size."""
    from torch.distributed.tensor import Replicate

    own: tuple[Any, ...] = tuple(p.placements)  # type: ignore[attr-defined]
    averaged = _AVERAGED.get(key)
    if averaged is None and tuple(shape) == tuple(p.shape):
        return own

    def keeps(x: Any) -> bool:
        if not hasattr(x, "dim"):
            return True
        dim = x.dim % p.dim()
        whole = averaged is not None and dim == averaged % p.dim()
        return not whole and dim < len(shape) and shape[dim] == p.shape[dim]

    return tuple(x if keeps(x) else Replicate() for x in own)


def beside(p: Tensor, value: Tensor, key: str = "") -> Tensor:
    """A state from a checkpoint, as the parameter lies: plain beside a plain one, a DTensor beside a DTensor.

    A DTensor beside a plain parameter, or of another mesh, is gathered: all ranks have to ask for it.
    """
    if not is_dtensor(p):
        gathered: Tensor = whole(value)
        return gathered
    wanted = placements_of(p, value.shape, key)
    if is_dtensor(value):
        if value.device_mesh == p.device_mesh:  # type: ignore[attr-defined]
            if tuple(value.placements) == wanted:  # type: ignore[attr-defined]
                return value
            dtype = torch.int32 if value.dtype == torch.int16 else value.dtype  # as in whole()
            moved: Tensor = value.to(dtype).redistribute(p.device_mesh, wanted)  # type: ignore[attr-defined]
            return moved.to(value.dtype)
        value = whole(value)
    return like(p, _cut_out(p, value, wanted), value.shape, key)


def _cut_out(p: Tensor, value: Tensor, placements: Sequence[Any]) -> Tensor:
    """This rank's part of a tensor that it has as a whole."""
    mesh = p.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    cuts: dict[int, list[tuple[int, Any, int]]] = {}
    for n, x, at in zip(mesh.shape, placements, coordinate or (), strict=False):
        if hasattr(x, "dim"):
            cuts.setdefault(x.dim % value.dim(), []).append((n, x, at))
    for dim, of_dim in cuts.items():
        value = value.index_select(dim, _slices(value.shape[dim], of_dim).to(value.device))
    return value.contiguous()


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        strides[d], step = step, step * max(1, shape[d])
    return tuple(strides)
