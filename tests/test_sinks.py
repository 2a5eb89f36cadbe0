"""Sinks: console, JSON lines that survive a crash, TensorBoard's own reader, calls of wandb and mlflow."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tqdm import tqdm

from mo_fused.training.errors import InputError
from mo_fused.training.histograms import EDGES
from mo_fused.training.monitor import Monitor
from mo_fused.training.record import RECORD
from mo_fused.training.run_folder import METRICS, RunFolder
from mo_fused.training.sinks import Console, JsonLines, MLflow, TensorBoard, WandB
from mo_fused.training.sinks.json_lines import json_line

COUNTS = [0] * 20 + [3, 5] + [0] * (len(EDGES) - 23)
DETAIL: dict[str, Any] = {
    "step": 500,
    "parameters": {"a.weight": {"grad_norm": 2.0, "update_norm": None, "param_norm": 8.0, "nonfinite": 0}},
    "histograms": {"a.weight": {"grad": COUNTS, "update": None, "edges": list(EDGES)}},
}
EVENT: dict[str, Any] = {"step": 7, "watcher": "LossSpike", "message": "loss 9 is high", "loss": 9.0}


def record(step: int, **values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(RECORD), "step": step, "loss": 2.5, "lr": 0.5, "skipped": False, **values}


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.splitlines()]


# -- console ----------------------------------------------------------------------------------------------------------


def test_a_line_now_and_then() -> None:
    out = io.StringIO()
    sink = Console(every=2, file=out)
    more = {"skipped_steps": 0, "samples_per_second": 10.0, "tokens_per_second": 12345.6, "data_share": 0.01}
    for step in range(1, 4):
        sink.write(record(step, grad_norm=1.234, **more))
    sink.write(record(5, skipped_steps=3, samples_per_second=10.0, data_share=0.5, val_loss=1.75))
    sink.event(EVENT)
    assert out.getvalue().splitlines() == [
        "step 2: loss 2.5, lr 5.00e-01, grad_norm 1.23, 12,346 tokens/s",
        "step 5: loss 2.5, validation loss 1.75, lr 5.00e-01, 3 skipped, 10 samples/s, 50% waiting for data",
        "step 7: LossSpike: loss 9 is high",
    ]
    with pytest.raises(ValueError, match="every to be 1 or more; found 0"):
        Console(every=0)


def test_the_line_goes_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out, written = io.StringIO(), []
    monkeypatch.setattr(tqdm, "write", lambda text, file: written.append((text, file)))
    sink = Console(every=1, file=out)
    with tqdm(total=2, file=io.StringIO()):
        sink.write(record(1))
    assert written == [("step 1: loss 2.5, lr 5.00e-01", out)] and out.getvalue() == ""
    sink.write(record(2))
    assert len(written) == 1 and out.getvalue() == "step 2: loss 2.5, lr 5.00e-01\n"


# -- JSON lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_run", [True, False])
def test_three_files(as_run: bool, tmp_path: Path) -> None:
    folder = RunFolder("lm", tmp_path / "r") if as_run else tmp_path / "r"
    sink = JsonLines(folder)
    sink.write(record(1, loss=math.nan, grad_norm=math.inf))
    sink.write(record(2, val_loss=3.0))
    sink.detail({**DETAIL, "parameters": {"a": {"grad_norm": math.nan, "norms": [1.0, math.inf]}}})
    sink.event({**EVENT, "loss": math.inf, "worst": torch.tensor([1.0, math.nan]), "ids": (4, 5), "at": Path("x")})
    first, second = lines(tmp_path / "r" / "metrics.jsonl")  # whoever reads meanwhile sees everything
    assert [key for key in first if not key.endswith("_nonfinite")] == list(METRICS)
    assert (first["loss"], first["loss_nonfinite"], first["grad_norm_nonfinite"]) == (None, True, True)
    assert second["val_loss"] == 3.0 and "loss_nonfinite" not in second
    (detail,) = lines(tmp_path / "r" / "details.jsonl")
    assert detail["parameters"]["a"] == {"grad_norm": None, "grad_norm_nonfinite": True, "norms": [1.0, None]}
    assert detail["histograms"] == DETAIL["histograms"]
    (event,) = lines(tmp_path / "r" / "events.jsonl")
    assert event == {
        **EVENT,
        "loss": None,
        "loss_nonfinite": True,
        "worst": [1.0, None],
        "ids": [4, 5],
        "at": "x",
    }
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.event(EVENT)
    if isinstance(folder, RunFolder):
        folder.write_metrics({"step": 3})  # closed by itself
        folder.close()


def test_any_line_is_json_for_every_reader() -> None:
    text = json_line({"a": [math.nan, {"b": -math.inf}], 3: (1, [2.5])})
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": [None, {"b": None, "b_nonfinite": True}],
        "3": [1, [2.5]],
    }


def test_a_rate_that_is_not_finite_does_not_end_the_log(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path)
    sink.write(record(1, lr=0.5, lrs=[0.5, math.inf]))
    sink.close()
    assert lines(tmp_path / "metrics.jsonl")[0]["lrs"] == [0.5, None]


def test_a_cut_line_is_dropped_and_later_steps_can_be(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "details.jsonl", "events.jsonl"):
        (tmp_path / name).write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 4)) + '{"step": 4')
    sink = JsonLines(tmp_path)
    sink.write(record(5))
    sink.event({**EVENT, "step": 6})
    names = ("metrics", "details", "events")
    steps = {name: [row["step"] for row in lines(tmp_path / f"{name}.jsonl")] for name in names}
    assert steps == {"metrics": [1, 2, 3, 5], "details": [1, 2, 3], "events": [1, 2, 3, 6]}
    sink.cut(2)
    sink.detail({"step": 3})
    sink.close()
    steps = {name: [row["step"] for row in lines(tmp_path / f"{name}.jsonl")] for name in names}
    assert steps == {"metrics": [1, 2], "details": [1, 2, 3], "events": [1, 2]}


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"JsonLines .*file: expected a folder that can be written to; found .*exists"):
        JsonLines(tmp_path / "file")
    (tmp_path / "r" / "events.jsonl").mkdir(parents=True)
    with pytest.raises(InputError, match=r"found .*events.jsonl: Is a directory; name another folder"):
        JsonLines(tmp_path / "r")
    with pytest.raises(ValueError, match="every to be seconds above 0"):
        JsonLines(tmp_path, every=0.0)


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_the_thread_forces_to_disk_and_fetches_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, str]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((threading.current_thread().name, os.readlink(f"/proc/self/fd/{fd}")))
    )
    sink = JsonLines(tmp_path, every=0.05)
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(opt, [sink])
    opt.step()
    monitor.step(1.5)
    until(lambda: (str(tmp_path / "metrics.jsonl")) in [path for name, path in synced if name == "JsonLines"])
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1], "no second step was made"
    time.sleep(0.2)
    seen = len(synced)
    time.sleep(0.2)
    assert len(synced) == seen, "nothing new, nothing to force"
    opt.step()
    monitor.step(2.5)
    monitor.flush()
    assert synced[-1] == ("MainThread", str(tmp_path / "events.jsonl"))
    monitor.close()
    assert [row["loss"] for row in lines(tmp_path / "metrics.jsonl")] == [1.5, 2.5], "each step once"


def test_a_disk_that_fails_in_the_thread_is_told_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonLines(tmp_path, every=0.05)

    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    sink.write(record(1))
    until(lambda: sink._error is not None)
    with pytest.raises(OSError, match="Input/output error"):
        sink.write(record(2))


def test_a_sink_that_nobody_holds_ends_its_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    sink = JsonLines(tmp_path, every=0.02)
    assert threading.active_count() == before + 1
    sink.write(record(1))
    while sink._dirty:  # until it has been at work
        time.sleep(0.01)
    time.sleep(0.05)
    del sink
    until(lambda: threading.active_count() == before)


SCRIPT = """
import os, sys, time
import torch, mo_fused
from mo_fused.training.monitor import Monitor
from mo_fused.training.sinks import JsonLines
model = torch.nn.Linear(2, 1)
opt = mo_fused.SGD(model.parameters(), lr=0.1, stats=True)
monitor = Monitor(opt, [JsonLines(sys.argv[1], every=0.1)], detail_every=2)
for step in range(5):
    model(torch.ones(3, 2)).sum().backward()
    opt.step()
    monitor.step(float(step))
