"""Whether the first loss is that of a model that knows nothing yet: ln(classes) for a mean cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mo_fused.training.findings import Finding
from mo_fused.training.padding import targets_in

if TYPE_CHECKING:
    from mo_fused.training.trainer import Trainer

_CHECK = "first loss"
_NEAR = 0.15  # share of ln(classes)


class StartWatch:
    """The number of classes: what the user says, else what the first output and its targets look like."""

    def __init__(self, trainer: Trainer, classes: int | None) -> None:
        self.classes = classes
        self.given = classes is not None
        self._trainer = trainer
        self._batch: Any = None
        self._handle: Any = None

    def __enter__(self) -> StartWatch:
        if not self.given:
            inner = self._trainer.loss_fn

            def loss_fn(model: Any, batch: Any) -> Tensor:
                self._batch = batch
                try:
                    return inner(model, batch)
                finally:
                    self._batch = None
                    self._trainer.loss_fn = inner

            self._trainer.loss_fn = loss_fn
            self._handle = self._trainer.model.register_forward_hook(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _look(self, _model: object, _inputs: object, output: Any) -> None:
        if self._batch is not None and self.classes is None:
            self.classes = classes_of(output, self._batch)


def classes_of(output: Any, batch: Any) -> int | None:
    """The number of classes where ``output`` holds logits for the integer targets of ``batch``, else None.

    Logits: the first float tensor of the output with two columns or more, one row for each target. The last dimension
    is the classes, or the second one where the other dimensions are the targets' (images: batch, classes, ...).
    """
    targets, logits = targets_in(batch), _logits(output)
    if targets is None or logits is None or not targets.numel() or targets.is_floating_point() or targets.is_complex():
        return None
    if targets.numel() * logits.shape[-1] == logits.numel():
        classes = int(logits.shape[-1])
    elif logits.shape[:1] + logits.shape[2:] == targets.shape:
        classes = int(logits.shape[1])
    else:
        return None
    return classes if classes >= 2 and int(targets.max()) < classes else None


def judge_start(losses: list[float], start: StartWatch, begun_at: int) -> Finding:
    """Compares the first loss with ln(classes)."""
    if begun_at:
        return Finding(_CHECK, "ok", f"not looked at: the run is at step {begun_at} already")
    if not losses or start.classes is None:
        return Finding(_CHECK, "ok", "not looked at: no number of classes is known (give classes= if there is one)")
    first, expected = losses[0], math.log(start.classes)
    source = "as given" if start.given else "from the model's output"
    seen = f"{first:.4g}; ln({start.classes}) = {expected:.4g} is what knowing nothing costs ({source})"
    if not math.isfinite(first):
        return Finding(_CHECK, "problem", seen, "see the values that are not finite")
    if first > expected * (1 + _NEAR):
        do = "the initial weights of the last layer are too large, or inputs are not normalised, or the loss is no mean"
        return Finding(_CHECK, "warning", f"{seen}: {first / expected - 1:.0%} above", do)
    if first < expected * (1 - _NEAR):
        do = (
            "fine for a model that has been trained before or where one class is frequent; else the targets leak into "
            "the inputs, labels are wrong (too few classes in them), or padding counts as easy targets"
        )
        return Finding(_CHECK, "warning", f"{seen}: {1 - first / expected:.0%} below", do)
    return Finding(_CHECK, "ok", seen)


def _logits(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.dim() >= 2 and output.shape[-1] >= 2 else None
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    return next((found for part in parts if (found := _logits(part)) is not None), None)
