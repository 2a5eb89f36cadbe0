"""bench/bench_offload.py and bench/gpu_offload.py in small: that they run, and that what they say is what they saw."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mo_fused
from mo_fused.bench import offload, results
from mo_fused.bench.case import Settings
from mo_fused.offload import ring

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("bench_offload")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("gpu_offload")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The script sets torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def records_of(bench: ModuleType, tmp_path: Path, only: str, *more: str) -> list[dict[str, Any]]:
    file = tmp_path / "results.csv"
    (tmp_path / "states").mkdir()
    folder = str(tmp_path / "states")
    bench.main(["--quick", "--threads", "1", "--only", only, "--dir", folder, "--output", str(file), *more])
    assert os.listdir(folder) == []
    found = results.read(file)
    assert all(r["bench"] == "offload" and r["quick"] and r["median_ms"] > 0 and r["torch"] for r in found)
    return found


def test_steps_on_the_cpu(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [r for r in records_of(bench, tmp_path, "offload-") if r["contender"].startswith(("mo_fused", "copy"))]
    names = ["mo_fused", 'mo_fused "cpu"', 'mo_fused "cpu", gradients', 'mo_fused "disk:"', "copy"]
    assert [r["contender"] for r in found] == names * 2
    elements = sum(p.numel() for p in offload.MODEL.parameters(True))
    assert [r["bytes"] / elements for r in found[:4]] == [28, 52, 52, 60]
    assert [r["bytes"] / elements for r in found[5:9]] == [32, 56, 56, 64]
    assert "[offload-clip] GPT-2 124M float32, states on the host, clip + step" in capsys.readouterr().out


def test_every_contender_of_a_race_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them finds its gradients gone, and each one keeps its states where its name says."""
    seen: list[Any] = []
    make = offload.ours

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(make(*args, **options))
        return seen[-1]

    monkeypatch.setattr(offload, "ours", watched)
    racing = offload.contenders(None, str(tmp_path), Settings(quick=True, peers=()))[:-1]
    for _ in range(3):
        for contender in racing:
            contender.call()
    for opt in seen:
        assert {float(entry["step"]) for entry in opt.state.values()} == {3.0} and len(opt.state) == 28
    assert [opt.defaults["offload"] for opt in seen] == [None, "cpu", "cpu", f"disk:{tmp_path}"]
    assert [opt.defaults["offload_gradients"] for opt in seen] == [False, False, True, False]