if sys.argv[2] == "fork":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
if sys.argv[2] == "crash":
    raise RuntimeError("planted")
if sys.argv[2] == "kill":
    end = time.monotonic() + 20  # the fifth step waits for a sixth, but not for long
    while open(sys.argv[1] + "/metrics.jsonl").read().count("\\n") < 5 and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("how", "status"), [("end", 0), ("crash", 1), ("fork", 0)])
def test_nothing_is_lost_at_exit(how: str, status: int, tmp_path: Path, run_python: Any) -> None:
    """In none of these has anybody closed the monitor."""
    done = run_python("-c", SCRIPT, str(tmp_path / "r"), how)
    assert done.returncode == status and ("planted" in done.stderr) == (how == "crash"), done.stderr
    assert [row["loss"] for row in lines(tmp_path / "r" / "metrics.jsonl")] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [row["step"] for row in lines(tmp_path / "r" / "details.jsonl")] == [2, 4]


def test_a_killed_process_loses_nothing_that_is_older_than_the_thread_waits(tmp_path: Path, run_python: Any) -> None:
    done = run_python("-c", SCRIPT, str(tmp_path / "r"), "kill")
    assert done.returncode == -9, done.stderr
    assert [row["step"] for row in lines(tmp_path / "r" / "metrics.jsonl")] == [1, 2, 3, 4, 5]


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    sink.write(record(1, loss=2.5, lrs=[0.5, 0.25], skipped=True, val_loss=None))
    sink.write(record(2, loss=math.nan))
    sink.detail(DETAIL)
    sink.event(EVENT)
    sink.flush()
    found: Any = EventAccumulator(str(tmp_path))
    found.Reload()
    tags = found.Tags()
    assert sorted(tags["scalars"]) == [
        "grad_norm/a.weight", "loss", "lr", "lr/0", "lr/1", "param_norm/a.weight", "skipped",
    ]  # fmt: skip
    first, second = found.Scalars("loss")
    assert (first.step, first.value, second.step) == (1, 2.5, 2) and math.isnan(second.value)
    assert [(one.step, one.value) for one in found.Scalars("lr/1")] == [(1, 0.25)]
    assert [(one.step, one.value) for one in found.Scalars("skipped")] == [(1, 1.0), (2, 0.0)]
    assert [(one.step, one.value) for one in found.Scalars("grad_norm/a.weight")] == [(500, 2.0)]
    assert tags["histograms"] == ["grad/a.weight"]
    (one,) = found.Histograms("grad/a.weight")
    assert one.step == 500 and one.histogram_value.num == 8
    limits, counts = one.histogram_value.bucket_limit, one.histogram_value.bucket
    assert {limit: count for limit, count in zip(limits, counts, strict=True) if count} == {EDGES[21]: 3, EDGES[22]: 5}
    assert tags["tensors"] == ["events/LossSpike/text_summary"]
    sink.close()


