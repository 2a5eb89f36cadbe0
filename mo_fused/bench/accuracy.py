"""How far an optimizer's parameters end from those of float64: the same gradients, the same steps."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mo_fused.bench.peers import Peer
from mo_fused.bench.workloads import Shape

STEPS = 30
SHAPES: tuple[Shape, ...] = ((64, 129), (257,), (128, 64))
DISAGREES = 0.02
"""An exact optimizer whose error is larger does something else than the rule."""


@cache
def error(peer: Peer, oracle: Peer, dtype: torch.dtype, device: torch.device) -> float:
    """Root mean square of the difference to ``oracle`` at float64, as a share of how far the parameters went.

    Both take 30 steps over the same gradients, rounded to ``dtype`` for both. In bf16 without master weights most of it
    is the rounding of the parameters, which every such optimizer has.
    """
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 0.02 for i, shape in enumerate(SHAPES)]
    params = [torch.nn.Parameter(p.to(device, dtype)) for p in start]
    exact = [torch.nn.Parameter(p.detach().cpu().double()) for p in params]
    begin = [p.detach().clone() for p in exact]
    own, other = peer.make(params), oracle.make(exact)
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(params, exact, strict=True)):
            grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1000 + 100 * step + i)) * 1e-2
            p.grad = grad.to(device, dtype)
            q.grad = grad.to(dtype).double()
        own.step()
        other.step()
    return _norm([p.detach().cpu().double() - q for p, q in zip(params, exact, strict=True)]) / _norm(
        [q - b for q, b in zip(exact, begin, strict=True)]
    )


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([t.detach().flatten() for t in tensors]).norm())
