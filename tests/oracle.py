"""What the tests compare with: torch's single-tensor optimizers in float64, and equality of bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from cases import Case, Rows, states
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def wide(x: Tensor) -> Tensor:
    """A contiguous float64 (complex128) copy on the CPU."""
    dtype = torch.complex128 if x.is_complex() else torch.float64
    return x.detach().to("cpu", dtype, copy=True).contiguous()


def norm64(tensors: Iterable[Tensor | None]) -> float:
    """The 2-norm of all elements together in float64, scaled so that no square leaves the range of doubles."""
    parts = []
    for x in tensors:
        if x is not None and x.numel():
            flat = torch.view_as_real(wide(x)) if x.is_complex() else wide(x)
            largest = float(flat.abs().max())
            parts.append(float((flat / largest).square().sum().sqrt()) * largest if 0 < largest < math.inf else largest)
    return math.hypot(*parts)


def clip64(grads: Sequence[Tensor | None], max_norm: float) -> tuple[list[Tensor | None], float, float]:
    """float64 gradients scaled as torch's clip_grad_norm_ scales them; with the norm and the coefficient."""
    wides = [None if g is None else wide(g) for g in grads]
    norm = norm64(wides)
    coef = min(1.0, max_norm / (norm + 1e-6))
    return [None if g is None else g * coef for g in wides], norm, coef


def reference(
    case: Case,
    values: Sequence[Tensor],
    grads: Rows,
    *,
    dtype: torch.dtype = torch.float64,
    groups: Callable[[list[Tensor]], Iterable[Any]] = lambda params: params,
    max_norm: float = math.inf,
    **changes: Any,
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Runs torch's single-tensor path on contiguous copies on the CPU and returns the parameters and their state.

    `dtype` other than float64 gives torch's own result in that type, the yardstick of its rounding error. A finite
    `max_norm` clips each step's gradients in float64 first.
    """

    def convert(x: Tensor) -> Tensor:
        return wide(x) if dtype == torch.float64 else wide(x).to(dtype)

    with torch.device("cpu"):
        params = [convert(v).requires_grad_() for v in values]
        opt = case.torch(groups(params), **changes)
        for row in grads:
            if math.isfinite(max_norm):
                row = clip64(row, max_norm)[0]
            for p, g in zip(params, row, strict=True):
                p.grad = None if g is None else convert(g)
            opt.step()
    return [p.detach() for p in params], states(opt, params)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits, where any NaN equals any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    if not x.is_floating_point():
        return torch.equal(x, y)
    as_int = _BITS[x.element_size()]
    return bool(((x.view(as_int) == y.view(as_int)) | (x.isnan() & y.isnan())).all())


def assert_same_bits(got: Any, want: Any, where: str = "value") -> None:
    """Compares tensors, or lists and dictionaries of them, and names the first element that differs."""
    if isinstance(want, dict):
        assert list(got) == list(want), f"{where}: keys {list(got)} instead of {list(want)}"
        for key in want:
            assert_same_bits(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {len(got)} entries instead of {len(want)}"
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same_bits(g, w, f"{where}[{i}]")
    elif not same_bits(got, want):
        assert got.dtype == want.dtype, f"{where}: dtype {got.dtype} instead of {want.dtype}"
        assert got.shape == want.shape, f"{where}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
        x, y = got.detach().cpu().contiguous().reshape(-1), want.detach().cpu().contiguous().reshape(-1)
        as_int = _BITS[x.element_size()]
        bad = ((x.view(as_int) != y.view(as_int)) & ~(x.isnan() & y.isnan())).nonzero().reshape(-1)
        i = int(bad[0])
        digits = 2 * x.element_size()
        hexes = [f"{int(v.view(as_int)[i]) & (1 << 4 * digits) - 1:0{digits}x}" for v in (x, y)]
        raise AssertionError(
            f"{where}: {len(bad)} of {x.numel()} elements differ; element {i} is {float(x[i])!r} (0x{hexes[0]}) "
            f"instead of {float(y[i])!r} (0x{hexes[1]})"
        )


def rms(x: Tensor) -> float:
    """Root mean square of the finite elements; 0 if there are none."""
    finite = x.detach().cpu().double()
    finite = finite[finite.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def assert_close(got: Tensor, want: Tensor, steps: int, where: str = "value") -> None:
    """Every element within one spacing a step of `want`, relative to its own size plus the tensor's typical size.

    One spacing is twice what a single rounding may lose; the typical size covers elements that cancelled to near 0. A
    handful of elements has no typical size: there it is at least 1, the size of the tests' weights.
    """
    assert got.shape == want.shape, f"{where}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    truth, ours = want.detach().cpu().double(), got.detach().cpu().double()
    typical = max(rms(truth), 1.0) if truth.numel() < 8 else rms(truth)
    info = torch.finfo(got.dtype)
    allowed = steps * info.eps * (truth.abs() + typical + info.smallest_normal)
    bad = ~((ours - truth).abs() <= allowed) & (ours != truth) & ~(ours.isnan() & truth.isnan())
    if bad.any():
        i = int(bad.reshape(-1).nonzero()[0])
        raise AssertionError(
            f"{where}: {int(bad.sum())} of {bad.numel()} elements are off; element {i} is "
            f"{float(ours.reshape(-1)[i])!r} instead of {float(truth.reshape(-1)[i])!r} "
            f"(allowed {float(allowed.reshape(-1)[i]):.3g})"
        )


def assert_states_close(got: dict[str, Tensor], want: dict[str, Tensor], steps: int, where: str = "state") -> None:
    """Same keys in the same order, `step` equal, everything else within rounding."""
    assert list(got) == list(want), f"{where}: keys {list(got)} instead of {list(want)}"
    for key in want:
        if key == "step":
            assert float(got[key]) == float(want[key]), f"{where}: step {float(got[key])} instead of {float(want[key])}"
        else:
            assert_close(got[key], want[key], steps, f"{where}[{key!r}]")
