"""The rules in plain torch: the twin of csrc/rules, bit for bit.

At float64 it is the oracle of the tests, at float32 the eager backend. Only additions, subtractions, multiplications,
divisions and comparisons are used: torch's ``lerp``, ``addcmul`` and ``add(alpha=)`` fuse, and its own CPU square root
is off by one unit in the last place for many values, so square roots go through float64.

Shapes: every tensor of a call has the parameter's shape. Scalars are Python floats (float64), rounded once to the
compute type by torch, as the kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import dispatch


def integer_power(base: float, n: int) -> float:
    """base**n by squaring: the same products in the same order as csrc/rules/portable.h."""
    result = 1.0
    while n > 0:
        if n & 1:
            result *= base
        base *= base
        n >>= 1
    return result


def square_root(x: Tensor) -> Tensor:
    """IEEE square root of a float32 or float64 tensor."""
    if x.dtype == torch.float64:
        if dispatch.is_cpu(x):
            with np.errstate(invalid="ignore"):
                return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))
        return x.sqrt()
    return x.double().sqrt().float()


def compute_type(param: Tensor) -> torch.dtype:
    """float64 for float64 parameters, else float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Storage to compute type (exact, but for float64 storage under a float32 rule)."""
    return x.to(dtype)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute type to storage, round to nearest even; NaN stays NaN and denormals are kept."""
    if dtype in (torch.float32, torch.float64):
        return x.to(dtype)
    x = x.to(torch.float32)  # float64 reaches half precision through float32, as in a cast of torch
    if dtype == torch.float16:
        return x.to(dtype)
    bits = x.contiguous().view(torch.int32)
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
    quiet = bits | 0x400000
    upper = torch.where(x.isnan(), quiet, rounded) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


@dataclass(frozen=True)
class AdamScalars:
    """Scalars of one parameter for one step (csrc/rules/adamw.h, prepare_adamw)."""

    coef: float
    beta1: float
    beta2: float
    eps: float
    inv_sqrt_bc2: float
    step_size: float
    decay: float
    l2: float

    @classmethod
    def prepare(
        cls,
        step: int,
        coef: float,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> AdamScalars:
        bc1 = 1.0 - integer_power(beta1, step)
        bc2 = 1.0 - integer_power(beta2, step)
        return cls(
            coef=coef,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            inv_sqrt_bc2=1.0 / float(np.sqrt(bc2)),
            step_size=lr / bc1,
            decay=lr * weight_decay if decoupled else 0.0,
            l2=0.0 if decoupled else weight_decay,
        )


@dataclass(frozen=True)
class SGDScalars:
    """Scalars of one parameter for one step (csrc/rules/sgd.h)."""

    coef: float
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def _rounded(value: float, dtype: torch.dtype) -> float:
    """The value as the compute type holds it, for comparisons with zero and one half."""
    return value if dtype == torch.float64 else float(np.float32(value))


def _apply(p: Tensor, update: Tensor) -> Tensor:
    # An update of zero leaves p as it is, also the sign of -0.0.
    return torch.where(update == 0, p, p - update)


def adamw_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, w: Tensor | None, s: AdamScalars
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """New (p, m, v, w) and the update, all in the compute type. ``w``: AMSGrad's running maximum, or None.

    Kingma & Ba 2015, Loshchilov & Hutter 2019, Reddi et al. 2018.
    """
    dtype = p.dtype
    g = g * s.coef
    if _rounded(s.l2, dtype) != 0:
        g = g + p * s.l2
    m = m + (g - m) * (1.0 - s.beta1) if _rounded(s.beta1, dtype) > 0.5 else g - (g - m) * s.beta1
    square = g * g
    from_old = _rounded(s.beta2, dtype) > 0.5
    average = v + (square - v) * (1.0 - s.beta2) if from_old else square - (square - v) * s.beta2
    v = torch.where(v == float("inf"), v, average)
    second = v
    if w is not None:
        w = torch.where((w > v) | w.isnan(), w, v)
        second = w
    update = (m / (square_root(second) * s.inv_sqrt_bc2 + s.eps)) * s.step_size
    if _rounded(s.decay, dtype) != 0:
        update = update + p * s.decay
    return _apply(p, update), m, v, w, update


def sgd_update(
    p: Tensor, g: Tensor, buf: Tensor | None, s: SGDScalars, fresh: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """New (p, momentum buffer) and the update. ``fresh``: the buffer holds no value yet and takes the gradient."""
    g = g * s.coef
    if _rounded(s.weight_decay, p.dtype) != 0:
        g = g + p * s.weight_decay
    direction = g
    if buf is not None:
        buf = g if fresh else buf * s.momentum + g * (1.0 - s.dampening)
        direction = g + buf * s.momentum if s.nesterov else buf
    update = direction * s.lr
    return _apply(p, update), buf, update


def sum_of_squares(x: Tensor) -> float:
    """In float64 and in an order that does not depend on the number of threads (torch's sum does)."""
    x = x.detach().double().reshape(-1)
    if dispatch.is_cpu(x):
        values = x.numpy()
        with np.errstate(all="ignore"):
            return float(np.sum(values * values))
    return float((x * x).sum())


def grad_sums(g: Tensor) -> tuple[float, int, float, int, int]:
    """(sum of squares, its power of two, largest magnitude, non-finite elements, zero elements) of one gradient.

    The sum of squares is the first number times 2 to the second, so that neither 1e200 nor 1e-200 is lost.
    """
    if g.is_sparse:
        g = g.coalesce().values()
    if g.is_complex():
        g = torch.view_as_real(g.resolve_conj())
    if g.numel() == 0:
        return 0.0, 0, 0.0, 0, 0
    x = g.detach().double()
    amax = float(x.abs().amax())
    nonfinite = int((~x.isfinite()).sum())
    zeros = int((x == 0).sum())
    total = sum_of_squares(x)
    if amax > 0 and np.isfinite(amax) and not 1e-280 <= total < float("inf"):
        k = int(np.frexp(amax)[1])
        scaled = torch.ldexp(x, torch.tensor(-k, device=x.device))
        return sum_of_squares(scaled), 2 * k, amax, nonfinite, zeros
    return total, 0, amax, nonfinite, zeros
