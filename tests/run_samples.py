"""Folders of runs as training leaves them, made without training: healthy, with faults, cut off, empty, and old."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAYERS = ("embed.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "head.weight")
# The keys of metrics.jsonl before there was a monitor.
OLD_KEYS = ("step", "loss", "lr", "grad_norm", "update_norm", "clip_coef", "skipped", "step_seconds", "val_loss")


def record(step: int, noise: random.Random, **given: Any) -> dict[str, Any]:
    """One healthy step's record."""
    norm = 1.5 * math.exp(noise.gauss(0, 0.1))
    values: dict[str, Any] = {
        "step": step,
        "loss": 1.0 + 3.0 * math.exp(-step / 60) + noise.gauss(0, 0.02),
        "lr": 1e-3 * min(1.0, step / 20),
        "grad_norm": norm,
        "clip_coef": min(1.0, 1 / norm),
        "update_norm": 0.03,
        "param_norm": 30.0,
        "update_ratio": 1e-3,
        "loss_scale": 1024.0,
        "skipped": False,
        "skipped_steps": 0,
        "memory_device": 3 * 2**30,
        "memory_host": 5 * 2**30,
        "mean_length": 96.0,
        "samples_per_second": 120.0,
        "tokens_per_second": 12000.0 + noise.gauss(0, 200),
        "data_share": 0.02,
        "step_seconds": 0.08,
        "val_loss": 1.4 if step % 50 == 0 else None,
        "val_metric": 0.7 if step % 50 == 0 else None,
        "epoch": 0,
    }
    return {**values, **given}


def detail(step: int, zero: tuple[str, ...] = (), nonfinite: tuple[str, ...] = ()) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for place, name in enumerate(LAYERS, 1):
        parameters[name] = {"grad_norm": 0.1 * place, "update_norm": 0.01 * place, "param_norm": 5.0, "nonfinite": 0}
        if name in zero:
            parameters[name].update(grad_norm=0.0, update_norm=0.0)
        if name in nonfinite:
            parameters[name].update(grad_norm=None, nonfinite=7)
    return {"step": step, "parameters": parameters}


def write_lines(path: Path, rows: list[dict[str, Any]], cut: int = 0) -> None:
    """A file of JSON lines, without its last ``cut`` bytes."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(content[: len(content) - cut])


def make_run(
    path: Path,
    steps: int = 200,
    *,
    seed: int = 0,
    changed: Mapping[int, Mapping[str, Any]] | None = None,
    details: list[dict[str, Any]] | None = None,
    events: list[dict[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    cut: int = 0,
) -> Path:
    """The folder of a healthy run, but for the records ``changed`` and the bytes at its log's end that are ``cut``."""
    noise = random.Random(seed)
    path.mkdir(parents=True)
    rows = [record(step, noise, **(changed or {}).get(step, {})) for step in range(1, steps + 1)]
    write_lines(path / "metrics.jsonl", rows, cut)
    write_lines(path / "details.jsonl", details if details is not None else [detail(s) for s in (50, 100, 150, 200)])
    write_lines(path / "events.jsonl", events or [])
    changes = [{"key": "lr", "before": 0.002, "after": 0.001}]
    write_lines(
        path / "changes.jsonl", [{"time": "2026-01-01T12:00:00+0000", "against": "lm-before", "changes": changes}]
    )
    settings = {"task": "lm", "lr": 0.001, "steps": steps, "environment": {"torch": "2.13.0"}, **(config or {})}
    # JSON is YAML.
    (path / "config.yaml").write_text(json.dumps(settings))
    return path


def faulty_run(path: Path) -> Path:
    """A loss spike at 120, skipped steps 60 and 61 (the loss of 61 not finite), a dead and a non-finite layer."""
    return make_run(
        path,
        seed=1,
        changed={
            60: {"skipped": True, "grad_norm": None, "grad_norm_nonfinite": True},
            61: {"skipped": True, "loss": None, "loss_nonfinite": True, "grad_norm": None, "grad_norm_nonfinite": True},
            120: {"loss": 9.5, "grad_norm": 40.0},
        },
        details=[detail(50), detail(100, zero=("blocks.0.bias",)), detail(150, nonfinite=("head.weight",))],
        events=[
            {"step": 120, "watcher": "LossSpike", "message": "loss 9.5 is 6.1 times the mean before", "lr": 0.001},
            {"step": 150, "watcher": "NonFinite", "message": "head.weight has 7 elements that are not finite"},
        ],
        config={"lr": 0.004},
    )


def empty_run(path: Path) -> Path:
    """Killed before its first step."""
    path.mkdir(parents=True)
    (path / "metrics.jsonl").touch()
    return path


def old_run(path: Path, steps: int = 100) -> Path:
    """What was written before there were details, events and the newer keys."""
    make_run(path, steps)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    write_lines(path / "metrics.jsonl", [{key: row[key] for key in OLD_KEYS} for row in rows])
    (path / "details.jsonl").unlink()
    (path / "events.jsonl").unlink()
    return path
