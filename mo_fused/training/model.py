"""A small GPT over bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then a GELU layer of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) to the same shape."""
        batch, context, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x


class ByteGPT(nn.Module):
    """GPT whose tokens are the 256 bytes; the output layer shares the embedding's weight.

    Args:
        context: longest input, in bytes.
        layers, heads, width: depth, attention heads and embedding size; ``width`` is a multiple of ``heads``.

    Starts at a loss near ln(256) = 5.55: small random weights, and the layers that write into the residual stream
    scaled down by the square root of their number so that its size does not grow with depth.
    """

    def __init__(self, *, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(("attention_out", "mlp_out"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 bytes of shape (batch, length), length up to ``context``, to logits (batch, length, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.embedding(tokens) + self.position(positions))
        return F.linear(self.norm(x), self.embedding.weight)
