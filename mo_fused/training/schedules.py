"""Learning-rate schedules: each function returns a torch ``LRScheduler`` whose state_dict holds plain numbers only.

They have in common that the groups' present rates are the peaks, that a warm-up of N steps gives step k (from 0) the
rate peak * (k + 1) / N, and that ``step()`` is called once after every optimizer step. A checkpoint's state brings its
own shape with it; to go on with another shape (a longer run, an earlier decay) leave that state out and give
``last_epoch``, the number of steps done minus one, after loading the optimizer's state.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mo_fused.errors import bad_option
from mo_fused.training.schedule_shapes import (
    InverseSqrt,
    WarmupConstant,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
)

# Power of the decay's progress by the name of its shape.
_DECAY_POWERS = {"linear": 1.0, "sqrt": 0.5}


def warmup_cosine(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int | None = None,
    min_ratio: float = 0.1,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up to each group's own rate, then half a cosine down to ``min_ratio`` times that rate.

    Loshchilov and Hutter 2017, "SGDR", without restarts. The formula is :class:`WarmupCosine`'s.

    Args:
        optimizer: any torch optimizer.
        total_steps: number of optimizer steps of the run; the rate stays at its minimum afterwards.
        warmup_steps: number of warm-up steps; ``None`` is 1 % of ``total_steps``, at least one.
        min_ratio: the last step's rate as a share of the peak.
        last_epoch: index of the last step done, as for every torch schedule; -1 starts.

    Raises:
        ValueError: ``total_steps`` below 1, ``warmup_steps`` outside 0..total_steps, ``min_ratio`` outside 0..1.
    """
    total, warmup = _lengths(total_steps, warmup_steps)
    return LambdaLR(optimizer, WarmupCosine(total, warmup, _ratio(min_ratio)), last_epoch)


def warmup_linear(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int | None = None,
    min_ratio: float = 0.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up to each group's own rate, then a straight line down to ``min_ratio`` times that rate.

    The last step has ``min_ratio``, so with 0 it changes nothing. The formula is :class:`WarmupLinear`'s. Arguments and
    errors are those of :func:`warmup_cosine`.
    """
    total, warmup = _lengths(total_steps, warmup_steps)
    return LambdaLR(optimizer, WarmupLinear(total, warmup, _ratio(min_ratio)), last_epoch)


def warmup_stable_decay(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int | None = None,
    decay_steps: int | None = None,
    min_ratio: float = 0.0,
    shape: str = "linear",
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up, the peak for most of the run, then a short decay to ``min_ratio`` times the peak (WSD).

    Hu et al. 2024, "MiniCPM"; the shapes of the decay are from Hägele et al. 2024, "Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations". The formula is :class:`WarmupStableDecay`'s. Any checkpoint from before
    the decay can be decayed, see this module's head.

    Args:
        optimizer, total_steps, warmup_steps, min_ratio, last_epoch: as for :func:`warmup_cosine`.
        decay_steps: number of steps below the peak at the end; ``None`` is 10 % of ``total_steps``, at least one, as
            far as the warm-up leaves room.
        shape: "linear", or "sqrt" for 1 - sqrt(progress), which falls faster at first.

    Raises:
        ValueError: ``total_steps`` below 1, ``warmup_steps`` outside 0..total_steps, ``decay_steps`` outside
            0..(total_steps - warmup_steps), ``min_ratio`` outside 0..1, an unknown ``shape``.
    """
    total, warmup = _lengths(total_steps, warmup_steps)
    room = total - warmup
    if decay_steps is None:
        decay_steps = min(max(1, total // 10), room)
    decay = _whole("decay_steps", decay_steps)
    if not 0 <= decay <= room:
        expected = f"0 to total_steps - warmup_steps ({room})"
        raise bad_option("decay_steps", expected, decay, "give a shorter decay, a shorter warm-up or more steps")
    ratio = _ratio(min_ratio)
    if shape not in _DECAY_POWERS:
        raise bad_option("shape", " or ".join(map(repr, _DECAY_POWERS)), shape, "give one of these")
    return LambdaLR(optimizer, WarmupStableDecay(total, warmup, decay, ratio, _DECAY_POWERS[shape]), last_epoch)


def warmup_constant(
    optimizer: Optimizer,
    warmup_steps: int | None = None,
    *,
    total_steps: int | None = None,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up to each group's own rate, which stays.

    Args:
        optimizer, last_epoch: as for :func:`warmup_cosine`.
        warmup_steps: number of warm-up steps; may be left out where ``total_steps`` is given.
        total_steps: number of optimizer steps of the run; 1 % of it, at least one, is the default warm-up.

    Raises:
        ValueError: neither number given, ``warmup_steps`` below 0 or above ``total_steps``, ``total_steps`` below 1.
    """
    return LambdaLR(optimizer, WarmupConstant(_warmup_alone(warmup_steps, total_steps, least=0)), last_epoch)


def inverse_sqrt(
    optimizer: Optimizer,
    warmup_steps: int | None = None,
    *,
    total_steps: int | None = None,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up to each group's own rate, then as one over the square root of the step's number.

    Vaswani et al. 2017, "Attention Is All You Need", scaled so that the highest rate is the group's: step k has
    peak * min((k + 1) / N, sqrt(N / (k + 1))). The length of the run plays no part but for the default warm-up.

    Args:
        optimizer, last_epoch: as for :func:`warmup_cosine`.
        warmup_steps: N, at least 1; may be left out where ``total_steps`` is given.
        total_steps: number of optimizer steps of the run; 1 % of it, at least one, is the default warm-up.

    Raises:
        ValueError: neither number given, ``warmup_steps`` below 1 or above ``total_steps``, ``total_steps`` below 1.
    """
    return LambdaLR(optimizer, InverseSqrt(_warmup_alone(warmup_steps, total_steps, least=1)), last_epoch)


def _lengths(total_steps: int, warmup_steps: int | None, least: int = 0) -> tuple[int, int]:
    """Both numbers checked, the default warm-up put in."""
    total = _whole("total_steps", total_steps)
    if total < 1:
        raise bad_option("total_steps", "1 or more", total, "give the number of optimizer steps of the run")
    warmup = max(1, total // 100) if warmup_steps is None else _whole("warmup_steps", warmup_steps)
    if not least <= warmup <= total:
        expected = f"{least} to total_steps ({total})"
        raise bad_option("warmup_steps", expected, warmup, "give a shorter warm-up or more steps")
    return total, warmup


def _warmup_alone(warmup_steps: int | None, total_steps: int | None, least: int) -> int:
    if total_steps is not None:
        return _lengths(total_steps, warmup_steps, least)[1]
    if warmup_steps is None:
        raise bad_option("warmup_steps", "given", None, "give warmup_steps, or total_steps for a warm-up of 1 % of it")
    warmup = _whole("warmup_steps", warmup_steps)
    if warmup < least:
        raise bad_option("warmup_steps", f"{least} or more", warmup, "give the number of warm-up steps")
    return warmup


def _whole(name: str, value: Any) -> int:
    """A plain int: a share such as 0.1 would pass every comparison, and a NumPy number would end up in the state."""
    try:
        return operator.index(value)
    except TypeError:
        raise bad_option(name, "a whole number", value, "give a number of steps, not a share of them") from None


def _ratio(min_ratio: Any) -> float:
    if isinstance(min_ratio, str) or min_ratio is None or not 0.0 <= min_ratio <= 1.0:
        raise bad_option("min_ratio", "0 to 1", min_ratio, "give the last rate as a share of the peak")
    return float(min_ratio)
