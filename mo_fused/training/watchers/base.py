"""What every watcher is made of: records come in, findings go out, and something is done about them."""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from mo_fused.errors import bad_option

Event = dict[str, Any]
"""A finding: ``step``, ``watcher`` (class name), ``message`` and numbers."""
Action = str | Callable[[Event], object]

_ACTIONS = ("log", "warn", "stop")
_KEPT = 100  # events that a watcher itself keeps


class Observed(Protocol):
    """What a watcher needs of the monitor that it is attached to (``model``, if it has one, gives names)."""

    optimizer: Optimizer

    def emit(self, event: Event) -> None: ...

    def stop(self) -> None: ...


class Watcher:
    """Looks at the record of every step; :meth:`emit` hands a finding on.

    With a monitor: ``Monitor(optimizer, watchers=[...])``. In a loop without one, call ``on_record`` with a mapping of
    what is known (each watcher says which keys it reads); findings are in ``events``.

    Args:
        action: what follows a finding besides the monitor's sinks: ``"log"`` nothing (without a monitor, a line of the
            logger ``mo_fused.training``), ``"warn"`` a RuntimeWarning, ``"stop"`` a warning and the end of training
            (``monitor.stop()``; ``stop_asked`` is set), or a function that is called with the event.

    Attributes:
        events: the newest 100 findings.
        stop_asked: a finding of a watcher with ``action="stop"`` has asked for the end.

    Raises:
        ValueError: another action.
    """

    def __init__(self, *, action: Action = "warn") -> None:
        if not callable(action) and action not in _ACTIONS:
            expected = f"one of {', '.join(map(repr, _ACTIONS))} or a function"
            raise bad_option("action", expected, action, "give one of these")
        self.action = action
        self.monitor: Observed | None = None
        self.events: deque[Event] = deque(maxlen=_KEPT)
        self.stop_asked = False

    def attach(self, monitor: Observed) -> None:
        """Called once by the monitor that this watcher is given to."""
        self.monitor = monitor

    def on_step(self, monitor: Observed, loss: Tensor | float, batch_info: Mapping[str, Any]) -> None:
        """Right after the optimizer's step, with everything still on the device: nothing here may wait for it.

        Args:
            monitor: whose ``optimizer`` has made the step.
            loss: of the step, 0-dim.
            batch_info: what the loop has told the monitor; always with ``step``.
        """

    def on_record(self, record: Mapping[str, Any]) -> None:
        """A step's numbers, one or more steps later; every step once, in order."""

    def close(self) -> None:
        """No further step comes: takes hooks away."""

    def emit(self, step: int, message: str, *, quiet: bool = False, **numbers: Any) -> Event:
        """A finding: to ``events`` and the monitor, then the action (not when ``quiet``)."""
        event = {"step": step, "watcher": type(self).__name__, "message": message, **numbers}
        self.events.append(event)
        if self.monitor is not None:
            self.monitor.emit(event)
        if quiet:
            return event
        if callable(self.action):
            self.action(event)
            return event
        line = f"{type(self).__name__}, step {step}: {message}"
        if self.action == "log":
            if self.monitor is None:
                logging.getLogger("mo_fused.training").info(line)
            return event
        warnings.warn(line, RuntimeWarning, stacklevel=3)
        if self.action == "stop":
            self.stop_asked = True
            if self.monitor is not None:
                self.monitor.stop()
        return event


def number(record: Mapping[str, Any], key: str) -> float | None:
    """The value of a record as a float; None where it was not measured.

    A line of ``metrics.jsonl`` has null and ``<key>_nonfinite`` for what is not finite: NaN here.
    """
    value = record.get(key)
    if value is None:
        return math.nan if record.get(f"{key}_nonfinite") else None
    return float(value)


def whole(name: str, value: object, least: int) -> int:
    """An option that counts something."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise bad_option(name, f"a whole number, {least} or more", value, "give a number of steps")
    return value


def above(name: str, value: object, least: float) -> float:
    """An option that is a number above ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < math.inf:
        raise bad_option(name, f"a number above {least:g}", value, "give such a number")
    return float(value)
