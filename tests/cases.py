"""Test cases as data: optimizers and their options, dtypes, layouts, gradients. Tests are products of these lists.

Which backend they are run against is data too, given by the environment: see BACKEND and DEVICE.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

import mo_fused

BACKEND = os.environ.get("MO_FUSED_TEST_BACKEND", "cpu")
"""The backend under test. tests/conftest.py makes it the default of the optimizers that a test does not give one."""
DEVICE = torch.device(os.environ.get("MO_FUSED_TEST_DEVICE", "cpu"))
"""Where tests put parameters and gradients. What they compare with is computed on the CPU."""
INTERPRETED = BACKEND == "triton" and DEVICE.type == "cpu"
"""The kernels run in Triton's interpreter, some ten thousand times slower than they are meant to."""

ON_HOST = BACKEND != "cpu" and DEVICE.type == "cpu"
"""The kernels of a device run on the CPU: Triton's in its interpreter, CUDA's compiled for it."""

# By default the two backends that exist without an accelerator; they must agree to the bit.
BACKENDS = ("cpu", "eager") if BACKEND == "cpu" else (BACKEND,)
# The native kernels, always on CPU tensors, and what has to have their bits.
PAIR = ("cpu", "eager") if BACKEND == "cpu" else ("cpu", BACKEND)


def place(backend: str) -> torch.device:
    """The device on which a backend is tested."""
    return torch.device("cpu") if backend == "cpu" else DEVICE


def large(*shape: int) -> tuple[int, ...]:
    """This shape, of several chunks; in the interpreter one of some 2300 elements, which are two chunks there."""
    factor = (2300 / math.prod(shape)) ** (1 / len(shape))
    if not INTERPRETED or factor >= 1:
        return shape
    return tuple(max(1, round(n * factor) // 2 * 2 + n % 2) for n in shape)  # an odd size stays odd


def some(usual: Sequence[Any], interpreted: Sequence[Any]) -> Sequence[Any]:
    """Values of a test's grid: all, or those that the interpreter has time for."""
    return interpreted if INTERPRETED else usual


# One wide type, the common type, and two half types that differ in what they lack (bf16 precision, fp16 range).
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALF = (torch.bfloat16, torch.float16)
# One of each size, for addresses in the interpreter.
WIDTHS = (torch.float32, torch.bfloat16, torch.float64)

Gradients = list[list[Tensor | None]]
Rows = Sequence[Sequence[Tensor | None]]  # what reads gradients takes these


def short(dtype: torch.dtype) -> str:
    """The dtype's name as used in test ids."""
    return str(dtype).removeprefix("torch.")


def _number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_number(v) for v in value)
    return float(value.reshape(())) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Case:
    """One optimizer with one set of torch's own arguments."""

    kind: str
    name: str
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}"

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """A fresh copy, because a tensor learning rate is written by schedulers."""
        return {**copy.deepcopy(self.kwargs), **changes}

    def ours(self, params: Iterable[Any], **changes: Any) -> Any:
        """The optimizer under test."""
        return getattr(mo_fused, self.kind)(params, **self.arguments(**changes))

    def torch(self, params: Iterable[Any], **changes: Any) -> torch.optim.Optimizer:
        """torch's single-tensor path: the only one of its three that is right for every layout and dtype.

        Tensor arguments go in as Python floats of equal value: torch would compute step size and bias correction in the
        tensor's fp32, which no float64 reference may do.
        """
        plain = {key: _number(value) for key, value in self.arguments(**changes).items()}
        opt: torch.optim.Optimizer = getattr(torch.optim, self.kind)(params, foreach=False, **plain)
        return opt


# The rate is large on purpose: four steps must move a half-precision weight of size 1 by many of its spacings.
RATE = 0.1
ADAMW = Case("AdamW", "default", dict(lr=RATE, weight_decay=0.1))
ADAM = Case("Adam", "l2", dict(lr=RATE, weight_decay=0.1))
SGD = Case("SGD", "momentum", dict(lr=RATE, momentum=0.9, weight_decay=0.1))
# A short memory, so that the second moment falls at times and its running maximum is another number.
AMSGRAD = Case("AdamW", "amsgrad", dict(lr=RATE, betas=(0.9, 0.5), weight_decay=0.1, amsgrad=True))
# Dampening must not touch the first step, where the buffer is the gradient itself. It also tells a buffer that starts
# from the gradient from one that starts from zero.
DAMPENED = Case("SGD", "dampening", dict(lr=RATE, momentum=0.9, dampening=0.3))

