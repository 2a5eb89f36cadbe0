"""A line on the terminal every now and then."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from mo_fused.errors import bad_option
from mo_fused.training.sinks.base import Sink

_COLUMNS = {
    "loss": "loss {:.4g}",
    "val_loss": "validation loss {:.4g}",
    "val_metric": "metric {:.4g}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad_norm {:.3g}",
    "update_ratio": "update ratio {:.1e}",
    "loss_scale": "loss scale {:g}",
    "skipped_steps": "{} skipped",
    "tokens_per_second": "{:,.0f} tokens/s",
    "samples_per_second": "{:,.0f} samples/s",
    "data_share": "{:.0%} waiting for data",
}


class Console(Sink):
    """A line every ``every`` steps and after each validation, and a line for each event.

    Where a tqdm bar is shown, it stays below the lines.

    Args:
        every: steps.
        file: where to; None is standard output.

    Raises:
        ValueError: ``every`` below 1.
    """

    def __init__(self, every: int = 50, file: TextIO | None = None) -> None:
        if every < 1:
            raise bad_option("every", "1 or more", every, "give a number of steps")
        self.every, self._file = every, file

    def write(self, record: dict[str, Any]) -> None:
        """A line, if this step is due."""
        if record["step"] % self.every == 0 or record.get("val_loss") is not None:
            self._print(f"step {record['step']}: {line(record)}")

    def event(self, event: dict[str, Any]) -> None:
        """A line."""
        self._print(f"step {event['step']}: {event['watcher']}: {event['message']}")

    def _print(self, text: str) -> None:
        file = self._file or sys.stdout  # looked up now: it may have been replaced
        # A bar that is shown was made by a module that is loaded.
        tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if tqdm is not None and getattr(tqdm, "_instances", None):
            tqdm.write(text, file=file)
        else:
            print(text, file=file)
        file.flush()


def line(record: dict[str, Any]) -> str:
    """What was measured, the most asked for first; nothing of what is as it should be."""
    shown = dict(record)
    if shown.get("tokens_per_second") is not None:
        shown["samples_per_second"] = None
    if not shown.get("skipped_steps"):
        shown["skipped_steps"] = None
    if (shown.get("data_share") or 0.0) < 0.05:
        shown["data_share"] = None
    return ", ".join(words.format(shown[key]) for key, words in _COLUMNS.items() if shown.get(key) is not None)
