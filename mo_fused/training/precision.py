"""The precision of the forward and backward pass: fp32, or autocast to bf16 or fp16 with a loss scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

import mo_fused
from mo_fused.errors import bad_option
from mo_fused.optim.base import FusedOptimizer

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """What surrounds forward and step.

    Args:
        name: ``"fp32"`` (no autocast), ``"bf16"`` (autocast) or ``"fp16"`` (autocast and a gradient scaler).
        device: where the model is.
        optimizer: decides which scaler: :class:`mo_fused.GradScaler` for ours, torch's for any other.
        scaler: use this one instead (fp16 only).

    Raises:
        ValueError: no such precision, or a scaler without fp16.
    """

    def __init__(
        self, name: str, device: torch.device, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        if name not in _AUTOCAST:
            raise bad_option("precision", f"one of {', '.join(_AUTOCAST)}", name, "give one of these")
        if scaler is not None and name != "fp16":
            expected = f"None with precision={name!r}, which needs no loss scale"
            raise bad_option("scaler", expected, type(scaler).__name__, 'leave it out or give precision="fp16"')
        self.name = name
        self.scaler = scaler
        if name == "fp16" and scaler is None:
            build: Any = mo_fused.GradScaler if isinstance(optimizer, FusedOptimizer) else torch.amp.GradScaler
            self.scaler = build(device.type)
        self._device = device

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass and the loss."""
        dtype = _AUTOCAST[self.name]
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype=dtype)
