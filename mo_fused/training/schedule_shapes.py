"""Shapes of the learning-rate schedules: the factor on each group's peak rate at step k, counted from 0.

Objects rather than closures, because ``LambdaLR.state_dict`` saves the attributes of objects and drops functions: so a
resumed run keeps its shape. The attributes are plain numbers. In the formulas T is ``total_steps``, N is
``warmup_steps`` and m is ``min_ratio``.

Every shape begins with the same warm-up: step k < N has the factor (k + 1) / N, so no step has rate 0 and step N - 1
has the peak. Where the cosine or the line has one step only, N = T - 1, that step has its beginning, the peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class WarmupLinear:
    """::

    N <= k < T       m + (1 - m) * (1 - p)                p = (k - N) / (T - 1 - N), so step T - 1 has m
    k >= T           m
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
        return self.min_ratio + (1.0 - self.min_ratio) * self._left(progress)

    def _left(self, progress: float) -> float:
        return 1.0 - progress


@dataclass
class WarmupCosine(WarmupLinear):
    """::

    N <= k < T       m + (1 - m) * (1 + cos(pi * p)) / 2  p = (k - N) / (T - 1 - N), so step T - 1 has m
    k >= T           m
    """

    def _left(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass
class WarmupStableDecay:
    """::

    N <= k < T - D   1
    T - D <= k < T   m + (1 - m) * (1 - p**q)             p = (k - (T - D) + 1) / D, so D steps are below the peak
    k >= T           m                                    and step T - 1 has m

    with D = ``decay_steps`` and q = ``decay_power``: 1 is a straight line, 1/2 the "1-sqrt" shape.
    """

    total_steps: int
    warmup_steps: int
    decay_steps: int
    min_ratio: float
    decay_power: float

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if step >= self.total_steps:
            return self.min_ratio
        decayed = step - (self.total_steps - self.decay_steps) + 1
        if decayed <= 0:
            return 1.0
        return self.min_ratio + (1.0 - self.min_ratio) * (1.0 - math.pow(decayed / self.decay_steps, self.decay_power))


@dataclass
class WarmupConstant:
    """::

    k >= N           1
    """

    warmup_steps: int

    def __call__(self, step: int) -> float:
        return (step + 1) / self.warmup_steps if step < self.warmup_steps else 1.0


@dataclass
class InverseSqrt:
    """::

    k >= N           sqrt(N / (k + 1))
    """

    warmup_steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return math.sqrt(self.warmup_steps / (step + 1))
