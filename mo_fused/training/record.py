"""The record of a step: what is in it, and how it is made once its numbers have arrived."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mo_fused.training.deferred import Deferred

RECORD: dict[str, str] = {
    "step": "optimizer steps done, from 1",
    "loss": "training loss of this step's batch, before the step",
    "lr": "learning rate of the first group in this step",
    "lrs": "that of every group, where they differ",
    "grad_norm": "global gradient norm before clipping",
    "clip_coef": "factor on the gradients, 1 when not clipped",
    "update_norm": "norm of the change that the rule asked for",
    "param_norm": "norm of the parameters after the step",
    "update_ratio": "update_norm / param_norm",
    "loss_scale": "scale of the loss in this step (fp16)",
    "skipped": "true when the step changed nothing",
    "skipped_steps": "how many of the steps so far were skipped",
    "memory_device": "bytes that tensors took at most on the device since the record before",
    "memory_host": "bytes that the process had in memory at most, looked at once a second",
    "mean_length": "tokens of the batch divided by its samples",
    "samples_per_second": "samples of the step divided by step_seconds",
    "tokens_per_second": "tokens of the step divided by step_seconds",
    "data_share": "share of step_seconds spent waiting for data",
    "step_seconds": "wall time of the step",
    "val_loss": "validation loss after this step",
    "val_metric": "the task's own metric on the validation data after this step",
    "epoch": "epochs of the loader that are over",
}
"""Keys of a record. None: not measured."""


@dataclass
class Waiting:
    """A step whose numbers may still be on the device.

    Args:
        row: what is known, by the record's keys; also ``lr/0`` and so on where groups may differ, ``samples``,
            ``tokens`` and ``data_seconds``.
        values: the rest.
        details: makes the detailed record, if this step has one.
    """

    row: dict[str, Any]
    values: list[Deferred]
    details: Callable[[], dict[str, Any]] | None
    record: dict[str, Any] | None = None
    detail: dict[str, Any] | None = None
    given: list[Any] = field(default_factory=list)
    """Sinks that have asked for it before its turn."""

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return all(values.ready for values in self.values)

    def read(self, skipped_before: int) -> float:
        """Makes ``record`` and ``detail``, the first time.

        Args:
            skipped_before: how many steps before this one were skipped.

        Returns:
            The seconds that the device was waited for.
        """
        if self.record is not None:
            return 0.0
        begun = time.perf_counter()
        row: dict[str, Any] = dict(self.row)
        for values in self.values:
            row.update(values.read())
        waited = time.perf_counter() - begun
        skipped = row.get("skipped")
        row["skipped"] = None if skipped is None else bool(skipped)
        row["skipped_steps"] = skipped_before + bool(skipped)
        rates = [float(row[f"lr/{group}"]) for group in range(sum(key.startswith("lr/") for key in row))]
        if len(set(rates)) > 1:
            row["lrs"] = rates
        _add_quotients(row)
        self.record = {key: _plain(row.get(key)) for key in RECORD}
        if self.details is not None:
            self.detail = {"step": row["step"], **self.details()}
        return waited


def _add_quotients(row: dict[str, Any]) -> None:
    samples, tokens, seconds = row.get("samples"), row.get("tokens"), row.get("step_seconds")
    if row.get("update_norm") is not None and row.get("param_norm"):
        row["update_ratio"] = row["update_norm"] / row["param_norm"]
    if samples and tokens is not None:
        row["mean_length"] = tokens / samples
    if seconds:
        row["samples_per_second"] = None if samples is None else samples / seconds
        row["tokens_per_second"] = None if tokens is None else tokens / seconds
        if row.get("data_seconds") is not None:
            row["data_share"] = min(1.0, row["data_seconds"] / seconds)


def _plain(value: Any) -> Any:
    """Numbers of NumPy and the like as plain ones."""
    return value.item() if hasattr(value, "item") else value
