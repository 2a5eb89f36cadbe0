"""The rules in plain torch: the twin of csrc/rules, bit for bit.

At float64 it is the oracle of the tests, at float32 the eager backend. Only additions, subtractions, multiplications,
divisions and comparisons are used: torch's ``lerp``, ``addcmul`` and ``add(alpha=)`` fuse, and its own CPU square root
is off by one unit in the last place for many values, so square roots go through float64.

Shapes: every tensor of a call has the parameter's shape. Scalars are Python floats (float64), rounded once to the
compute type by torch, as the kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import dispatch

if TYPE_CHECKING:
    from .distributed.factored import Whole


def integer_power(base: float, n: int) -> float:
    """base**n by squaring: the same products in the same order as csrc/rules/portable.h."""
    result = 1.0
    while n > 0:
        if n & 1:
            result *= base
        base *= base
        n >>= 1
    return result


_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")


def real_power(base: float, exponent: float) -> float:
    """base**exponent for base > 0, with the bits of csrc/rules/portable.h."""
    m, k = math.frexp(base)
    m, k = m * 2.0, k - 1
    if m > 1.4142135623730951:
        m, k = m * 0.5, k + 1
    s = (m - 1.0) / (m + 1.0)
    z, series = s * s, 1.0 / 25.0
    for i in range(23, 0, -2):
        series = series * z + 1.0 / i
    x = exponent * (k * _LN2_HIGH + (k * _LN2_LOW + (s + s) * series))
    n = int(x * 1.4426950408889634 + (-0.5 if x < 0.0 else 0.5))
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    result = 1.0
    for i in range(15, 0, -1):
        result = 1.0 + r * result / i
    return math.ldexp(result, n)


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


def scale_gradient(grad: Tensor, factor: float) -> None:
    """Multiplies a gradient by a factor in place, as the kernels do: widened, and rounded once."""
    compute = torch.float64 if grad.dtype == torch.float64 else torch.float32
    grad.detach().copy_(narrow(widen(grad.detach(), compute) * factor, grad.dtype))


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


@dataclass(frozen=True)
class AdafactorScalars:
    """Scalars of one parameter for one step (csrc/rules/adafactor.h, prepare_adafactor)."""

    coef: float
    relative: float
    """The step size before it is scaled."""
    rest: float
    """What a new square counts in the running averages: step ** beta2_decay."""
    added: float
    floor: float
    limit: float
    beta1: float
    decay: float

    @classmethod
    def prepare(cls, step: int, coef: float, hyper: dict[str, float], param_dtype: torch.dtype) -> AdafactorScalars:
        """``hyper``: the fields of csrc/abi.h's Hyper."""
        flags, kind, lr = int(hyper["factor_flags"]), int(hyper["step_kind"]), hyper["lr"]
        eps = hyper["eps"] if hyper["eps"] == hyper["eps"] else torch.finfo(param_dtype).eps
        root = 1.0 / float(np.sqrt(float(step)))
        largest = torch.finfo(torch.float64 if param_dtype == torch.float64 else torch.float32).max
        return cls(
            coef=coef,
            relative=(min(lr, root), lr, min(1e-2, root), min(1e-6 * step, root))[kind],
            rest=real_power(float(step), hyper["beta2"]),
            added=eps if flags & _EPS_ADDED else 0.0,
            floor=0.0 if flags & _EPS_ADDED else eps,
            limit=largest if flags & _EPS_ADDED or eps == 0.0 else min(largest, 1.0 / eps),
            beta1=hyper["beta1"],
            decay=hyper["weight_decay"] if flags & _DECAY_SCALED else lr * hyper["weight_decay"],
        )

    def sized(self, hyper: dict[str, float], update_rms: float, param_rms: float) -> tuple[float, float]:
        """(what U is multiplied by, what the parameter is multiplied by for weight decay)."""
        flags, size = int(hyper["factor_flags"]), self.relative
        if flags & _SCALE_PARAMETER:
            size *= max(hyper["eps2"], param_rms)
        decay = self.decay * size if flags & _DECAY_SCALED else self.decay
        return size / max(1.0, update_rms / hyper["threshold"]), decay


_SCALE_PARAMETER, _EPS_ADDED, _DECAY_SCALED = 1, 2, 4  # FactorFlag of csrc/abi.h


def toward(old: Tensor, new: Tensor, weight: float) -> Tensor:
    """Interpolation from the nearer end, as torch.lerp."""
    return old + (new - old) * weight if weight < 0.5 else new - (new - old) * (1.0 - weight)


