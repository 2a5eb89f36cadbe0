"""Optimizers whose parameters are a part of a model's: other ranks step the others (ZeRO-1, FSDP1, pipelines)."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .. import errors

if TYPE_CHECKING:
    from ..optim.base import FusedOptimizer

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_NEAR = 16
"""Calls between ZeroRedundancyOptimizer and the end of a constructor: two, and those of subclasses."""


def partitioned(optimizer: FusedOptimizer, process_group: Any = None) -> None:
    """Says that every rank of a group steps parameters of its own, all of them together one model's.

    Gradient norm, clipping, skip and the totals of ``last_step`` are then those of all ranks' parameters together, and
    every rank has to call ``step`` as often as the others. For stages of a pipeline, experts on ranks of their own, and
    FSDP1, whose ranks hold plain parts. ``ZeroRedundancyOptimizer(params, optimizer_class=mo_fused.AdamW, ...)`` needs
    no such call, and DTensors know the ranks of their meshes by themselves: with DTensors, ``process_group`` is those
    ranks that have the other stages or experts, one of each mesh. No parameter may be there on two ranks of the group.

    Args:
        optimizer: one of this package, before its next step.
        process_group: the ranks; None for all.

    Raises:
        TypeError: the optimizer is not one of this package.
        RuntimeError: torch.distributed is not initialized.
        ValueError: this process is not in the group; the optimizer is under :func:`mo_fused.gradient_release`.
    """
    from ..optim.base import FusedOptimizer

    if not isinstance(optimizer, FusedOptimizer):
        raise errors.partition_optimizer(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")
    optimizer = optimizer._bare()
    if not dist.is_available() or not dist.is_initialized():
        raise errors.no_process_group()
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise errors.not_a_member()
    if optimizer._release() is not None:
        raise errors.release_distributed("one rank's part of the parameters (partitioned)")
    optimizer.__dict__["_partition"] = dist.group.WORLD if process_group is None else process_group
    optimizer.__dict__.pop("_row_set", None)


def zero_group() -> Any:
    """The process group of the ZeroRedundancyOptimizer that is making its local optimizer right now, or None.

    It hands over parameters and defaults alone, nothing that tells of it, and a norm over one rank's parameters would
    clip each rank by another factor in silence: so the callers are looked at.
    """
    module = sys.modules.get(_ZERO)
    if module is None or not dist.is_initialized():
        return None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None:
            return None
        if frame.f_code.co_filename == module.__file__:
            owner = frame.f_locals.get("self")
            if isinstance(owner, module.ZeroRedundancyOptimizer):
                return owner.process_group
        frame = frame.f_back
    return None
