"""``mo-fused train`` stopped in every way and given again: it goes on, and ends in the bits of a run never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mo_fused.training import InputError, TrainConfig, load_checkpoint, run
from mo_fused.training import train as train_module

SMALL: dict[str, dict[str, Any]] = {
    "lm": {"context": 16, "layers": 1, "heads": 2, "width": 16, "batch_size": 2},
    "vision": {"width": 4, "batch_size": 16, "warmup_steps": 4},
    "ctr": {"width": 4, "context": 5, "batch_size": 16, "warmup_steps": 4},
}
MEASURED = ("step_seconds", "tokens_per_second", "samples_per_second", "data_share", "memory_host", "memory_device")


def config(task: str, folder: Path, **changes: Any) -> TrainConfig:
    settings = {"task": task, "steps": 12, "validate_every": 4, "checkpoint_every": 3, "device": "cpu", **SMALL[task]}
    return TrainConfig(**{**settings, "run_dir": str(folder), **changes})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def final(folder: Path, step: int) -> dict[str, Any]:
    """The last checkpoint, but for what names the folder."""
    state = load_checkpoint(folder / "checkpoints" / f"step-{step:08d}.pt")
    state["config"] = {key: value for key, value in state["config"].items() if key != "run_dir"}
    return state


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]


def assert_same_run(folder: Path, undisturbed: Path, step: int) -> None:
    assert rows(folder) == rows(undisturbed)
    assert [row["step"] for row in rows(folder)] == list(range(1, step + 1))
    ours, theirs = final(folder, step), final(undisturbed, step)
    assert [key for key in theirs if not same(ours[key], theirs[key])] == []


def stopping_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGINT while this step is being logged."""
    log_step = train_module.Monitor.step

    def stepped(self: Any, loss: Any, info: Any) -> None:
        log_step(self, loss, info)
        if info["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train_module.Monitor, "step", stepped)


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("lm", {}),
        ("lm", {"optimizer": "torch", "precision": "fp16"}),
        ("vision", {"precision": "bf16"}),
        ("ctr", {"accumulate": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "plain",
)
def test_stopped_by_ctrl_c_and_given_again(
    task: str,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At a step with a checkpoint of its own, with a validation, and with neither."""
    whole = run(config(task, tmp_path / "whole", **changes))
    assert whole.status == 0
    metric = {"lm": "bits per byte", "vision": "accuracy", "ctr": "AUC"}[task]
    assert f", {metric} {whole.val_metric:.4f}" in capsys.readouterr().out.splitlines()[-2], "it ends with its metric"
    for stop in (3, 4, 5):
        with monkeypatch.context() as patch:
            stopping_at(patch, stop)
            first = run(config(task, tmp_path / f"{stop}", **changes))
        assert (first.status, first.steps_done) == (130, stop)
        torch.rand(3)
        second = run(config(task, tmp_path / f"{stop}", **changes))
        assert (second.status, second.steps_done) == (0, 12)
        assert_same_run(tmp_path / f"{stop}", tmp_path / "whole", 12)


def test_killed_at_random_and_given_again(tmp_path: Path) -> None:
    """The real command, by SIGKILL in any step or save."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**SMALL["lm"], "steps": 120, "validate_every": 20}))
    command = [sys.executable, "-m", "mo_fused.cli", "train", "run.yaml", "--device", "cpu", "--checkpoint-every", "2"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    done = subprocess.run([*command, "--run-dir", "whole"], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    chance = random.Random(20)
    log, kills = tmp_path / "r" / "metrics.jsonl", 0
    while True:
        process = subprocess.Popen(
            [*command, "--run-dir", "r"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        before, limit = log.stat().st_size if log.exists() else 0, time.monotonic() + 60
        while kills < 3 and process.poll() is None and (not log.exists() or log.stat().st_size <= before):
            assert time.monotonic() < limit
            time.sleep(0.005)
        if kills < 3:
            time.sleep(chance.uniform(0.0, 0.15))
            kills += 1
            process.kill()
            process.communicate()
            continue
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        break
    assert "resumed at step" in out and out.rstrip().endswith("finished: 120 steps")
    assert_same_run(tmp_path / "r", tmp_path / "whole", 120)


def test_killed_before_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are lines but no checkpoint: the run begins again, and its lines with it."""
    run(config("lm", tmp_path / "whole"))
    run(config("lm", tmp_path / "r"))
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        path.unlink()
    log = tmp_path / "r" / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]) + b'{"step": 3, "lo')
    run(config("lm", tmp_path / "r"))
    assert_same_run(tmp_path / "r", tmp_path / "whole", 12)


def test_a_broken_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run(config("lm", tmp_path / "whole"))
    run(config("lm", tmp_path / "r"))
    newest = tmp_path / "r" / "checkpoints" / "step-00000012.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    with pytest.warns(RuntimeWarning, match="step-00000012.pt.*cut short.*checkpoint before it is tried"):
        assert run(config("lm", tmp_path / "r")).steps_done == 12
    assert_same_run(tmp_path / "r", tmp_path / "whole", 12)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(config("ctr", tmp_path / "r"))
    log = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    second = run(config("ctr", tmp_path / "r"))
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == log
    assert (second.status, second.steps_done, second.val_metric) == (0, 12, first.val_metric)
    assert second.train_loss == pytest.approx(first.train_loss, rel=1e-12)
    assert "resumed at step 12" in capsys.readouterr().out


def test_more_steps_keep_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config("vision", tmp_path / "r"))
    result = run(config("vision", tmp_path / "r", steps=15))
    assert result.steps_done == 15
    said = capsys.readouterr().out
    assert "resumed with steps: 12 -> 15" in said
    assert "the schedule was made for 12 steps: after them the rate stays at its last" in said
    rates = [row["lr"] for row in rows(tmp_path / "r")]
    assert rates[12:] == [rates[11]] * 3, "the rate stays at the minimum of the schedule that the run began with"
    assert yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())["steps"] == 15


@pytest.mark.parametrize("changes", [{"lr": 1.0}, {"seed": 5}, {"batch_size": 3}, {"steps": 6}, {"precision": "bf16"}])
def test_other_settings_are_another_run(changes: dict[str, Any], tmp_path: Path) -> None:
    run(config("lm", tmp_path / "r"))
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=f"the settings of the run that is resumed.*{next(iter(changes))}: "):
        run(config("lm", tmp_path / "r", **changes))
    assert {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()} == before


def test_a_refused_checkpoint_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    run(config("lm", tmp_path / "r"))
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        path.write_bytes(b"something else")
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    with pytest.warns(RuntimeWarning), pytest.raises(InputError, match="at least one that can be read"):
        run(config("lm", tmp_path / "r", steps=15))
    assert {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()} == before


def test_what_changed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changes in (
        ("a", {}),
        ("b", {"lr": 1e-3, "validate_every": 6}),
        ("c", {"lr": 2e-3, "weight_decay": 0.1, "validate_every": 6}),
    ):
        run(config("lm", tmp_path / name, **changes))
    said = capsys.readouterr().out
    assert "one setting changed against a: lr: 0.003 -> 0.001\n  validate_every: 4 -> 6 (changes nothing in the" in said
    assert "2 settings changed against b: the cause of a difference can't be told" in said
    (record,) = [json.loads(line) for line in (tmp_path / "c" / "changes.jsonl").read_text().splitlines()]
    assert [change["key"] for change in record["changes"]] == ["lr", "weight_decay"]


def test_profile(tmp_path: Path) -> None:
    run(config("vision", tmp_path / "r", profile=2))
    (trace,) = (tmp_path / "r" / "profile").glob("*.pt.trace.json")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2
