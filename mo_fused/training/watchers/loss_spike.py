"""Losses far above those of the steps before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mo_fused.training.watchers.base import Action, Observed, Watcher, above, number, whole
from mo_fused.training.watchers.recent_steps import RecentSteps, plain_stats

_KEPT = 8  # steps whose samples are kept until their record comes


class LossSpike(Watcher):
    """A loss above ``factor`` times the mean of the ``window`` steps before.

    Nothing is said before ``window`` losses are there, nor while their mean is not above 0. Steps that were skipped and
    losses that are not finite don't enter the mean; a spike does. The event has ``loss``, ``mean``, ``ratio``, ``lr``,
    ``grad_norm``; ``parameters``, what ``last_step.per_param()`` says of that step (with an optimizer of this package;
    its ring of four steps allows records that come three steps late); and, when ``batch_info`` has ``sample_losses``
    (1-D tensor), ``worst_losses`` and ``worst_samples``: the ids in ``sample_ids`` or else places in the batch. Of
    spikes in consecutive steps the first alone is followed by the action; all are events.

    A step costs the host some microseconds and the device nothing: sample losses and statistics stay where they are,
    and are read, which waits for the device, only after a spike.

    False alarms on a healthy level loss with independent log-normal noise (1e8 simulated steps,
    bench/false_alarms.py): none at 10 % of noise (standard deviation of the logarithm), one in 660,000 steps at 15 %,
    one in 5100 at 20 %: take a larger ``factor`` there.

    Args:
        factor: how far above the mean, above 1.
        window: steps that the mean is over.
        samples: how many of the worst samples are named.
        action: see :class:`Watcher`.

    Reads ``step``, ``loss``, ``skipped``, ``lr``, ``grad_norm``.
    """

    def __init__(self, factor: float = 2.0, window: int = 100, *, samples: int = 5, action: Action = "warn") -> None:
        super().__init__(action=action)
        self.factor, self.window = above("factor", factor, 1.0), whole("window", window, 2)
        self.samples = whole("samples", samples, 0)
        self._losses: deque[float] = deque(maxlen=window)
        self._recent = RecentSteps()
        self._batches: deque[tuple[int, Tensor, Any]] = deque(maxlen=_KEPT)
        self._spiked_at: int | None = None

    def on_step(self, monitor: Observed, loss: Tensor | float, batch_info: Mapping[str, Any]) -> None:
        self._recent.note(monitor, batch_info["step"])
        losses = batch_info.get("sample_losses")
        if losses is not None:
            self._batches.append((batch_info["step"], losses.detach(), batch_info.get("sample_ids")))

    def on_record(self, record: Mapping[str, Any]) -> None:
        loss = number(record, "loss")
        if loss is None or not math.isfinite(loss):
            return
        if len(self._losses) == self.window:
            mean = math.fsum(self._losses) / self.window
            if mean > 0.0 and loss > self.factor * mean:
                self._found(record, loss, mean)
        if not record.get("skipped"):
            self._losses.append(loss)

    def _found(self, record: Mapping[str, Any], loss: float, mean: float) -> None:
        step = int(record["step"])
        numbers: dict[str, Any] = {"loss": loss, "mean": mean, "ratio": loss / mean}
        numbers.update({key: number(record, key) for key in ("lr", "grad_norm")})
        parameters = self._recent.per_parameter(step)
        if parameters is not None:
            numbers["parameters"] = plain_stats(parameters)
        message = f"loss {loss:.4g} is {loss / mean:.2f} times the mean of the {self.window} steps before ({mean:.4g})"
        samples = self._worst(step)
        if samples:
            numbers["worst_samples"] = [sample for sample, _ in samples]
            numbers["worst_losses"] = [value for _, value in samples]
            message += "; worst samples " + ", ".join(f"{sample} ({value:.4g})" for sample, value in samples)
        following = self._spiked_at is not None and step == self._spiked_at + 1
        self._spiked_at = step
        self.emit(step, message, quiet=following, **numbers)

    def _worst(self, step: int) -> list[tuple[Any, float]]:
        """(id, loss) of the samples with the largest loss; NaN is larger than any number."""
        for kept, losses, ids in self._batches:
            if kept != step:
                continue
            values = losses.reshape(-1).double().cpu()
            largest, places = values.topk(min(self.samples, len(values)))
            known = ids.tolist() if isinstance(ids, Tensor) else ids
            return [(at if known is None else known[at], v) for at, v in zip(places.tolist(), largest.tolist())]
        return []
