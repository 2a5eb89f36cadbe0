"""AdamW and Adam: torch's classes on the fused step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import OPTIONS, FusedOptimizer, check_options
from .rules import AdamRule

STEP_OPTIONS_DOC = """
        max_grad_norm: clips the gradients' global L2 norm, over all groups, to this value inside the step; ``.grad`` is
            not rewritten. A group with ``"clip": False`` takes no part in the norm or the scaling. None: no clipping.
        skip_nonfinite: a step in which any gradient element is inf or NaN changes nothing.
        clip_in_place: also write the clipped, unscaled gradients back to ``.grad``.
        stats: measure norms of gradients, updates and parameters every step (``opt.last_step``).
        amp: "fused" unscales inside the step, as torch's ``fused=True`` does; "torch" leaves it to the scaler.
        backend: "cpu", "cuda", "triton", "eager" or None for the best one (also the environment variable
            MO_FUSED_BACKEND).
        offload: "cpu" keeps state on the host, "disk:PATH" in a file under PATH, and the host's kernels do the step.
        offload_gradients: with ``offload``, the backward moves each gradient to the host and leaves ``.grad`` None.
        offload_fraction: with ``offload``, the part of the state's bytes that goes there, largest tensors first."""

OPTIONS_DOC = f"""
    Keyword-only options beyond torch's:

    Args:{STEP_OPTIONS_DOC}
        state_dtype: of the moments: "fp32", "bf16", "int8" or "int4" (with a float32 scale for each block of up to 256
            or 128 elements; vectors and tensors of fewer than 4096 elements stay float32), or None for the parameter's
            own. Existing state is converted to the format that is named; with None plain moments stay as they are.
        master_weights: for bf16 and fp16 parameters, weights finer than the parameter: "fp32" (4 bytes an element),
            "split" (bf16: a remainder of 2 bytes, bit-equal to "fp32"), "split8" (bf16: 1 byte), "kahan" (2 bytes), or
            "stochastic" rounding (none).
        seed: of the random numbers of "split8", "stochastic", "int8" and "int4"; the same seed gives the same bits on
            every backend and after a resume.

    ``fused`` and ``foreach`` are stored and shown; they do not choose the backend (``opt.explain()`` tells which runs).
"""


class AdamW(FusedOptimizer, torch.optim.AdamW):
    __doc__ = f"""torch.optim.AdamW with the whole step fused (Loshchilov & Hutter 2019, arXiv:1711.05101).

    theta <- theta - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * theta), computed in float32 (float64 for float64
    parameters) and rounded once to the parameter's dtype. Arguments before ``max_grad_norm`` are torch's, in torch's
    order. State: ``step``, ``exp_avg``, ``exp_avg_sq``, with ``amsgrad`` also ``max_exp_avg_sq``, as in torch.
    {OPTIONS_DOC}"""

    _rule = AdamRule(decoupled=True)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
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
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._adopt(options)


class Adam(FusedOptimizer, torch.optim.Adam):
    __doc__ = f"""torch.optim.Adam with the whole step fused (Kingma & Ba 2015, arXiv:1412.6980).

    Weight decay is added to the gradient unless ``decoupled_weight_decay=True`` (torch 2.7 and newer). Arguments before
    ``max_grad_norm`` are torch's, in torch's order. State as in :class:`AdamW`.
    {OPTIONS_DOC}"""

    _rule = AdamRule(decoupled=False)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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
        # The key does not exist in torch before 2.7; there it may not be passed.
        extra = {"decoupled_weight_decay": True} if decoupled_weight_decay else {}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            **extra,
        )
        self._adopt(options)
