"""The folder a run leaves behind: ``config.yaml`` and ``metrics.jsonl``.

``metrics.jsonl`` holds one JSON object a line and a line a step, always with the keys of :data:`METRICS` in that order.
``null`` means not measured; a number that is not finite is ``null`` too, with ``"<key>_nonfinite": true`` beside it, so
that every line is JSON for every reader.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mo_fused.training.errors import bad_input

METRICS: dict[str, str] = {
    "step": "optimizer steps done, from 1",
    "loss": "training loss of this step's batch, before the step",
    "lr": "learning rate of the first group in this step",
    "grad_norm": "global gradient norm before clipping",
    "update_norm": "norm of the change that the rule asked for",
    "clip_coef": "factor on the gradients, 1 when not clipped",
    "skipped": "true when the step changed nothing",
    "step_seconds": "wall time of the step, validation not counted",
    "tokens_per_second": "tokens of the batch divided by step_seconds",
    "val_loss": "validation loss after this step",
}


def metrics_line(values: Mapping[str, float | bool | None]) -> str:
    """One line of ``metrics.jsonl`` (no line end) from the values that were measured.

    Raises:
        KeyError: a key that :data:`METRICS` doesn't have.
    """
    unknown = values.keys() - METRICS.keys()
    if unknown:
        raise KeyError(f"no such metric: {', '.join(sorted(unknown))}; METRICS lists the {len(METRICS)} there are")
    row: dict[str, float | bool | None] = {}
    for key in METRICS:
        value = values.get(key)
        if isinstance(value, float) and not math.isfinite(value):
            row[key] = None
            row[f"{key}_nonfinite"] = True
        else:
            row[key] = value
    return json.dumps(row, allow_nan=False)


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``path`` so that at any moment, a crash included, it is either absent (or old) or complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class RunFolder:
    """A new run's folder; an existing run is never written over.

    Args:
        task: names the default folder, ``runs/<task>-<time>``.
        path: the folder to use; ``None`` makes the default one. It may exist if it is empty.

    Raises:
        InputError: the folder is not empty, is a file, or cannot be made.
    """

    def __init__(self, task: str, path: str | Path | None = None) -> None:
        try:
            self._made = path is None or not Path(path).exists()
            self.path = _default_folder(task) if path is None else _named_folder(Path(path))
            # "x": of two runs started at once in one folder, one gets it and the other gets the error.
            self._metrics = open(self.path / "metrics.jsonl", "x", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise bad_input(
                "--run-dir",
                expected="a folder that can be made and written to",
                found=f"{error.filename or path}: {error.strerror}",
                remedy="name another folder with --run-dir",
            ) from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.yaml`` (plain values, order kept), all or nothing."""
        import yaml

        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text.encode())

    def write_metrics(self, values: Mapping[str, float | bool | None]) -> None:
        """Append one line to ``metrics.jsonl``; a reader sees it as soon as this returns."""
        self._metrics.write(metrics_line(values) + "\n")
        self._metrics.flush()

    def discard(self) -> None:
        """Take the folder away again if no step was written: the same command can then be given once more."""
        self._metrics.close()
        metrics, config = self.path / "metrics.jsonl", self.path / "config.yaml"
        if metrics.stat().st_size == 0:
            metrics.unlink()
            config.unlink(missing_ok=True)
            if self._made:
                self.path.rmdir()

    def close(self) -> None:
        """Close ``metrics.jsonl``; further calls do nothing."""
        self._metrics.close()


def _default_folder(task: str) -> Path:
    stem = f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def _named_folder(path: Path) -> Path:
    if path.exists():
        if not path.is_dir():
            found = "a file"
        elif any(path.iterdir()):
            found = "an earlier run" if (path / "metrics.jsonl").exists() else "a folder with other contents"
        else:
            return path
        raise bad_input(
            f"--run-dir {path}",
            expected="a new or empty folder",
            found=found,
            remedy="name another folder, or remove this one if nothing in it is wanted",
        )
    path.mkdir(parents=True)
    return path
