"""``mo-fused report``: what is read of a run's folder, what is said about the rest, and what is drawn of long runs."""

from __future__ import annotations

import builtins
import importlib
import json
import math
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from run_samples import LAYERS, detail, empty_run, faulty_run, make_run, old_run, write_lines

from mo_fused import cli
from mo_fused.training import InputError
from mo_fused.training.report import read_run, write_report
from mo_fused.training.report.heat_map import columns_of, heat
from mo_fused.training.report.panels import PANELS, marks_of, panels_of
from mo_fused.training.report.reading import NUMBERS
from mo_fused.training.report.series import marks, thin


def has_note(notes: list[str], *parts: str) -> bool:
    return any(all(part in note for part in parts) for note in notes)


def test_a_healthy_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "r"))
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert run.notes == [] and run.nonfinite == {}
    assert run.steps.tolist() == list(range(1, 201))
    assert set(run.numbers) == set(NUMBERS)
    assert run.numbers["loss"].tolist() == [row["loss"] for row in rows]
    validated = ~np.isnan(run.numbers["val_loss"])
    assert run.steps[validated].tolist() == [50, 100, 150, 200]
    assert run.layers.names == list(LAYERS) and run.layers.steps.tolist() == [50, 100, 150, 200]
    assert run.layers.norms["grad_norm"][:, 2] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert run.layers.norms["update_norm"][1].tolist() == [0.02] * 4
    assert run.config is not None and run.config["lr"] == 0.001
    assert run.changes[0]["changes"][0]["after"] == 0.001


def test_spikes_skips_and_what_is_not_finite(tmp_path: Path) -> None:
    run = read_run(faulty_run(tmp_path / "r"))
    assert run.notes == []
    assert run.skipped.tolist() == [60, 61]
    assert run.nonfinite["loss"].tolist() == [61] and run.nonfinite["grad_norm"].tolist() == [60, 61]
    assert [event["step"] for event in run.events] == [120, 150]
    found = marks_of(run, next(panel for panel in PANELS if panel.keys[0] == "loss"))
    at_60 = run.numbers["loss"][59]
    assert [(m.step, m.value) for m in found["spike"]] == [(120, 9.5)]
    assert [m.step for m in found["event"]] == [150]
    assert [(m.step, m.value) for m in found["skipped"]] == [(60, at_60), (61, at_60)]
    assert [(m.step, m.value) for m in found["nonfinite"]] == [(61, at_60)]
    assert run.layers.norms["grad_norm"][2].tolist() == [0.1 * 3, 0.0, 0.1 * 3]
    assert math.isinf(run.layers.norms["grad_norm"][4, 2]) and run.layers.norms["update_norm"][4, 2] == 0.05


def test_a_log_cut_in_its_last_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", 5)
    content = (folder / "metrics.jsonl").read_bytes()
    start = content[:-1].rindex(b"\n") + 1
    for end in [*range(start, len(content) - 3, 9), *range(len(content) - 3, len(content) + 1)]:
        (folder / "metrics.jsonl").write_bytes(content[:end])
        run = read_run(folder)
        whole = end >= len(content) - 1  # without the line's end it is still all there
        assert run.steps.tolist() == ([1, 2, 3, 4, 5] if whole else [1, 2, 3, 4])
        cut = not whole and end > start
        assert has_note(run.notes, "metrics.jsonl", "cut off", "line 5") == cut
        assert len(run.notes) == cut


