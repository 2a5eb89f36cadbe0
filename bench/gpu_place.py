"""Where the GPU checks run, and how they compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Place:
    """Where the backend under test runs."""

    device: torch.device
    dry: bool
    backend: str
    """The backend under test."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of every optimizer under test."""
        return {"backend": self.backend}

    def must_serve(self, opt: Any) -> None:
        """Nothing may have gone to another backend: the check would prove nothing."""
        on_backend(opt, self.backend)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator(seed), device=self.device).to(dtype)

    def parameters(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Parameters with values and gradients; the same ones in every call."""
        params: list[Tensor] = []
        for i, shape in enumerate(shapes):
            p = Parameter(self.normal(shape, 2 * i, dtype))
            p.grad = self.normal(shape, 2 * i + 1, dtype)
            params.append(p)
        return params


def check(truth: Any, text: str) -> None:
    """An assertion that ``python -O`` keeps."""
    if not truth:
        raise AssertionError(text)


def on_backend(opt: Any, backend: str) -> None:
    """Fails unless every parameter is stepped by this backend."""
    other = [e for e in opt.explain() if e.backend != backend]
    check(not other, f"expected backend {backend} for every parameter, found: {'; '.join(map(str, other[:3]))}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bits; any NaN equals any NaN. ``b`` may be on another device."""
    a, b = a.detach(), b.detach().to(a.device)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    x, y = a.contiguous(), b.contiguous()
    equal = x.view(whole) == y.view(whole)
    if a.is_floating_point() and not bool(equal.all()):
        equal |= x.isnan() & y.isnan()
    return bool(equal.all())


def differences(ours: Any, params: Sequence[Tensor], other: Any, others: Sequence[Tensor]) -> list[str]:
    """What differs in parameters and state, as text."""
    found = []
    for i, (p, q) in enumerate(zip(params, others, strict=True)):
        named = {"param": (p, q)} | {k: (v, other.state[q][k]) for k, v in ours.state[p].items()}
        for name, (x, y) in named.items():
            if not same_bits(x, y):
                far = (x.detach().double() - y.detach().to(x.device).double()).abs().max()
                found.append(f"{name} of tensor {i} {tuple(p.shape)} {p.dtype}: up to {float(far):.3g} apart")
    return found


def close(found: Tensor | float, wanted: Tensor | float, tolerance: float, what: str) -> None:
    a, b = float(found), float(wanted)
    check(abs(a - b) <= tolerance * abs(b), f"{what}: found {a!r}, expected {b!r} within {tolerance:g}")


def fields(opt: Any) -> dict[str, Tensor]:
    """Statistics of the last step, copied."""
    names = ("grad_norm", "grad_amax", "nonfinite", "clip_coef", "skipped", "update_norm", "stored_update_norm")
    read = {name: getattr(opt.last_step, name) for name in (*names, "param_norm")}
    return {name: value.clone() for name, value in read.items() if value is not None}