# -- wandb and mlflow: the calls, on stand-ins ------------------------------------------------------------------------


class Calls:
    """A stand-in that lists its calls."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], returns: dict[str, Any] | None = None) -> None:
        self._name, self._calls, self._returns = name, calls, returns or {}

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._calls.append((f"{self._name}.{method}", *args, options))
            return self._returns.get(method)

        return call


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    for key, value in values.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("own", [True, False])
def test_calls_of_wandb(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    run = Calls("run", calls)

    def init(**options: Any) -> Any:
        calls.append(("init", options))
        return run

    stand_in(monkeypatch, "wandb", init=init, Histogram=lambda np_histogram: ("histogram", np_histogram))
    sink = WandB(mode="offline", project="p") if own else WandB(run)
    sink.write(record(1, lrs=[0.5, 0.25]))
    sink.detail(DETAIL)
    sink.event(EVENT)  # of a step before: a watcher may be late
    sink.close()
    sink.close()
    charts = {"grad_norm/a.weight": 2.0, "param_norm/a.weight": 8.0}
    expected: list[tuple[Any, ...]] = [
        ("run.log", {"loss": 2.5, "lr": 0.5, "lr/0": 0.5, "lr/1": 0.25, "skipped": 0.0}, {"step": 1}),
        ("run.log", {**charts, "histogram/grad/a.weight": ("histogram", (COUNTS, list(EDGES)))}, {"step": 500}),
        ("run.log", {"events/LossSpike": 1}, {"step": 500}),
        ("run.alert", {"title": "LossSpike", "text": "step 7: loss 9 is high"}),
    ]
    if own:
        expected = [("init", {"mode": "offline", "project": "p"}), *expected, ("run.finish", {})]
    by_name = [(*call[:1], *sorted(call[1:], key=str)) for call in calls]
    assert by_name == [(*call[:1], *sorted(call[1:], key=str)) for call in expected]
    assert len(COUNTS) == len(EDGES) - 1


@pytest.mark.parametrize("active", [True, False])
def test_calls_of_mlflow(active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Run:
        class info:
            run_id = "id"

    def start_run(**options: Any) -> type[Run]:
        calls.append(("start_run", options))
        return Run

    module = stand_in(
        monkeypatch,
        "mlflow",
        active_run=lambda: Run if active else None,
        start_run=start_run,
        end_run=lambda: calls.append(("end_run",)),
        MlflowClient=lambda: Calls("client", calls, {"log_batch": Calls("sent", calls)}),
    )
    module.entities = stand_in(  # type: ignore[attr-defined]
        monkeypatch, "mlflow.entities", Metric=lambda key, value, timestamp, step: (key, value, step)
    )
    sink = MLflow(every=2, run_name="r")
    assert sink.run_id == "id"
    sink.write(record(1))
    assert [call for call in calls if call[0].startswith("client")] == []
    sink.write(record(2))
    sink.detail(DETAIL)
    sink.event(EVENT)
    sink.close()
    norms = [("grad_norm/a.weight", 2.0, 500), ("param_norm/a.weight", 8.0, 500)]
    two = [("loss", 2.5, 1), ("lr", 0.5, 1), ("skipped", 0.0, 1), ("loss", 2.5, 2), ("lr", 0.5, 2), ("skipped", 0.0, 2)]
    expected: list[tuple[Any, ...]] = [
        ("client.log_batch", "id", {"metrics": two, "synchronous": False}),
        ("client.set_tag", "id", "event.LossSpike", "step 7: loss 9 is high", {}),
        ("sent.wait", {}),
        ("client.log_batch", "id", {"metrics": norms, "synchronous": False}),
        ("sent.wait", {}),
    ]
    if not active:
        expected = [("start_run", {"run_name": "r"}), *expected, ("end_run",)]
    assert calls == expected
    with pytest.raises(ValueError, match="every to be 1 or more"):
        MLflow(every=0)


@pytest.mark.parametrize(
    ("package", "make"), [("wandb", WandB), ("mlflow", MLflow), ("tensorboard", lambda: TensorBoard("x"))]
)
def test_a_missing_package_is_named(
    package: str, make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"expected the package {package}; found none .*run: pip install {package}$"):
        make()
    assert not any(tmp_path.iterdir())
