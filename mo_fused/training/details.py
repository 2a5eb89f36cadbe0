"""What a monitor looks at parameter by parameter, every few hundred steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mo_fused.distributed import shards
from mo_fused.host_copy import HostCopy
from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.errors import bad_input
from mo_fused.training.histograms import EDGES, magnitude_counts
from mo_fused.training.name_patterns import nearest

_ReadNorms = Callable[[], dict[str, float]]


def parameter_names(optimizer: Optimizer, model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters by the name it was given, else the model's, else their position."""
    of_model = {} if model is None else {id(one): name for name, one in model.named_parameters()}
    found: list[tuple[str, Tensor]] = []
    for g, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for i, one in enumerate(group["params"]):
            name = str(given[i]) if given else of_model.get(id(one), f"parameter {len(found)} (group {g})")
            found.append((name, one))
    return found


def check_patterns(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raises InputError for a pattern that is no parameter's name."""
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise bad_input(
                "histograms",
                expected="patterns that match names of parameters",
                found=f"{pattern!r}, which matches none; {nearest(pattern, known)}",
                remedy="give the Monitor model=, if these are no names, or mend the pattern",
            )


class Details:
    """One step, seen right before and right after the optimizer's step; gradients are not needed any more then.

    Norms of this package's optimizers are those of ``last_step``. For any other one gradients and parameters are read
    here, once each.

    Args:
        optimizer: whose step it is.
        model: gives the parameters' names, if the optimizer has none.
        patterns: parameters whose histograms are made. A copy of these is held during the step, for the update.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, patterns: Iterable[str]) -> None:
        self._optimizer = optimizer
        self._named = parameter_names(optimizer, model)
        self._chosen = [pair for pair in self._named if any(fnmatchcase(pair[0], one) for one in patterns)]
        self._old: list[Tensor] = []
        self._counts: dict[str, dict[str, HostCopy]] = {}
        self._norms: dict[str, _ReadNorms] = {}
        self._fused: Callable[[], Mapping[Any, Any]] | None = None

    @torch.no_grad()
    def before(self) -> None:
        """To be called when the step begins."""
        optimizer = self._optimizer
        if isinstance(optimizer, FusedOptimizer) and optimizer._release() is not None:
            self._chosen = []  # parameters have been stepped during the backward, and gradients are gone
        scale = shards.present(getattr(optimizer, "grad_scale", None))  # of a step that unscales by itself
        for name, one in self._chosen:
            self._old.append(shards.local(one).detach().clone())
            if one.grad is not None:
                values = _values(one.grad)
                values = values if scale is None else values.float() / scale
                self._counts[name] = {"grad": HostCopy(magnitude_counts(values))}
        if not isinstance(optimizer, FusedOptimizer):
            there = [(name, _values(one.grad)) for name, one in self._named if one.grad is not None]
            self._norms["grad_norm"] = _norms(there, 2.0, scale)
            self._norms["grad_amax"] = _norms(there, math.inf, scale)

    @torch.no_grad()
    def after(self) -> None:
        """To be called when the step has been queued."""
        for (name, one), old in zip(self._chosen, self._old, strict=False):
            update = shards.local(one).detach() - old
            self._counts.setdefault(name, {})["update"] = HostCopy(magnitude_counts(update))
        self._old = []
        if isinstance(self._optimizer, FusedOptimizer):
            last = self._optimizer.last_step
            self._fused = None if last is None else last.per_param_later()
        else:
            here = [(name, _values(one)) for name, one in self._named if one.grad is not None]
            self._norms["param_norm"] = _norms(here, 2.0)

    def read(self) -> dict[str, Any]:
        """``parameters`` and, where asked for, ``histograms``."""
        parameters: dict[str, dict[str, Any]] = {}
        if self._fused is not None:
            for key, one in self._fused().items():
                values = asdict(one)
                values["zero_grad"] = values.pop("all_zero")
                parameters[self._named[key][0] if isinstance(key, int) else str(key)] = values
        for key, norms in self._norms.items():
            for name, value in norms().items():
                parameters.setdefault(name, {})[key] = value
                if key == "grad_amax":
                    parameters[name]["zero_grad"] = value == 0.0
        found: dict[str, Any] = {"parameters": parameters}
        if self._counts:
            found["histograms"] = {
                name: {
                    "grad": kinds["grad"].read().tolist() if "grad" in kinds else None,
                    "update": kinds["update"].read().tolist() if "update" in kinds else None,
                    "edges": list(EDGES),
                }
                for name, kinds in self._counts.items()
            }
        return found


def _values(tensor: Tensor) -> Tensor:
    """What is here of it: of a DTensor this process's part, of a sparse gradient its values."""
    tensor = shards.local(tensor.detach())
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _norms(
    named: list[tuple[str, Tensor]], order: float, scale: Tensor | None = None
) -> Callable[[], dict[str, float]]:
    """Norms by name, on their way to the host; of an empty tensor 0."""
    devices: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if tensor.numel():
            devices.setdefault(tensor.device, []).append((name, tensor))
    copies = []
    for device, pairs in devices.items():
        norms = torch.stack([one.double() for one in torch._foreach_norm([tensor for _, tensor in pairs], order)])
        copies.append(([name for name, _ in pairs], HostCopy(norms if scale is None else norms / scale.to(device))))

    def read() -> dict[str, float]:
        found = {name: 0.0 for name, tensor in named if not tensor.numel()}
        for names, copy in copies:
            found.update(zip(names, copy.read().tolist(), strict=True))
        return found

    return read
