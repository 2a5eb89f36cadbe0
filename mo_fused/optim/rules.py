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

from .. import errors, reference, state
from ..distributed import shards
from ..offload.homes import SlotForm
from ..table import HYPER

Group = dict[str, Any]
_NO_FACTORS = (0.0, 0.0, 0.0, 0.0)  # the fields of Hyper that belong to Adafactor


class ElementWise:
    """What optimizers have in common whose state looks like the parameter."""

    factored = False
    places: tuple[int, ...] = (2, 3, 4)
    """Operands of csrc/abi.h that the slots are."""
    group_keys: tuple[str, ...] = ()
    """Keys of groups that torch's class does not have."""

    def slot_shape(self, key: str, p: Tensor) -> torch.Size:
        return p.shape

    def slot(self, key: str, p: Tensor, state_dtype: str | None) -> SlotForm:
        """What a slot has to be."""
        dtype = p.dtype if state_dtype is None else state.STATE_DTYPES[state_dtype]
        return SlotForm(dtype, tuple(p.shape), like_param=True, any_float=state_dtype is None)

    def ensure(self, entry: dict[str, Any], p: Tensor, slots: tuple[str, ...], state_dtype: str | None) -> bool:
        """Makes the slots that are missing; True when one was made."""
        return state.ensure_slots(entry, p, slots, state_dtype)