ADAM_CASES = [
    ADAMW,
    Case("AdamW", "no_decay", dict(lr=RATE, weight_decay=0.0)),
    AMSGRAD,
    Case("AdamW", "maximize", dict(lr=RATE, weight_decay=0.1, maximize=True)),
    Case("AdamW", "amsgrad_maximize", dict(lr=RATE, betas=(0.9, 0.5), weight_decay=0.1, amsgrad=True, maximize=True)),
    # A large eps makes the order "divide by the bias correction, then add eps" visible.
    Case("AdamW", "large_eps", dict(lr=RATE, eps=0.5)),
    Case("AdamW", "tensor_lr", dict(lr=torch.tensor(RATE))),
    Case("AdamW", "tensor_lr_1d", dict(lr=torch.tensor([RATE], dtype=torch.float64), weight_decay=0.1)),
    Case("AdamW", "tensor_betas", dict(lr=RATE, betas=(torch.tensor(0.9), torch.tensor(0.999)))),
    # beta1 = 0 forgets everything; beta2 close to 1 needs its bias correction (1e-6) in double precision.
    Case("AdamW", "betas_0_high", dict(lr=RATE, betas=(0.0, 0.999999), weight_decay=0.1)),
    Case("AdamW", "betas_high_0", dict(lr=RATE, betas=(0.999999, 0.0))),
    Case("AdamW", "betas_0_0", dict(lr=RATE, betas=(0.0, 0.0))),
    Case("Adam", "default", dict(lr=RATE)),
    ADAM,
    Case("Adam", "l2_amsgrad_maximize", dict(lr=RATE, betas=(0.9, 0.5), weight_decay=0.1, amsgrad=True, maximize=True)),
    Case("Adam", "decoupled", dict(lr=RATE, weight_decay=0.1, decoupled_weight_decay=True)),
]
SGD_CASES = [
    Case("SGD", "plain", dict(lr=RATE)),
    Case("SGD", "decay", dict(lr=RATE, weight_decay=0.1)),
    Case("SGD", "maximize", dict(lr=RATE, weight_decay=0.1, maximize=True)),
    SGD,
    DAMPENED,
    Case("SGD", "full_dampening", dict(lr=RATE, momentum=0.5, dampening=1.0, weight_decay=0.1)),
    Case("SGD", "nesterov", dict(lr=RATE, momentum=0.9, nesterov=True)),
    Case("SGD", "nesterov_decay_maximize", dict(lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True)),
    Case("SGD", "tensor_lr", dict(lr=torch.tensor(RATE), momentum=0.9)),
    Case("SGD", "tensor_decay", dict(lr=RATE, weight_decay=torch.tensor(0.1, dtype=torch.float64))),
]
CASES = ADAM_CASES + SGD_CASES
# One of each rule, for tests whose subject is not the rule. Where a factor on the gradient is the subject, SGD has to
# be among them: Adam's first step does not depend on the gradient's size.
RULES = [ADAMW, ADAM, SGD]


def noise(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal values on DEVICE, drawn in float64 so that every dtype gets the same numbers, each rounded once."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu")
    return (drawn * scale).to(dtype).to(DEVICE)


def weights(shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Tensor]:
    """Starting values of parameters, one tensor per shape."""
    return [noise(shape, seed * 1000 + i, dtype) for i, shape in enumerate(shapes)]


def gradients(
    shapes: Sequence[Sequence[int]], steps: int, dtype: torch.dtype = torch.float32, seed: int = 2, scale: float = 8.0
) -> Gradients:
    """One list per step, of magnitudes `scale` and more.

    At the default scale even (1 - 0.999999) * g * g is a normal number of fp16, so that what is tested is the rule and
    not the range of the storage type.
    """

    def one(shape: Sequence[int], key: int) -> Tensor:
        x = noise(shape, key, torch.float64)
        return ((x + x.sign()) * scale).to(dtype)

    return [[one(s, seed * 100_000 + t * 1000 + i) for i, s in enumerate(shapes)] for t in range(steps)]


def parameters(values: Iterable[Tensor]) -> list[Parameter]:
    """Fresh parameters with the values' dtype, strides and device."""
    return [Parameter(v.detach().clone()) for v in values]


def drive(opt: torch.optim.Optimizer, params: Sequence[Tensor], grads: Rows) -> None:
    """Runs one step per list of gradients."""
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else g.to(p.device).clone()
        opt.step()


