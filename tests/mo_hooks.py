"""Hooks by which outside reproductions of reported faults reach features whose names they cannot know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import mo_fused


def skip_nonfinite(params: Iterable[Any], **kwargs: Any) -> Any:
    """An AdamW that drops a step with any non-finite gradient element."""
    return mo_fused.AdamW(params, skip_nonfinite=True, **kwargs)


def offload(params: Iterable[Any], **kwargs: Any) -> Any:
    """An AdamW that keeps its states in the host's memory."""
    return mo_fused.AdamW(params, offload="cpu", **kwargs)


def was_skipped(opt: Any) -> bool:
    """Whether the last step changed nothing because of an overflow."""
    return opt.last_step is not None and bool(opt.last_step.skipped)


def last_grad_norm(opt: Any) -> float:
    """The global gradient norm of the last step, before clipping."""
    return float(opt.last_step.grad_norm)


def nonfinite_names(params: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters with a non-finite gradient element; one read of the gradients, one of the counts."""
    with_grad = {name: p.grad for name, p in params.items() if p.grad is not None}
    counts = mo_fused.grad_stats(list(with_grad.values())).nonfinites.tolist()
    return [name for name, count in zip(with_grad, counts, strict=True) if count]


def zero_report(params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Zero elements, all elements, and the names of parameters whose gradient is all zero or missing."""
    with_grad = {name: p.grad for name, p in params.items() if p.grad is not None}
    zeros = mo_fused.grad_stats(list(with_grad.values())).zero_counts.tolist()
    sizes = {name: g.numel() for name, g in with_grad.items()}
    return {
        "zeros": sum(zeros),
        "elements": sum(sizes.values()),
        "all_zero": [name for name, zero in zip(with_grad, zeros, strict=True) if zero == sizes[name]],
        "no_grad": [name for name, p in params.items() if p.grad is None],
    }


def accum_step(
    model: torch.nn.Module,
    opt: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    max_norm: float,
) -> Tensor:
    """One step over micro-batches: the mean over all samples, clipped once. Returns that mean loss."""
    samples = sum(len(x) for x, _ in batches)
    opt.zero_grad()
    total = torch.zeros(())
    for x, y in batches:
        loss = loss_fn(model(x), y).sum() / samples
        loss.backward()
        total = total + loss.detach()
    mo_fused.clip_grad_norm_(model.parameters(), max_norm)
    opt.step()
    return total
