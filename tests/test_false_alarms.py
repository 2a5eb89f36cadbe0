"""bench/false_alarms.py counts what the watchers themselves would report."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mo_fused.training import LossSpike, NormOutlier, Plateau
from mo_fused.training.watchers.base import Watcher


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "bench")
    return importlib.import_module("false_alarms")


def reported(watcher: Watcher, key: str, values: list[float]) -> list[int]:
    """Places of the values at which the watcher reports something."""
    for step, value in enumerate(values):
        watcher.on_record({"step": step, key: value})
    return [event["step"] for event in watcher.events]


@pytest.mark.parametrize("noise", [0.3, 0.4])
def test_spikes_are_those_of_the_watcher(script: ModuleType, noise: float) -> None:
    losses = (noise * script.normal(3000, torch.Generator().manual_seed(1))).exp()
    found = torch.where(script.spikes(losses, 2.0, 100))[0] + 100
    assert 10 < len(found) <= 100, "more than a watcher keeps"
    assert found.tolist() == reported(LossSpike(action="log"), "loss", losses.tolist())


@pytest.mark.parametrize("window", [15, 100])  # of an odd window the median is an element
def test_outliers_are_those_of_the_watcher(script: ModuleType, window: int) -> None:
    logs = script.student(2000, torch.Generator().manual_seed(1))
    logs[1500:] *= 0.01  # there the least deviation holds
    found = torch.where(script.outliers(logs, 3.0, window))[0] + window
    assert 10 < len(found) <= 100
    assert found.tolist() == reported(NormOutlier(3.0, window, action="log"), "grad_norm", logs.exp().tolist())


def test_nothing_is_missed_by_looking_at_large_norms_only(script: ModuleType) -> None:
    for draw in (script.normal, script.student):
        logs = draw(20_000, torch.Generator().manual_seed(1))
        # Four deviations in the place of six, so that there is something to miss.
        every = script.outliers(logs, 4.0, 100)
        assert every.sum() >= 5 and torch.equal(every, script.outliers(logs, 4.0, 100, script.FAR))


def test_plateaus_are_those_of_the_watcher(script: ModuleType) -> None:
    """Rows that fall by a tenth of the bound to ten times the bound."""
    window, generator = 30, torch.Generator().manual_seed(1)
    places = torch.arange(2 * window, dtype=torch.float64) / window
    falls = torch.logspace(-1, 1, 60, dtype=torch.float64)[:, None] * 0.005
    rows = 1.0 - falls * places + 0.01 * torch.randn(60, 2 * window, dtype=torch.float64, generator=generator)
    found = script.plateaus(rows, 0.005).tolist()
    assert 3 < sum(found) < 57
    assert found == [bool(reported(Plateau(window, action="log"), "loss", row.tolist())) for row in rows]


def test_pieces_are_one_series(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step but the first hundred is looked at once, with the hundred before it."""
    monkeypatch.setattr(script, "CHUNK", 70)
    counted = iter(range(10_000))
    pieces = [
        p.tolist() for p in script.stream(lambda n, _: torch.tensor([next(counted) for _ in range(n)]), 250, 100, 0)
    ]
    assert [len(p) - 100 for p in pieces] == [70, 70, 70, 40]
    assert [x for p in pieces for x in p[100:]] == list(range(100, 350))
    assert all(p == list(range(p[0], p[0] + len(p))) for p in pieces)


def test_quick_run_writes_its_records(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mo_fused.bench import results

    file = tmp_path / "results.csv"
    script.main(["--quick", "--output", str(file)])
    found = {r["case"]: r for r in results.read(file)}
    assert len(found) == 6 and all(r["quick"] is True and r["steps"] >= 200 for r in found.values())
    assert (
        found["NormOutlier, ln(norm) t of 5 degrees"]["alarms"] > found["NormOutlier, ln(norm) normal"]["alarms"] >= 0
    )
    assert found["LossSpike, log-normal noise of 10%"]["alarms"] == 0
    assert "alarms in 20,000 steps" in capsys.readouterr().out
