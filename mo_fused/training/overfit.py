"""Whether a model can learn a few samples by heart: if not, something is wrong that more data won't mend."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mo_fused.errors import bad_option
from mo_fused.training.batches import sample_count, to_device
from mo_fused.training.errors import bad_input
from mo_fused.training.feed import Feed
from mo_fused.training.snapshot import kept_state
from mo_fused.training.trial import Watch, peak_rate

if TYPE_CHECKING:
    from mo_fused.training.trainer import Trainer


@dataclass(frozen=True)
class OverfitCheck:
    """How it went; ``losses`` are (steps done, mean loss of the samples), the first before any step.

    Each is the lower one of two: measured in eval mode, and that of the training steps of the last pass. Dropout keeps
    the latter up, and batch norm the former, whose running statistics are not those of the batches.
    """

    ok: bool
    samples: int
    steps: int
    threshold: float
    losses: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        first, last = self.losses[0][1], self.losses[-1][1]
        what = f"{self.samples} samples, loss {first:.4g} before"
        if self.ok:
            near = f"{self.threshold:.4g} counts as near zero"
            return f"gets there after {self.steps} steps: {what}, {last:.4g} then ({near})"
        lowest = min((loss for _, loss in self.losses if math.isfinite(loss)), default=math.nan)
        stays = f"loss stays at {last:.4g}" if math.isfinite(last) else f"loss is {last}"
        return (
            f"does not get there: {stays} after {self.steps} steps ({what}, {lowest:.4g} at its lowest, "
            f"{self.threshold:.4g} wanted); look at labels, loss function, frozen parameters, learning rate"
        )


def overfit_check(
    trainer: Trainer,
    loader: Iterable[Any],
    samples: int = 100,
    *,
    max_steps: int = 500,
    relative: float = 0.05,
    absolute: float = 0.01,
    every: int = 10,
) -> OverfitCheck:
    """:meth:`Trainer.overfit_check`, which says what it does."""
    for name, value in (("samples", samples), ("max_steps", max_steps), ("every", every)):
        if value < 1:
            raise bad_option(name, "1 or more", value, "give a whole number")
    for name, share in (("relative", relative), ("absolute", absolute)):
        if not 0.0 <= share < math.inf:
            raise bad_option(name, "0 or more", share, "leave it out for the usual threshold")
    with kept_state(trainer, loader):
        batches = first_samples(loader, samples)
        if not any(trainer.count(batch) for batch in batches):
            raise bad_input(
                "loader",
                expected=f"valid targets among its first {samples} samples",
                found="none",
                remedy="look at the targets (ignore_index marks those that don't count), or ask for more samples",
            )
        _prepare(trainer, len(batches))
        watch = trainer.monitor = Watch()
        per_pass = -(-len(batches) // trainer.accumulate)
        losses = [(0, _loss(trainer, batches))]
        threshold = max(relative * losses[0][1], absolute)
        done = 0
        while done < max_steps and math.isfinite(losses[-1][1]) and losses[-1][1] > threshold:
            wanted = min(done + every, max_steps)
            trainer.fit(batches, trainer.step + wanted - done)
            done = wanted
            # In this order a loss that is NaN in eval mode stays one. All processes have to end at the same step.
            lower = min(_loss(trainer, batches), _last_pass(watch.losses, per_pass))
            losses.append((done, float(trainer._processes.from_first(lower))))
    return OverfitCheck(
        ok=losses[-1][1] <= threshold,
        samples=sum(map(sample_count, batches)),
        steps=done,
        threshold=threshold,
        losses=tuple(losses),
    )


def first_samples(loader: Iterable[Any], samples: int) -> list[Any]:
    """Batches with the first ``samples`` samples of an epoch, the last one cut to size; fewer where it ends before.

    A cut that leaves a single sample is left out where there are others: batch norm can't train on one.
    """
    feed = Feed(loader)
    batches: list[Any] = []
    missing = samples
    while missing > 0 and feed.epoch == 0:
        batch = feed.take(1)[0]
        size = sample_count(batch)
        if size > missing:
            if missing == 1 and batches:
                break
            batch = cut(batch, size, missing)
        batches.append(batch)
        missing -= size
    return batches


def cut(batch: Any, size: int, wanted: int) -> Any:
    """The first ``wanted`` samples of a batch of ``size``: of all tensors and lists whose length that is."""
    if isinstance(batch, Tensor):
        return batch[:wanted] if batch.dim() and batch.shape[0] == size else batch
    if isinstance(batch, UserDict):  # transformers' BatchEncoding: its entries are attributes too
        kept = copy.copy(batch)
        kept.update({key: cut(value, size, wanted) for key, value in batch.items()})
        return kept
    if isinstance(batch, Mapping):
        return {key: cut(value, size, wanted) for key, value in batch.items()}
    if isinstance(batch, tuple):
        parts = [cut(value, size, wanted) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        if len(batch) == size and not any(isinstance(value, Tensor) for value in batch):
            return batch[:wanted]
        return [cut(value, size, wanted) for value in batch]
    return batch


def _prepare(trainer: Trainer, batches: int) -> None:
    """The peak rate throughout, no decay of weights, nothing written, nobody told."""
    trainer.schedule = trainer.checkpoints = trainer.validate = None
    trainer.accumulate = min(trainer.accumulate, batches)
    trainer._feed = trainer._resumed = None
    trainer.optimizer.zero_grad()
    for group in trainer.optimizer.param_groups:
        peak = peak_rate(group)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(peak)
        else:
            group["lr"] = peak
        if "weight_decay" in group:
            group["weight_decay"] = 0.0


def _last_pass(losses: list[float], steps: int) -> float:
    """The mean over the last pass; infinite before there is a whole one."""
    return math.inf if len(losses) < steps else math.fsum(losses[-steps:]) / steps


@torch.no_grad()
def _loss(trainer: Trainer, batches: list[Any]) -> float:
    """Mean over the valid targets of all batches and processes, in eval mode."""
    model, processes = trainer._processes.module, trainer._processes
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        count = int(trainer.count(batch))
        if count:
            with trainer.precision.autocast():
                loss = trainer.loss_fn(model, to_device(batch, trainer.device))
            sums += torch.tensor([float(loss) * count, count], dtype=torch.float64)
    total, count = processes.sum(sums.to(trainer.device, torch.float32)).tolist()
    return float(total / count)
