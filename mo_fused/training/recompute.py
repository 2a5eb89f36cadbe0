"""Activations of chosen blocks computed again in the backward pass instead of being kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from mo_fused.training.forward_class import ForwardMixin, add_forward, modules_named, remove_forward


def checkpoint_activations(model: nn.Module, pattern: str) -> list[str]:
    """Recomputes the named blocks in the backward: memory for activations against one more forward of these blocks.

    Gradients are the same bits: torch's random state and autocast are as in the first forward, and running statistics
    of norms are not counted twice. Only training is affected: a block in eval mode or under ``no_grad`` runs as
    ever. Names in the state_dict don't change, copies and pickles of the model keep it, a second call changes nothing.
    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; ``torch.utils.checkpoint`` without reentrance.

    Args:
        model: the module that the blocks are in.
        pattern: shell pattern on the names in ``model.named_modules()``; of modules inside each other the outermost,
            so ``"blocks.*"`` is each block as a whole.

    Returns:
        Names of the blocks that are recomputed.

    Raises:
        ValueError: the pattern matches no module, or only such without a forward.
    """
    blocks = modules_named(model, pattern)
    for block in blocks.values():
        add_forward(block, _Recomputed)
    return list(blocks)


def keep_activations(model: nn.Module) -> list[str]:
    """Undoes :func:`checkpoint_activations` for ``model`` and everything inside it; the names of the modules."""
    return remove_forward(model, _Recomputed)


class _Recomputed(ForwardMixin):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # the module's own
        if not (self.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        forward = partial(forward, **kwargs)  # so that none of the names can be one of checkpoint's own
        norms = [module for module in self.modules() if isinstance(module, _NormBase)]
        if not norms:
            return checkpoint(forward, *args, use_reentrant=False)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_contexts, norms))


def _contexts(norms: list[_NormBase]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward, and around each later one."""
    return nullcontext(), _StatisticsKept(norms)


class _StatisticsKept(AbstractContextManager[None]):
    """Norms count the batch into copies of their running statistics, which are thrown away.

    They still have some, since the second forward has to save as many tensors as the first one. A class rather than a
    generator, since it is entered once for each backward through the same graph.
    """

    def __init__(self, norms: list[_NormBase]) -> None:
        self._norms = norms
        self._kept: list[tuple[_NormBase, dict[str, Tensor]]] = []

    def __enter__(self) -> None:
        self._kept = [(norm, dict(norm.named_buffers(recurse=False))) for norm in self._norms]
        for norm, buffers in self._kept:
            for name, buffer in buffers.items():
                setattr(norm, name, buffer.clone())

    def __exit__(self, *_error: object) -> None:
        for norm, buffers in self._kept:
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)
        self._kept = []
