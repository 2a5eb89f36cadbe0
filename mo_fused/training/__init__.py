"""The training layer: schedules, parameter groups, the text model and the loop behind ``mo-fused train``.

Pure Python over the public API; every part works alone. Names are loaded on first use, so that ``mo-fused --help`` and
``mo-fused doctor`` need neither the model nor the packages of the ``train`` extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mo_fused.training.config import TrainConfig as TrainConfig
    from mo_fused.training.errors import InputError as InputError
    from mo_fused.training.groups import decay_groups as decay_groups
    from mo_fused.training.run_folder import RunFolder as RunFolder
    from mo_fused.training.schedules import warmup_cosine as warmup_cosine
    from mo_fused.training.train import run as run

_HOMES = {
    "InputError": "errors",
    "RunFolder": "run_folder",
    "TrainConfig": "config",
    "decay_groups": "groups",
    "run": "train",
    "warmup_cosine": "schedules",
}

__all__ = ["InputError", "RunFolder", "TrainConfig", "decay_groups", "run", "warmup_cosine"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
