"""What a run changes against the one before is said, and recorded in changes.jsonl."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from mo_fused.training import InputError, RunFolder, TrainConfig
from mo_fused.training.changes import RESUMABLE, compare, record_changes, resume_changes

FACTS: dict[str, Any] = {
    "data": {"source": "built-in", "sha256": "ab12", "model_parameters": 5},
    "environment": {"torch": "2.6.0", "python": "3.10.1"},
}


def config(**changes: Any) -> dict[str, Any]:
    return {**asdict(TrainConfig()), "device": "cpu", "run_dir": "runs/x", **FACTS, **changes}


def start(path: Path, settings: dict[str, Any], age: float = 0) -> list[str]:
    """One run that starts and ends; ``age`` in seconds is how long ago its config was written."""
    folder = RunFolder("lm", path, resume=True)
    try:
        lines = record_changes(folder, settings)
        folder.write_config(settings)
    finally:
        folder.close()
    if age:
        written = path / "config.yaml"
        os.utime(written, (written.stat().st_mtime - age,) * 2)
    return lines


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "changes.jsonl").read_text().splitlines()]


def test_none_one_and_several(tmp_path: Path) -> None:
    assert start(tmp_path / "a", config(), age=30) == []
    assert start(tmp_path / "b", config(run_dir="runs/y"), age=20) == ["no setting changed against a"]
    assert start(tmp_path / "c", config(lr=0.5), age=10) == ["one setting changed against b: lr: 0.003 -> 0.5"]
    assert start(tmp_path / "two", config(lr=0.25, seed=7), age=15) == [
        "2 settings changed against c: the cause of a difference can't be told",
        "  seed: 0 -> 7",
        "  lr: 0.5 -> 0.25",
    ]
    environment = {"torch": "2.7.0", "python": "3.10.1"}
    assert start(tmp_path / "d", config(lr=0.25, device="cuda", environment=environment)) == [
        "3 settings changed against c: the cause of a difference can't be told",
        "  device: cpu -> cuda",
        "  lr: 0.5 -> 0.25",
        "  environment.torch: 2.6.0 -> 2.7.0",
    ]
    assert [(r["against"], r["changes"]) for r in recorded(tmp_path / "a")] == [(None, [])]
    (last,) = recorded(tmp_path / "d")
    assert list(last) == ["time", "against", "changes"] and last["against"] == "c"
    assert last["changes"][1] == {"key": "lr", "before": 0.5, "after": 0.25}


def test_the_newest_run_of_the_task_counts(tmp_path: Path) -> None:
    start(tmp_path / "a_newest", config(lr=0.1), age=20)
    start(tmp_path / "b_older", config(lr=0.2), age=30)
    start(tmp_path / "ctr", {**config(), "task": "ctr"}, age=10)
    for name, content in (("broken", b"task: lm\nlr: [\n"), ("list", b"- 1\n"), ("latin", b"task: \xff\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_bytes(content)
    (tmp_path / "file").write_text("")
    (tmp_path / "nothing").mkdir()
    assert start(tmp_path / "mine", config(lr=0.3)) == ["one setting changed against a_newest: lr: 0.1 -> 0.3"]


def test_data_are_compared_by_checksum() -> None:
    def data(path: str | None, sha256: str) -> dict[str, Any]:
        return config(text=path, data={"source": path, "sha256": sha256, "model_parameters": len(sha256)})

    assert compare(data("a.txt", "1"), data("moved/a.txt", "1")) == []
    assert compare(data("a.txt", "1"), data("a.txt", "22")) == [{"key": "data.sha256", "before": "1", "after": "22"}]
    assert compare(data(None, "1"), data("a.txt", "22")) == [{"key": "text", "before": None, "after": "a.txt"}]
    assert compare({"text": "a"}, {"text": "b"}) == [{"key": "text", "before": "a", "after": "b"}]
    assert compare({"old": 1}, {"new": 2}) == [
        {"key": "new", "before": None, "after": 2},
        {"key": "old", "before": 1, "after": None},
    ]


def test_what_a_resumed_run_may_change(tmp_path: Path) -> None:
    allowed = {"steps": 900, "device": "cuda", "validate_every": 7, "checkpoint_every": 8, "keep_checkpoints": 9}
    allowed["profile"] = 10
    assert set(allowed) == set(RESUMABLE)
    start(tmp_path / "other", config(seed=5))
    start(tmp_path / "r", config())
    assert start(tmp_path / "r", config(run_dir="elsewhere")) == []
    lines = start(tmp_path / "r", config(**allowed, environment={"torch": "2.8.0", "python": "3.10.1"}))
    assert lines[0] == "resumed with steps: 700 -> 900" and len(lines) == 7
    assert lines[-1] == "resumed with environment.torch: 2.6.0 -> 2.8.0"
    first, second, third = recorded(tmp_path / "r")
    assert first["against"] == "other" and second["against"] == third["against"] == "r"
    assert second["changes"] == [] and {c["key"] for c in third["changes"]} == {*allowed, "environment.torch"}


def test_anything_else_refuses_the_resumed_run(tmp_path: Path) -> None:
    start(tmp_path / "r", config())
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    other = config(lr=0.5, steps=600, profile=1, text="b.txt", data={"sha256": "cd34"})
    with pytest.raises(InputError) as caught:
        start(tmp_path / "r", other)
    assert "found text: none -> b.txt; steps: 700 -> 600; lr: 0.003 -> 0.5; give the same" in str(caught.value)
    assert str(caught.value).startswith("--run-dir runs/x: expected the settings of the run that is resumed")
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before
    for name in set(asdict(TrainConfig())) - {*RESUMABLE, "run_dir", "text"}:
        with pytest.raises(InputError, match=f"found {name}: .* -> other"):
            resume_changes(config(), config(**{name: "other"}))


def test_a_run_killed_before_its_config_starts_anew(tmp_path: Path) -> None:
    start(tmp_path / "a", config(lr=0.5))
    RunFolder("lm", tmp_path / "r").close()
    assert start(tmp_path / "r", config()) == ["one setting changed against a: lr: 0.5 -> 0.003"]
    assert yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())["lr"] == 0.003
