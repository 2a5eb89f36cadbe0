"""Scaling and threads of `mo-fused bench`: lines that are straight and lines that are not, small runs, pictures."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mo_fused import team
from mo_fused.bench import results, scaling, threads
from mo_fused.bench.results import Record
from mo_fused.training.errors import InputError

pytestmark = pytest.mark.cpu_only(reason="the subject is the measurement, on the host")

XS = [1, 10, 100, 1000, 10_000, 100_000]
CPU = torch.device("cpu")


def test_fit_finds_an_exact_line() -> None:
    line = scaling.fit(XS, [0.25 + 0.003 * x for x in XS])
    assert line.intercept == pytest.approx(0.25, rel=1e-9)
    assert line.slope == pytest.approx(0.003, rel=1e-9)
    assert line.departure < 1e-9
    assert line.at(50) == pytest.approx(0.4, rel=1e-9)


def test_fit_minimises_relative_errors() -> None:
    """Against the normal equations of sum((a + b x) / t - 1)^2; a plain fit would follow the last point."""
    times = [1.1, 1.9, 10.5, 95.0, 1100.0, 9000.0]
    x, t = np.array(XS, dtype=float), np.array(times)
    w = 1 / t**2
    m = np.array([[w.sum(), (w * x).sum()], [(w * x).sum(), (w * x * x).sum()]])
    a, b = np.linalg.solve(m, [(w * t).sum(), (w * x * t).sum()])
    line = scaling.fit(XS, times)
    assert (line.intercept, line.slope) == (pytest.approx(a, rel=1e-6), pytest.approx(b, rel=1e-6))
    assert line.departure == pytest.approx(max(abs(t - a - b * x) / (a + b * x)), rel=1e-6)


def test_fit_needs_two_points() -> None:
    with pytest.raises(ValueError, match="two different x"):
        scaling.fit([3, 3], [1.0, 1.1])


def records(times: dict[int, float], spread: float = 0.02) -> list[Record]:
    """Points of a line as the benchmark records them."""
    return [
        {
            "bench": "scaling",
            "case": "number of tensors",
            "contender": "mo_fused",
            "quick": False,
            "median_ms": t,
            "low_ms": t * (1 - spread / 2),
            "high_ms": t * (1 + spread / 2),
            "x": x,
            "dtype": "fp32",
            "tensors": x,
            "parameters": 10**7,
            "on_line": True,
        }
        for x, t in times.items()
    ]


@pytest.mark.parametrize(
    ("times", "straight"),
    [
        ({x: 10 + 0.004 * x for x in XS}, True),
        ({x: (10 + 0.004 * x) * (1.1 if i % 2 else 0.9) for i, x in enumerate(XS)}, True),
        ({x: 10 + 0.004 * x + 4e-7 * x * x for x in XS}, False),  # a table that is searched for each tensor
        ({x: 0.01 * x**1.15 for x in XS}, False),
        ({x: 10 + 0.004 * x + (20 if x == 1000 else 0) for x in XS}, False),  # one point beside it
    ],
)
def test_bent_lines_are_called_so(times: dict[int, float], straight: bool) -> None:
    (line,) = scaling._lines(records(times))
    assert line["straight"] is straight
    assert ("NOT STRAIGHT" in scaling.verdict(line)) is not straight


def test_noise_is_no_verdict() -> None:
    (bent,) = scaling._lines(records({x: 0.01 * x**1.15 for x in XS}, spread=0.4))
    assert scaling.verdict(bent).startswith("no verdict")
    (good,) = scaling._lines(records({x: 10 + 0.004 * x for x in XS}, spread=0.4))
    assert "straight within 30%" in scaling.verdict(good) and "6 of 6 points spread" in scaling.verdict(good)


def test_points_of_fewer_threads_are_not_part_of_the_line() -> None:
    made = records({x: 10 + 0.004 * x for x in XS})
    made[0] |= {"median_ms": 1.0, "on_line": False}
    (line,) = scaling._lines(made)
    assert line["straight"] and line["points"] == len(XS) - 1
    assert line["slope_ms"] == pytest.approx(0.004) and line["intercept_ms"] == pytest.approx(10)


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(scaling, "free_bytes", lambda device: 4e9)
    assert scaling._dtypes(CPU, False, said.append) == ["fp32", "bf16"]
    # 2.5e9 bytes beside the reserve: 16 and 8 bytes a parameter, and a tenth more.
    assert [line.split(",")[1] for line in said] == [" fp32: up to 1e+08", " bf16: up to 1e+08"]
    monkeypatch.setattr(scaling, "free_bytes", lambda device: 64e9)
    assert scaling._dtypes(CPU, False, said.append) == ["fp32"]
    assert "up to 1e+09" in said[-1]


@pytest.fixture
def quick_races() -> Iterator[None]:
    """A race collects garbage before each round: what other tests have left is not looked at."""
    gc.collect()
    gc.freeze()
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own threads spin, which takes long where the cores are busy
    yield
    torch.set_num_threads(before)
    gc.unfreeze()


def test_quick_run_of_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_races: None) -> None:
    monkeypatch.setattr(scaling, "COUNTS", (1, 10, 100))
    monkeypatch.setattr(scaling, "TOTALS", (10**5, 10**6, 10**7))
    said: list[str] = []
    text, made = scaling.run(CPU, True, said.append)
    points, lines = [r for r in made if r.get("x")], [r for r in made if not r.get("x")]
    assert [r["x"] for r in points if r["contender"] == "mo_fused"] == [100, 1000, 10_000, 1, 10, 100]
    assert all(r["parameters"] == 10_000 for r in points if r["case"] == "number of tensors")
    assert all(0 < r["low_ms"] <= r["median_ms"] <= r["high_ms"] and r["rounds"] == 2 for r in points)
    assert len(lines) == 4 and {r["points"] for r in lines} == {3}
    assert len(said) == len(points) == 12
    assert text.count("tiny sizes: says nothing") == 4
    # From the file alone, in which a second run counts instead of the first.
    file, picture = tmp_path / "results.csv", tmp_path / "scaling.png"
    results.append(file, made, {})
    results.append(file, made, {})
    assert scaling._lines(results.read(file)) == lines
    scaling.plot(results.read(file), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_quick_run_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_races: None) -> None:
    monkeypatch.setattr(team, "allowed_cores", lambda: 3)
    before, rule = torch.get_num_threads(), team.team_size
    text, made = threads.run(CPU, True, print)
    assert (torch.get_num_threads(), team.team_size) == (before, rule)
    assert len({r["case"] for r in made}) == 6 and [r["x"] for r in made] == 6 * [1, 2, 3]
    assert [r["x"] for r in made if r["chosen"]] == 6 * [1]
    assert text.count("chosen: 1 thread") == 6
    file, picture = tmp_path / "results.csv", tmp_path / "threads.png"
    results.append(file, made, {})
    threads.plot(results.read(file), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_threads_are_forced(teams_as_asked: None) -> None:
    """As many as are asked for, although the work is worth one."""
    (load,) = (load for load in threads.LOADS if load.name.startswith("1000 x 64"))
    optimizer = threads.peers.ours(load.parameters(False))
    with threads.exactly(2):
        optimizer.step()
    assert optimizer._rows().table.control["threads"][0] == 2  # type: ignore[attr-defined]
    assert threads.counts(6, 5) == [1, 2, 4, 5, 6] and threads.counts(1) == [1]


def test_verdict_on_threads() -> None:
    def rows(*times: float, spread: float = 0.0) -> list[Record]:
        return [
            threads._record("c", 1 << i, i == 1, threads.Sample(t, t * (1 - spread), t * (1 + spread), 9, 1), False)
            for i, t in enumerate(times)
        ]

    assert threads.verdict(rows(4.0, 2.1, 2.0)).endswith("1.05x the time of the best (4 threads): chosen well")
    assert threads.verdict(rows(4.0, 2.5, 2.0)).endswith("NOT WELL")
    assert "no verdict, 2 threads and 4 threads spread" in threads.verdict(rows(4.0, 2.5, 2.0, spread=0.3))


def test_no_threads_on_a_device() -> None:
    said: list[str] = []
    text, made = threads.run(torch.device("meta"), True, said.append)
    assert made == [] and "left out: the step on meta" in text and said


@pytest.mark.parametrize("plot", [scaling.plot, threads.plot], ids=["scaling", "threads"])
def test_without_matplotlib(plot: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r'pip install "mo-fused\[bench\]"'):
        plot([], tmp_path / "x.png")  # type: ignore[operator]
    assert not list(tmp_path.iterdir())
