"""What a trainer does in one step: draw batches, backward passes, clip, update, schedule."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mo_fused.errors import message
from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.batches import sample_count, to_device
from mo_fused.training.deferred import Deferred
from mo_fused.training.errors import bad_input
from mo_fused.training.feed import Feed
from mo_fused.training.precision import Precision
from mo_fused.training.processes import Processes

LossFn = Callable[[nn.Module, Any], Tensor]
"""(model, batch on the model's device) to the mean loss over the batch's valid targets, a 0-dim tensor."""


MOST_WITHOUT = 10_000
"""Batches in a row without a valid target after which an endless loader is taken to have none."""


def check_loss(loss: object) -> None:
    """Raises TypeError unless ``loss`` is what a :data:`LossFn` returns."""
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        found += " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        remedy = "return the mean over the batch's valid targets"
        if isinstance(loss, Tensor) and not loss.requires_grad:
            remedy = "look for detach(), no_grad() and a model whose parameters are all frozen"
        raise TypeError(f"loss_fn: {message('a 0-dim tensor to call backward on', found, remedy)}")


def _whole(count: Any) -> int:
    """A number of targets; a fraction would be cut to size, and the step be no longer that of one large batch."""
    try:
        return operator.index(count)
    except TypeError:
        found = repr(count)
        raise TypeError(f"count: {message('a whole number of valid targets', found, 'return an int')}") from None


class StepMonitor(Protocol):
    """What a trainer calls after every step; :class:`Trainer` says what ``batch_info`` holds."""

    def step(self, loss: Tensor, batch_info: Mapping[str, Any]) -> None:
        """A step has been made. ``loss``: its mean loss, 0-dim, on the device."""


class TrainerStep:
    """The part of :class:`Trainer` that makes one optimizer step."""

    model: nn.Module
    optimizer: Optimizer
    loss_fn: LossFn
    schedule: LRScheduler | None
    precision: Precision
    accumulate: int
    max_grad_norm: float | None
    monitor: StepMonitor | None
    count: Callable[[Any], int]
    device: torch.device
    _processes: Processes
    _feed: Feed | None
    _resumed: Mapping[str, Any] | None
    _skipped: Deferred | bool | None  # the step before
    _left_out: bool  # the last step, by a scaler that has waited for the device
    _stop_asked: bool
    _save_at_stop: bool
    _stop_words: list[Deferred]

    @property
    def epoch(self) -> int:
        """Epochs of the loader that are over."""
        if self._feed is not None:
            return self._feed.epoch
        return 0 if self._resumed is None else int(self._resumed.get("epoch") or 0)

    def _one_step(self, feed: Feed) -> tuple[Tensor, dict[str, Any]]:
        """One optimizer step: its loss and what a monitor is told."""
        begun = time.perf_counter()
        batches, targets = self._take(feed)
        waited = time.perf_counter() - begun
        lr = self.optimizer.param_groups[0]["lr"]
        try:
            loss = self._backward(batches, targets)
            measured = self._update()
        except BaseException:  # half a step's gradients must not count in the next one
            self.optimizer.zero_grad()
            if self.precision.scaler is not None:  # unscaled already, it would refuse to do so again
                self.precision.scaler._per_optimizer_states.clear()
            raise
        info: dict[str, Any] = {
            "epoch": self.epoch,
            "lr": float(lr),
            "batches": len(batches),
            "samples": sum(sample_count(batch) for batch in batches),
            "targets": sum(targets),
            "data_seconds": waited,
            "seconds": time.perf_counter() - begun,
            "measured": measured,
            "validation": None,
        }
        return loss, info

    def _take(self, feed: Feed) -> tuple[list[Any], list[int]]:
        """The batches of a step and their numbers of valid targets; those without any are left out (unless sharded)."""
        epoch, without = feed.epoch, 0
        while True:
            batches = feed.take(self.accumulate)
            targets = [_whole(self.count(batch)) for batch in batches]
            kept = [i for i, count in enumerate(targets) if count > 0]
            if self._processes.sharded and self._processes.count > 1:
                kept = list(range(len(batches)))  # every forward pass gathers parameters from the other processes
            elif not kept and self._processes.count > 1:
                kept = [0]  # the other processes wait for this one's backward pass
            if kept:
                return [batches[i] for i in kept], [targets[i] for i in kept]
            without += len(batches)
            if feed.epoch > epoch + 1 or without >= MOST_WITHOUT:
                raise bad_input(
                    "loader",
                    expected="batches with valid targets",
                    found=f"{without} batches without any",
                    remedy="look at the targets (ignore_index marks those that don't count), or give count= to Trainer",
                )

    def _backward(self, batches: list[Any], targets: list[int]) -> Tensor:
        """Backward passes of a step; returns its mean loss over all valid targets of all processes (detached)."""
        processes, scaler = self._processes, self.precision.scaler
        total: Tensor | float = float(sum(targets))
        if processes.count > 1:  # gradients will be averaged, so each process's share counts that much more
            total = (
                processes.sum(torch.tensor(total, device=self.device, dtype=torch.float64)).clamp(min=1.0)
                / processes.count
            )
        parts = []
        for number, (batch, count) in enumerate(zip(batches, targets, strict=True), 1):
            with nullcontext() if number == len(batches) else processes.no_sync():
                with self.precision.autocast():
                    loss = self.loss_fn(self.model, to_device(batch, self.device))
                check_loss(loss)
                if count == 0:
                    loss = processes.nothing(loss)
                share = count / total
                if isinstance(share, Tensor):
                    share = share.to(torch.promote_types(loss.dtype, torch.float32))
                weighted = loss if processes.count == 1 and count == total else loss * share
                (weighted if scaler is None else scaler.scale(weighted)).backward()  # type: ignore[no-untyped-call]
            parts.append(weighted.detach().to(torch.promote_types(weighted.dtype, torch.float32)))
        mean = torch.stack(parts).sum()
        if processes.count > 1:
            unsaved = self._stop_asked and not self._save_at_stop
            own = mean.new_tensor([float(self._stop_asked), float(unsaved)])
            mean, stop, unsaved = processes.sum(torch.cat([mean.reshape(1) / processes.count, own]))
            self._stop_words = [*self._stop_words[-1:], Deferred({"stop": stop, "unsaved": unsaved})]
        return mean

    def _update(self) -> dict[str, Tensor]:
        """Clip, step, schedule; returns what was measured (0-dim tensors on the device)."""
        optimizer, scaler = self.optimizer, self.precision.scaler
        # Without amp="fused" the scaler may leave the step out, and last_step is another's.
        ours = isinstance(optimizer, FusedOptimizer) and (scaler is None or optimizer._step_supports_amp_scaling)
        measured: dict[str, Tensor] = {}
        if self.max_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            groups = [group for group in optimizer.param_groups if group.get("clip", True)]
            parameters = [parameter for group in groups for parameter in group["params"]]
            norm = nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
            # The same formula that clip_grad_norm_ applies and doesn't return.
            coefficient = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            measured.update({"grad_norm": norm, "clip_coef": coefficient})
        skipped_now = False
        if scaler is None:
            optimizer.step()
        else:
            # With another optimizer torch's scaler waits for the device anyway, and knows at once.
            before = 0.0 if ours else scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped_now = not ours and scaler.get_scale() < before
        last = optimizer.last_step if isinstance(optimizer, FusedOptimizer) and not skipped_now else None
        if last is not None and self.monitor is not None:
            names = ("grad_norm", "update_norm", "clip_coef", "skipped")
            measured.update({name: value for name in names if (value := getattr(last, name)) is not None})
        if scaler is not None and not ours:
            measured["skipped"] = torch.tensor(skipped_now, device=self.device)
        optimizer.zero_grad()
        # That the step before this one was skipped is read only now, with this one queued.
        if self.schedule is not None and not skipped_now and not self._was_skipped():
            self.schedule.step()
        self._skipped = None
        if ours and last is not None:
            known = last.on_host()
            self._skipped = Deferred({"skipped": last.skipped}) if known is None else bool(known["skipped"])
        self._left_out = skipped_now
        return measured

    def _was_skipped(self) -> bool:
        skipped = self._skipped
        return bool(skipped.read()["skipped"]) if isinstance(skipped, Deferred) else bool(skipped)
