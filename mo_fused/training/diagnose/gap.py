"""Training loss against validation loss."""

from __future__ import annotations

import numpy as np

from mo_fused.training.diagnose.check import Check, curve, fault, not_judged, ok
from mo_fused.training.diagnose.start import Expected
from mo_fused.training.report.reading import Run

CHECK = "train/validation gap"
_LEAST = 4  # validations
_RISE = 0.10  # above the lowest validation loss
_NOISE = 3.0  # times what one validation differs from the next
_APART = 0.1  # of what knowing nothing costs: a gap that is no noise


def train_validation_gap(run: Run, expected: Expected | None) -> Check:
    """A validation loss that rises while that of training falls, or never gets below what knowing nothing costs."""
    at, held = curve(run, "val_loss")
    steps, losses = curve(run, "loss")
    if not len(held):
        return not_judged(CHECK, "no validation loss was recorded")
    if len(held) < _LEAST or not len(losses):
        return not_judged(CHECK, f"{len(held)} validations are too few ({_LEAST} are needed)")
    width = max(10, len(losses) // 20)
    best = int(held.argmin())
    end = float(np.median(held[-max(1, min(3, len(held) - 1 - best)) :]))
    there = int(np.searchsorted(steps, at[best], side="right"))
    then, last = float(np.mean(losses[max(0, there - width) : there or 1])), float(np.mean(losses[-width:]))
    seen = (
        f"validation {held[best]:.4g} at best (step {at[best]}), {end:.4g} at the end; "
        f"training {then:.4g} then, {last:.4g} at the end; gap {end - last:.3g}"
    )
    nothing = expected is not None and held.min() > expected.learned > last
    if expected is not None and nothing and end - last > _APART * expected.low:
        seen = f"{seen}; the validation loss never gets clearly below what knowing nothing costs ({expected.text})"
        means = "what is learned by heart says nothing about other samples: wrong labels in the training data"
        do = "look at twenty samples with their labels as the model gets them, after all shuffling and augmentation"
        return fault(CHECK, "wrong labels", seen, means, do)
    noise = float(np.median(np.abs(np.diff(held))))
    # A steady rise is no noise: what counts is how far single validations are from their neighbours' middle.
    if len(held) > _LEAST:
        noise = float(np.median(np.abs(held[1:-1] - (held[:-2] + held[2:]) / 2)))
    if end - held[best] > max(_RISE * abs(float(held[best])), _NOISE * noise) and last < then:
        means = "over-fitting: the model learns samples by heart"
        do = f"stop at the best validation (step {at[best]}); then take more data or augmentation, or a smaller model"
        return fault(CHECK, "over-fitting", f"{seen}; it has risen by {end / held[best] - 1:.0%}", means, do)
    return ok(CHECK, seen)
