"""Weights that are finer than the 16-bit parameter that stands for them: the twin of csrc/rules/master.h and random.h.

Everything is bits: float32 as int32, random numbers as 32-bit integers in int64 tensors. Shapes are the parameter's.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODES = {"fp32": 1, "split": 2, "split8": 3, "kahan": 4, "stochastic": 5}
"""MasterMode of csrc/abi.h."""
SLOTS = {"fp32": "master", "split": "master_low", "split8": "master_low", "kahan": "compensation"}
"""Where each keeps the rest of the weight; stochastic rounding keeps none."""
ALL_SLOTS = tuple(dict.fromkeys(SLOTS.values()))
BF16_ONLY = ("split", "split8")
DRAWS = ("split8", "stochastic")
"""Modes whose results depend on the step's random numbers."""
_MASK64 = (1 << 64) - 1
_MASTER_SLOT = 5


def _mix64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def stream(seed: int, position: int) -> int:
    """The random numbers of one parameter: from the seed and its position in the state_dict; 64 bits."""
    return _mix64(_mix64(seed & _MASK64) + (position + 1) * 0x9E3779B97F4A7C15 & _MASK64)


def step_key(stream: int, step: int, slot: int = _MASTER_SLOT) -> int:
    """Those of one slot in one step."""
    of_slot = _mix64(stream + slot * 0x9E3779B97F4A7C15 & _MASK64)
    return _mix64(of_slot + step * 0xD1342543DE82EF95 & _MASK64)


def draw(shape: torch.Size, key: int, device: torch.device, offset: int = 0) -> Tensor:
    """32 random bits for every element, by its index in the order of the shape (int64, values below 2**32).

    ``offset``: index of the first element, where this is a part of a larger tensor.
    """
    mask = 0xFFFFFFFF
    index = torch.arange(offset, offset + shape.numel(), dtype=torch.int64, device=device)
    x = (index & mask) * 0x9E3779B1 & mask
    x ^= (key & mask) + (index >> 32) * 0x85EBCA77 & mask
    x ^= x >> 16
    x = x * 0x21F0AAAD & mask
    x ^= x >> 15
    x = x + (key >> 32) & mask
    x = x * 0x735A2D97 & mask
    return (x ^ (x >> 15)).reshape(shape)


def _bits(x: Tensor) -> Tensor:
    """Those of float32, as int64 in [0, 2**32)."""
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _float(bits: Tensor) -> Tensor:
    wrapped = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return wrapped.to(torch.int32).view(torch.float32)


def _bf16(upper: Tensor) -> Tensor:
    """bf16 of its bits."""
    wrapped = torch.where(upper >= 1 << 15, upper - (1 << 16), upper)
    return wrapped.to(torch.int16).view(torch.bfloat16)


def _is_nan(bits: Tensor) -> Tensor:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def _is_special(bits: Tensor) -> Tensor:
    return (bits & 0x7F800000) == 0x7F800000


def followed(master: Tensor, p: Tensor) -> Tensor:
    """The fp32 master where the parameter is its rounded copy, and the parameter where somebody else has written it."""
    from .reference import narrow  # which knows how kernels round

    copy = rounded_away(master) if p.dtype == torch.bfloat16 else narrow(master, p.dtype)
    same = copy.contiguous().view(torch.int16).reshape(p.shape) == p.detach().contiguous().view(torch.int16)
    return torch.where(same, master, p.detach().float())


def rounded_away(x: Tensor) -> Tensor:
    """float32 to bf16, ties away from zero; NaN stays NaN."""
    bits = _bits(x)
    return _bf16(torch.where(_is_nan(bits), (bits >> 16) | 0x40, bits + 0x8000 >> 16) & 0xFFFF)


def _remainder(x: Tensor, p: Tensor) -> Tensor:
    """What of the weight's bits the bf16 parameter does not hold, signed (int64)."""
    bits, upper = _bits(x), p.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    low = bits - (upper << 16)
    return torch.where(_is_nan(bits), torch.zeros_like(low), low)


