"""What mo-fused bench keeps and says: files of results, verdicts, comparisons."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mo_fused.bench import facts, results, verdict
from mo_fused.bench.case import COPY, Outcome
from mo_fused.bench.peers import FUSED, OURS
from mo_fused.bench.race import Sample
from mo_fused.training.errors import InputError

pytestmark = pytest.mark.cpu_only(reason="what is measured on the CPU, with its backends by name")

# -- files of results -------------------------------------------------------------------------------------------------


def test_a_file_only_grows_and_reads_back_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    here = facts.circumstances()
    first = {
        "bench": "step",
        "case": 'a, "b"\nc',
        "contender": "1.5",
        "quick": False,
        "median_ms": 0.1,
        "goals": [{"x": 1}],
    }
    results.append(file, [first], {**here, "commit": "7e12"})
    begun = file.read_bytes()
    results.append(file, [{"bench": "true", "median_ms": None, "error": float("inf"), "version": ""}], here)
    assert file.read_bytes().startswith(begun)
    one, two = results.read(file)
    assert {k: one[k] for k in first} == first and one["commit"] == "7e12", "text stays text"
    assert two["bench"] == "true" and two["median_ms"] is None and two["error"] == math.inf and two["version"] == ""
    assert {k: two[k] for k in here} == here
    assert set(results.FACTS) == set(here)


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    here = facts.circumstances()
    for name in ("a", "b"):
        results.append(file, [{"bench": "step", "case": name, "goals": [1]}], here)
    file.write_bytes(file.read_bytes()[:-9])
    results.append(file, [{"bench": "step", "case": "c"}], here)
    assert [r["case"] for r in results.read(file)] == ["a", "c"]


def test_a_file_of_an_earlier_version_is_read_and_not_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    file.write_text("bench,case,contender,median_ms,more\nstep,a model,mo_fused,1.5,\n")
    (found,) = results.read(file)
    assert (found["case"], found["median_ms"], found["error"], found["threads"]) == ("a model", 1.5, None, None)
    with pytest.raises(InputError, match="with the columns"):
        results.append(file, [found], {})


def test_another_file_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("a,b\n1,2\n")
    for act in (
        lambda: results.append(file, [{"bench": "x"}], {}),
        lambda: results.read(file),
        lambda: results.check(file),
    ):
        with pytest.raises(InputError, match="expected a CSV file of results with the columns bench, case, contender"):
            act()
    assert file.read_text() == "a,b\n1,2\n"
    with pytest.raises(InputError, match="no such file"):
        results.read(tmp_path / "none.csv")
    with pytest.raises(InputError, match="no folder"):
        results.check(tmp_path / "none" / "x.csv")
    with pytest.raises(InputError, match="expected a file that can be written; found a folder"):
        results.check(tmp_path)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def outcome(ms: dict[str, tuple[float, float, float]], **more: Any) -> Outcome:
    samples = {name: Sample(m / 1e3, low / 1e3, high / 1e3, 9, 1) for name, (low, m, high) in ms.items()}
    return Outcome("step", "a model", samples, dict.fromkeys(ms, 8000000.0), **more)


def test_the_summary_says_who_is_faster() -> None:
    done = outcome({OURS: (1.9, 2.0, 2.1), FUSED: (2.9, 3.0, 3.1), "DeepSpeed": (1.5, 1.6, 1.7), COPY: (1, 1, 1)})
    head, row = verdict.summary([done]).splitlines()
    assert row.split() == ["a", "model", "2.000", "DeepSpeed", "1.600", "0.80x", "DeepSpeed"]
    assert head.startswith("case     mo_fused, ms  fastest other")
    assert (done.rate(OURS), done.share(OURS)) == (pytest.approx(4.0), pytest.approx(0.5))


def test_tables_and_records_say_what_was_measured() -> None:
    done = outcome({OURS: (1.9, 2.0, 2.2), FUSED: (2.9, 3.0, 3.1)})
    assert [line.split()[-2] for line in done.text().splitlines()[2:]] == ["1.00x", "1.50x"]
    first = done.records()[0]
    assert [first[name] for name in ("low_ms", "median_ms", "high_ms")] == pytest.approx([1.9, 2.0, 2.2])
    assert first["gb_per_s"] == pytest.approx(4.0)


def test_noise_gives_no_verdict() -> None:
    noisy = {OURS: (1.5, 2.0, 2.1), FUSED: (2.9, 3.0, 3.1), COPY: (1.0, 3.0, 9.0)}
    done = outcome(noisy)
    assert done.noisy == [OURS], "30 %; the copy may"
    assert "noisy" in verdict.summary([done]).splitlines()[1] and "1.50x" not in verdict.summary([done])
    assert "no verdict: mo_fused spread by more than 25% of the median" in done.text()
    assert verdict.pair(done, OURS, "fused") == "a model: too noisy to tell"
    assert outcome(noisy, max_spread=0.31).noisy == []
    assert outcome(noisy, quick=True).noisy == [] and "1.50x" not in verdict.summary([outcome(noisy, quick=True)])


def test_one_noisy_peer_does_not_hide_another_that_is_faster() -> None:
    done = outcome({OURS: (2.0, 2.0, 2.0), "noisy": (0.5, 1.0, 1.5), FUSED: (1.5, 1.5, 1.5)})
    assert verdict.summary([done]).splitlines()[1].split()[-3:] == ["noisy", "torch", "fused"]


def test_pairs() -> None:
    done = outcome({OURS: (1.9, 2.0, 2.1), FUSED: (2.9, 3.0, 3.1), "torch foreach": (2.0, 2.2, 2.4)})
    for word in ("fused", "torch fused"):
        assert verdict.pair(done, OURS, word) == "a model: mo_fused is 1.50x as fast as torch fused"
    assert verdict.pair(done, "fused", "foreach") == "a model: torch foreach is 1.36x as fast as torch fused"
    assert verdict.pair(done, "torch fused", OURS) == "a model: mo_fused is 1.50x as fast as torch fused"
    assert "no telling mo_fused from torch foreach" in verdict.pair(done, OURS, "foreach")
    assert verdict.pair(done, OURS, "lion") == ""


def test_files_are_compared_by_their_quartiles() -> None:
    def row(case: str, low: float, median: float, high: float, **more: Any) -> dict[str, Any]:
        base: dict[str, Any] = dict.fromkeys(results.COLUMNS[:-1])
        base |= {"bench": "step", "case": case, "contender": OURS, "quick": False, "cores": 2}
        return {**base, "low_ms": low, "median_ms": median, "high_ms": high, **more}

    a = [
        row("x", 5, 5, 5),
        row("x", 9.5, 10, 10.5),
        row("y", 9.5, 10, 10.5),
        row("z", 6, 10, 14),
        row("only a", 1, 1, 1),
    ]
    b = [row("x", 7.6, 8, 8.4), row("y", 10, 10.2, 10.4), row("z", 1, 1, 1), row("y", 1, 1, 1, quick=True)]
    a, b = [*a, row("m", 5, 5, 5)], [*b, row("m", 1, 1, 1, cores=4)]
    found = verdict.compare(a, b, 0.25)
    assert [(r[0], r[4], r[5]) for r in found.rows] == [
        ("x", "1.25x", "faster"),
        ("y", "0.98x", "the same, as far as can be told"),
        ("z", "10.00x", "too noisy to tell"),
        ("m", "5.00x", "not comparable: another machine"),
    ]
    assert found.noisy == ["z, mo_fused (80%)"] and found.machines == ["cores: 2 in A, 4 in B"]
    assert verdict.compare(b, a, 0.25).rows[0][5] == "slower"
    bare = {**row("x", 1, 1, 1), "low_ms": None, "high_ms": None}
    assert verdict.compare(a, [bare], 0.25).rows[0][5] == "not comparable: no quartiles"


def test_a_changed_checkout_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"ls-files": "facts.py", "rev-parse": "7e12", "status": ""}
    monkeypatch.setattr(facts, "_git", lambda *words: answers[words[0]])
    assert facts._commit() == "7e12"
    answers["status"] = " M mo_fused/table.py"
    assert facts._commit() == "7e12-dirty"
    answers["ls-files"] = ""
    assert facts._commit() is None, "the package merely lies in another project's repository"
