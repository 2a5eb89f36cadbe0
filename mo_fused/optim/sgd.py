"""SGD: torch's class on the fused step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .adamw import OPTIONS_DOC
from .base import OPTIONS, FusedOptimizer, check_options
from .formats import draws
from .rules import SGDRule

_RULES = (SGDRule(), SGDRule(counts=True))


class SGD(FusedOptimizer, torch.optim.SGD):
    __doc__ = f"""torch.optim.SGD with the whole step fused (momentum after Sutskever et al. 2013).

    buf <- momentum * buf + (1 - dampening) * g (the first step copies g), theta <- theta - lr * buf. Arguments before
    ``max_grad_norm`` are torch's, in torch's order. State: ``momentum_buffer``; none without momentum.
    {OPTIONS_DOC}"""

    @property
    def _rule(self) -> SGDRule:  # type: ignore[override]
        return _RULES[draws(self.defaults)]  # asked for several times a step

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        clip_in_place: bool = False,
        stats: bool = False,
        amp: str = "fused",
        backend: str | None = None,
        state_dtype: str | None = None,
        master_weights: str | None = None,
        seed: int = 0,
        offload: str | None = None,
        offload_gradients: bool = False,
        offload_fraction: float = 1.0,
    ) -> None:
        arguments = locals()
        options = check_options({name: arguments[name] for name in OPTIONS})
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self._adopt(options)
