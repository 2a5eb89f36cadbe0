"""Moments in 8 or 4 bits: the twin of csrc/rules/quantised.h, and the state entries that hold them.

A quantised moment is two entries of a parameter's state: codes (``exp_avg_q8``: int8 of the parameter's shape,
``exp_avg_sq_q8``: uint8, ``exp_avg_q4`` and ``exp_avg_sq_q4``: uint8 of shape ``(n, slice / 2)``, two codes in a byte,
the first in its lower half) and ``exp_avg_scale``, float32 of shape ``(n, blocks of a slice)``. ``n`` is the
parameter's first dimension and a slice the rest of it, so that no block crosses the border of a shard along it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import errors
from .distributed import shards

Entry = dict[str, Any]

SIGNED = ("exp_avg", "momentum_buffer")
ROOTS = ("exp_avg_sq", "max_exp_avg_sq")
MOMENTS = SIGNED + ROOTS
"""Slots that can be quantised. Those of squares are kept as roots."""
SMALLEST = 4096
"""Tensors of fewer elements keep float32 moments, and so do vectors."""
LARGEST_BLOCK = {"int8": 256, "int4": 128}
SMALLEST_BLOCK = 32
STATE_SLOT = 2
"""What the random numbers are keyed by beside the step (kState0 of csrc/abi.h)."""


@dataclass(frozen=True)
class Code:
    """One QuantType of csrc/abi.h: steps of 2**-mantissa at zero, ``top`` the largest magnitude's code."""

    number: int
    bits: int
    mantissa: int
    top: int
    root: bool
    dtype: torch.dtype

    @property
    def reach(self) -> float:
        """The value of the largest code, before it is scaled."""
        exponent, fraction = divmod(self.top, 1 << self.mantissa)
        return (1.0 + fraction / (1 << self.mantissa)) * 2.0**exponent - 1.0

    @property
    def limit(self) -> float:
        """The largest magnitude, also kept for an infinite one (a root's: the largest with a finite square)."""
        return float.fromhex("0x1.fffffep63") if self.root else float(torch.finfo(torch.float32).max)


Q8 = Code(6, 8, 5, 127, False, torch.int8)
Q8_ROOT = Code(7, 8, 7, 255, True, torch.uint8)
Q4 = Code(8, 4, 2, 7, False, torch.uint8)
Q4_ROOT = Code(9, 4, 2, 15, True, torch.uint8)

_CODES = {"int8": (Q8, Q8_ROOT), "int4": (Q4, Q4_ROOT)}
QUANTISED = tuple(_CODES)
"""What ``state_dtype`` may be besides dtypes."""


def code_of(key: str, state_dtype: str) -> Code:
    """The code that a slot is kept in."""
    return _CODES[state_dtype][key in ROOTS]


def names(key: str, code: Code) -> tuple[str, str]:
    """The entries that hold a slot: codes and scales."""
    return f"{key}_q{code.bits}", f"{key}_scale"


ALL_SLOTS = tuple(name for key in MOMENTS for name in (f"{key}_q8", f"{key}_q4", f"{key}_scale"))


def slot_of(name: str) -> str:
    """The slot that an entry of a state belongs to: codes and scales to the moment that they hold."""
    return name.rpartition("_")[0] if name in ALL_SLOTS else name


def block_for(shape: Sequence[int], state_dtype: str) -> int:
    """Elements of a tensor of this shape that share a scale; 0: it keeps float32 moments.

    The shape is that of the whole tensor, so that a shard along the first dimension decides as the whole does.
    """
    if len(shape) < 2 or math.prod(shape) < SMALLEST:
        return 0
    width = math.prod(shape[1:])
    block = min(width & -width, LARGEST_BLOCK[state_dtype])
    return block if block >= SMALLEST_BLOCK else 0


def block_of(p: Tensor, state_dtype: str) -> int:
    """Elements of the parameter that share a scale; 0: it keeps float32 moments."""
    of_float32 = p.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return block_for(p.shape, state_dtype) if of_float32 else 0


