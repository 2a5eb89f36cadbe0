"""The trace of a few steps: in the format that viewers read, with every step in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mo_fused
from mo_fused.training.profiling import profile_steps
from mo_fused.training.trainer import Trainer


def events(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def count(path: Path | None, begin: str) -> int:
    """Events of the host called so (a device's own lines repeat them)."""
    return sum(str(e.get("name", "")).startswith(begin) and e.get("cat") == "user_annotation" for e in events(path))


def test_three_steps_of_a_trainer(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    profiler = profile_steps(3, tmp_path)
    opt = mo_fused.AdamW(model.parameters())
    trainer = Trainer(model, opt, lambda m, batch: m(batch).square().mean(), monitor=profiler)
    trainer.fit([torch.ones(2, 4)] * 4, 4)
    assert profiler.path is not None, "it is written as soon as the last step is there"
    trainer.fit([torch.ones(2, 4)] * 4, 8)
    path = profiler.close()
    assert path == profiler.path and list((tmp_path / "profile").iterdir()) == [path]
    assert path is not None and path.name.endswith(".pt.trace.json")
    assert count(path, "ProfilerStep#") == 3
    assert count(path, "Optimizer.step#AdamW") == 3
    assert sum(event.get("name") == "aten::addmm" for event in events(path)) == 3, "and nothing of the warm-up"


def test_an_early_end(tmp_path: Path) -> None:
    with profile_steps(5, tmp_path) as profiler:
        for _ in range(3):
            torch.ones(3).sum()
            profiler.step()
    assert count(profiler.path, "ProfilerStep#") >= 2
    nothing = profile_steps(5, tmp_path / "other")
    assert nothing.close() is None and nothing.close() is None and not (tmp_path / "other").exists()


def test_steps_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps to be 1 or more; found 0"):
        profile_steps(0, tmp_path)
