"""A model, optimizers and formats for tests of distributed checkpoints, whose steps have the same bits on any ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mo_fused

BF16 = torch.bfloat16


class Layer(nn.Linear):
    """Gradients without a matrix product, whose bits could depend on addresses: each parameter plus a given tensor."""

    def forward(self, at: int) -> Tensor:
        return sum((p.square() / 2 + p * noise(p, at)).sum() for p in (self.weight, self.bias))  # type: ignore[return-value]


def noise(p: Tensor, at: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(at)).to(p.dtype)


class Model(nn.Module):
    """70 slices: cut unevenly by four; 3 slices: nothing for the last of four ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = Layer(128, 70, dtype=dtype)  # enough elements, and a width, for quantised moments
        self.few = Layer(33, 3, dtype=dtype)

    def forward(self, at: int) -> Tensor:
        return self.wide(at) + self.few(at)


@dataclass(frozen=True)
class Case:
    """An optimizer, and a key that the state of the wide weight has to have."""

    kind: str
    key: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    flat: bool = False

    def optimizer(self, model: nn.Module, group: dict[str, Any] | None = None, **changes: Any) -> Any:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, **(group or {"clip": False})},
        ]
        kind = changes.pop("kind", getattr(mo_fused, self.kind))
        return kind(groups, **{"lr": 0.01, **self.options, **changes})

    def saving(self) -> dsd.StateDictOptions:
        return dsd.StateDictOptions(flatten_optimizer_state_dict=self.flat)


LIMIT = {"max_grad_norm": 1e6}  # ranks talk to each other, and nothing is clipped
SGD = {"momentum": 0.9, "dampening": 0.1}
CASES = {
    "adamw": Case("AdamW", "exp_avg", LIMIT),
    "adamw-bf16": Case("AdamW", "exp_avg_sq", {"state_dtype": "bf16"}, flat=True),
    "adamw-int8": Case("AdamW", "exp_avg_q8", {"state_dtype": "int8", **LIMIT}),
    "adamw-int4": Case("AdamW", "exp_avg_sq_q4", {"state_dtype": "int4"}, flat=True),
    "amsgrad": Case("Adam", "max_exp_avg_sq", {"amsgrad": True}),
    "amsgrad-int8": Case("Adam", "max_exp_avg_sq_q8", {"amsgrad": True, "state_dtype": "int8", "stats": True}),
    "sgd": Case("SGD", "momentum_buffer", SGD, flat=True),
    "sgd-bf16": Case("SGD", "momentum_buffer", {**SGD, "state_dtype": "bf16", **LIMIT}),
    "sgd-int8": Case("SGD", "momentum_buffer_q8", {**SGD, "state_dtype": "int8", "skip_nonfinite": True}),
    "sgd-int4": Case("SGD", "momentum_buffer_scale", {**SGD, "state_dtype": "int4"}, flat=True),
    "fp32": Case("AdamW", "master", {"master_weights": "fp32", "state_dtype": "fp32"}, BF16),
    "split": Case("AdamW", "master_low", {"master_weights": "split", **LIMIT}, BF16, flat=True),
    "split8-int8": Case("AdamW", "master_low", {"master_weights": "split8", "state_dtype": "int8", **LIMIT}, BF16),
    "kahan-int4": Case("Adam", "compensation", {"master_weights": "kahan", "state_dtype": "int4"}, BF16),
    "stochastic": Case("AdamW", "exp_avg", {"master_weights": "stochastic", "seed": 7}, BF16),
    "sgd-stochastic": Case("SGD", "momentum_buffer", {**SGD, "master_weights": "stochastic"}, BF16),
}


def build(case: Case, sharded: bool, **changes: Any) -> tuple[nn.Module, Any]:
    model = Model(case.dtype)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model.wide, model.few, model):
            fully_shard(part, mesh=mesh)
    return model, case.optimizer(model, **changes)


def train(model: nn.Module, opt: Any, steps: range) -> None:
    """The first rank has all of the loss: sums over ranks have the same bits whatever their number."""
    ranks = dist.get_world_size() if isinstance(model.wide.weight, DTensor) else 1
    for at in steps:
        (model(at) * (ranks if ranks == 1 or dist.get_rank() == 0 else 0)).backward()
        opt.step()
        opt.zero_grad()


def whole(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    """Parameters, state and groups without their places: equal on any number of ranks. Collective."""
    out = {}
    for name, p in model.named_parameters():
        for key, value in {"": p.detach(), **opt.state[p]}.items():
            out[f"{name} {key}"] = gathered(value)
    for at, group in enumerate(opt.param_groups):
        out |= {f"{at} {key}": torch.tensor(v) for key, v in group.items() if isinstance(v, (bool, int, float))}
    return out


def gathered(value: Any) -> Tensor:
    """All of a state. Neither gloo nor nccl sends 16-bit integers."""
    value = torch.as_tensor(value)
    if not isinstance(value, DTensor):
        return value.clone()
    sent = value.to(torch.int32) if value.dtype == torch.int16 else value
    return sent.full_tensor().to(value.dtype, copy=True)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    kinds = {name for name in wanted if found[name].dtype != wanted[name].dtype}
    assert not kinds, {name: (found[name].dtype, wanted[name].dtype) for name in kinds}
    differ = {n: (found[n] != wanted[n]).sum().item() for n in wanted if not torch.equal(found[n], wanted[n])}
    assert not differ, f"elements that differ: {differ}"