def test_the_file_against_its_disk(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm, cold = records_of(bench, tmp_path, "disk")
    states = sum(8 * p.numel() for p in bench.MODEL.parameters(True))
    for found in (warm, cold):
        assert found["bytes"] == 2 * states and found["rounds"] == 2
        assert found["gb_per_s"] == pytest.approx(2 * states / found["median_ms"] / 1e6)
        parts = 1 / found["disk_read_gb_per_s"] + 1 / found["disk_write_gb_per_s"]
        assert found["share_of_disk"] == pytest.approx(found["gb_per_s"] * parts / 2)
    assert (warm["case"], cold["case"]) == ("disk, warm", "disk, cold")
    assert "x the disk" in capsys.readouterr().out


def test_what_a_disk_reads_and_writes(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []

    def noting(name: str) -> Callable[..., int]:
        call = getattr(os, name)

        def noted(descriptor: int, buffers: Any, at: int) -> int:
            done = int(call(descriptor, buffers, at))
            calls.append((name, at, done))
            return done

        return noted

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, noting(name))
    with open(tmp_path / "file", "w+b") as file:
        disk = bench.Disk(file.fileno(), 2500, 1000)
        disk.write()
        disk.read()
        bench.forget(file.fileno())
    of_each = [(0, 1000), (1000, 1000), (2000, 500)]
    assert calls == [(name, *part) for name in ("pwritev", "preadv") for part in of_each]


def test_steps_within_a_limit(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = records_of(bench, tmp_path, "", "--limit")
    assert found["may"] == found["states"] // 4 and len(found["times"]) == 3
    assert found["before"] < found["peak"] < found["before"] + found["may"]
    printed = capsys.readouterr().out
    assert "of which 51 MiB could be allocated" in printed and "can't allocate memory" in printed


def test_a_name_that_no_case_has(bench: ModuleType) -> None:
    with pytest.raises(SystemExit, match="there are offload-step, offload-clip, disk, limit, gpu"):
        bench.main(["--quick", "--only", "nothing"])


# -- the GPU's part, on the CPU ---------------------------------------------------------------------------------------


def test_a_training_step(
    on_gpu: ModuleType, bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = records_of(bench, tmp_path, "gpu", "--batch", "1")
    names = [r["contender"] for r in found]
    ours = [on_gpu.PLAIN, on_gpu.CPU, on_gpu.TAKEN, on_gpu.RELEASED, on_gpu.CLIPPED, on_gpu.CPU_CLIPPED]
    assert [n for n in names if n.startswith("mo_fused")] == ours
    printed = capsys.readouterr().out
    for name in (on_gpu.TORCHAO, on_gpu.DEEPSPEED):
        assert name in names or f"{name}: not installed" in printed or f"{name} does not train here" in printed
    assert f"{on_gpu.CPU}: peak 0.00 GiB" in printed and "target at most 1.2x" in printed
    goals = {r["contender"]: [g["reference"] for g in r.get("goals", ())] for r in found}
    assert goals[on_gpu.CPU] == [on_gpu.PLAIN] and goals[on_gpu.CPU_CLIPPED] == [on_gpu.CLIPPED]


def test_contenders_of_a_training_step_train_alike(on_gpu: ModuleType) -> None:
    torch.set_num_threads(1)
    found, _ = on_gpu.contenders(torch.device("cpu"), on_gpu.TINY, torch.float32)
    words = on_gpu.batch_of(torch.device("cpu"), on_gpu.TINY, 2)
    for trained in found.values():
        for _ in range(3):
            trained.train(words)
    weights = {name: [p.detach() for p in trained.model.parameters()] for name, trained in found.items()}
    for name in (on_gpu.CPU, on_gpu.TAKEN, on_gpu.RELEASED):
        assert all(map(torch.equal, weights[name], weights[on_gpu.PLAIN])), name
    assert all(map(torch.equal, weights[on_gpu.CPU_CLIPPED], weights[on_gpu.CLIPPED]))
    assert not all(map(torch.equal, weights[on_gpu.CLIPPED], weights[on_gpu.PLAIN]))
    start = on_gpu.Gpt(on_gpu.TINY).state_dict()
    assert {k: v.shape for k, v in start.items()} == {
        k: v.shape for k, v in found[on_gpu.PLAIN].model.state_dict().items()
    }


def test_the_check_of_bits_sees_a_difference(on_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    place = importlib.import_module("gpu_place").Place(torch.device("cpu"), True, "cpu")
    assert on_gpu.offload(place).endswith("with the bits of no offload")
    assert ring.SLOT_BYTES == 32 << 20
    step = mo_fused.AdamW.step

    def other(self: Any, *args: Any) -> Any:
        out = step(self, *args)
        if self.defaults["offload_gradients"]:
            self.param_groups[0]["params"][1].data[3] += 1e-6
        return out

    monkeypatch.setattr(mo_fused.AdamW, "step", other)
    with pytest.raises(AssertionError, match="AdamW, gradients: param of tensor 1"):
        on_gpu.offload(place)


def test_without_a_gpu_it_says_so(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.on_a_gpu(None, "0.1 B", bench.Settings()) == ("[gpu] needs a GPU", [])


def test_the_script_runs_as_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "bench_offload.py"), "--quick", "--only", "disk", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[disk] a step's file of" in done.stdout and list(tmp_path.iterdir()) == []


def test_training_on_disk_says_what_it_saw(run_python: Callable[..., Any], tmp_path: Path) -> None:
    words = ("--layers", "1", "--steps", "2", "--no-limit", "--dir", str(tmp_path))
    done = run_python(str(BENCH / "train_on_disk.py"), *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("0.20 GB of states, limit none:") and "both at once" in done.stdout
    assert os.listdir(tmp_path) == []
