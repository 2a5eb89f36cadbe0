"""Late spikes of the loss, and whether the same samples are in them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from mo_fused.training.diagnose.check import (
    Check,
    Floats,
    Steps,
    curve,
    fault,
    not_judged,
    ok,
    setting,
    some,
    warm_up_end,
)
from mo_fused.training.diagnose.gradients import found_by
from mo_fused.training.report.reading import Run

CHECK = "late spikes"
_WINDOW, _FACTOR = 100, 2.0  # those of LossSpike
_SHARE = 0.25  # of the first loss: a smaller rise is noise of a loss that is nearly 0
_DEVIATIONS, _TAILS = 8.0, 3.0  # robust deviations of the window; times its upper tail (to the 95 % quantile)
_MANY = 3  # spikes, or spikes with the same sample
_SMALLEST = 0.02  # of the first loss, of a spike whose samples are looked at
_WRONG = 3.0  # times the first loss: a sample that the model is sure of, and wrong
_ALONE = 50.0  # times the median of the worst samples named: then its loss need only be above the first one
_OUTSTANDING = 0.5  # share of the worst sample's loss


def late_spikes(run: Run) -> Check:
    """Losses above twice the mean of the 100 before, far outside their noise and no small part of the first loss.

    A smaller spike that LossSpike has found is looked at too, for its samples. One stands out whose loss is far above
    the run's first loss (or just above it, if those of the batch's other samples are nothing beside it). Samples that
    stand out in two spikes or more are bad, if they are in three or more and half of all in which a sample stands out.
    """
    steps, losses = curve(run, "loss")
    begin = warm_up_end(run) or 0
    if len(losses) <= _WINDOW:
        return not_judged(CHECK, f"{len(losses)} steps are too few (more than {_WINDOW} are needed)")
    first = abs(float(losses[0]))
    spikes = _spikes(steps, losses, begin)
    events = [e for e in found_by(run, "LossSpike") if e["step"] > begin and _rise(e) > _SMALLEST * first]
    again, standing, unclear = _samples(events, first, setting(run, "batch_size"))
    if again:
        listed = some(f"{sample} ({count} times)" for sample, count in again)
        seen = f"of {len(events)} spikes that LossSpike found, {standing} have samples that stand out, and again and "
        means = "bad samples: broken inputs or wrong labels in them"
        return fault(
            CHECK,
            "bad samples",
            f"{seen}again these: {listed}",
            means,
            "look at these samples, and mend or remove them",
        )
    if not spikes:
        count = int((steps[_WINDOW:] > begin).sum())
        return ok(CHECK, f"none in {count} steps: above twice the mean of the {_WINDOW} before and outside the noise")
    seen = f"{len(spikes)} (step{'s' if len(spikes) > 1 else ''} {some(spikes)}); "
    seen += unclear or f"they do not cluster on samples ({standing} spikes with samples that stand out)"
    if len(spikes) < _MANY:
        return ok(CHECK, seen)
    means = "the rate is too high for this stage, or batches are broken that no watcher could name"
    do = "give the monitor sample_losses and sample_ids" if unclear else "lower the rate, or clip (max_grad_norm=1)"
    return fault(CHECK, "late spikes", seen, means, do)


def _spikes(steps: Steps, losses: Floats, begin: int) -> list[int]:
    """The steps after ``begin`` whose loss is a spike."""
    before = np.lib.stride_tricks.sliding_window_view(losses[:-1], _WINDOW)
    mean, now, at = before.mean(axis=1), losses[_WINDOW:], steps[_WINDOW:]
    chosen = np.flatnonzero((mean > 0.0) & (now > _FACTOR * mean) & (at > begin))
    spikes = []
    for place in chosen.tolist():  # one by one: all windows at once are a hundred times the log
        window = before[place]
        middle = float(np.median(window))
        noise = _DEVIATIONS * 1.4826 * float(np.median(np.abs(window - middle)))
        tail = _TAILS * (float(np.quantile(window, 0.95)) - middle)
        if now[place] - middle > max(noise, tail, _SHARE * abs(float(losses[0]))):
            spikes.append(int(at[place]))
    return spikes


def _samples(events: list[dict[str, Any]], first: float, batch: Any) -> tuple[list[tuple[str, int]], int, str]:
    """The samples that come back, the number of spikes with samples that stand out, and why nothing is known."""
    named = [event for event in events if isinstance(event.get("worst_samples"), list) and event["worst_samples"]]
    if not named:
        return [], 0, "whether they cluster on samples is not known: no ids were recorded"
    ids = [sample for event in named for sample in event["worst_samples"]]
    if isinstance(batch, int) and all(isinstance(one, int) and one < batch for one in ids):
        return [], 0, "the samples have places in their batch instead of ids, which says nothing about them"
    standing = [found for event in named if (found := _standing_out(event, first))]
    count = Counter(sample for found in standing for sample in found)
    again = [(sample, n) for sample, n in count.most_common() if n >= 2]
    covered = sum(not found.isdisjoint(sample for sample, _ in again) for found in standing)
    return again if covered >= max(_MANY, len(standing) / 2) else [], len(standing), ""


def _standing_out(event: dict[str, Any], first: float) -> set[str]:
    samples, losses = event["worst_samples"], event.get("worst_losses")
    if not isinstance(losses, list) or len(losses) != len(samples):
        return set()
    # Null is what JSON has for a loss that is not finite.
    values = [float(one) if isinstance(one, (int, float)) else np.inf for one in losses]
    certain = _WRONG * first if values[0] < _ALONE * float(np.median(values)) else first
    least = max(certain, _OUTSTANDING * values[0])
    return {str(sample) for sample, value in zip(samples, values, strict=True) if value >= least}


def _rise(event: dict[str, Any]) -> float:
    """How far the loss of a spike was above the mean before; infinite if the event does not say it."""
    loss, mean = event.get("loss"), event.get("mean")
    if isinstance(loss, (int, float)) and isinstance(mean, (int, float)):
        return float(loss) - float(mean)
    return float("inf")
