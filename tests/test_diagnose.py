"""``mo-fused diagnose``: small trainings with a planted fault, healthy ones, and folders that hold little."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import run_samples
from diagnose_runs import BAD, make_run

from mo_fused import cli
from mo_fused.training import InputError
from mo_fused.training.diagnose import Diagnosis, diagnose
from mo_fused.training.diagnose.start import expected_loss
from mo_fused.training.report import read_run

CHECKS = ["first loss", "gradient norms", "loss after", "late spikes", "train/validation", "loss scale"]


def states(found: Diagnosis) -> list[str]:
    assert [check.check.startswith(name) for check, name in zip(found.checks, CHECKS, strict=True)] == [True] * 6
    return [check.state for check in found.checks]


@pytest.mark.parametrize(
    ("planted", "named", "at"),
    [
        ("wrong labels", "wrong labels", 2),
        ("wrong labels learned by heart", "wrong labels", 4),
        ("vanishing gradient", "vanishing gradient", 1),
        ("no warm-up", "no warm-up", 2),
        ("rate too low", "rate too low", 2),
        ("bad samples", "bad samples", 3),
        ("over-fitting", "over-fitting", 4),
        ("fp16 underflow", "fp16 underflow", 5),
        ("loss scale too low", "fp16 underflow", 5),
    ],
)
def test_the_planted_fault_and_no_other_is_named(planted: str, named: str, at: int, tmp_path: Path) -> None:
    found = diagnose(make_run(planted, tmp_path / "r"))
    assert found.faults == [named], str(found)
    check = found.checks[at]
    assert check.fault == named and check.means and check.do and any(c.isdigit() for c in check.seen)
    if named == "bad samples":
        listed = {part.split(" (")[0] for part in check.seen.partition("these: ")[2].split(", ")}
        assert {int(one) for one in listed} & set(BAD) and len(listed - set(map(str, BAD))) == 0
    if planted == "vanishing gradient":  # the stalled loss is told as what it is: a consequence
        assert found.checks[2].state == "follows" and "vanishing" in found.checks[2].means


@pytest.mark.parametrize(
    ("planted", "seed"),
    [*(("healthy", seed) for seed in range(4)), ("healthy fp16", 0), ("the same with a warm-up", 0)],
)
def test_nothing_is_found_in_a_healthy_run(planted: str, seed: int, tmp_path: Path) -> None:
    found = diagnose(make_run(planted, tmp_path / "r", seed))
    assert found.faults == [] and states(found) == ["ok"] * 6, str(found)


def test_without_the_layers_a_stall_names_both_causes(tmp_path: Path) -> None:
    folder = make_run("vanishing gradient", tmp_path / "r")
    (folder / "details.jsonl").unlink()
    found = diagnose(folder)
    assert found.faults == ["wrong labels"] and "vanishing gradient could do the same" in found.checks[2].means
    assert "layers were not judged" in found.checks[1].seen


def test_without_sample_ids_bad_samples_are_not_named(tmp_path: Path) -> None:
    folder = make_run("bad samples", tmp_path / "r", 1)
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert diagnose(folder).faults == ["bad samples"]
    places = [{**row, "worst_samples": list(range(5))} for row in rows]
    run_samples.write_lines(folder / "events.jsonl", places)
    assert diagnose(folder).faults == []
    (folder / "events.jsonl").unlink()
    assert diagnose(folder).faults == []


def test_late_spikes_that_no_watcher_has_seen(tmp_path: Path) -> None:
    spikes = {step: {"loss": 9.5} for step in (130, 150, 190)}
    found = diagnose(run_samples.make_run(tmp_path / "r", changed={1: {"loss": 5.5}, **spikes}))
    assert found.faults == ["late spikes"] and "3 (steps 130, 150, 190)" in found.checks[3].seen
    assert "no ids were recorded" in found.checks[3].seen
    two = diagnose(run_samples.make_run(tmp_path / "s", changed={1: {"loss": 5.5}, **dict(list(spikes.items())[:2])}))
    assert two.faults == [] and "2 (steps 130, 150)" in two.checks[3].seen


def test_dead_stalled_and_not_finite(tmp_path: Path) -> None:
    start = {1: {"loss": 5.5}}
    details = [run_samples.detail(step, zero=("head.weight",)) for step in (50, 100)]
    found = diagnose(run_samples.make_run(tmp_path / "dead", changed=start, details=details))
    assert found.faults == ["dead gradient"] and "exactly zero in head.weight" in found.checks[1].seen
    event = {"step": 150, "watcher": "DeadGradient", "kind": "stalled update", "parameters": ["head.weight"]}
    found = diagnose(run_samples.make_run(tmp_path / "stalled", changed=start, events=[event]))
    assert found.faults == ["stalled updates"] and "head.weight" in found.checks[5].seen
    bad = {120: {"loss": None, "loss_nonfinite": True}}
    found = diagnose(run_samples.make_run(tmp_path / "bad", changed={**start, **bad}))
    assert found.faults == ["loss not finite"] and "first in step 120" in found.checks[5].seen
    many = {step: {"skipped": True} for step in range(30, 60)}
    found = diagnose(run_samples.make_run(tmp_path / "skipped", changed={**start, **many}))
    assert found.faults == ["skipped steps"] and "30 of 200 steps skipped" in found.checks[5].seen
    large = {step: {"grad_norm": 500.0} for step in range(50, 70)}
    found = diagnose(run_samples.make_run(tmp_path / "large", changed={**start, **large}))
    assert found.faults == ["exploding gradient"]
    scales = {step: {"loss_scale": 65536.0 * 2.0 ** -(step // 20)} for step in range(2, 201)}
    found = diagnose(run_samples.make_run(tmp_path / "scale", changed={**start, **scales}))
    assert found.faults == ["loss scale collapse"] and "1024 at first, 64 at the end" in found.checks[5].seen


def test_a_loss_that_rises_or_stays(tmp_path: Path) -> None:
    def found(name: str, losses: dict[int, float], **config: object) -> list[str]:
        changed = {step: {"loss": loss} for step, loss in {1: 5.5, **losses}.items()}
        return diagnose(run_samples.make_run(tmp_path / name, changed=changed, config=config)).faults

    assert found("peak", dict.fromkeys(range(30, 40), 8.0)) == ["rate too high"]
    assert found("one bad batch", {30: 80.0}) == found("two", {30: 80.0, 31: 80.0}) == []
    assert found("diverged", {step: 4.0 + step / 100 for step in range(150, 201)}) == ["diverged"]
    # Far above ln(256), and still falling: a start that was too high, no more.
    assert found("high", {step: 60.0 - step / 5 for step in range(1, 201)}) == ["first loss too high"]
    assert found("stays", dict.fromkeys(range(1, 201), 60.0)) == ["first loss too high", "loss does not fall"]
    assert found("unknown", dict.fromkeys(range(1, 201), 60.0), task=None) == ["loss does not fall"]
    not_finite = {1: {"loss": None, "loss_nonfinite": True}}
    first = diagnose(run_samples.make_run(tmp_path / "nan", changed=not_finite)).checks[0]
    assert first.fault == "loss not finite" and first.seen == "not finite in step 1"


@pytest.mark.parametrize(
    ("loss", "named"), [(6.4, "first loss too high"), (5.6, ""), (4.8, ""), (4.6, "first loss too low")]
)
def test_the_first_loss(loss: float, named: str, tmp_path: Path) -> None:
    found = diagnose(run_samples.make_run(tmp_path / "r", changed={1: {"loss": loss}})).checks[0]
    assert found.fault == named and "ln(256) = 5.545" in found.seen


def test_the_expected_loss(tmp_path: Path) -> None:
    def expected(name: str, classes: int | None = None, **config: object) -> tuple[float, float] | None:
        run = read_run(run_samples.make_run(tmp_path / name, 3, config={"task": None, **config}))
        found = expected_loss(run, classes)
        return None if found is None else (found.low, found.high)

    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert expected("vision", task="vision") == (math.log(10), math.log(10))
    assert expected("data", data={"classes": 7}, task="vision") == (math.log(7), math.log(7))
    assert expected("given", 3, task="vision") == (math.log(3), math.log(3))
    assert expected("ctr", task="ctr", data={"click_rate": 0.25}) == pytest.approx((entropy, math.log(2)))
    assert expected("ctr2", task="ctr", data=[1]) == (math.log(2), math.log(2))
    assert expected("own", task=["lm"], data={"classes": True}) is None
    own = diagnose(run_samples.make_run(tmp_path / "r", config={"task": None})).checks[0]
    assert own.state == "not judged" and "--classes" in own.seen


def test_what_cannot_be_judged_is_said(tmp_path: Path) -> None:
    empty = diagnose(run_samples.empty_run(tmp_path / "empty"))
    assert states(empty) == ["not judged"] * 6 and "nothing could be judged" in str(empty)
    short = diagnose(run_samples.make_run(tmp_path / "short", 12, changed={1: {"loss": 5.5}}, cut=7))
    assert short.steps == 11 and any("cut off" in note for note in short.not_read)
    assert states(short) == ["ok", "ok", "not judged", "not judged", "not judged", "ok"]
    assert "11 steps with a finite loss are too few (50 are needed)" in short.checks[2].seen
    old = diagnose(run_samples.old_run(tmp_path / "old"), classes=55)
    assert old.faults == [] and any("details.jsonl: no such file" in note for note in old.not_read)
    folder = run_samples.make_run(tmp_path / "late", 200)
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[30:]))
    late = diagnose(folder)
    assert states(late)[0] == states(late)[2] == "not judged" and "begins with step 31" in late.checks[0].seen
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 300)))
    bare = diagnose(folder)
    assert "ok" not in states(bare)[2:] and bare.faults == []


def test_any_cut_of_a_log_is_read(tmp_path: Path) -> None:
    folder = make_run("bad samples", tmp_path / "r", steps=120)
    contents = {name: (folder / f"{name}.jsonl").read_bytes() for name in ("metrics", "details", "events")}
    for share in (0.0, 0.001, 0.01, 0.1, 0.4, 0.9, 0.999):
        for name, content in contents.items():
            (folder / f"{name}.jsonl").write_bytes(content[: int(share * len(content))])
        assert diagnose(folder).faults == []


def test_events_of_any_kind_are_read(tmp_path: Path) -> None:
    odd = [
        {"step": 150, "watcher": "LossSpike", "worst_samples": [["a", 1], {"b": 2}], "worst_losses": [None, "x"]},
        {"step": 151, "watcher": "LossSpike", "worst_samples": "all", "loss": "high"},
        {"step": 152, "watcher": "LossSpike", "worst_samples": [3], "worst_losses": []},
        {"step": 153, "watcher": ["LossSpike"], "kind": 4},
        {"step": 154, "watcher": "DeadGradient", "kind": "stalled", "parameters": None},
    ]
    found = diagnose(run_samples.make_run(tmp_path / "r", changed={1: {"loss": 5.5}}, events=odd))
    assert found.faults == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run("over-fitting", tmp_path / "r")
    assert cli.main(["diagnose", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "5. train/validation gap: fault (over-fitting)" in text and "  change first: " in text
    assert "found: over-fitting (6 of 6 checks were possible)" in text
    assert cli.main(["diagnose", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] == ["over-fitting"] and found["steps"] == 400 and len(found["checks"]) == 6
    assert set(found["checks"][0]) == {"check", "state", "seen", "fault", "means", "do"}
    assert cli.main(["diagnose", str(folder), "--classes", "1000"]) == 0
    assert "first loss too low" in capsys.readouterr().out
    assert cli.main(["diagnose", str(tmp_path / "none")]) == 2
    assert cli.main(["diagnose", str(folder), "--classes", "1"]) == 2
    assert "--classes: expected a whole number, 2 or more" in capsys.readouterr().err
    with pytest.raises(InputError, match="2 or more"):
        diagnose(folder, classes=True)