def test_damaged_records_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", 4)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    odd = [b"\0" * 40, b"[1, 2]", b"\xff\xfe{}", b"[" * 100_000, b'{"loss": 1.0}', b'{"step": true}', b'{"step": -1}']
    odd += [b'{"step": 5, "loss": "low", "lr": 1e999, "memory_host": ' + b"9" * 400 + b', "speed_of_light": 3e8}']
    (folder / "metrics.jsonl").write_bytes(b"\n".join([*(line.encode() for line in lines), *odd, b""]))
    write_lines(folder / "events.jsonl", [{"watcher": "LossSpike"}, {"step": 2, "watcher": "Plateau"}])
    write_lines(folder / "details.jsonl", [{"step": 1}, detail(2), {"step": 3, "parameters": {"w": None, "v": {}}}])
    (folder / "config.yaml").write_text("lr: [1")
    run = read_run(folder)
    assert run.steps.tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(run.numbers["loss"][4]) and run.nonfinite["lr"].tolist() == [5]
    assert run.nonfinite["memory_host"].tolist() == [5]
    assert has_note(run.notes, "metrics.jsonl: 4 lines not read", "lines 5, 6, 7, 8")
    assert has_note(run.notes, "metrics.jsonl: 3 records without a step")
    assert has_note(run.notes, "loss is no number in 1 record")
    assert has_note(run.notes, "unknown", "speed_of_light")
    assert has_note(run.notes, "events.jsonl: 1 event without a step")
    assert has_note(run.notes, "details.jsonl: 1 record without")
    assert has_note(run.notes, "config.yaml: not read", "line 1")
    assert [event["watcher"] for event in run.events] == ["Plateau"]
    assert run.layers.names == [*LAYERS, "v"] and run.layers.steps.tolist() == [2, 3]


def test_steps_done_again_count_once(tmp_path: Path) -> None:
    """A run gone on with from a checkpoint, whose log was not cut back: the later lines are the run."""
    folder = make_run(tmp_path / "r", 10)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    again = [{**row, "loss": 100.0 + row["step"]} for row in rows[6:9]]
    write_lines(folder / "metrics.jsonl", [*rows, *again])
    spike = {"step": 8, "watcher": "LossSpike", "message": "m"}
    write_lines(folder / "events.jsonl", [spike, {**spike, "message": "n"}, spike])
    write_lines(folder / "details.jsonl", [detail(4), detail(8), detail(8, zero=LAYERS)])
    run = read_run(folder)
    assert run.steps.tolist() == list(range(1, 10))
    assert run.numbers["loss"][5:].tolist() == [rows[5]["loss"], 107.0, 108.0, 109.0]
    assert has_note(run.notes, "4 records of steps 7 to 10")
    assert [event["message"] for event in run.events] == ["m", "n"]
    assert run.layers.steps.tolist() == [4, 8] and run.layers.norms["grad_norm"][:, 1].tolist() == [0.0] * 5


def test_an_empty_run_and_an_older_version(tmp_path: Path) -> None:
    empty = read_run(empty_run(tmp_path / "empty"))
    assert len(empty.steps) == 0 and panels_of([empty]) == []
    assert has_note(empty.notes, "no step was recorded") and has_note(empty.notes, "details.jsonl: no such file")
    old = read_run(old_run(tmp_path / "old"))
    assert len(old.steps) == 100 and not np.isnan(old.numbers["grad_norm"]).any()
    assert has_note(old.notes, "nothing of", "memory_host", "update_ratio", "not recorded in this run")
    assert {"Loss", "Learning rate", "Clip coefficient"} <= {panel.title for panel in panels_of([old])}
    assert not {"Update ratio (update norm / parameter norm)"} & {panel.title for panel in panels_of([old])}


def test_rates_of_groups_that_differ(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "r", 3, changed={step: {"lrs": [1e-3, 1e-4]} for step in (2, 3)}))
    assert run.notes == []
    assert run.numbers["lrs.1"][1:].tolist() == [1e-4, 1e-4] and np.isnan(run.numbers["lrs.1"][0])


def test_thinning_keeps_every_extreme() -> None:
    steps = np.arange(1, 1_000_001)
    values = np.random.default_rng(0).normal(size=len(steps))
    spikes = np.random.default_rng(1).choice(2000, 300, replace=False) * 500 + 250  # at most one a bucket
    values[spikes] += 100.0
    values[spikes + 1] = np.nan
    x, y = thin(steps, values)
    assert len(x) <= 4002 and np.all(np.diff(x) > 0) and not np.isnan(y).any()
    assert set(steps[spikes]) <= set(x.tolist())
    assert np.array_equal(y, values[x - 1])
    assert (y.min(), y.max()) == (np.nanmin(values), np.nanmax(values))
    assert (x[0], x[-1]) == (1, 1_000_000)
    few = thin(steps[:4000], values[:4000])
    assert len(few[0]) == np.count_nonzero(~np.isnan(values[:4000]))


