"""Variable-length batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor


from torch import Tensor


def count_targets(batch: Any, ignore_index: int = -100) -> int:
    t = (
        batch[1]
        if isinstance(batch, (tuple, list))
        else batch.get("labels", batch.get("targets"))
        if isinstance(batch, dict)
        else None
    )
    if isinstance(t, Tensor) and not t.is_floating_point():
        return int((t != ignore_index).sum())
    from mo_fused.training.batches import sample_count

    return sample_count(batch)
