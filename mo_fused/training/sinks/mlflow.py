"""MLflow."""

from __future__ import annotations

import time
from typing import Any

from mo_fused.errors import bad_option
from mo_fused.training.sinks.base import Sink, imported, parameter_scalars, scalars


class MLflow(Sink):
    """Logs to a run of MLflow.

    Numbers go in batches through ``MlflowClient.log_batch``, and a thread of MLflow's sends them; the next batch waits
    for it, and raises what it could not send. Histograms have no place there and are left out.

    Args:
        run_id: of a run that goes on; it is not ended here. None takes the active run, and where there is none starts
            one and ends it at the end.
        every: steps between two batches.
        **options: of ``mlflow.start_run``.

    Raises:
        InputError: the package mlflow is missing.
        ValueError: ``every`` below 1.
    """

    def __init__(self, run_id: str | None = None, every: int = 50, **options: Any) -> None:
        if every < 1:
            raise bad_option("every", "1 or more", every, "give a number of steps")
        self._mlflow = imported("mlflow", "mlflow", "MLflow")
        self._entities = imported("mlflow.entities", "mlflow", "MLflow")
        self._own = False
        if run_id is None:
            active = self._mlflow.active_run()
            self._own = active is None
            run_id = (self._mlflow.start_run(**options) if active is None else active).info.run_id
        self.run_id, self.every = run_id, every
        self._client = self._mlflow.MlflowClient()
        self._metrics: list[Any] = []
        self._sent: list[Any] = []

    def write(self, record: dict[str, Any]) -> None:
        """The record's numbers, with the batch that is due."""
        self._add(scalars(record), record["step"])
        if record["step"] % self.every == 0:
            self._send()

    def detail(self, record: dict[str, Any]) -> None:
        """Norms by parameter."""
        self._add(parameter_scalars(record), record["step"])

    def event(self, event: dict[str, Any]) -> None:
        """A tag of the run with the step and the message: the newest one of each watcher."""
        self._client.set_tag(self.run_id, f"event.{event['watcher']}", f"step {event['step']}: {event['message']}")

    def flush(self) -> None:
        """Send what waits, and wait until it is there."""
        self._send()
        self._wait()

    def close(self) -> None:
        """Send what waits; end the run, if it was started here."""
        self.flush()
        if self._own:
            self._own = False
            self._mlflow.end_run()

    def _send(self) -> None:
        self._wait()
        waiting, self._metrics = self._metrics, []
        for first in range(0, len(waiting), 1000):  # as many as a server takes at once
            part = waiting[first : first + 1000]
            self._sent.append(self._client.log_batch(self.run_id, metrics=part, synchronous=False))

    def _wait(self) -> None:
        """Raises what went wrong in the thread."""
        sent, self._sent = self._sent, []
        for one in sent:
            one.wait()

    def _add(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._metrics += [self._entities.Metric(name, value, now, step) for name, value in values.items()]
