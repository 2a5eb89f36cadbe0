"""Where a :class:`mo_fused.training.monitor.Monitor` writes to.

Names are loaded on first use: none of the packages behind them is needed before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mo_fused.training.sinks.base import Sink as Sink
    from mo_fused.training.sinks.console import Console as Console
    from mo_fused.training.sinks.json_lines import JsonLines as JsonLines
    from mo_fused.training.sinks.mlflow import MLflow as MLflow
    from mo_fused.training.sinks.tensorboard import TensorBoard as TensorBoard
    from mo_fused.training.sinks.wandb import WandB as WandB

_HOMES = {
    "Console": "console",
    "JsonLines": "json_lines",
    "MLflow": "mlflow",
    "Sink": "base",
    "TensorBoard": "tensorboard",
    "WandB": "wandb",
}

__all__ = ["Console", "JsonLines", "MLflow", "Sink", "TensorBoard", "WandB"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
