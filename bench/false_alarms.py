"""How often the watchers of a healthy run raise an alarm: simulated losses and gradient norms, seeds fixed.

    python bench/false_alarms.py [--quick] [--output FILE]

LossSpike: a level loss with independent log-normal noise (the noise is the standard deviation of its logarithm).
NormOutlier: a level norm whose logarithm is normally distributed, or by Student's t with 5 degrees of freedom. Plateau:
looks that have nothing in common, each at a loss that improves by just ``min_improvement`` from one window to the next,
with normal noise. All watchers have their default arguments. What is counted are steps (of Plateau: looks) at which the
watcher's rule holds, and the first steps of a run, where it says nothing yet, are left out.

The rules are written once more, for many steps at a time; tests/test_false_alarms.py compares them with the watchers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mo_fused.bench import results
from mo_fused.bench.facts import circumstances, heading
from mo_fused.training import LossSpike, NormOutlier, Plateau
from mo_fused.training.watchers import norm_outlier

CHUNK = 1_000_000
NOISE = (0.10, 0.15, 0.20)
STEPS, HEAVY_STEPS, LOOKS, QUICK = 100_000_000, 10_000_000, 200_000, 20_000
FAR = 2.0
"""Smaller logarithms of norms, in the deviations of their distribution, are taken for no outliers: for six robust
deviations to fit below, those of a window of 100 would have to come out at a third of the true one."""


def spikes(losses: Tensor, factor: float, window: int) -> Tensor:
    """Whether each loss after the first ``window`` is above ``factor`` times the mean of the ``window`` before."""
    sums = torch.cat([losses.new_zeros(1), losses.cumsum(0)])
    means = (sums[window:-1] - sums[: -window - 1]) / window
    return losses[window:] > factor * means


def outliers(logs: Tensor, k: float, window: int, far: float = -math.inf) -> Tensor:
    """Whether each ln(norm) after the first ``window`` is ``k`` robust deviations above the median of those before."""
    found = torch.zeros(len(logs) - window, dtype=torch.bool)
    (looked,) = torch.where(logs[window:] > far)
    windows = logs.unfold(0, window, 1)[looked]
    middle = _middle(windows)
    deviation = norm_outlier._TO_DEVIATION * _middle((windows - middle[:, None]).abs())
    found[looked] = logs[window:][looked] > middle + k * deviation.clamp_min(norm_outlier._LEAST)
    return found


def _middle(rows: Tensor) -> Tensor:
    ordered, half = rows.sort(dim=1).values, rows.shape[1] // 2
    return ordered[:, half] if rows.shape[1] % 2 else 0.5 * (ordered[:, half - 1] + ordered[:, half])


def plateaus(losses: Tensor, min_improvement: float) -> Tensor:
    """Whether a look at each row, two windows long, finds that the later one has not improved enough."""
    halves = losses.unflatten(1, (2, -1))
    n = halves.shape[2]
    means = halves.mean(2)
    centred = torch.arange(n, dtype=losses.dtype) - (n - 1) / 2
    slopes = (halves * centred).sum(2, keepdim=True) / centred.square().sum()
    scatter = (halves - means[:, :, None] - slopes * centred).square().mean(2)
    error = (scatter.sum(1) / n).sqrt()
    return means[:, 0] - means[:, 1] + 2.0 * error < min_improvement * means[:, 0].abs()


def normal(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, dtype=torch.float64, generator=generator)


def student(count: int, generator: torch.Generator, degrees: int = 5) -> Tensor:
    squares = torch.randn(degrees, count, dtype=torch.float64, generator=generator).square().sum(0)
    return normal(count, generator) / (squares / degrees).sqrt()


def stream(draw: Callable[[int, torch.Generator], Tensor], steps: int, window: int, seed: int) -> Iterator[Tensor]:
    """One series of ``window + steps`` numbers in pieces that each begin with the last ``window`` of the one before."""
    generator = torch.Generator().manual_seed(seed)
    last = draw(window, generator)
    for done in range(0, steps, CHUNK):
        piece = torch.cat([last, draw(min(CHUNK, steps - done), generator)])
        last = piece[-window:]
        yield piece


def measure(quick: bool) -> Iterator[dict[str, Any]]:
    """A record for each watcher and kind of noise: ``alarms`` among ``steps``."""
    spike, outlier, plateau = LossSpike(), NormOutlier(), Plateau()
    steps = QUICK if quick else STEPS
    for noise in NOISE:
        series = stream(normal, steps, spike.window, 0)
        alarms = sum(int(spikes((noise * z).exp(), spike.factor, spike.window).sum()) for z in series)
        yield record("LossSpike", f"log-normal noise of {noise:.0%}", alarms, steps, quick)
    for name, draw, count in (("normal", normal, steps), ("t of 5 degrees", student, HEAVY_STEPS)):
        count = min(count, steps)
        series = stream(draw, count, outlier.window, 0)
        alarms = sum(int(outliers(z, outlier.k, outlier.window, FAR).sum()) for z in series)
        yield record("NormOutlier", f"ln(norm) {name}", alarms, count, quick)
    generator, looks, alarms = torch.Generator().manual_seed(0), QUICK // 100 if quick else LOOKS, 0
    # Falls in a straight line: its means are 1 and 1 - min_improvement.
    places = torch.arange(2 * plateau.window, dtype=torch.float64) - (plateau.window - 1) / 2
    level = 1.0 - plateau.min_improvement * places / plateau.window
    for done in range(0, looks, 500):
        shape = (min(500, looks - done), len(level))
        noisy = level + 0.1 * torch.randn(shape, dtype=torch.float64, generator=generator)
        alarms += int(plateaus(noisy, plateau.min_improvement).sum())
    yield record("Plateau", "improves by min_improvement", alarms, looks, quick)


def record(watcher: str, case: str, alarms: int, steps: int, quick: bool) -> dict[str, Any]:
    found = {"contender": watcher, "quick": quick, "alarms": alarms, "steps": steps, "seed": 0}
    return {"bench": "false_alarms", "case": f"{watcher}, {case}", **found}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: does it run, not how often")
    parser.add_argument("--output", metavar="FILE", help="append the results to FILE, a CSV file")
    given = parser.parse_args(words)
    facts = circumstances()
    print(heading(facts), flush=True)
    for found in measure(given.quick):
        print(f"{found['case']:<45} {found['alarms']:>7} alarms in {found['steps']:,} steps", flush=True)
        results.append(given.output, [found], facts)


if __name__ == "__main__":
    main()