def _rms(x: Tensor, whole: Whole | None) -> float:
    if whole is not None:
        return whole.root_mean_square(x)
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0


def factored_roots(
    g: Tensor, row_var: Tensor, col_var: Tensor, s: AdafactorScalars, whole: Whole | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New (row_var, col_var) and the inverse roots of rows and columns, in the compute type.

    ``g``: ``(..., n, m)``; ``row_var`` ``(..., n, 1)`` and ``col_var`` ``(..., 1, m)``: running means of the squares
    over columns and over rows. U = g times both roots (Shazeer & Stern 2018, algorithm 4). ``whole``: what the
    parameter is a part of; means are the whole's.
    """
    square = (g.double() * s.coef).square()
    of_matrix = None
    if whole is None:
        of_rows, of_columns = square.mean(-1, keepdim=True), square.mean(-2, keepdim=True)
    else:
        of_rows, of_columns, of_matrix = whole.means(square, row_var)
    row_var = toward(row_var.double(), of_rows + s.added, s.rest).to(g.dtype)
    col_var = toward(col_var.double(), of_columns + s.added, s.rest).to(g.dtype)
    mean = row_var.double().mean(-2, keepdim=True)
    if of_matrix is not None:  # rows are elsewhere too; their mean is linear in the squares
        mean = toward(of_matrix[0], of_matrix[1] + s.added, s.rest)
    mean = torch.where(mean < s.floor, s.floor, mean)
    return (
        row_var,
        col_var,
        (mean.sqrt() / row_var.double().sqrt()).to(g.dtype),
        (1.0 / col_var.double().sqrt()).to(g.dtype),
    )


def factored_update(g: Tensor, r: Tensor | float, c: Tensor, s: AdafactorScalars) -> Tensor:
    """U, the update before its RMS is limited."""
    root = c if isinstance(r, float) else r * c
    return (g * s.coef) * torch.where(root > s.limit, s.limit, root)


def adafactor_update(
    p: Tensor, g: Tensor, r: Tensor | float, c: Tensor, m: Tensor | None, s: AdafactorScalars, size: float, decay: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """New (p, first moment) and the update. ``r``, ``c``: inverse roots of rows and columns, or 1.0 and of elements."""
    update = factored_update(g, r, c, s) * size
    if m is not None:
        from_old = _rounded(s.beta1, p.dtype) > 0.5
        update = m = m + (update - m) * (1.0 - s.beta1) if from_old else update - (update - m) * s.beta1
    if _rounded(decay, p.dtype) != 0:
        update = update + p * decay
    return _apply(p, update), m, update


def adafactor_step(
    p: Tensor,
    grad: Tensor,
    entry: dict[str, Any],
    slots: Sequence[str],
    hyper: dict[str, float],
    scale: float,
    whole: Whole | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A step of one parameter, in place; (old p, what storage kept of the new one, the update) in the compute type.

    ``hyper``: the fields of csrc/abi.h's Hyper; ``scale``: what the gradient is multiplied by; ``whole``: what the
    parameter is a part of.
    """
    compute = compute_type(p)
    entry["step"] += 1
    s = AdafactorScalars.prepare(int(entry["step"]), -scale if hyper["maximize"] else scale, hyper, p.dtype)
    old, g = widen(p.detach(), compute), widen(grad.detach(), compute)
    r: Tensor | float = 1.0
    if "variance" in slots:
        scaled = g * s.coef
        v = entry["variance"]
        square = scaled * scaled + s.added
        v.copy_(v + (square - v) * s.rest if s.rest < 0.5 else square - (square - v) * (1.0 - s.rest))
        c = 1.0 / square_root(v)
    else:
        row_var, col_var, r, c = factored_roots(g, entry["row_var"], entry["col_var"], s, whole)
        if p.numel() if whole is None else whole.numel:  # means over nothing are none
            entry["row_var"].copy_(row_var)
            entry["col_var"].copy_(col_var)
    size, decay = s.sized(hyper, _rms(factored_update(g, r, c, s), whole), _rms(old, whole))
    m = widen(entry["exp_avg"], compute) if "exp_avg" in slots else None
    new, m, update = adafactor_update(old, g, r, c, m, s, size, decay)
    stored = narrow(new, p.dtype)
    kept = widen(stored, compute)
    before = old.clone() if old.data_ptr() == p.data_ptr() else old
    p.detach().copy_(stored)
    if m is not None:
        entry["exp_avg"].copy_(narrow(m, entry["exp_avg"].dtype))
    return before, kept, update


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
