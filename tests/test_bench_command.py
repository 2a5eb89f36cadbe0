"""mo-fused bench itself, in small: what it measures, prints, records and refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mo_fused import cli
from mo_fused.bench import command, facts, results, steps
from mo_fused.bench.case import Case, Settings
from mo_fused.bench.peers import FUSED, OURS
from mo_fused.bench.race import Contender

pytestmark = pytest.mark.cpu_only(reason="what is measured on the CPU, with its backends by name")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One: a team of torch's costs tiny tensors more than it does for them, and on a busy machine a thousand times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*words: str) -> int:
    return cli.main(["bench", "--device", "cpu", "--threads", "1", *words])


def test_the_command_measures_prints_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "results.csv", tmp_path / "bars.png"
    words = ["step", "amp", "overhead", "--only", "small-fp32", "--quick", "--peers", "torch fused"]
    assert run(*words, "--output", str(file), "--plot", str(picture)) == 0
    out = capsys.readouterr().out
    assert "[step-small-fp32] 1000 x 64 float32, step\n" in out and "[amp-small-fp32]" in out
    ours = next(text for text in out.splitlines() if text.startswith("  mo_fused  "))
    assert 0 < float(ours.split()[-1]) < 1e-4, "the error, under its heading"
    assert "fastest other" in out and "kernels: " in out
    found = results.read(file)
    assert [(r["bench"], r["contender"]) for r in found] == [
        ("step", OURS),
        ("step", FUSED),
        ("amp", steps.OUR_SCALER),
        ("amp", steps.TORCH_SCALER),
        ("amp", FUSED),
    ]
    assert all(
        r["quick"] and r["median_ms"] > 0 and r["torch"] == torch.__version__ and r["threads"] == 1 for r in found
    )
    assert found[1]["version"] == torch.__version__ and found[0]["error"] < 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suite", ["adafactor", "offload", "clip", "overhead"])
def test_every_suite_runs(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    only = {"adafactor": "matrices", "clip": "lora", "overhead": "groups", "offload": "clip"}[suite]
    assert run(suite, "--quick", "--peers", "none", "--only", only) == 0
    assert OURS in capsys.readouterr().out


def test_memory_runs_in_processes_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("memory", "--quick", "--peers", "none", "--only", "adamw-gpt2-fp32") == 0
    line = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("  mo_fused, clipping"))
    assert float(line.split()[2].rstrip("%")) == pytest.approx(200, abs=1), "two moments"


def test_a_noisy_machine_gets_no_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    turns = iter(range(1000))

    def contenders(settings: Settings) -> list[Contender]:
        return [Contender(OURS, lambda: time.sleep(0.021 + 0.02 * (next(turns) % 2))), Contender(FUSED, lambda: None)]

    case = Case("step", "a model", contenders)
    monkeypatch.setattr(command, "_suite", lambda name: {"step-a": case})
    monkeypatch.setattr(command, "alone", lambda case, settings: (case.run(settings), []))  # a function of a test
    assert run("step", "--rounds", "8") == command.TOO_NOISY == 3
    out = capsys.readouterr().out
    assert "This machine is too noisy to tell" in out and "a model: mo_fused (" in out and "--max-spread" in out
    assert "x  torch fused" not in out.split("This machine")[0].split("fastest other")[1]


def test_two_contenders_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("step", "--only", "small-fp32", "--quick", "--compare", "mo_fused", "foreach") == 0
    out = capsys.readouterr().out
    assert "torch foreach" in out and "torch fused" not in out
    assert "1000 x 64 float32, step: tiny sizes, which say nothing" in out


def test_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = facts.circumstances()
    names = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for name, ms in zip(names, (10.0, 5.0), strict=True):
        row = {"bench": "step", "case": "a model", "contender": OURS, "quick": False, "median_ms": ms}
        results.append(name, [{**row, "low_ms": ms * 0.99, "high_ms": ms * 1.01}], here)
    assert run("--compare", *map(str, names)) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "a",
        "model",
        "mo_fused",
        "10.000",
        "5.000",
        "2.00x",
        "faster",
    ]
    assert run("--compare", *map(str, names), "--max-spread", "0.01") == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lion"], "SUITE: expected one of step, clip, amp"),
        (["step", "--only", "bert"], "--only: expected a part of one of step-gpt2-fp32"),
        (["--rounds", "1"], "--rounds: expected at least 2; found 1"),
        (["--max-spread", "0"], "--max-spread: expected a share above 0"),
        (["--device", "tpu"], "--device: expected one of cpu"),
        (["--plot", "no/such/folder/x.png"], "expected a file in a folder that is there"),
        (["--output", "no/such/folder/x.csv"], "expected a file in a folder that is there"),
        (["--compare", "a.csv", "fused"], "expected two files of results, or two contenders; found one file, a.csv"),
        (["--compare", "a.csv", "b.csv"], "a.csv: expected a file of results"),
    ],
)
def test_bad_usage_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == cli.BAD_USAGE
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_a_race_has_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Its threads are those of the command, what is left out is told, and the outcome comes back."""
    settings = Settings(peers=("torch fused",), rounds=2)
    done, said = command.alone(steps.CLIPS["clip-small-fp32"], settings)
    assert done is not None and list(done.samples) == [OURS, FUSED] and done.samples[OURS].rounds == 2
    assert said == []
    missing, said = command.alone(steps.CLIPS["clip-huge-bf16"], settings)
    assert missing is None and said == ["one tensor of 2^31 + 64 bfloat16 is left out: is for GPUs"]
