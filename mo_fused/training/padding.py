"""Sequences of different lengths in one batch, and a loss whose mean counts the real targets only.

Padding stands on the right. Where a model looks only to the left (causal attention, positions counted from the left),
what it computes for a real element is then the same as without padding, and the padded targets don't count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mo_fused.errors import bad_option, message
from mo_fused.training.batches import sample_count, tensors

IGNORE = -100  # the default of torch.nn.functional.cross_entropy
_NAMES = ("labels", "targets")


class PaddedBatch(NamedTuple):
    """``inputs`` and ``targets`` int64, ``mask`` bool and true where an element is real; each (batch, length)."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor


def pad_batch(
    sequences: Sequence[tuple[Any, Any]], *, pad_value: int = 0, ignore_index: int = IGNORE, multiple_of: int = 1
) -> PaddedBatch:
    """Put pairs (inputs, targets) of integer sequences together, padded on the right to the longest.

    Serves as ``DataLoader(dataset, collate_fn=pad_batch)``.

    Args:
        sequences: one pair for each sample, both of the same length: 1-D integer tensors, arrays or lists.
        pad_value: stands in the inputs where there is nothing; an index that the model's embedding has.
        ignore_index: stands in the targets there; :func:`cross_entropy` doesn't count it.
        multiple_of: the length is rounded up to a multiple of this, so that fewer different shapes occur.

    Raises:
        ValueError: no sequence, one that isn't 1-D or no integers, or a pair of two lengths.
    """
    if multiple_of < 1:
        raise bad_option("multiple_of", "1 or more", multiple_of, "leave it out to pad to the longest sequence")
    pairs = [tuple(_integers(part, n) for part in pair) for n, pair in enumerate(sequences)]
    if not pairs:
        raise ValueError(message("at least one sequence to pad", "none", "give pad_batch a list of pairs"))
    for n, pair in enumerate(pairs):
        if len(pair) != 2 or len(pair[0]) != len(pair[1]):
            raise ValueError(
                message(
                    f"sequence {n} to be a pair of inputs and targets of one length",
                    f"lengths {', '.join(str(len(part)) for part in pair)}",
                    f"give every input a target; {ignore_index} marks one that must not count",
                )
            )
    longest = max(len(inputs) for inputs, _ in pairs)
    shape = (len(pairs), -(-longest // multiple_of) * multiple_of)
    batch = PaddedBatch(
        torch.full(shape, pad_value), torch.full(shape, ignore_index), torch.zeros(shape, dtype=torch.bool)
    )
    for n, (inputs, targets) in enumerate(pairs):
        batch.inputs[n, : len(inputs)] = inputs
        batch.targets[n, : len(inputs)] = targets
        batch.mask[n, : len(inputs)] = True
    return batch


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Mean cross-entropy in nats over the targets that aren't ``ignore_index``; 0, with zero gradients, without any.

    The same number as ``torch.nn.functional.cross_entropy`` gives where any target counts. fp16 and bf16 logits are
    computed with in fp32. The host doesn't wait for the device.

    Args:
        logits: (..., classes).
        targets: integer classes, the shape of ``logits`` without its last dimension.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    flat = targets.reshape(-1)
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, ignore_index=ignore_index, reduction="sum")
    return total / (flat != ignore_index).sum().clamp(min=1)


def count_targets(batch: Any, ignore_index: int = IGNORE) -> int:
    """Number of targets in a batch that a mean loss is taken over: its weight among the batches of one step.

    The targets are what a mapping or named tuple calls "labels" or "targets", else the second element of a tuple or
    list. Integers are classes: those that aren't ``ignore_index`` count. For other targets, or none, the samples count
    (first dimension of the first tensor). A model that shifts its labels itself drops some: count these yourself.

    Reads the targets' values, so call it before the batch goes to a device, or the host waits for that device.

    Raises:
        TypeError: no tensor in the batch.
    """
    targets = targets_in(batch)
    if targets is not None and not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool):
        return int((targets != ignore_index).sum())
    if next(tensors(batch), None) is None:
        found = type(batch).__name__
        raise TypeError(message("a batch with tensors in it", found, "make tensors of it (collate_fn), or give count="))
    return sample_count(batch)


def targets_in(batch: Any) -> Tensor | None:
    """What a mapping or named tuple calls "labels" or "targets", else the second element of a tuple or list."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in _NAMES if name in batch), None)
    elif isinstance(batch, (tuple, list)):
        named = next((getattr(batch, name) for name in _NAMES if name in getattr(batch, "_fields", ())), None)
        found = named if named is not None else batch[1] if len(batch) > 1 else None
    return found if isinstance(found, Tensor) else None


def _integers(values: Any, n: int) -> Tensor:
    tensor = torch.as_tensor(values)
    # An empty list becomes a float tensor.
    bad = tensor.is_floating_point() and tensor.numel() or tensor.is_complex() or tensor.dtype == torch.bool
    if tensor.dim() != 1 or bad:
        raise ValueError(
            message(
                f"sequence {n} to be one-dimensional integers",
                f"{tensor.dtype} of shape {tuple(tensor.shape)}",
                "pad other data in a collate function of your own",
            )
        )
    return tensor.long()
