"""A user's code, checked and not run: ``mypy --strict tests/typed_consumer.py`` beside an installed mo_fused.

``assert_type`` fails where a result is Any, and an ignored error that is none fails too (``warn_unused_ignores``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from typing_extensions import assert_type

import mo_fused
from mo_fused import training


def build(model: nn.Module) -> mo_fused.AdamW:
    return mo_fused.AdamW(training.decay_groups(model, weight_decay=0.1), lr=1e-3, max_grad_norm=1.0, stats=True)


def measured(model: nn.Module) -> None:
    assert_type(mo_fused.clip_grad_norm_(model.parameters(), 1.0), torch.Tensor)
    assert_type(mo_fused.get_total_norm(list(model.parameters())), torch.Tensor)
    assert_type(mo_fused.grad_stats(p for p in model.parameters()), mo_fused.GradStats)


def loop(model: nn.Module, batches: Iterable[torch.Tensor]) -> float:
    opt = build(model)
    as_torch: torch.optim.AdamW = opt
    scaler: torch.amp.GradScaler = mo_fused.GradScaler("cpu")
    schedule = training.warmup_cosine(opt, 100, 10)
    as_schedule: torch.optim.lr_scheduler.LRScheduler = schedule
    for batch in batches:
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(as_torch)
        scaler.update()
        as_schedule.step()
    last = opt.last_step
    assert_type(last, mo_fused.StepStats | None)
    return 0.0 if last is None or last.grad_norm is None else float(last.grad_norm)


def moved(opt: mo_fused.SGD, other: mo_fused.Adafactor) -> None:
    mo_fused.from_state_dict(opt, mo_fused.to_torch_state_dict(other), source="torch")
    print(opt.explain(), training.param_groups(nn.Linear(1, 1), training.NO_DECAY, lr=0.1))


def wrong(model: nn.Module) -> None:
    """What must be an error."""
    mo_fused.AdamW(model.parameters(), max_grad_norm="1")  # type: ignore[arg-type]
    mo_fused.AdamW(model.parameters(), no_such_option=True)  # type: ignore[call-arg]
    mo_fused.grad_stats(3)  # type: ignore[arg-type]
    training.warmup_cosine(model, 100, 10)  # type: ignore[arg-type]