def shapes_of(shape: torch.Size, code: Code, block: int) -> tuple[torch.Size, torch.Size]:
    """The shapes of codes and scales of a parameter."""
    width = shape.numel() // shape[0]
    codes = shape if code.bits == 8 else torch.Size((shape[0], width // 2))
    return codes, torch.Size((shape[0], width // block))


def holds(entry: Entry, key: str, code: Code, p: Tensor, block: int) -> bool:
    """Whether the state has this slot in these codes already."""
    found = tuple(entry.get(name) for name in names(key, code))
    wanted = zip(shapes_of(p.shape, code, block), (code.dtype, torch.float32), strict=True)
    return all(
        isinstance(t, Tensor)
        and type(shards.local(t)) is Tensor
        and t.shape == shape
        and t.dtype == dtype
        and shards.local(t).is_contiguous()
        and t.device == p.device
        for t, (shape, dtype) in zip(found, wanted, strict=True)
    )


def make(key: str, code: Code, p: Tensor, block: int) -> Entry:
    """The entries of a slot of zeros, as the kernels want them."""
    codes, scale = shapes_of(p.shape, code, block)
    of_codes, of_scale = names(key, code)
    return {
        of_codes: shards.zeros(p, codes, code.dtype),
        of_scale: shards.zeros(p, scale, torch.float32),
    }


def find(entry: Entry, key: str) -> Code | None:
    """The code in which the state has a slot, or None."""
    for code in _CODES.values():
        one = code[key in ROOTS]
        if all(isinstance(entry.get(name), Tensor) for name in names(key, one)):
            return one
    return None


def check(entry: Entry, key: str, shape: torch.Size, name: str) -> None:
    """Refuses codes and scales that cannot be those of a parameter of this shape."""
    code = find(entry, key)
    if code is None:
        return
    codes, scale = (entry[n] for n in names(key, code))
    if code.dtype == codes.dtype and scale.dim() == 2 and scale.numel() and len(shape) > 1:
        block, rest = divmod(shape.numel(), scale.numel())
        if not rest and block % 2 == 0 and (codes.shape, scale.shape) == shapes_of(shape, code, block):
            return
    found = f"{codes.dtype} {tuple(codes.shape)} with scales {tuple(scale.shape)}"
    raise errors.state_mismatch("codes", name, names(key, code)[0], f"for {tuple(shape)}", found)


def drop(entry: Entry | None, key: str) -> None:
    """Takes every quantised form of a slot out of the state."""
    for name in (f"{key}_q8", f"{key}_q4", f"{key}_scale"):
        if entry is not None:
            entry.pop(name, None)


def expand_whole(entry: Entry, shape: torch.Size) -> None:
    """Takes codes out of an entry of a checkpoint, for plain moments of the whole shape.

    Of DTensors all ranks have to ask for it.
    """
    for key in MOMENTS:
        code = find(entry, key)
        if code is not None:
            whole = {name: shards.whole(entry[name]) for name in names(key, code)}
            entry[key] = load(whole, key, code, shape)
        drop(entry, key)


def load(entry: Entry, key: str, code: Code, shape: torch.Size) -> Tensor:
    """The moment in float32, of the parameter's shape (of the local part of a DTensor: that of its local tensor)."""
    codes, scale = (shards.local(entry[name]) for name in names(key, code))
    x = decode(codes, scale, code).reshape(shape)
    return x * x if code.root else x


def store(entry: Entry, key: str, code: Code, value: Tensor, random: Tensor | None) -> None:
    """Writes a float32 moment to codes and scales that are there. ``random``: 16 bits each; None rounds to nearest."""
    from .reference import square_root

    codes, scale = (shards.local(entry[name]) for name in names(key, code))
    value = value.contiguous()
    new_codes, new_scale = encode(square_root(value) if code.root else value, code, scale, random)
    codes.copy_(new_codes.reshape(codes.shape))
    scale.copy_(new_scale.reshape(scale.shape))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _float(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


_ONE = 0x3F800000


def decode(codes: Tensor, scale: Tensor, code: Code) -> Tensor:
    """Values (roots, where the code is one) in float32, one row a block: shape ``(blocks, elements of a block)``."""
    flat = codes.reshape(-1)
    if code.bits == 4:
        halves = torch.stack([flat & 15, flat >> 4], dim=1).reshape(-1).to(torch.int32)
        number = halves if code.root else (halves ^ 8) - 8
    else:
        number = flat.to(torch.int32)
    number = number.reshape(scale.numel(), -1)
    points = _float((number.abs() << (23 - code.mantissa)) + _ONE) - 1.0
    x = points * scale.reshape(-1, 1)
    return torch.where(number < 0, -x, x)


def encode(values: Tensor, code: Code, scale: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """(codes, scales) of values (roots, where the code is one), in blocks as many as ``scale`` has elements.

    Codes are of shape ``(blocks, elements of a block)`` (of 4 bits: half as many bytes), scales ``(blocks,)``.
    """
    x = values.reshape(scale.numel(), -1)
    bits = _bits(x)
    largest = (bits & 0x7FFFFFFF).amax(dim=1, keepdim=True)
    valid = largest <= 0x7F800000
    size = _float(torch.where(valid, largest, 0)).clamp(2.0**-100, code.limit)
    inverse = torch.full_like(size, code.reach) / size  # a number over a tensor would be rounded twice
    x = x.abs() * torch.where(valid, inverse, 0.0)
    nearest = torch.full_like(bits, 1 << 15)
    draws = nearest if random is None else random.to(torch.int32).reshape(x.shape)
    if not code.root:
        draws = torch.where(x < 1.0, draws, nearest)
    steps = _bits(x + 1.0) - _ONE + (draws << (7 - code.mantissa)) >> (23 - code.mantissa)
    number = torch.where(valid, steps.clamp(max=code.top), 0)
    if code.root:
        number = torch.where((number == 0) & (bits != 0) & valid, 1, number)
    else:
        number = torch.where(bits < 0, -number, number)
    if code.bits == 4:
        number = (number & 15).to(torch.uint8).reshape(len(x), -1, 2)
        packed = number[..., 0] | number[..., 1] << 4
    else:
        packed = number.to(code.dtype)
    return packed, torch.where(valid, size / code.reach, math.nan).reshape(-1)
