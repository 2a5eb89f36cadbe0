"""Adafactor in float64, written from the formulae: what the tests of mo_fused.Adafactor compare with.

Shazeer & Stern 2018 (arXiv:1804.04235), algorithms 4 and 5, in the two forms in wide use. In torch.optim.Adafactor's
eps[0] bounds the mean of the row averages and the root from below; in that of the transformers library it is added
to the squared gradient, and weight decay follows the scaled step size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Rows
from oracle import clip64, wide
from torch import Tensor

import mo_fused

State = dict[str, Any]


def root_mean_square(x: Tensor) -> float:
    return math.sqrt(float(x.square().mean()))


@dataclass(frozen=True)
class Form:
    """Options under the names of mo_fused.Adafactor; ``like`` says whose defaults the constructor starts from."""

    name: str
    like: str = "torch"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.like}-{self.name}"

    def settings(self, **changes: Any) -> dict[str, Any]:
        """All options under this package's names."""
        out: dict[str, Any] = {
            "lr": 1e-2,
            "beta2_decay": -0.8,
            "eps": (None, 1e-3),
            "d": 1.0,
            "weight_decay": 0.0,
            "maximize": False,
            "scale_parameter": True,
            "relative_step": None,
            "warmup_init": False,
            "beta1": None,
            "transformers_form": False,
        }
        if self.like == "transformers":
            out.update(lr=None, eps=(1e-30, 1e-3), relative_step=True, transformers_form=True)
        given = {**self.options, **changes}
        aliases = {"clip_threshold": "d", "decay_rate": "beta2_decay"}
        out.update({aliases.get(k, k): v for k, v in given.items()})
        return out

    def ours(self, params: Iterable[Any], **changes: Any) -> Any:
        """The optimizer under test."""
        make = mo_fused.Adafactor.like_transformers if self.like == "transformers" else mo_fused.Adafactor
        return make(params, **copy.deepcopy({**self.options, **changes}))

    def exact(
        self,
        values: Sequence[Tensor],
        grads: Rows,
        *,
        keep: bool = False,
        max_norm: float = math.inf,
        states: Sequence[State] | None = None,
        **changes: Any,
    ) -> tuple[list[Tensor], list[State]]:
        """Parameters and states after the steps, in float64.

        Args:
            values: starting parameters; their dtypes choose eps[0] when that is None.
            grads: one list per step; None for a parameter that has no gradient.
            keep: round each parameter to its dtype after every step (statistics stay float64).
            max_norm: clip the gradients of each step together to this norm first.
            states: to go on from.
        """
        settings = self.settings(**changes)
        params = [wide(v) for v in values]
        entries = [{} for _ in values] if states is None else [copy.deepcopy(s) for s in states]
        for row in grads:
            if math.isfinite(max_norm):
                row = clip64(row, max_norm)[0]
            for i, g in enumerate(row):
                if g is not None:
                    params[i] = exact_step(params[i], wide(g), entries[i], values[i].dtype, settings)
                    if keep:
                        params[i] = params[i].to(values[i].dtype).double()
        return params, entries


def step_size(t: float, param: Tensor, s: dict[str, Any]) -> float:
    """rho_t, and alpha_t = max(eps2, RMS(p)) rho_t where the step size is scaled."""
    root = 1 / math.sqrt(t)
    if s["relative_step"] is None:
        rho = min(float(s["lr"]), root)
    elif s["relative_step"]:
        rho = min(1e-6 * t if s["warmup_init"] else 1e-2, root)
    else:
        rho = float(s["lr"])
    return max(s["eps"][1], root_mean_square(param)) * rho if s["scale_parameter"] else rho


def exact_step(p: Tensor, g: Tensor, state: State, dtype: torch.dtype, s: dict[str, Any]) -> Tensor:
    """The parameter after a step in float64; ``state`` is written. ``dtype``: what the parameter is stored in."""
    if s["maximize"]:
        g = -g
    matrix = p.dim() > 1
    if "step" not in state:
        state["step"] = 0.0
        if matrix:
            state["row_var"] = torch.zeros_like(p.sum(-1, keepdim=True))
            state["col_var"] = torch.zeros_like(p.sum(-2, keepdim=True))
        else:
            state["variance"] = torch.zeros_like(p)
        if s["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(p)
    state["step"] += 1.0
    if p.numel() == 0:
        return p
    t = state["step"]
    eps1 = torch.finfo(dtype).eps if s["eps"][0] is None else s["eps"][0]
    added, floor = (eps1, 0.0) if s["transformers_form"] else (0.0, eps1)
    beta2 = 1 - t ** s["beta2_decay"]
    alpha = step_size(t, p, s)

    square = g * g + added
    if matrix:
        state["row_var"] = beta2 * state["row_var"] + (1 - beta2) * square.mean(-1, keepdim=True)
        state["col_var"] = beta2 * state["col_var"] + (1 - beta2) * square.mean(-2, keepdim=True)
        mean = state["row_var"].mean(-2, keepdim=True)
        second = state["row_var"] * state["col_var"] / mean.clamp(min=floor)
    else:
        second = state["variance"] = beta2 * state["variance"] + (1 - beta2) * square
    update = g / second.sqrt().clamp(min=floor)
    update = alpha * update / max(1.0, root_mean_square(update) / s["d"])
    if s["beta1"] is not None:
        update = state["exp_avg"] = s["beta1"] * state["exp_avg"] + (1 - s["beta1"]) * update
    decay = (alpha if s["transformers_form"] else float(s["lr"] or 0.0)) * s["weight_decay"]
    return p - decay * p - update


# With lr = 0.3 the step size is lr for eleven steps and 1 / sqrt(t) from then on.
TORCH = Form("default", "torch", dict(lr=0.3))
TRANSFORMERS = Form("default", "transformers")
MOMENTUM = Form("beta1", "transformers", dict(beta1=0.9, weight_decay=0.1))

FORMS = [
    TORCH,
    Form("decay_maximize", "torch", dict(lr=0.3, weight_decay=0.1, maximize=True)),
    Form("d", "torch", dict(lr=0.3, d=1.5, beta2_decay=-0.5)),
    # Far above the tests' gradients: bounds the mean and the root.
    Form("floor", "torch", dict(lr=0.3, eps=(30.0, 1e-3), weight_decay=0.1)),
    Form("eps2", "torch", dict(lr=0.3, eps=(0.0, 5.0))),
    Form("tensor_lr", "torch", dict(lr=torch.tensor(0.25), weight_decay=0.1)),
    TRANSFORMERS,
    Form("warmup", "transformers", dict(warmup_init=True, weight_decay=0.1)),
    Form("own_lr", "transformers", dict(lr=0.1, relative_step=False, scale_parameter=False, weight_decay=0.1)),
    Form("added", "transformers", dict(eps=(30.0, 0.5), clip_threshold=2.0, decay_rate=-0.5)),
    MOMENTUM,
    # Both forms of the running mean: from the old value, and, below one half, from the new one.
    Form("low_beta1", "transformers", dict(lr=0.1, relative_step=False, beta1=0.3)),
    # Options that neither library has together.
    Form("torch_beta1", "torch", dict(lr=0.3, beta1=0.5, weight_decay=0.1, maximize=True)),
    Form("torch_plain_lr", "torch", dict(lr=0.1, relative_step=False, scale_parameter=False, weight_decay=0.1)),
    Form("maximize", "transformers", dict(maximize=True, scale_parameter=False)),
]
# One of each form, for tests whose subject is not the formula.
BOTH = [TORCH, MOMENTUM]
