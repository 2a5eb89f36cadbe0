"""What distinguishes one optimizer from another, for everything above the kernels: its slots, its hyper-parameters, and
torch's own single-tensor step for parameters that the kernels do not take."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from .. import state

Group = dict[str, Any]


class AdamRule:
    """Adam, AdamW and AMSGrad."""

    code = 0
    has_step = True
    sparse_ok = False
    copies_first = False
    all_slots = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled
        self._read = itemgetter("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "differentiable")

    def decoupled(self, group: Group) -> bool:
        # torch before 2.7 has no such key: AdamW there is decoupled, Adam is not.
        return bool(group.get("decoupled_weight_decay", self._decoupled))

    def slots(self, group: Group) -> tuple[str, ...]:
        return self.all_slots if group["amsgrad"] else self.all_slots[:2]

    def structure(self, group: Group) -> tuple[bool, bool]:
        return bool(group["amsgrad"]), bool(group.get("differentiable"))

    def values(self, group: Group) -> tuple[Any, ...]:
        return (*self._read(group), group.get("decoupled_weight_decay"), group.get("clip"))

    def hyper(self, group: Group) -> tuple[Any, ...]:
        """The fields of csrc/abi.h's Hyper in their order: numbers, or tensors of one element."""
        beta1, beta2 = group["betas"]
        clip, decoupled = group.get("clip", True), self.decoupled(group)
        lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
        return lr, beta1, beta2, eps, decay, 0.0, 0.0, bool(clip), group["maximize"], decoupled, group["amsgrad"], False

    def torch_step(self, p: Tensor, grad: Tensor, entry: dict[str, Any], group: Group) -> None:
        """torch's single-tensor step of one parameter; ``grad`` is unscaled and clipped already."""
        slots = self.slots(group)
        state.ensure_step(entry, p, group)
        state.ensure_slots(entry, p, slots)
        functional = adamw if self.decoupled(group) else adam
        functional(
            [p],
            [grad],
            [entry["exp_avg"]],
            [entry["exp_avg_sq"]],
            [entry["max_exp_avg_sq"]] if group["amsgrad"] else [],
            [entry["step"]],
            foreach=False,
            fused=False,
            capturable=group.get("capturable", False),
            differentiable=group.get("differentiable", False),
            has_complex=torch.is_complex(p),
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class SGDRule:
    """SGD with or without momentum. Without, a parameter has no state at all, as in torch."""

    code = 1
    has_step = False
    sparse_ok = True
    copies_first = True  # the first step copies the gradient into the buffer
    all_slots = ("momentum_buffer",)

    def __init__(self) -> None:
        self._read = itemgetter("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "differentiable")

    def slots(self, group: Group) -> tuple[str, ...]:
        return self.all_slots if group["momentum"] != 0 else ()

    def structure(self, group: Group) -> tuple[bool, bool]:
        return bool(group["momentum"] != 0), bool(group.get("differentiable"))

    def values(self, group: Group) -> tuple[Any, ...]:
        return (*self._read(group), group.get("clip"))

    def hyper(self, group: Group) -> tuple[Any, ...]:
        """The fields of csrc/abi.h's Hyper in their order: numbers, or tensors of one element."""
        lr, momentum, dampening, decay = group["lr"], group["momentum"], group["dampening"], group["weight_decay"]
        clip, maximize, nesterov = bool(group.get("clip", True)), group["maximize"], group["nesterov"]
        return lr, 0.0, 0.0, 0.0, decay, momentum, dampening, clip, maximize, False, False, nesterov

    def torch_step(self, p: Tensor, grad: Tensor, entry: dict[str, Any], group: Group) -> None:
        """torch's single-tensor step of one parameter; ``grad`` is unscaled and clipped already."""
        buffers: list[Tensor | None] = [entry.get("momentum_buffer")]
        sgd(
            [p],
            [grad],
            buffers,
            has_sparse_grad=grad.is_sparse,
            foreach=False,
            fused=False,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"] != 0:
            entry["momentum_buffer"] = buffers[0]


Rule = AdamRule | SGDRule
