"""The loss once the rate is at its peak: whether it jumps there, falls afterwards, and stays down."""

from __future__ import annotations

import numpy as np

from mo_fused.training.diagnose.check import Check, Floats, curve, fault, from_the_start, not_judged, ok, warm_up_end
from mo_fused.training.diagnose.start import Expected
from mo_fused.training.report.reading import Run

CHECK = "loss after the warm-up"
_LEAST = 50  # steps
_AT_PEAK, _SHARE = 50, 0.05  # steps after the warm-up that belong to the peak, and that share of a longer run
_RISE = 1.3  # times the first loss, in three steps on end: one bad batch is no jump
_HARDLY = 5  # steps: a shorter warm-up is none
_STALLED = 0.97  # of the first loss
_STALLED_STEPS = 100  # after the warm-up
_NEARBY = 1.1  # times what knowing nothing costs
_SMALL_UPDATE = 1e-6  # of the parameters' norm; 1e-3 is usual


def after_warm_up(run: Run, expected: Expected | None) -> Check:
    """A jump at the peak rate, a loss that does not fall, and one that has fallen and risen again."""
    steps, losses = curve(run, "loss")
    if len(losses) < _LEAST:
        return not_judged(CHECK, f"{len(losses)} steps with a finite loss are too few ({_LEAST} are needed)")
    if not from_the_start(run):
        return not_judged(CHECK, f"the log begins with step {run.steps[0]}")
    peak = warm_up_end(run)
    first, size = float(losses[0]), max(10, len(losses) // 5)
    last, smooth = float(np.median(losses[-size:])), smoothed(losses)
    begun = f"the peak rate was reached in step {peak}" if peak is not None else "no learning rate was recorded"
    if peak is not None and len(losses) - np.searchsorted(steps, peak) < _LEAST // 2:
        return not_judged(CHECK, f"{begun} of {steps[-1]}: too few steps came after it")
    until = (peak or 1) + max(_AT_PEAK, _SHARE * int(steps[-1]))
    three = np.lib.stride_tricks.sliding_window_view(losses, 3).min(axis=1)[: np.searchsorted(steps, until, "right")]
    highest, at = float(three.max()), int(steps[three.argmax()])
    seen = (
        f"{begun}; loss {first:.4g} at first, up to {highest:.4g} in three steps on end by step {until:.0f}, "
        f"{last:.4g} at the end"
    )
    if first > 0.0 and highest > _RISE * first:
        seen = f"{seen}: {highest / first:.1f} times the first loss from step {at}"
        if peak is not None and peak <= _HARDLY:
            means = "the full rate met moments and weights that had not settled: there is no warm-up"
            do = "let the rate rise over the first 1 to 10 % of the steps (warmup_steps), at the same peak"
            return fault(CHECK, "no warm-up", seen, means, do)
        means = "the peak rate is too high for this model"
        return fault(CHECK, "rate too high", seen, means, "lower the peak rate to a third")
    lowest = float(smooth.min())
    if lowest > 0.0 and last > 2.0 * lowest and last - lowest > 0.25 * abs(first):
        seen = f"{seen}: it had been {lowest:.4g} in step {steps[smooth.argmin()]}"
        means = "training has diverged: the rate is too high for what the model has become"
        return fault(CHECK, "diverged", seen, means, "lower the rate to a third from the last good checkpoint")
    if steps[-1] - (peak or 0) < _STALLED_STEPS:
        return ok(CHECK, f"{seen} (whether it has stalled takes {_STALLED_STEPS} steps after the warm-up)")
    as_if_nothing = expected is not None and expected.learned < last <= _NEARBY * expected.high
    if as_if_nothing or (first > 0.0 and last > _STALLED * first and (expected is None or last > expected.learned)):
        return _stalled(run, expected, seen, last)
    return ok(CHECK, seen)


def smoothed(losses: Floats) -> Floats:
    """The median of each five consecutive losses, which one bad batch doesn't move."""
    padded = np.pad(losses, 2, mode="edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1), dtype=np.float64)


def _stalled(run: Run, expected: Expected | None, seen: str, last: float) -> Check:
    _, ratios = curve(run, "update_ratio")
    if len(ratios) and np.median(ratios) < _SMALL_UPDATE:
        seen = f"{seen}; updates are {np.median(ratios):.2g} of the parameters' norm (usual: 1e-3)"
        means = "the rate is so low that the model stands still"
        return fault(CHECK, "rate too low", seen, means, "raise the rate tenfold")
    if expected is not None and expected.learned < last <= _NEARBY * expected.high:
        seen = f"{seen}: it stays at what knowing nothing costs ({expected.text})"
        means = "inputs say nothing about their labels: wrong labels, or labels shuffled against their inputs"
        do = "look at twenty samples with their labels as the model gets them, after all shuffling and augmentation"
        if not len(run.layers.steps):
            means += "; a vanishing gradient could do the same, which details.jsonl would tell"
        return fault(CHECK, "wrong labels", seen, means, do)
    means = "the rate is far off, or what the loss depends on is not trained"
    do = "overfit one batch (mo_fused.training.overfit_check): if that fails, the model or the loss is broken"
    return fault(CHECK, "loss does not fall", seen, means, do)
