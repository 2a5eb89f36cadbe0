"""What is stepped in the benchmarks, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import mo_fused

Shape = tuple[int, ...]
Make = Callable[..., torch.optim.Optimizer]

LR, DECAY = 1e-4, 0.1
MAX_NORM = 1.0
GROUPS = 60
"""Parameter groups as people have them: with and without decay, and a learning rate for every layer."""


def gpt2_shapes(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """GPT-2's parameters, the output layer tied to the embedding. The defaults: 148 tensors, 124,439,808 elements."""
    shapes: list[Shape] = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


@dataclass(frozen=True)
class Workload:
    """Tensors of one dtype. ``shapes`` is what is measured, ``quick`` the same in small."""

    name: str
    shapes: Sequence[Shape]
    quick: Sequence[Shape]
    dtype: torch.dtype
    in_memory: bool
    """Far larger than the caches, so that bytes per second mean something."""

    def parameters(self, quick: bool) -> list[Tensor]:
        """Parameters with random values and gradients."""
        generator = torch.Generator().manual_seed(0)
        params: list[Tensor] = []
        for shape in self.quick if quick else self.shapes:
            p = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(self.dtype))
            p.grad = (torch.randn(shape, generator=generator) * 1e-3).to(self.dtype)
            params.append(p)
        return params

    def counted_bytes(self, params: list[Tensor]) -> float:
        """Bytes of one operand (all parameters, say); 0 where bytes per second mean nothing."""
        return float(sum(p.numel() * p.element_size() for p in params)) if self.in_memory else 0.0


def gpt2(dtype: torch.dtype) -> Workload:
    name = str(dtype).removeprefix("torch.")
    return Workload(f"GPT-2 124M {name}", gpt2_shapes(), gpt2_shapes(2, 48, 500, 64), dtype, True)


def small(dtype: torch.dtype) -> Workload:
    """1000 tensors of 64 elements: what is left is the work per tensor."""
    name = str(dtype).removeprefix("torch.")
    return Workload(f"1000 x 64 {name}", [(64,)] * 1000, [(64,)] * 50, dtype, False)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WORKLOADS = {f"gpt2-{name}": gpt2(dtype) for name, dtype in DTYPES.items()}
WORKLOADS |= {f"small-{name}": small(dtype) for name, dtype in DTYPES.items()}


def in_groups(params: list[Tensor], groups: int) -> list[dict[str, Any]]:
    """The parameters dealt out to groups, each with a learning rate of its own, every second one without decay."""
    return [
        {"params": params[g::groups], "lr": LR * (1 + g / groups), "weight_decay": DECAY * (g % 2)}
        for g in range(groups)
        if params[g::groups]
    ]


OURS, FUSED, FOREACH, DEEPSPEED = "mo_fused", "torch fused", "torch foreach", "DeepSpeedCPUAdam"


def torch_fused(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True, **options)


def torch_foreach(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, foreach=True, **options)


def ours(params: Any, **options: Any) -> torch.optim.Optimizer:
    return mo_fused.AdamW(params, lr=LR, weight_decay=DECAY, **options)


def share_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Gives all of them the state tensors of the first, so that they race over the same memory.

    Where pages lie decides by up to a quarter: two runs of one and the same optimizer over states of their own differ.
    A peer that keeps other slots keeps its own state.
    """
    first = optimizers[0]
    first.step()
    for other in optimizers[1:]:
        if isinstance(other, torch.optim.AdamW):
            for p, state in first.state.items():
                other.state[p] = state


@cache
def deepspeed() -> Make | None:
    """DeepSpeedCPUAdam as AdamW, or None after saying why not: it compiles itself when it is used first."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        print(f"{DEEPSPEED} is left out: {error}")
        return None

    def make(params: Any, **options: Any) -> torch.optim.Optimizer:
        kind: type[torch.optim.Optimizer] = DeepSpeedCPUAdam
        return kind(params, lr=LR, weight_decay=DECAY, adamw_mode=True, **options)  # type: ignore[call-arg]

    try:
        make([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # whatever its compiler, its loader or its version check raises
        print(f"{DEEPSPEED} is left out: it does not build here ({(str(error).splitlines() or ['?'])[0][:120]})")
        return None
    return make


def peers(scaled: bool = False) -> dict[str, Make]:
    """Everybody else. ``scaled``: those that step under a GradScaler."""
    there: dict[str, Make] = {FUSED: torch_fused, FOREACH: torch_foreach}
    other = deepspeed()
    if other is not None and not scaled:
        there[DEEPSPEED] = other
    return there


def agree(
    a: Make, b: Make, dtype: torch.dtype, before_a: Callable[[list[Tensor]], Any] | None = None, **options: Any
) -> None:
    """Refuses to time two optimizers that do not do the same: three steps on small tensors, compared.

    ``before_a`` is what ``a`` needs before its step (clipping, say); ``options`` are for ``b``.
    """
    workload = Workload("agreement", [(33, 7), (129,), (1,)], [], dtype, False)
    first, second = workload.parameters(False), workload.parameters(False)
    one, other = a(first), b(second, **options)
    for step in range(3):
        for p, q in zip(first, second, strict=True):
            p.grad = torch.full_like(p, 0.1 * (step + 1))
            q.grad = p.grad.clone()
        if before_a is not None:
            before_a(first)
        one.step()
        other.step()
    # Where they round differently: the last digit of a parameter, and of steps of LR where a parameter is near zero.
    digits = {torch.bfloat16: 2.0**-7}.get(dtype, 1e-5)
    for p, q in zip(first, second, strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), rtol=digits, atol=3 * LR * digits)
