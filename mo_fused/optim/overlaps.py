"""Which of many tensors have memory in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor


def sharing(tensors: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, int]]:
    """Owners of tensors that have an element in common, in the order of memory; an owner may share with itself.

    Args:
        tensors: (owner, tensor) of strided tensors that are not empty.
    """
    spans = []
    for owner, t in tensors:
        reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        spans.append((t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size(), owner, t))
    spans.sort(key=lambda span: span[:2])
    open_spans: list[tuple[int, int, int, Tensor]] = []
    for span in spans:
        open_spans = [other for other in open_spans if other[1] > span[0]]
        for other in open_spans:
            if _share_elements(other[3], span[3]):
                yield other[2], span[2]
        open_spans.append(span)


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose spans of memory intersect have an element in common."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    addresses = []
    for t in (a, b):
        at = np.array([t.data_ptr()], dtype=np.int64)
        for n, s in zip(t.shape, t.stride(), strict=True):
            at = (at[:, None] + np.arange(n, dtype=np.int64)[None, :] * (s * t.element_size())).reshape(-1)
        addresses.append(at)
    return bool(np.intersect1d(addresses[0], addresses[1]).size)
