"""Settings of a run: defaults by task, YAML files, and which of default, file and command line wins."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mo_fused import cli
from mo_fused.training import InputError, TrainConfig
from mo_fused.training import train as train_module
from mo_fused.training.config import ALLOWED, OPTIONS, TASK_DEFAULTS, TASKS, spelled
from mo_fused.training.config_file import load_config, load_run_config
from mo_fused.training.presets import RECOMMENDATION, TEXT, VISION


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "settings.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- TrainConfig


def test_the_text_model_keeps_its_defaults() -> None:
    assert asdict(TrainConfig()) == {
        "task": "lm",
        "text": None,
        "optimizer": "mo_fused",
        "steps": 700,
        "seed": 0,
        "device": None,
        "run_dir": None,
        "lr": 3e-3,
        "batch_size": 8,
        "context": 128,
        "layers": 4,
        "heads": 6,
        "width": 192,
        "warmup_steps": 100,
        "min_lr_ratio": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "validate_every": 100,
        "schedule": "warmup_cosine",
        "momentum": None,
        "nesterov": None,
        "embedding_lr_factor": 1.0,
        "clip_embeddings": True,
        "precision": "fp32",
        "accumulate": 1,
        "checkpoint_every": 100,
        "keep_checkpoints": 3,
        "profile": 0,
    }
    assert TrainConfig().preset == replace(TEXT, lr=3e-3, warmup_steps=100)
    assert [TrainConfig(steps=steps).schedule_steps for steps in (5, 200, 201)] == [200, 200, 201]


def test_the_other_tasks_take_their_presets() -> None:
    vision, ctr = TrainConfig(task="vision"), TrainConfig(task="ctr")
    assert vision.preset == replace(VISION, warmup_steps=vision.warmup_steps)
    assert ctr.preset == replace(RECOMMENDATION, lr=6e-3, warmup_steps=60)
    assert (vision.max_grad_norm, vision.lr, vision.momentum, vision.weight_decay) == (0.0, 0.1, 0.9, 5e-4)
    assert (ctr.embedding_lr_factor, ctr.clip_embeddings) == (0.3, False)
    missing = {name for name, value in asdict(vision).items() if value is None} - {"device", "run_dir"}
    assert missing == {
        *("text", "context", "layers", "heads", "beta1", "beta2", "eps"),
        *("embedding_lr_factor", "clip_embeddings"),
    }
    assert TrainConfig(task="vision", steps=7).schedule_steps == 7


def test_every_value_reaches_the_preset() -> None:
    preset = TrainConfig(
        lr=0.5,
        beta1=0.1,
        beta2=0.2,
        eps=0.3,
        weight_decay=0.4,
        max_grad_norm=0,
        schedule="warmup_linear",
        warmup_steps=6,
        min_lr_ratio=0.7,
        embedding_lr_factor=0.8,
        clip_embeddings=False,
    ).preset
    assert (preset.lr, preset.betas, preset.eps, preset.weight_decay) == (0.5, (0.1, 0.2), 0.3, 0.4)
    assert (preset.schedule, preset.warmup_steps, preset.min_lr_ratio) == ("warmup_linear", 6, 0.7)
    assert (preset.max_grad_norm, preset.embedding_lr_factor, preset.clip_embeddings) == (None, 0.8, False)
    turned = TrainConfig(task="vision", momentum=0.5, nesterov=True, max_grad_norm=2.0).preset
    assert (turned.optimizer, turned.momentum, turned.nesterov, turned.max_grad_norm) == ("SGD", 0.5, True, 2.0)


@given(
    st.sampled_from(TASKS),
    st.fixed_dictionaries(
        {},
        optional={
            "steps": st.integers(1, 10**6),
            "lr": st.floats(1e-9, 10),
            "schedule": st.sampled_from(["warmup_cosine", "warmup_constant", "inverse_sqrt", "warmup_stable_decay"]),
            "nesterov": st.booleans(),
            "context": st.integers(1, 512),
            "max_grad_norm": st.floats(0, 10),
            "accumulate": st.integers(1, 8),
            "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
        },
    ),
)
def test_a_config_can_be_given_again(task: str, settings: dict[str, Any]) -> None:
    settings = {k: v for k, v in settings.items() if k in ("accumulate", "precision") or k in TASK_DEFAULTS[task]}
    config = TrainConfig(task=task, **settings)
    assert asdict(TrainConfig(**asdict(config))) == asdict(config)
    assert {name: getattr(config, name) for name in settings} == settings
    assert yaml.safe_load(yaml.safe_dump(asdict(config))) == asdict(config), "as a run's config.yaml holds it"
    assert config.preset.lr == config.lr
    assert 1 <= config.warmup_steps <= config.schedule_steps


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"task": "vision", "layers": 2},
            "layers: expected none with the task vision, which has no such setting; found 2",
        ),
        ({"task": "vision", "text": "a.txt"}, "--text: expected none with the task vision"),
        ({"task": "vision", "beta1": 0.9}, "beta1: expected none with the task vision"),
        ({"task": "ctr", "heads": 2}, "heads: expected none with the task ctr"),
        ({"momentum": 0.9}, "momentum: expected none with the task lm"),
        ({"task": "vision", "embedding_lr_factor": 0.3}, "embedding_lr_factor: expected none"),
        ({"schedule": "warmup_constant", "min_lr_ratio": 0.1}, "min_lr_ratio: expected none with the schedule warmup_"),
        ({"schedule": "inverse_sqrt", "warmup_steps": 0}, "--warmup-steps: expected 1 or more"),
        (
            {"task": "vision", "steps": 5, "warmup_steps": 6},
            r"--warmup-steps: expected at most the steps of the run \(5\)",
        ),
        ({"task": "vision", "momentum": 0.0, "nesterov": True}, "momentum: expected a number above 0"),
        ({"heads": 5}, r"width: expected a multiple of the number of heads \(5\); found 192"),
        ({"precision": "fp8"}, "--precision: expected one of fp32, bf16, fp16; found 'fp8'"),
        ({"accumulate": 0}, "--accumulate: expected a whole number from 1 to 1048576; found 0"),
        ({"checkpoint_every": -1}, "--checkpoint-every: expected a whole number of 0 or more; found -1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: expected a whole number of 1 or more; found 0"),
        ({"steps": True}, "--steps: expected a whole number of 1 or more; found True"),
        ({"steps": 1.5}, "--steps: expected a whole number"),
        ({"lr": "fast"}, "--lr: expected a finite number above 0; found 'fast'"),
        ({"lr": float("nan")}, "--lr: .* found nan"),
        ({"lr": 10**400}, "--lr: expected a finite number above 0"),
        ({"seed": 2**63}, r"--seed: expected a whole number from 0 to 2\*\*63 - 1"),
        ({"seed": None}, "--seed: .* found None"),
        ({"max_grad_norm": -1.0}, "max_grad_norm: expected a finite number of 0 or more"),
        ({"clip_embeddings": 1}, "clip_embeddings: expected true or false; found 1"),
        ({"schedule": "cosine"}, "schedule: expected one of warmup_cosine, "),
        ({"task": "chess"}, "--task: expected one of lm, vision, ctr; found 'chess'"),
    ],
)
def test_what_a_setting_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"^{said}"):
        TrainConfig(**settings)


def test_every_setting_is_checked() -> None:
    assert set(ALLOWED) == set(asdict(TrainConfig()))
    for name in ALLOWED:
        with pytest.raises(InputError, match=f"^{spelled(name)}: "):
            TrainConfig(**{name: object()})


# --- files


def test_a_file_of_settings(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "\ufefftask: lm  # as usual\nlr: 1e-3\neps: 1E-8\nweight_decay: .5\nmin_lr_ratio: 0\nsteps: 1_000\n"
        "clip_embeddings: no\nschedule: warmup_linear\ntext: 'n\u00f6.txt'\ndevice:\nseed: ~\n",
    )
    settings = load_config(path)
    assert settings == {
        "task": "lm",
        "lr": 1e-3,
        "eps": 1e-8,
        "weight_decay": 0.5,
        "min_lr_ratio": 0.0,
        "steps": 1000,
        "clip_embeddings": False,
        "schedule": "warmup_linear",
        "text": "n\u00f6.txt",
    }
    assert type(settings["min_lr_ratio"]) is float
    assert TrainConfig(**settings).lr == 1e-3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("batchsize: 4\n", "found unknown: batchsize; write batch_size for batchsize$"),
        ("lr: 1\nwamup_steps: 4\nqqqq: 1\n", "found unknown: wamup_steps, qqqq; write warmup_steps for wamup_steps$"),
        ("qqqq: 4\n", "found unknown: qqqq; take it out; the settings are accumulate, batch_size, "),
        ("12: 4\n", "found unknown: 12"),
        ("steps: 4\nlr: 1\nsteps: 5\n", "found steps twice in line 3; correct the file"),
        ("steps: yes\n", r"steps: expected a whole number of 1 or more; found True \(a truth value\); correct steps"),
        ("steps: 2.5\n", r"steps: expected a whole number of 1 or more; found 2.5 \(a number\)"),
        ("steps: 1e3\n", r"steps: expected a whole number of 1 or more; found '1e3' \(a text\)"),
        ("steps: 0\n", "steps: expected a whole number of 1 or more; found 0"),
        ("lr: fast\n", r"lr: expected a finite number above 0; found 'fast' \(a text\)"),
        ("lr: 1e999\n", "lr: expected a finite number above 0; found inf"),
        ("lr: .nan\n", "lr: expected a finite number above 0; found nan"),
        ("lr: true\n", "lr: expected a finite number above 0; found True"),
        ("lr: [1]\n", r"lr: expected a finite number above 0; found \[1\] \(a list\)"),
        ("nesterov: 1\n", "nesterov: expected true or false; found 1"),
        (
            "run_dir: 2024\n",
            r"run_dir: expected a text that is not empty; found 2024 \(a whole number\); put it in quot",
        ),
        ("text: 2024-01-01\n", "text: expected a text that is not empty; found datetime.date"),
        ("precision: fp8\n", "precision: expected one of fp32, bf16, fp16; found 'fp8'"),
        ("", "expected a YAML file of settings; found an empty file"),
        ("# only this\n", "found an empty file"),
        ("- steps\n- 5\n", "found a list"),
        ("steps 5\n", "found a text"),
        ("steps: [1\n", "found expected ',' or ']'.* in line 2"),
        ("a: 1\n---\nb: 1\n", "settings; found another document in line 2; correct the file"),
        ("steps: 1\n\tlr: 1\n", r"settings; found character '\\t' that cannot start any token in line 2"),
        ('run_dir: "a\\0b"\n', r"run_dir: expected a text that is not empty; found 'a\\x00b'"),
        ("? {a: 1}\n: 2\n", "found unhashable key in line 1"),
        ("steps: !!python/object/apply:os.getcwd []\n", "found could not determine a constructor"),
        ("seed: 2024-13-99\n", "found .*; correct the file"),
        (b"steps: 5\nt: \xff\n", "found byte 0xff at offset 12, which is not UTF-8"),
        (b"steps: 5\0", "found .*special characters are not allowed"),
    ],
)
def test_a_file_that_describes_no_run(content: str | bytes, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InputError, match=said) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.yaml: expected a YAML file of settings; found no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="found a folder; give a file .*--resume"):
        load_config(tmp_path)
    with pytest.raises(InputError, match="found no regular file"):
        load_config("/dev/zero")


def test_a_runs_config_describes_a_new_run_or_going_on(tmp_path: Path) -> None:
    config = TrainConfig(task="vision", lr=0.05, steps=30)
    facts = {"data": {"source": "digits"}, "environment": {"torch": "2"}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**asdict(config), "run_dir": "runs/earlier", "device": "cpu", **facts}))
    assert TrainConfig(**load_config(path)) == replace(config, device="cpu")
    assert TrainConfig(**load_run_config(tmp_path)) == replace(config, device="cpu", run_dir=str(tmp_path))
    assert load_config(written(tmp_path, "run_dir: mine\n")) == {"run_dir": "mine"}


# --- the command line


def settings_of(*arguments: str) -> TrainConfig:
    parsed: argparse.Namespace = cli.build_parser().parse_args(["train", *arguments])
    return TrainConfig(**cli._train_settings(parsed))


def test_options_win_over_the_file_and_the_file_over_the_task(tmp_path: Path) -> None:
    path = str(written(tmp_path, "task: vision\nsteps: 50\nlr: 0.2\n"))
    assert settings_of() == TrainConfig()
    assert settings_of("--task", "ctr") == TrainConfig(task="ctr")
    expected = TrainConfig(task="vision", steps=60, lr=0.2)
    for arguments in ([path, "--steps", "60"], ["--steps", "60", path]):
        assert settings_of(*arguments) == expected
    assert expected.batch_size == TASK_DEFAULTS["vision"]["batch_size"] != TASK_DEFAULTS["lm"]["batch_size"]
    with pytest.raises(InputError, match="layers: expected none with the task vision"):
        settings_of(str(written(tmp_path, "layers: 2\n")), "--task", "vision")


def test_every_option_arrives(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "task": "lm",
        "text": "a",
        "optimizer": "torch",
        "steps": 11,
        "seed": 12,
        "device": "cpu",
        "run_dir": "r",
        "lr": 0.5,
        "batch_size": 13,
        "warmup_steps": 14,
        "precision": "bf16",
        "accumulate": 15,
        "checkpoint_every": 16,
        "profile": 17,
    }
    assert set(values) == set(OPTIONS)
    arguments = [part for name, value in values.items() for part in (spelled(name), str(value))]
    assert settings_of(*arguments) == TrainConfig(**values)


def test_resuming_takes_the_runs_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r").mkdir()
    Path("r/config.yaml").write_text(yaml.safe_dump({**asdict(TrainConfig(lr=0.25, steps=9)), "data": {}}))
    assert settings_of("--resume", "r", "--steps", "12") == TrainConfig(lr=0.25, steps=12, run_dir="r")

    monkeypatch.setattr(train_module, "run", lambda config: pytest.fail("it must not start"))
    Path("empty").mkdir()
    Path("file").write_text("")
    for arguments, said in (
        (["--resume", "none"], "--resume none: expected the folder of an earlier run; found no such folder"),
        (["--resume", "empty"], "found a folder without config.yaml; name the folder of a run, or start one"),
        (["--resume", "file"], "found a file"),
        (["r/config.yaml", "--resume", "r"], "--resume r: expected no CONFIG, .*found r/config.yaml"),
    ):
        assert cli.main(["train", *arguments]) == 2
        assert re.search(said, capsys.readouterr().err)
    with pytest.raises(SystemExit):
        cli.main(["train", "--resume", "r", "--run-dir", "r"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_help_says_the_defaults_of_each_task(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    rates = ", ".join(f"{task} {TASK_DEFAULTS[task]['lr']}" for task in TASKS)
    assert f"peak learning rate (default: {rates})" in text
    assert "(default: mo_fused)" in text and "None" not in text
