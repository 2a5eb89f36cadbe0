"""Parameter groups from a model."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of named parameters: matrices (two or more dimensions) decay, biases and norm gains do not.

    Parameters that need no gradient are left out, tied ones appear once, an empty group is dropped.

    Args:
        model: the module whose parameters are to be trained.
        weight_decay: the decay of the first group.

    Returns:
        Groups for any torch optimizer, largest dimension first; names travel with the parameters (``param_names``).
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