def states(opt: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Copies of the state tensors of each parameter, in the order of `params`."""
    return [{k: v.detach().clone() for k, v in opt.state.get(p, {}).items()} for p in params]


def snapshot(opt: torch.optim.Optimizer, params: Sequence[Tensor]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Copies of the parameters and of their states."""
    return [p.detach().clone() for p in params], states(opt, params)


def assert_backend(opt: Any, backend: str) -> None:
    """Every parameter must have run on this backend: a silent fallback would make the test prove nothing."""
    records = list(opt.explain())
    assert records, "explain() reports no parameter"
    wrong = [f"{r.name} {tuple(r.shape)} {r.dtype}: {r.backend} ({r.reason})" for r in records if r.backend != backend]
    assert not wrong, f"expected backend {backend!r} everywhere, found: {'; '.join(wrong[:5])}"


@st.composite
def strided_views(draw: Any) -> tuple[tuple[int, ...], list[int], list[int]]:
    """A shape with up to four dimensions, and non-overlapping strides for a parameter and a gradient."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    out = []
    for _ in range(2):
        stride, reach = [0] * len(shape), 1
        for d in draw(st.permutations(range(len(shape)))):
            stride[d] = reach * draw(st.integers(1, 3))
            reach = stride[d] * max(shape[d], 1)
        out.append(stride)
    return shape, out[0], out[1]


@dataclass(frozen=True)
class Layout:
    """How a parameter and its gradient lie in memory. Both makers take a contiguous tensor and return equal values."""

    name: str
    shape: tuple[int, ...]
    param: Callable[[Tensor], Tensor]
    grad: Callable[[Tensor], Tensor]

    def __str__(self) -> str:
        return self.name


GUARD = 7.0


def inside(values: Tensor, stride: Sequence[int], offset: int = 0) -> Tensor:
    """A view with these strides into a buffer that is otherwise full of GUARD, with 32 spare elements on each side."""
    span = sum((n - 1) * s for n, s in zip(values.shape, stride, strict=True)) + 1 if values.numel() else 0
    buffer = torch.full((span + 64 + offset,), GUARD, dtype=values.dtype, device=values.device)
    return buffer.as_strided(values.shape, stride, 32 + offset).copy_(values)


def untouched(view: Tensor) -> bool:
    """Whether every element of the view's storage that the view does not cover still holds GUARD."""
    buffer = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.detach().untyped_storage())
    covered = torch.zeros(buffer.numel(), dtype=torch.bool, device=view.device)
    covered.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return bool((buffer[~covered] == GUARD).all())


def _dense(order: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Dense, but with the dimensions in another order in memory: order[0] is the slowest."""

    def make(x: Tensor) -> Tensor:
        back = sorted(range(x.dim()), key=lambda d: order[d])
        return x.permute(tuple(order)).contiguous().permute(tuple(back))

    return make


def _strided(stride: Sequence[int], offset: int = 0) -> Callable[[Tensor], Tensor]:
    return lambda x: inside(x, stride, offset)


def _plain(x: Tensor) -> Tensor:
    return x.clone()


def _channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last, copy=True)


LAYOUTS = [
    Layout("contiguous", (4, 3, 5, 2), _plain, _plain),
    Layout("channels_last", (4, 3, 5, 2), _channels_last, _channels_last),
    Layout("channels_last_contiguous_grad", (4, 3, 5, 2), _channels_last, _plain),
    Layout("contiguous_channels_last_grad", (4, 3, 5, 2), _plain, _channels_last),
    Layout("channels_last_3d", (2, 3, 4, 5, 2), _dense((0, 2, 3, 4, 1)), _plain),
    Layout("transposed", (6, 35), _dense((1, 0)), _dense((1, 0))),
    Layout("transposed_contiguous_grad", (6, 35), _dense((1, 0)), _plain),
    Layout("contiguous_transposed_grad", (6, 35), _plain, _dense((1, 0))),
    Layout("permuted_three_ways", (3, 4, 5), _dense((2, 0, 1)), _dense((1, 2, 0))),
    # x[::2] and x[:, ::3] of larger buffers: gaps that must not be written.
    Layout("every_second", (40,), _strided((2,)), _plain),
    Layout("every_second_both", (40,), _strided((2,)), _strided((3,))),
    Layout("every_third_column", (9, 7), _strided((21, 3)), _strided((21, 3))),
    Layout("every_third_column_transposed_grad", (9, 7), _strided((21, 3)), _dense((1, 0))),
    Layout("rows_with_gaps", (9, 16), _strided((20, 1)), _plain),
    # Six dimensions of which no two can be joined: the general index walk.
    Layout("six_dims", (2, 3, 2, 2, 3, 2), _strided((400, 110, 50, 20, 5, 2)), _dense((5, 3, 1, 0, 2, 4))),
    Layout("zero_dim", (), _plain, _plain),
    Layout("zero_dim_in_buffer", (), _strided((), 3), _strided((), 1)),
    Layout("one_element", (1, 1, 1), _strided((5, 9, 2)), _plain),
    # Strides of dimensions of size 1 mean nothing and come out arbitrary from batched matmul.
    Layout("size_one_strides", (2, 1, 50), _strided((50, 1, 1)), _strided((50, 777, 1))),
    Layout("size_one_stride_zero", (1, 6), _strided((0, 1)), _plain),
    Layout("offset_1", (257,), _strided((1,), 1), _plain),
    Layout("offset_3_both", (5, 51), _strided((51, 1), 3), _strided((51, 1), 1)),
    Layout("expanded_scalar_grad", (6, 5), _plain, lambda x: x.reshape(-1)[:1].abs().expand(6, 5)),
    Layout("expanded_row_grad", (6, 5), _plain, lambda x: x[:1].clone().expand(6, 5)),
    Layout("expanded_column_grad", (6, 5), _dense((1, 0)), lambda x: x[:, :1].clone().expand(6, 5)),
    # Larger than a chunk, so that a chunk border falls inside a row of a strided tensor. (Below 32768 elements, where
    # torch starts its own threads, whose busy waiting makes a small test slow on a machine that is shared.)
    Layout("large_transposed", large(125, 140), _dense((1, 0)), _plain),
    Layout("large_gaps", large(70, 260), _strided((263, 1), 1), _dense((1, 0))),
]
