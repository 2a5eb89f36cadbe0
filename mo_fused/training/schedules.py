"""Learning-rate schedules: each function returns a torch ``LRScheduler`` whose state_dict holds plain numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mo_fused.errors import bad_option


@dataclass
class WarmupCosine:
    """Factor on each group's peak rate at step k, counted from 0.

    ::

        k < N            (k + 1) / N                          no step has rate 0, step N - 1 has the peak
        N <= k < T       m + (1 - m)/2 * (1 + cos(pi * p))    p = (k - N) / (T - 1 - N), so step T - 1 has m
        k >= T           m

    with T = ``total_steps``, N = ``warmup_steps``, m = ``min_ratio``. An object rather than a closure, because
    ``LambdaLR.state_dict`` saves the attributes of objects and drops functions: a resumed run keeps its shape.
    """

    total_steps: int
    warmup_steps: int
    min_ratio: float

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if step >= self.total_steps:
            return self.min_ratio
        progress = (step - self.warmup_steps) / max(1, self.total_steps - 1 - self.warmup_steps)
        return self.min_ratio + 0.5 * (1.0 - self.min_ratio) * (1.0 + math.cos(math.pi * progress))


def warmup_cosine(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int | None = None,
    min_ratio: float = 0.1,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up to each group's own rate, then half a cosine down to ``min_ratio`` times that rate.

    Call ``step()`` once after every optimizer step. The groups' present rates are the peaks.

    Args:
        optimizer: any torch optimizer.
        total_steps: number of optimizer steps of the run; the rate stays at its minimum afterwards.
        warmup_steps: number of warm-up steps; ``None`` is 1 % of ``total_steps``, at least one.
        min_ratio: the last rate as a share of the peak.
        last_epoch: index of the last step done, as for every torch schedule; -1 starts.

    Raises:
        ValueError: ``total_steps`` below 1, ``warmup_steps`` outside 0..total_steps, ``min_ratio`` outside 0..1.
    """
    if total_steps < 1:
        raise bad_option("total_steps", "1 or more", total_steps, "give the number of optimizer steps of the run")
    if warmup_steps is None:
        warmup_steps = max(1, total_steps // 100)
    if not 0 <= warmup_steps <= total_steps:
        expected = f"0 to total_steps ({total_steps})"
        raise bad_option("warmup_steps", expected, warmup_steps, "give a shorter warm-up or more steps")
    if not 0.0 <= min_ratio <= 1.0:
        raise bad_option("min_ratio", "0 to 1", min_ratio, "give the last rate as a share of the peak")
    return LambdaLR(optimizer, WarmupCosine(total_steps, warmup_steps, min_ratio), last_epoch)
