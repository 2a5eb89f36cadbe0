"""Batches of any nesting: to a device, and how many samples they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``: dicts, lists, tuples and named tuples are rebuilt, anything else that
    has ``to(device)`` is asked to move itself, other values stay as they are."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if type(batch) is dict:
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    return batch


def sample_count(batch: Any) -> int:
    """Length of the first dimension of the first tensor in the batch; 1 where there is none."""
    first = next(tensors(batch), None)
    return 1 if first is None or first.dim() == 0 else int(first.shape[0])


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of the batch, in its order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(part)
