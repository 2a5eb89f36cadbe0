"""The command ``mo-fused train`` and the parts of the training layer that it is made of.

The command runs in processes of its own where the process matters (signals, exit status, what is on disk), and inside
this one where only the answer does.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mo_fused import cli
from mo_fused.training import TrainConfig, run
from mo_fused.training import train as train_module
from mo_fused.training.model import ByteGPT
from mo_fused.training.run_folder import METRICS
from mo_fused.training.tasks import Task, build_task

SMALL: dict[str, Any] = {"context": 16, "layers": 1, "heads": 2, "width": 16, "batch_size": 2, "device": "cpu"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mo_fused.cli", *arguments]


def one_thread() -> dict[str, str]:
    """Environment of a run whose losses don't depend on the cores of the machine, nor its time on its load."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n"), "the last line was cut"
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# --- the command, end to end


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """The same 20 steps of the default model with each optimizer."""
    there = tmp_path_factory.mktemp("runs")
    done = {}
    for optimizer in ("mo_fused", "torch"):
        options = [
            "--optimizer",
            optimizer,
            "--run-dir",
            f"run_{optimizer}",
            "--steps",
            "20",
            "--seed",
            "3",
            "--batch-size",
            "2",
        ]
        result = subprocess.run(
            command("train", "--device", "cpu", *options),
            cwd=there,
            env=one_thread(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        done[optimizer] = (there / f"run_{optimizer}", result)
    return done


def test_both_optimizers_give_the_same_losses(runs: dict[str, Any]) -> None:
    ours, theirs = (metrics(runs[name][0]) for name in ("mo_fused", "torch"))
    assert len(ours) == len(theirs) == 20
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5, rel=0)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert a["clip_coef"] == pytest.approx(b["clip_coef"], rel=1e-3)
        assert a["lr"] == b["lr"]
    assert ours[-1]["val_loss"] == pytest.approx(theirs[-1]["val_loss"], abs=1e-5)
    assert ours[0]["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert ours[-1]["val_loss"] < 4.0, "20 steps learn at least which bytes are frequent"


@pytest.mark.parametrize("optimizer", ["mo_fused", "torch"])
def test_metrics_have_one_schema(runs: dict[str, Any], optimizer: str) -> None:
    rows = metrics(runs[optimizer][0])
    for number, row in enumerate(rows, 1):
        assert list(row) == list(METRICS)
        assert row["step"] == number
        assert row["skipped"] is False
        assert row["tokens_per_second"] == pytest.approx(2 * 128 / row["step_seconds"])
        assert row["samples_per_second"] == pytest.approx(2 / row["step_seconds"])
        assert 0 < row["clip_coef"] <= 1
        assert row["clip_coef"] == pytest.approx(min(1.0, 1.0 / row["grad_norm"]), rel=1e-5)
        assert (row["val_loss"] is not None) == (number == 20) == (row["val_metric"] is not None)
        if optimizer == "torch":
            assert row["update_norm"] is None
        else:
            assert row["update_norm"] > 0
    peak = TrainConfig().lr
    assert [row["lr"] for row in rows] == pytest.approx([peak * number / 100 for number in range(1, 21)])


def test_config_says_what_ran(runs: dict[str, Any]) -> None:
    config = yaml.safe_load((runs["torch"][0] / "config.yaml").read_text())
    assert {"task": "lm", "optimizer": "torch", "steps": 20, "seed": 3, "device": "cpu"}.items() <= config.items()
    assert config["data"]["source"] == "pydoc_data.topics"
    assert config["environment"]["torch"] == str(torch.__version__)
    given = {name: config[name] for name in TrainConfig.__dataclass_fields__}
    assert asdict(TrainConfig(**given)) == given, "the settings can be given again as they stand"
    names = ["changes.jsonl", "checkpoints", "config.yaml", "details.jsonl", "events.jsonl", "metrics.jsonl"]
    assert sorted(p.name for p in runs["torch"][0].iterdir()) == names


def test_output_shows_progress_and_sums_up(runs: dict[str, Any]) -> None:
    folder, result = runs["mo_fused"]
    assert "20/20" in result.stderr
    assert "loss " in result.stderr and "lr " in result.stderr and "grad_norm " in result.stderr
    assert f"validation loss {metrics(folder)[-1]['val_loss']:.4f}" in result.stdout
    assert "tokens/s" in result.stdout and "run folder run_mo_fused" in result.stdout
    assert result.stdout.rstrip().endswith("finished: 20 steps")


def test_ctrl_c_ends_cleanly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("train", "--steps", "100000", "--batch-size", "1", "--run-dir", "r"),
        cwd=tmp_path,
        env=one_thread(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        log = tmp_path / "r" / "metrics.jsonl"
        limit = time.monotonic() + 60
        while not log.exists() or log.read_bytes().count(b"\n") < 3:
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    rows = metrics(tmp_path / "r")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert out.rstrip().endswith(f"stopped by Ctrl-C at step {len(rows)} of 100000")
    assert yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())["steps"] == 100000


def test_help_needs_no_training_package(tmp_path: Path) -> None:
    """``mo-fused doctor`` is what one runs when something is missing."""
    code = (
        "import sys\n"
        "sys.modules['tqdm'] = sys.modules['yaml'] = None\n"
        "from mo_fused import cli\n"
        "sys.exit(cli.main(['doctor', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


# --- bad input: one clear error, exit status 2, nothing written


def refused(capsys: pytest.CaptureFixture[str], here: Path, *arguments: str) -> str:
    before = sorted(here.rglob("*"))
    try:
        status = cli.main(["train", *arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("mo-fused train: error: ")
    assert sorted(here.rglob("*")) == before
    return error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps: expected a whole number of 1 or more; found 0"),
        (["--steps", "-5"], "found -5"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--batch-size", "0"], "--batch-size: expected"),
        (["--batch-size", "99999999999"], "--batch-size: expected"),
        (["--seed", "-1"], "--seed: expected"),
        (["--lr", "0"], "--lr: expected a finite number above 0; found 0.0"),
        (["--lr", "nan"], "found nan"),
        (["--lr", "inf"], "found inf"),
        (["--task", "chess"], "invalid choice: 'chess'"),
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--device", "toaster"], "--device: expected a device that computes here (cpu"),
        (["--device", "meta"], "found 'meta'"),
        (["--device", "cuda:99"], "found 'cuda:99'"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, tmp_path, *arguments)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "no such file"),
        (b"", "an empty file"),
        (b"too short", "9 bytes"),
        (b"x" * 1280, "1280 bytes"),
        (b"text " * 500 + b"\0" + b"text " * 500, "a NUL byte at offset 2500"),
        ("gr\u00fc\u00dfe ".encode("latin-1") * 500, "byte 0xfc at offset 2, which is not UTF-8"),
        (("hello " * 500).encode("utf-16"), "a NUL byte at offset 3"),
        (bytes(range(1, 256)) * 10, "byte 0x80 at offset 127"),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    content: bytes | None,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    error = refused(capsys, tmp_path, "--text", "file")
    assert error.startswith("mo-fused train: error: --text file: expected a text")
    assert f"found {found}" in error
    assert "give --text" in error


def test_a_folder_or_device_as_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "found a folder" in refused(capsys, tmp_path, "--text", str(tmp_path))
    assert "found no regular file" in refused(capsys, tmp_path, "--text", "/dev/zero")


def test_an_existing_run_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(small(Path("full"), steps=2))
    lines = (tmp_path / "full" / "metrics.jsonl").read_text()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("do not lose")
    (tmp_path / "file").write_text("a file")
    capsys.readouterr()
    error = refused(capsys, tmp_path, "--run-dir", "full", "--steps", "2", "--lr", "1", "--batch-size", "2")
    assert "expected the settings of the run that is resumed" in error and "lr: 0.003 -> 1.0" in error
    assert "found a folder with other contents" in refused(capsys, tmp_path, "--run-dir", "other", "--steps", "1")
    assert "found a file" in refused(capsys, tmp_path, "--run-dir", "file", "--steps", "1")
    assert "file/run: Not a directory" in refused(capsys, tmp_path, "--run-dir", "file/run", "--steps", "1")
    assert (tmp_path / "full" / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize("package", ["tqdm", "yaml"])
def test_a_missing_package_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    error = refused(capsys, tmp_path, "--steps", "1")
    assert 'pip install "mo_fused[train]"' in error
    assert ("no PyYAML" if package == "yaml" else "no tqdm") in error


def test_too_large_a_batch_is_refused_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The allocator's own error, for what no machine has: a batch that is merely large might fit into swap."""

    def hungry_task(config: TrainConfig, device: torch.device) -> Task:
        return replace(build_task(config, device), loss_fn=lambda model, batch: torch.empty(2**62, dtype=torch.uint8))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_module, "build_task", hungry_task)
    (tmp_path / "empty").mkdir()
    for folder in ("new", "empty"):
        error = refused(capsys, tmp_path, "--device", "cpu", "--run-dir", folder)
        assert "--batch-size: expected a batch that fits into memory" in error


def test_a_backend_that_cannot_be_had_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MO_FUSED_BACKEND", "abacus")
    error = refused(capsys, tmp_path, "--device", "cpu", "--optimizer", "mo_fused", "--steps", "1")
    assert "'abacus'" in error and "expected" in error


# --- the loop, at small size


def small(folder: Path | None, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**SMALL, "steps": 5, "run_dir": None if folder is None else str(folder), **changes})


def test_default_folder_and_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text("Grün ist die Hoffnung. " * 100, encoding="utf-8")
    results = [run(small(None, text="own.txt")) for _ in range(2)]
    assert [r.run_dir.parent.name for r in results] == ["runs", "runs"]
    assert all(r.run_dir.name.startswith("lm-2") and len(metrics(r.run_dir)) == 5 for r in results)
    assert results[0].run_dir != results[1].run_dir, "two runs in the same second"
    assert yaml.safe_load((results[0].run_dir / "config.yaml").read_text())["data"]["source"] == "own.txt"


@pytest.mark.parametrize("optimizer", ["mo_fused", "torch"])
def test_the_seed_alone_decides(optimizer: str, tmp_path: Path) -> None:
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(3)  # the global generator's position must not matter
        run(small(tmp_path / name, seed=seed, optimizer=optimizer))
        losses.append([row["loss"] for row in metrics(tmp_path / name)])
    assert losses[0] == losses[1] != losses[2]


def test_rates_are_the_schedules(tmp_path: Path) -> None:
    run(small(tmp_path / "r", steps=9, warmup_steps=4, lr=1.0))
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3, 4))]
    assert [row["lr"] for row in metrics(tmp_path / "r")] == pytest.approx(expected)


def test_the_first_steps_do_not_depend_on_the_number_of_steps(tmp_path: Path) -> None:
    """6 steps are fewer than two warm-ups of 4: they are the first of 8."""
    for steps in (6, 8):
        run(small(tmp_path / str(steps), steps=steps, warmup_steps=4))
    short, long = ([(row["loss"], row["lr"]) for row in metrics(tmp_path / name)] for name in ("6", "8"))
    assert short == long[:6]


def test_validation_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    result = run(small(tmp_path / "r", steps=7, validate_every=3))
    measured = [row["step"] for row in metrics(tmp_path / "r") if row["val_loss"] is not None]
    assert measured == [3, 6, 7]
    assert result.status == 0 and result.val_loss == metrics(tmp_path / "r")[-1]["val_loss"]


@pytest.mark.parametrize("optimizer", ["mo_fused", "torch"])
def test_a_loss_that_is_not_finite_ends_the_run(
    optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(small(tmp_path / "r", steps=50, lr=1e30, optimizer=optimizer))
    rows = metrics(tmp_path / "r")
    assert result.status == 1 and result.diverged and len(rows) < 10
    broken = next(row for row in rows if row.get("loss_nonfinite"))
    assert broken["loss"] is None
    assert list(rows[0]) == list(METRICS), "a flag stands only beside a number that is not finite"
    assert f"found none at step {broken['step']} of 50. Try a lower --lr" in capsys.readouterr().out


def test_a_skipped_step_holds_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3's gradient is NaN. The host learns of it while step 4 runs, so step 5 repeats step 4's place."""
    calls = 0

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient * math.nan if calls == 3 else gradient

    def poisoned_task(config: TrainConfig, device: torch.device) -> Task:
        task = build_task(config, device)
        assert isinstance(task.model, ByteGPT)
        task.model.norm.weight.register_hook(poison)
        return task

    monkeypatch.setattr(train_module, "build_task", poisoned_task)
    result = run(small(tmp_path / "r", steps=8, warmup_steps=8, lr=0.8))
    rows = metrics(tmp_path / "r")
    assert result.status == 0
    assert [row["skipped"] for row in rows] == [number == 3 for number in range(1, 9)]
    assert rows[2]["grad_norm"] is None and rows[2]["grad_norm_nonfinite"] is True
    assert [row["lr"] for row in rows] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.5, 0.6, 0.7])