def test_marks_that_are_too_many_are_counted() -> None:
    steps = np.arange(1, 1001)
    values = np.sin(steps / 10)
    values[499] = 7.0
    found = marks(steps[::-1].copy(), [f"at {step}" for step in steps[::-1]], steps, values, limit=30)
    assert len(found) == 30 and sum(mark.count for mark in found) == 1000
    assert all(a.last < b.step for a, b in zip(found, found[1:]))
    assert [mark.text for mark in found if mark.value == 7.0] == ["at 500"]
    # Beyond the curve's ends, and where it has no value, a mark is at the nearest point before, or the first.
    values[9] = np.nan
    found = marks(np.array([0, 10, 2000]), ["a", "b", "c"], steps, values)
    assert [(mark.step, mark.value) for mark in found] == [(0, values[0]), (10, values[8]), (2000, values[999])]


def test_the_heat_map_of_many_records_shows_the_largest(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "r", 10, details=[detail(step) for step in range(1, 101)]))
    run.layers.norms["grad_norm"][3, 57] = 77.0
    run.layers.norms["grad_norm"][0, 40:45] = np.nan
    parts = columns_of(run, cells=10)
    assert [len(part) for part in parts] == [5] * 20
    assert len(columns_of(run)) == 100 and heat(run, "grad_norm").shape == (5, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mo_fused.training.report.heat_map.columns_of", lambda _run: parts)
        found = heat(run, "grad_norm")
    assert found[3].tolist() == [77.0 if column == 11 else 0.4 for column in range(20)]
    assert np.isnan(found[0, 8]) and found[0, 7] == 0.1


def test_the_command_writes_page_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, cut = faulty_run(tmp_path / "$x_{$"), make_run(tmp_path / "cut", cut=9)
    picture = tmp_path / "both.png"
    assert cli.main(["report", str(run), str(cut), str(run), "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    assert f"report {run / 'report.html'}\nreport {picture}\n" in out
    assert f"{cut}: 199 steps read\n  metrics.jsonl: the last line is cut off" in out
    image = matplotlib.image.imread(picture)
    # Both runs' colours are in the picture, and the red of a spike.
    for colour in ("#0072B2", "#D55E00", "#b00020"):
        wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(image[..., :3] - wanted).max(axis=-1) < 0.02).sum() > 20, colour
    assert sorted(path.name for path in run.iterdir() if path.suffix not in (".jsonl", ".yaml")) == ["report.html"]
    assert cli.main(["report", str(empty_run(tmp_path / "empty")), "--png", str(picture)]) == 0


@pytest.mark.parametrize(
    "given, expected",
    [
        (["missing"], "missing: expected the folder of a run; found no such folder"),
        (["other"], "other: expected the folder of a run; found a folder without metrics.jsonl"),
        (["run/config.yaml"], "found a file"),
        (["run", "--output", "run/metrics.jsonl"], "--output run/metrics.jsonl: expected a .html file"),
        (["run", "--output", "no/page.html"], "found no folder no"),
        (["run", "--png", "page.html"], "--png page.html: expected a .png file"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("run"), 2)
    Path("other").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert cli.main(["report", *given]) == cli.BAD_USAGE
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("package, option", [("plotly", []), ("matplotlib", ["--png", "x.png"])])
def test_a_missing_package_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    option: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("run"), 2)

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importing(name, *rest)

    importing = importlib.import_module
    monkeypatch.setattr("importlib.import_module", refuse)
    assert cli.main(["report", "run", *option]) == cli.BAD_USAGE
    error = capsys.readouterr().err
    assert f'expected the package {package}; found no {package}; run: pip install "mo_fused[report]"' in error
    assert not Path("run/report.html").exists()


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "r", 2)
    (folder / "report.html").write_text("old")
    opened = builtins.open

    def full(path: Any, *rest: Any, **options: Any) -> Any:
        if str(path).endswith(".part"):
            raise OSError(28, "No space left on device")
        return opened(path, *rest, **options)

    monkeypatch.setattr(builtins, "open", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_report([folder])
    monkeypatch.undo()
    assert (folder / "report.html").read_text() == "old"
    assert not list(folder.glob(".*.part"))


def test_what_was_not_measured_is_no_fault_of_the_log(tmp_path: Path) -> None:
    nothing = {key: None for key in NUMBERS if key != "loss"}
    run = read_run(make_run(tmp_path / "r", 3, changed=dict.fromkeys((1, 2, 3), nothing)))
    assert run.notes == [] and set(run.numbers) == {"loss"}
    assert [panel.title for panel in panels_of([run])] == ["Loss"]
