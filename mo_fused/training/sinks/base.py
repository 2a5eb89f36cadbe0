"""What every sink can be told, and the numbers that those with scalar charts take from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from mo_fused.training.errors import bad_input

PER_PARAMETER = ("grad_norm", "update_norm", "param_norm")
"""Numbers of each parameter in a detailed record that become charts."""


class Sink:
    """Takes what a monitor has measured. Every method may be left out; what is handed over must not be changed.

    A sink that raises is left out from then on, with one warning; training goes on.
    """

    ask: Callable[[], None] | None = None
    """Set by the monitor. A sink with a thread of its own may call it there: the monitor then writes to this sink what
    has waited for the next step. All calls to one sink come one after the other."""

    def write(self, record: dict[str, Any]) -> None:
        """A step's record: the keys of :data:`mo_fused.training.record.RECORD`."""

    def detail(self, record: dict[str, Any]) -> None:
        """A detailed record: ``step``, ``parameters`` and, where asked for, ``histograms``."""

    def event(self, event: dict[str, Any]) -> None:
        """A watcher's finding: ``step``, ``watcher``, ``message`` and numbers."""

    def flush(self) -> None:
        """Put what has been written where it stays."""

    def close(self) -> None:
        """Flush and free what is held. Further calls do nothing."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, without ``step`` and what was not measured; rates of several groups as lr/0."""
    return dict(_numbers(record))


def parameter_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Norms of a detailed record as ``grad_norm/NAME``."""
    found = record.get("parameters", {}).items()
    return {f"{key}/{name}": one[key] for name, one in found for key in PER_PARAMETER if one.get(key) is not None}


def histograms(record: Mapping[str, Any]) -> Iterator[tuple[str, list[int], list[float]]]:
    """(``grad/NAME`` or ``update/NAME``, counts, edges) of a detailed record."""
    for name, one in record.get("histograms", {}).items():
        for kind in ("grad", "update"):
            if one.get(kind) is not None:
                yield f"{kind}/{name}", one[kind], one["edges"]


def imported(module: str, package: str, sink: str) -> Any:
    """A module that only this sink needs.

    Raises:
        InputError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise bad_input(
            sink, expected=f"the package {package}", found=f"none ({error})", remedy=f"run: pip install {package}"
        ) from error


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if key == "step" or value is None:
            continue
        if key == "lrs":
            yield from ((f"lr/{group}", float(lr)) for group, lr in enumerate(value))
        elif isinstance(value, (bool, int, float)):
            yield key, float(value)
