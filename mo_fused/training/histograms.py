"""Histograms of magnitudes, counted where the numbers are."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST, LARGEST = -40, 16  # powers of two; float16 begins at 2**-24 and ends below 2**16
EDGES: tuple[float, ...] = (
    0.0,
    *(2.0**power for power in range(SMALLEST, LARGEST + 1)),
    float(torch.finfo(torch.float32).max),
)
"""Edges of the bins, one more than there are bins. The first bin has zeros and all below 2**-40, the last one all from
2**16 on, inf and NaN."""

_PIECE = 1 << 22  # elements at a time: the temporary tensors are some times their size


def magnitude_counts(values: Tensor) -> Tensor:
    """How many elements of ``values`` have a magnitude in each bin of :data:`EDGES`: int64, on the same device.

    Nothing waits for the device.
    """
    inner = torch.tensor(EDGES[1:-1], dtype=torch.float32).to(values.device, non_blocking=True)
    counts = torch.zeros(len(EDGES) - 1, dtype=torch.int64, device=values.device)
    for piece in torch.split(values.detach().reshape(-1), _PIECE):
        sizes = piece.abs().float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        bins = torch.bucketize(sizes, inner, right=True)
        counts.index_add_(0, bins, torch.ones_like(bins))
    return counts
