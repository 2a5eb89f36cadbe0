"""The statistics of the last steps by parameter, kept without reading them until somebody asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch.optim import Optimizer

from mo_fused.errors import StaleStatsError
from mo_fused.stats import RING, ParamStats, StepStats


class RecentSteps:
    """``optimizer.last_step`` of as many steps as it stays readable."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, StepStats, Mapping[Any, str]]] = deque(maxlen=RING)
        self._names: Mapping[Any, str] = {}
        self._size = -1

    def note(self, monitor: Any, step: int) -> None:
        """Keeps the step that was just made; nothing is copied."""
        last: StepStats | None = getattr(monitor.optimizer, "last_step", None)
        # A scaler may have left the step out: the statistics are then those of an earlier one.
        if last is None or (self._kept and self._kept[-1][1] is last):
            return
        size = sum(len(group["params"]) for group in monitor.optimizer.param_groups)
        if size != self._size:
            self._names, self._size = parameter_names(monitor.optimizer, getattr(monitor, "model", None)), size
        self._kept.append((step, last, self._names))

    def per_parameter(self, step: int) -> dict[str, ParamStats] | None:
        """What ``per_param()`` says of ``step``, by name; None when nobody knows (any more). Waits for the device."""
        for kept, stats, names in self._kept:
            if kept == step:
                try:
                    return {names.get(key, str(key)): value for key, value in stats.per_param().items()}
                except StaleStatsError:
                    return None
        return None


def parameter_names(optimizer: Optimizer, model: Any = None) -> dict[Any, str]:
    """What to call the parameters that ``per_param()`` lists by name or position.

    Named after the optimizer's names, else the model's, else the position.
    """
    of_model = {} if model is None else {id(one): name for name, one in model.named_parameters()}
    names: dict[Any, str] = {}
    position = 0
    for g, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for i, parameter in enumerate(group["params"]):
            name = str(given[i]) if given else of_model.get(id(parameter), f"parameter {position} (group {g})")
            names[name if given else position] = name
            position += 1
    return names


def plain_stats(found: Mapping[str, ParamStats]) -> dict[str, dict[str, Any]]:
    """For an event: the measured fields of each parameter."""
    return {
        name: {key: value for key, value in asdict(one).items() if value is not None} for name, one in found.items()
    }


def listed(names: list[str], most: int = 5) -> str:
    """Names in one line."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