def load(p: Tensor, rest: Tensor | None, mode: str) -> Tensor:
    """The weights in float32."""
    if mode == "fp32":
        assert rest is not None
        return followed(rest.detach(), p)
    if mode in BF16_ONLY:
        assert rest is not None
        upper = p.detach().contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
        low = rest.to(torch.int64) * (256 if mode == "split8" else 1)
        # A remainder that no weight has left beside this parameter: somebody else has written the parameter.
        magnitude = upper & 0x7FFF
        impossible = ((magnitude == 0) & (low < 0)) | ((magnitude == 0x7F80) & (low > 0))
        low = torch.where(impossible, torch.zeros_like(low), low)
        return _float((upper << 16) + low & 0xFFFFFFFF).reshape(p.shape)
    x = p.detach().float()
    if rest is None:
        return x
    lost = rest.float()
    half, least = (2.0**-8, 2.0**-134) if p.dtype == torch.bfloat16 else (2.0**-11, 2.0**-25)
    return torch.where(lost.abs() <= x.abs() * half + least, x + lost, x)


def store(x: Tensor, p: Tensor, rest: Tensor | None, mode: str, key: int, offset: int = 0) -> Tensor:
    """Writes weights to a parameter and its rest; what they keep of it, in float32.

    ``key`` and ``offset``: of the random numbers, see :func:`draw`.
    """
    from .reference import narrow  # which knows how kernels round

    target = p.detach()
    if mode == "fp32":
        assert rest is not None
        rest.copy_(x)
        target.copy_(rounded_away(x) if p.dtype == torch.bfloat16 else narrow(x, p.dtype))
        return x
    if mode in BF16_ONLY:
        assert rest is not None
        if mode == "split8":
            x = _rounded_24(x, draw(x.shape, key, x.device, offset))
        target.copy_(rounded_away(x).reshape(p.shape))
        low = _remainder(x, target)
        rest.copy_(low >> 8 if mode == "split8" else low)
        return x
    if mode == "kahan":
        assert rest is not None
        stored = narrow(x, p.dtype)
        lost = x - stored.float()
        target.copy_(stored)
        rest.copy_(narrow(torch.where(lost.isfinite(), lost, torch.zeros_like(lost)), p.dtype))
        return load(p, rest, mode)
    target.copy_(stochastic(x, p.dtype, draw(x.shape, key, x.device, offset)))
    return target.float()


def _rounded_24(x: Tensor, random: Tensor) -> Tensor:
    bits = _bits(x)
    kept = bits + (random >> 24) & 0xFFFFFF00
    down = bits & 0xFFFFFF00
    return _float(torch.where(_is_special(kept), down, kept))


def stochastic(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """float32 to bf16 or fp16, up with the probability that makes it right on average."""
    from .reference import narrow

    bits = _bits(x)
    if dtype == torch.bfloat16:
        up = torch.where(_is_special(bits), torch.zeros_like(random), random >> 16)
        nan = (bits >> 16) | 0x40
        return _bf16(torch.where(_is_nan(bits), nan, bits + up >> 16) & 0xFFFF).reshape(x.shape)
    sign, magnitude = bits & 0x80000000, bits & 0x7FFFFFFF
    normal = sign | (magnitude + (random >> 19) & 0xFFFFE000)
    units = _float(magnitude) * 2.0**24
    down = units.clamp(max=1024.0).floor()
    up = ((units - down) * 2.0**24 > (random >> 8).float()).float()
    small = sign | _bits((down + up) * 2.0**-24)
    chosen = torch.where(magnitude >= 0x477FE000, bits, torch.where(magnitude >= 0x38800000, normal, small))
    return narrow(_float(chosen), dtype).reshape(x.shape)


def keep(x: Tensor, p: Tensor, rest: Tensor, mode: str) -> None:
    """Writes to the rest what it can hold of weights that the parameter stands for already; the parameter stays.

    A weight that is further from its parameter than the rest reaches is given up for the parameter's value.
    """
    from .reference import narrow  # which knows how kernels round

    if mode == "fp32":
        for _ in range(2):  # half a spacing away it may belong to the next parameter: a last bit is lost then
            copy = rounded_away(x) if p.dtype == torch.bfloat16 else narrow(x, p.dtype)
            x = torch.where(copy.reshape(p.shape) == p.detach(), x, torch.nextafter(x, p.detach().float()))
        rest.copy_(followed(x, p))
    elif mode == "kahan":
        rest.copy_((x - p.detach().float()).to(rest.dtype))
    else:
        low = _remainder(x, p.detach())
        # Half a spacing away the parameter may have been rounded to the other side: one last bit is lost.
        low = torch.where(low.abs() > 1 << 16, torch.zeros_like(low), low.clamp(-(1 << 15), (1 << 15) - 1))
        rest.copy_(low >> 8 if mode == "split8" else low)
