"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from mo_fused.training.sinks.base import Sink, histograms, imported, parameter_scalars, scalars


class WandB(Sink):
    """Logs to a run of Weights & Biases, whose own process sends what it is given.

    Args:
        run: one that ``wandb.init`` has returned; it is not finished here. None starts one and finishes it at the end.
        **options: of ``wandb.init``, for instance ``project=`` and ``mode="offline"``.

    Raises:
        InputError: the package wandb is missing.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        self._wandb = imported("wandb", "wandb", "WandB")
        self._own = run is None
        self._step = 0
        self._run: Any = self._wandb.init(**options) if run is None else run

    def write(self, record: dict[str, Any]) -> None:
        """The record's numbers."""
        self._log(scalars(record), record["step"])

    def detail(self, record: dict[str, Any]) -> None:
        """Norms by parameter, and histograms (of magnitudes)."""
        values: dict[str, Any] = parameter_scalars(record)
        for tag, counts, edges in histograms(record):
            values[f"histogram/{tag}"] = self._wandb.Histogram(np_histogram=(counts, edges))
        self._log(values, record["step"])

    def event(self, event: dict[str, Any]) -> None:
        """An alert (which the account's settings turn into a message), and 1 in the watcher's chart."""
        self._log({f"events/{event['watcher']}": 1}, event["step"])
        self._run.alert(title=event["watcher"], text=f"step {event['step']}: {event['message']}")

    def close(self) -> None:
        """Finish the run, if it was started here."""
        if self._own:
            self._own = False
            self._run.finish()

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._step = max(self._step, step)  # what comes for an earlier step would be dropped
        self._run.log(values, step=self._step)
