"""In which order the elements of a row are walked, when its operands are not all dense in the same order.

Names follow NumPy's and torch's iterators: dimensions are sorted by the parameter's strides and merged where every
operand allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MAX_DIMS = 8
OPERANDS = 6


@dataclass(frozen=True)
class Plan:
    """The part of a row that follows from dtypes, sizes and strides."""

    numel: int
    dtypes: tuple[int, int, int, int, int, int]
    """Codes of csrc/abi.h; -1 where there is no such operand."""
    layout: list[int] | None
    """Words of a Layout record (csrc/abi.h), or None when the operands are dense in one and the same order."""
    block: int = 0
    """Elements that share a scale, where the state is quantised."""


@dataclass(frozen=True)
class Order:
    layout: list[int] | None
    problem: str
    """Why the kernels cannot walk these operands; empty when they can."""
    overlapping: bool
    """A written operand certainly has several elements at one address (an expanded tensor)."""


def dense_in_one_order(operands: Sequence[Tensor]) -> bool:
    """Whether all of them, of one shape, lie without gaps in one and the same order."""
    first = operands[0]
    if all(t.is_contiguous() for t in operands):
        return True
    size = first.shape
    strides = [s for s, n in zip(first.stride(), size, strict=True) if n != 1]
    for t in operands[1:]:
        if [s for s, n in zip(t.stride(), size, strict=True) if n != 1] != strides:
            return False
    expected = 1
    for stride, n in sorted((s, n) for s, n in zip(first.stride(), size, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True


def _may_overlap(strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """Conservative: False only when no two elements share an address."""
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def walking_order(operands: Sequence[Tensor | None], written: Sequence[int], keep_order: bool = False) -> Order:
    """How to walk the given operands (param, grad, state0..2, master) together; all that are there have the same sizes.

    Args:
        written: positions of those that are written.
        keep_order: in the order of the shape, whatever the strides.
    """
    operands = [*operands, *[None] * (OPERANDS - len(operands))]
    there = [t for t in operands if t is not None]
    lead = there[0]
    in_order = all(t.is_contiguous() for t in there) if keep_order else dense_in_one_order(there)
    if lead.numel() == 0 or in_order:
        return Order(None, "", False)
    dims = [d for d, n in enumerate(lead.shape) if n != 1]
    sizes = [lead.shape[d] for d in dims]
    strides = [[0] * len(dims) if t is None else [t.stride(d) for d in dims] for t in operands]
    for i in written:
        if 0 in strides[i]:
            return Order(None, "its elements share memory", True)
        if _may_overlap(strides[i], sizes):
            return Order(None, "its elements may share memory", False)
    leading = next(i for i, t in enumerate(operands) if t is not None)
    order = sorted(range(len(dims)), key=lambda k: 0 if keep_order else -strides[leading][k])
    merged: list[tuple[int, list[int]]] = []
    for k in order:
        size, step = sizes[k], [s[k] for s in strides]
        if merged:
            outer_size, outer = merged[-1]
            if all(o == s * size for o, s in zip(outer, step, strict=True)):
                merged[-1] = (outer_size * size, step)
                continue
        merged.append((size, step))
    if not merged:  # one element
        merged = [(1, [1] * len(operands))]
    if len(merged) > MAX_DIMS:
        return Order(None, f"its layout needs {len(merged)} dimensions, the kernels walk {MAX_DIMS}", False)
    return Order(_words(merged, operands), "", False)


def _words(merged: list[tuple[int, list[int]]], operands: Sequence[Tensor | None]) -> list[int]:
    dims = len(merged)
    pad = [0] * (MAX_DIMS - dims)
    words = [dims, *(n for n, _ in merged), *pad]
    for op in range(OPERANDS):
        words += [steps[op] for _, steps in merged] + pad
    for op in range(OPERANDS):
        expected, linear = 1, operands[op] is not None
        for size, steps in reversed(merged):
            linear = linear and (size == 1 or steps[op] == expected)
            expected *= size
        words.append(int(linear))
    return words
