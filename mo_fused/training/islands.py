"""Modules that stay in fp32 inside a model that runs under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mo_fused.errors import bad_option, message
from mo_fused.training.forward_class import ForwardMixin, add_forward, has_forward, modules_named, remove_forward

_NARROW = (torch.float16, torch.bfloat16)


def fp32_island(module: nn.Module, pattern: str | None = None) -> list[str]:
    """Keeps a module, and all inside it, out of autocast: for losses, norms or routers that need fp32.

    fp16 and bf16 tensors in its inputs (nested in tuples, lists and dictionaries too) become fp32, autocast is off
    inside, and fp16 and bf16 tensors in its output become fp32. Other dtypes are left as they are. Names in the
    state_dict don't change, copies and pickles of the model keep the island, and a second call changes nothing.

    Args:
        module: the island itself, or with ``pattern`` the model that it is in.
        pattern: shell pattern on the names in ``module.named_modules()``; of modules inside each other the outermost.

    Returns:
        Names of the islands, ``[""]`` for ``module`` itself.

    Raises:
        ValueError: the pattern matches nothing, a module has no forward, or parameters that are fp16 or bf16.
    """
    if pattern is not None:
        islands = modules_named(module, pattern)
    elif has_forward(module):
        islands = {"": module}
    else:
        raise bad_option("module", "a module with a forward", type(module).__name__, "make islands of its parts")
    for name, island in islands.items():
        for own, parameter in island.named_parameters():
            if parameter.dtype in _NARROW:
                path = f"{name}.{own}" if name else own
                found = f"{path} of {parameter.dtype}"
                raise ValueError(message("an island's parameters in fp32", found, "call .float() on the module first"))
    for island in islands.values():
        add_forward(island, _Fp32)
    return list(islands)


def remove_fp32_islands(model: nn.Module) -> list[str]:
    """Undoes :func:`fp32_island` for ``model`` and everything inside it; the names of the modules that were islands."""
    return remove_forward(model, _Fp32)


class _Fp32(ForwardMixin):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = _device_type(self, (args, kwargs))
        args, kwargs = _widened((args, kwargs))
        with torch.autocast(device, enabled=False):
            return _widened(super().forward(*args, **kwargs))


def _widened(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype in _NARROW else t, tree)


def _device_type(module: nn.Module, inputs: Any) -> str:
    """Where the module computes: where its inputs are, else where its parameters are. Meta tensors have no autocast."""
    tensors = [*(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), *module.parameters()]
    types = [tensor.device.type for tensor in tensors if not tensor.is_meta]
    return types[0] if types else "cpu"
