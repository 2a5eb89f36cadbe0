"""The gradient norm out of DDP's communication: what has just been averaged is measured while it is in cache.

The step then needs no first pass over the gradients. Whether they are still what was measured is told by the gradient
tensors themselves and their version counters; if not, the step measures as it always does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import dispatch, errors
from ..device_gradients import on_one_device
from ..host_gradients import HostGradients
from ..table import MEASURE

if TYPE_CHECKING:
    from ..optim.base import FusedOptimizer

Values = tuple[float, float, float, float]
"""Norm, largest magnitude, non-finite and zero elements of one gradient as it is, scaled by a GradScaler or not."""


def norm_hook(
    ddp_model: torch.nn.parallel.DistributedDataParallel,
    optimizer: FusedOptimizer,
    hook: Callable[[Any, Any], Any] | None = None,
    state: Any = None,
) -> NormHook:
    """Registers a communication hook that measures each bucket's gradients when they have been averaged.

    A step that clips, skips or has a GradScaler then reads the gradients once instead of twice. After an edit of a
    gradient (clipping by hand, ``unscale_``, accumulation without synchronisation) the step measures them itself; an
    edit through ``grad.data`` is not noticed. On a GPU ``last_step.per_param()`` then has no fields of gradients, and
    with ``stats=True`` the step measures itself.

    Args:
        ddp_model: the model in its DistributedDataParallel, which takes one communication hook.
        optimizer: AdamW, Adam or SGD of this package over its parameters.
        hook: what communicates, as for ``register_comm_hook``; None averages as DDP does without a hook.
        state: what the hook gets first.

    Returns:
        The hook; ``hits`` counts the steps that needed no pass of their own.

    Raises:
        TypeError: not a DistributedDataParallel, or an optimizer of somebody else.
        ValueError: Adafactor, whose first pass is more than a norm; an optimizer under gradient release.
    """
    from ..optim.base import FusedOptimizer

    if not isinstance(ddp_model, torch.nn.parallel.DistributedDataParallel):
        raise errors.hook_model(type(ddp_model).__name__)
    if not isinstance(optimizer, FusedOptimizer):
        raise errors.hook_optimizer(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")
    optimizer = optimizer._bare()
    if optimizer._rule.factored:
        raise errors.hook_factored()
    if optimizer._release() is not None:
        raise errors.release_ddp()
    if hook is None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        hook, state = allreduce_hook, ddp_model.process_group
    found = NormHook(optimizer, hook, state)
    # DDP looks at a hook's annotations, and takes those of this file, which are strings, for wrong ones.
    ddp_model.register_comm_hook(found, lambda state, bucket: state.communicate(bucket))
    optimizer.__dict__["_norm_hook"] = found
    return found


class NormHook:
    """What :func:`norm_hook` returns."""

    def __init__(self, optimizer: FusedOptimizer, hook: Callable[[Any, Any], Any], state: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._hook, self._state = hook, state
        self._values: dict[int, Values] = {}
        self._records: list[tuple[list[int], Tensor]] = []
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._clips: dict[int, bool] = {}
        self.hits = 0
        """Steps that needed no first pass."""

    def communicate(self, bucket: Any) -> Any:
        """Communicates one bucket, and measures what comes out of it."""
        if bucket.index() == 0:
            self._begin()
        if bucket.is_last():
            # DDP copies buckets to gradients in a callback that it queues after this one, which queues its own then.
            _at_the_end(lambda: _at_the_end(self._note_versions))

        def measure(future: Any) -> Any:
            value = future.value()
            averaged = value[0] if isinstance(value, (list, tuple)) else value
            self._measure(bucket, averaged)
            return averaged

        return self._hook(self._state, bucket).then(measure)

    def _begin(self) -> None:
        self._values, self._records, self._seen = {}, [], {}
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        self._clips = {id(p): bool(g.get("clip", True)) for g in groups for p in g["params"]}

    @torch.no_grad()
    def _measure(self, bucket: Any, averaged: Tensor) -> None:
        start = bucket.buffer().storage_offset()
        for clips in (True, False):
            params, grads = [], []
            for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if self._clips.get(id(p)) is clips:
                    at = averaged.storage_offset() + view.storage_offset() - start
                    params.append(id(p))
                    grads.append(averaged.as_strided(view.shape, view.stride(), at))
            if not grads:
                continue
            device = on_one_device(grads)
            if device is not None:
                record, _ = device.measure_part()
                if not clips:
                    record[0] = 0.0
                self._records.append((params, record))
                continue
            host = HostGradients(list(grads))
            host.run(MEASURE)
            self._values.update(zip(params, host.rows(), strict=True))

    def _note_versions(self) -> None:
        optimizer = self._optimizer()
        for group in [] if optimizer is None else optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and not p.grad.is_inference():
                    self._seen[id(p)] = (weakref.ref(p.grad), p.grad._version)

    # -- the step -----------------------------------------------------------------------------------------------------

    def holds(self, params: list[Tensor]) -> bool:
        """Whether the gradients of these parameters, and of no others, are what was measured."""
        of_device = {i for ids, _ in self._records for i in ids}
        there = {id(p) for p in params if p.grad is not None}
        return (there == of_device if of_device else there <= self._values.keys()) and all(
            p.grad is None or self._is_as_it_was(p, p.grad) for p in params
        )

    def _is_as_it_was(self, p: Tensor, grad: Tensor) -> bool:
        seen = self._seen.get(id(p))
        return seen is not None and seen[0]() is grad and seen[1] == grad._version

    def values(self, p: Tensor) -> Values:
        """What was measured of a gradient on the host."""
        return self._values[id(p)]

    def records(self) -> list[Tensor]:
        """The totals of the gradients on a device: see DevicePart.partial."""
        for _, record in self._records:
            dispatch.used_here(record)  # it was made on a stream of the communication
        return [record for _, record in self._records]


def _at_the_end(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