class AdamRule(ElementWise):
    """Adam, AdamW and AMSGrad."""

    code = 0
    has_step = True
    copies_first = False
    all_slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled
        self._read = itemgetter("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "differentiable")

    def decoupled(self, group: Group) -> bool:
        # torch before 2.7 has no such key: AdamW there is decoupled, Adam is not.
        return bool(group.get("decoupled_weight_decay", self._decoupled))

    def refuse(self, p: Tensor, grad: Tensor) -> None:
        """Raises what torch raises for a gradient that the rule is not for."""
        if grad.layout != torch.strided:
            raise errors.sparse_adam()

    def slots(self, group: Group, p: Tensor) -> tuple[str, ...]:
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
        flags = bool(clip), group["maximize"], decoupled, group["amsgrad"], False
        return lr, beta1, beta2, eps, decay, 0.0, 0.0, *flags, *_NO_FACTORS

    def torch_step(self, p: Tensor, grad: Tensor, entry: dict[str, Any], group: Group) -> None:
        """torch's single-tensor step of one parameter; ``grad`` is unscaled and clipped already."""
        state.ensure_step(entry, p, group)
        state.ensure_slots(entry, p, self.slots(group, p))
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


class SGDRule(ElementWise):
    """SGD with or without momentum. Without, a parameter has no state at all, as in torch."""

    code = 1
    copies_first = True  # the first step copies the gradient into the buffer
    all_slots: tuple[str, ...] = ("momentum_buffer",)

    def __init__(self, counts: bool = False) -> None:
        self.has_step = counts
        """Random numbers need the number of the step; nothing else of this rule does."""
        self._read = itemgetter("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "differentiable")

    def refuse(self, p: Tensor, grad: Tensor) -> None:
        """torch's SGD takes sparse gradients."""

    def slots(self, group: Group, p: Tensor) -> tuple[str, ...]:
        return self.all_slots if group["momentum"] != 0 else ()

    def structure(self, group: Group) -> tuple[bool, bool]:
        return bool(group["momentum"] != 0), bool(group.get("differentiable"))

    def values(self, group: Group) -> tuple[Any, ...]:
        return (*self._read(group), group.get("clip"))

    def hyper(self, group: Group) -> tuple[Any, ...]:
        """The fields of csrc/abi.h's Hyper in their order: numbers, or tensors of one element."""
        lr, momentum, dampening, decay = group["lr"], group["momentum"], group["dampening"], group["weight_decay"]
        clip, maximize, nesterov = bool(group.get("clip", True)), group["maximize"], group["nesterov"]
        return lr, 0.0, 0.0, 0.0, decay, momentum, dampening, clip, maximize, False, False, nesterov, *_NO_FACTORS

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


class AdafactorRule:
    """Adafactor in torch's form and in that of the transformers library."""

    code = 3
    has_step = True
    copies_first = False
    factored = True
    all_slots: tuple[str, ...] = ("row_var", "col_var", "exp_avg", "variance")
    places: tuple[int, ...] = (2, 3, 4, 2)
    group_keys: tuple[str, ...] = ("scale_parameter", "relative_step", "warmup_init", "beta1", "transformers_form")

    def __init__(self) -> None:
        torch_keys = ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize")
        self._read = itemgetter(*torch_keys, *self.group_keys)

    def refuse(self, p: Tensor, grad: Tensor) -> None:
        """Raises what torch raises for a gradient that the rule is not for."""
        if torch.is_complex(p):
            raise RuntimeError("Adafactor does not support complex parameters")
        if grad.layout != torch.strided:
            raise RuntimeError("Adafactor does not support sparse gradients")

    def slots(self, group: Group, p: Tensor) -> tuple[str, ...]:
        second = ("row_var", "col_var") if p.dim() > 1 else ("variance",)
        return second if group["beta1"] is None else (*second, "exp_avg")

    def slot_shape(self, key: str, p: Tensor) -> torch.Size:
        if key in ("row_var", "col_var"):
            shape = list(p.shape)
            if p.dim() > 1:
                shape[-1 if key == "row_var" else -2] = 1
            return torch.Size(shape)
        return p.shape

    def slot(self, key: str, p: Tensor, state_dtype: str | None) -> SlotForm:
        """What a slot has to be."""
        compute = reference.compute_type(p)
        if key != "exp_avg":
            return SlotForm(compute, tuple(self.slot_shape(key, p)), like_param=False)
        dtype = compute if state_dtype is None else state.STATE_DTYPES[state_dtype]
        return SlotForm(dtype, tuple(p.shape), like_param=True, any_float=state_dtype is None)

    def ensure(self, entry: dict[str, Any], p: Tensor, slots: tuple[str, ...], state_dtype: str | None) -> bool:
        """Makes the slots that are missing, and second moments of the compute type of those that are of another."""
        compute = reference.compute_type(p)
        for key in slots:
            value = entry.get(key)
            if key == "exp_avg":
                dtype = compute if state_dtype is None else state.STATE_DTYPES[state_dtype]
                if value is None:
                    entry[key] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
                elif state_dtype is not None and type(shards.local(value)) is Tensor and value.dtype != dtype:
                    entry[key] = value.to(dtype)
            elif value is None:
                entry[key] = shards.zeros(p, self.slot_shape(key, p), compute, key)
            elif type(here := shards.local(value)) is Tensor and (here.dtype != compute or not here.is_contiguous()):
                entry[key] = shards.like(p, here.to(compute).contiguous(), value.shape, key)
        return False

    def structure(self, group: Group) -> tuple[bool, bool]:
        return group["beta1"] is not None, False

    def values(self, group: Group) -> tuple[Any, ...]:
        return (*self._read(group), group.get("clip"))

    def hyper(self, group: Group) -> tuple[Any, ...]:
        """The fields of csrc/abi.h's Hyper in their order: numbers, or tensors of one element."""
        eps1, eps2 = group["eps"]
        kind = 0 if group["relative_step"] is None else 1 if not group["relative_step"] else 2 + group["warmup_init"]
        # The flags of csrc/abi.h: the step size is scaled; eps is added; decay follows the scaled step size.
        flags = bool(group["scale_parameter"]) + 6 * bool(group["transformers_form"])
        lr = 0.0 if group["lr"] is None else group["lr"]
        eps = float("nan") if eps1 is None else eps1
        beta1 = 0.0 if group["beta1"] is None else group["beta1"]
        numbers = lr, beta1, group["beta2_decay"], eps, group["weight_decay"], 0.0, 0.0
        clip = bool(group.get("clip", True))
        return *numbers, clip, group["maximize"], False, False, False, eps2, group["d"], kind, flags

    def torch_step(self, p: Tensor, grad: Tensor, entry: dict[str, Any], group: Group) -> None:
        """The reference's step of one parameter (torch's takes no fp32 statistics of a bf16 parameter)."""
        slots = self.slots(group, p)
        state.ensure_step(entry, p, group)
        self.ensure(entry, p, slots, None)
        hyper = {name: float(value) for name, value in zip(HYPER.names or (), self.hyper(group), strict=True)}
        reference.adafactor_step(p, grad, entry, slots, hyper, 1.0)


Rule = AdamRule | SGDRule | AdafactorRule
