"""torch.distributed: parts of parameters (DTensor: FSDP2, tensor parallelism), ZeRO-1, DDP's communication hook."""

from __future__ import annotations

from typing import Any

__all__ = ["norm_hook", "partitioned"]


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """What users call, imported when it is asked for: the rest of the package needs the modules beside it first."""
    if name == "norm_hook":
        from .ddp_norms import norm_hook

        return norm_hook
    if name == "partitioned":
        from .partition import partitioned

        return partitioned
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
