"""What is stepped in the benchmarks: the parameters of models, and sets of tensors that are hard for an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mo_fused import dispatch

Shape = tuple[int, ...]

GROUPS = 60
"""Parameter groups as people have them: with and without decay, and a learning rate for every layer."""
LR, DECAY, MAX_NORM = 1e-4, 0.1, 1.0


def gpt2_shapes(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """GPT-2's parameters, the output layer tied to the embedding. The defaults: 148 tensors, 124,439,808 elements."""
    shapes: list[Shape] = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


def llama_layer_shapes(layers: int = 1, width: int = 4096, kv: int = 1024, inner: int = 14336) -> list[Shape]:
    """Decoder layers of Llama 3 8B: 9 tensors and 218,112,000 elements each."""
    one: list[Shape] = [(width, width), (kv, width), (kv, width), (width, width)]
    one += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    return layers * one


def vit_shapes(
    layers: int = 24, width: int = 1024, patch: int = 16, tokens: int = 197, classes: int = 1000
) -> list[Shape]:
    """A vision transformer. The defaults are ViT-L/16's: 296 tensors, 304,326,632 elements."""
    shapes: list[Shape] = [(1, 1, width), (1, tokens, width), (width, 3, patch, patch), (width,)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width,), (width,), (classes, width), (classes,)]


def resnet_shapes(blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> list[Shape]:
    """A ResNet of bottlenecks. The defaults are ResNet-50's: 161 tensors, 25,557,032 elements."""
    shapes: list[Shape] = [(width, 3, 7, 7), (width,), (width,)]
    inputs = width
    for stage, count in enumerate(blocks):
        inner = width << stage
        for block in range(count):
            shapes += [(inner, inputs, 1, 1), (inner,), (inner,), (inner, inner, 3, 3), (inner,), (inner,)]
            shapes += [(4 * inner, inner, 1, 1), (4 * inner,), (4 * inner,)]
            if block == 0:
                shapes += [(4 * inner, inputs, 1, 1), (4 * inner,), (4 * inner,)]
            inputs = 4 * inner
    return [*shapes, (classes, inputs), (classes,)]


def lora_shapes(pairs: int = 1000, rank: int = 8, width: int = 1024) -> list[Shape]:
    """Low-rank adapters, two matrices each. The defaults: 2000 tensors, 16,384,000 elements."""
    pair: list[Shape] = [(rank, width), (width, rank)]
    return pairs * pair


@dataclass(frozen=True)
class Workload:
    """Tensors of one dtype. ``shapes`` is what is measured, ``quick`` the same in small."""

    name: str
    shapes: Sequence[Shape]
    quick: Sequence[Shape]
    dtype: torch.dtype
    in_memory: bool
    """Far larger than the caches, so that bytes per second mean something."""
    cuda_only: bool = False

    def parameters(self, quick: bool, device: torch.device | str = "cpu") -> list[Tensor]:
        """Parameters with random values and gradients, made on the device."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(shape: Shape, size: float) -> Tensor:
            # Of large tensors only one is there in fp32 at a time, and on a GPU none.
            dtype = self.dtype if dispatch.is_cuda(torch.device(device)) else torch.float32
            filled = torch.empty(shape, device=device, dtype=dtype).normal_(0.0, size, generator=generator)
            return filled.to(self.dtype)

        params: list[Tensor] = []
        for shape in self.quick if quick else self.shapes:
            p = torch.nn.Parameter(normal(shape, 0.02))
            p.grad = normal(shape, 1e-3)
            params.append(p)
        return params

    def counted_bytes(self, params: Sequence[Tensor]) -> float:
        """Bytes of one operand (all parameters, say); 0 where bytes per second mean nothing."""
        return float(sum(p.numel() * p.element_size() for p in params)) if self.in_memory else 0.0


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def gpt2(dtype: torch.dtype) -> Workload:
    name = str(dtype).removeprefix("torch.")
    return Workload(f"GPT-2 124M {name}", gpt2_shapes(), gpt2_shapes(2, 48, 500, 64), dtype, True)


def small(dtype: torch.dtype) -> Workload:
    """1000 tensors of 64 elements: what is left is the work per tensor."""
    name = str(dtype).removeprefix("torch.")
    return Workload(f"1000 x 64 {name}", [(64,)] * 1000, [(64,)] * 50, dtype, False)


def matrices(dtype: torch.dtype) -> Workload:
    """Adafactor's small tensors: rows, columns and a factored moment each."""
    name = {v: k for k, v in DTYPES.items()}[dtype]
    return Workload(f"500 x 64x64 {name}", [(64, 64)] * 500, [(64, 64)] * 20, dtype, False)


_MODELS: dict[str, Callable[[torch.dtype], Workload]] = {
    "gpt2": gpt2,
    "llama": lambda d: Workload("Llama 8B layer", llama_layer_shapes(), llama_layer_shapes(1, 64, 16, 224), d, True),
    "vit": lambda d: Workload("ViT-L", vit_shapes(), vit_shapes(2, 32, 4, 17, 10), d, True),
    "resnet": lambda d: Workload("ResNet-50", resnet_shapes(), resnet_shapes((1, 1), 8, 10), d, True),
    "lora": lambda d: Workload("LoRA, 1000 pairs", lora_shapes(), lora_shapes(20, 4, 32), d, True),
    "small": small,
    "tiny": lambda d: Workload("10,000 x 16", [(16,)] * 10_000, [(16,)] * 200, d, False),
    "huge": lambda d: Workload("one tensor of 2^31 + 64", [((1 << 31) + 64,)], [(4097,)], d, True, cuda_only=True),
}


def _named(model: str, word: str) -> Workload:
    made = _MODELS[model](DTYPES[word])
    dtype = str(DTYPES[word]).removeprefix("torch.")
    return made if made.name.endswith(dtype) else replace(made, name=f"{made.name} {dtype}")


WORKLOADS = {f"{model}-{word}": _named(model, word) for model in _MODELS for word in DTYPES}
WORKLOADS |= {f"matrices-{word}": matrices(dtype) for word, dtype in DTYPES.items()}


def in_groups(params: Sequence[Tensor], groups: int) -> list[dict[str, Any]]:
    """The parameters dealt out to groups, each with a learning rate of its own, every second one without decay."""
    return [
        {"params": params[g::groups], "lr": LR * (1 + g / groups), "weight_decay": DECAY * (g % 2)}
        for g in range(groups)
        if params[g::groups]
    ]
