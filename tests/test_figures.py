"""README.md's figures are those of bench/results, and there are no others."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mo_fused.bench import results
from mo_fused.training.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
README = (ROOT / "README.md").read_text(encoding="utf-8")

NUMBER = r"\d[\d.,]*(?:e\d+)?"
WORD = r"(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|some tens of|some hundreds of)"
MEASURED = {
    "a time": rf"\b(?:{NUMBER}|{WORD})[ -]?(?:ns|us|µs|ms|s|seconds?|minutes?|hours?|microseconds|milliseconds)\b",
    "a rate": rf"{NUMBER} ?(?:[KMGT]B|samples|tokens|steps|elements)(?:/s| a second)\b",
    "a ratio": rf"\b{NUMBER}x(?!\w)",
    "a comparison": rf"\b(?:{NUMBER}|{WORD}) times (?:as|faster|slower|more|less|what|the (?:time|speed|cost))\b",
    "a share": rf"{NUMBER} ?%",
    "a frequency": r"\b(?:one|once|none) in (?:a |\d)[\w.]*",
    "a quality": rf"\b(?:accuracy|AUC|loss|perplexity) (?:of |is )?{NUMBER}|{NUMBER} (?:bits per byte|AUC|accuracy)",
}
"""What a measured figure looks like."""
ALLOWED = {
    "in about two minutes on two cores": "what the tasks are sized for",
    "each in less than two minutes on two cores": "what the tasks are sized for",
    "every 2 seconds: what is 5 seconds old": "an interval that is set, and what is promised of it",
    "more than 15 % away is a fault": "a threshold of diagnose",
    "then a decay over the last 10 % of the steps": "a default",
    "N is 1 % of the steps": "a default",
    "and 5 % of the memory for fragmentation": "a constant of plan",
}
"""What looks like one and is none, with the reason."""
ALLOWED_IN_TEMPLATES = {
    "10 % noise:": "how the noise was simulated",
    "15 %:": "how the noise was simulated",
    "20 %:": "how the noise was simulated",
    "above 2x the mean": "a default",
    "by less than 0.5 % from": "a default",
}


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    """bench/report.py and bench/figures.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("report"), importlib.import_module("figures")


@pytest.fixture
def report(scripts: tuple[ModuleType, ModuleType]) -> ModuleType:
    return scripts[0]


@pytest.fixture
def figures(scripts: tuple[ModuleType, ModuleType]) -> ModuleType:
    return scripts[1]


# -- README.md --------------------------------------------------------------------------------------------------------


def test_blocks_are_what_the_results_say(report: ModuleType) -> None:
    made = report.rendered(README, report.environment())
    assert made == README, f"run `python bench/report.py`:\n{report.difference(README, made)}"


def test_every_block_has_its_template_and_the_reverse(report: ModuleType) -> None:
    blocks = [found[1] for found in report.BLOCK.finditer(README)]
    assert sorted(blocks) == list(report.templates())
    assert README.count("<!-- figures:") == 2 * len(blocks), "a mark without its other one"


def figures_in(text: str, allowed: dict[str, str]) -> list[str]:
    """Everything that looks measured, with its surroundings, in text of one line."""
    flat = " ".join(text.split())
    for words in allowed:
        assert words in flat, f"{words!r} is allowed, and is not there any more"
        flat = flat.replace(words, "")
    found = [(kind, m) for kind, pattern in MEASURED.items() for m in re.finditer(pattern, flat)]
    return [f"{kind}: ...{flat[max(0, m.start() - 60) : m.end() + 30]}..." for kind, m in found]


def test_no_figure_stands_outside_of_a_block(report: ModuleType) -> None:
    assert figures_in(report.BLOCK.sub("", README), ALLOWED) == []


def test_no_figure_stands_in_a_template(report: ModuleType) -> None:
    """They are computed there."""
    texts = [path.read_text(encoding="utf-8") for path in report.templates().values()]
    literal = re.sub(r"{{.*?}}|{%.*?%}", "...", "\n".join(texts), flags=re.DOTALL)
    assert figures_in(literal, ALLOWED_IN_TEMPLATES) == []


def test_words_about_formats_hold(figures: ModuleType) -> None:
    """What README.md says below the table of errors, without numbers."""
    said = " ".join(README.split())
    assert "8 bits are closer than the peers' in m and in the update, and about as close in v." in said
    assert (
        "4 bits are closer than torchao's in m and in each element's root, and further off in v and in the upd" in said
    )
    found = figures.Figures(BENCH / "results" / "cpu-2-cores.csv")
    case = "text model, lr 0.003, betas 0.9 and 0.95, step 300"
    of = {r["contender"]: r["lived"] for r in found.race("state_formats", case)}
    ours, peers = of["int8"], of["bitsandbytes, torchao 8 bits"]
    assert ours["m"] < peers["m"] and ours["update"] < peers["update"] and abs(ours["v"] / peers["v"] - 1) < 0.1
    ours, peers = of["int4"], of["torchao 4 bits"]
    assert ours["m"] < peers["m"] and ours["root"] < peers["root"]
    assert ours["v"] > peers["v"] and ours["update"] > peers["update"] > of["int4, nearest"]["update"]


@pytest.mark.parametrize(
    "text",
    [
        "a step takes 5.4 ms, beside 23",
        "costs 60us",
        "the first one takes 42 s",
        "it is done in three minutes",
        "some tens of microseconds a parameter",
        "at 3.6 GB/s of the file",
        "trains 1,200 samples a second",
        "a ratio of 1.58x to torch's",
        "three times as fast as torch's",
        "costs 0.99 times what it costs in one group",
        "costs 0.45 % of a step",
        "one in 5000 steps, or one in a million",
        "none in 2e7 steps",
        "ends at 2.69 bits per byte",
        "reaches an accuracy of 0.97",
    ],
)
def test_a_figure_is_known_when_it_is_seen(text: str) -> None:
    assert figures_in(text, {})


@pytest.mark.parametrize(
    "text", ["a weight of 64x64", "0.3 times the rate", "16 bytes", "0.9 x the rate", "2.6 or newer"]
)
def test_a_constant_is_none(text: str) -> None:
    assert figures_in(text, {}) == []


# -- from results to text ---------------------------------------------------------------------------------------------

OLD, NEW = "2026-01-01T10:00:00+0000", "2026-01-02T09:00:00+0000"
FACTS = {"processor": "P", "cores": 2, "threads": 2, "torch": "2.6", "mo_fused": "0.1", "python": "3.11"}


def row(contender: str, ms: float | None, case: str = "A, step", time: str = NEW, **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(results.COLUMNS[:-1])
    given = {"bench": "step", "case": case, "contender": contender, "median_ms": ms, "time": time, "quick": False}
    return {**empty, **FACTS, **given, **more}


@pytest.fixture
def race(figures: ModuleType) -> Any:
    """Two cases; of the first an older run, a newer one of --quick, and a peer that is faster."""
    return figures.Figures(
        "some.csv",
        [
            row("mo_fused", 8.0, time=OLD),
            row("torch fused", 12.0, time=OLD),
            row("gone", 1.0, time=OLD),
            row("mo_fused", 10.0, gb_per_s=50.0, share_of_copy=1.25),
            row("torch fused", 15.0),
            row("quick one", 9.0, version="1.2"),
            row("draw", 9.96),
            row("copy", 1.0),
            row("mo_fused", 1.0, case="B, step", time=OLD),
            row("torch fused", 0.5, case="B, step", time=OLD),
            row("mo_fused", 0.001, time="2026-01-03T00:00:00+0000", quick=True),
            row("mo_fused", 1.0, case="B, clip + step, cold caches"),
        ],
    )


def test_the_newest_run_of_each_case_counts(race: Any) -> None:
    assert race.cases("step", "*, step") == ["A, step", "B, step"]
    assert race.ms("step", "A, step") == 10.0 and race.ms("step", "B, step") == 1.0
    assert race.ratio("step", "A, step", "torch fused") == 1.5
    assert race.runs("step", "*, step", "torch fused") == "A 1.50x, 1.50x"


def test_table_has_a_column_for_each_contender(race: Any) -> None:
    assert race.table("step", "*, step").splitlines() == [
        "| Case | mo_fused | torch fused | quick one | draw | GB/s | of copy |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| A | 10.0 | 15.0 (1.50x) | **9.00 (0.90x)** | 9.96 (1.00x) | 50 | 125 % |",
        "| B | 1.00 | **0.500 (0.50x)** |  |  |  |  |",
    ]


def test_who_is_faster_is_said(race: Any, figures: ModuleType) -> None:
    expected = "Faster than mo_fused: A: quick one (0.90x); B: torch fused (0.50x)."
    assert race.faster("step", "*, step") == expected
    slower = [row("mo_fused, mo_fused.GradScaler", 1.0), row("mo_fused, torch's GradScaler", 0.5), row("torch", 1.5)]
    assert figures.Figures("f.csv", slower).faster("step", "*") == "Faster than mo_fused: none of these."
    assert figures.Figures("f.csv", slower[:2]).faster("step", "*") == "", "without a peer there is nothing to say"


def test_numbers_of_groups_are_races_of_their_own(figures: ModuleType) -> None:
    times = {"mo_fused, 1 group": 2.0, "mo_fused, 60 groups": 4.0, "torch, 1 group": 3.0, "torch, 60 groups": 3.0}
    found = figures.Figures("f.csv", [row(name, ms, "in groups") for name, ms in times.items()])
    assert found.table("step", "*").splitlines()[2:] == [
        "| 1 group | 2.00 | 3.00 (1.50x) |",
        "| 60 groups | 4.00 | **3.00 (0.75x)** |",
    ]
    assert found.faster("step", "*") == "Faster than mo_fused: 60 groups: torch (0.75x)."


def test_machine_is_that_of_the_records(race: Any) -> None:
    assert race.machine("step", pattern="*, step") == (
        "P, 2 cores, 2 threads, no native kernels; torch 2.6, mo_fused 0.1, Python 3.11; "
        "2026-01-01 and 2026-01-02; `mo-fused bench step`"
    )
    assert race.versions("step") == "quick one 1.2"


def test_a_missing_record_says_what_to_run(race: Any, figures: ModuleType) -> None:
    wanted = r"some.csv: expected a record of bench 'clip': the case 'A'.*run `mo-fused bench clip --output some.csv`"
    with pytest.raises(InputError, match=wanted):
        race.ms("clip", "A")
    with pytest.raises(InputError, match="gone in the case 'A, step'"):
        race.ms("step", "A, step", "gone")  # of an older run, which is another race
    with pytest.raises(InputError, match="share_of_copy of torch fused"):
        race.value("step", "A, step", "torch fused", "share_of_copy")
    with pytest.raises(InputError, match=r"run `python bench/bench_distributed.py --output"):
        race.table("distributed", "*")
    for _, _, command in figures.COMMANDS:
        assert (ROOT / command.split()[1]).is_file(), command


@pytest.mark.parametrize(
    "number, text", [(1234.5, "1234"), (99.96, "100"), (61.3, "61.3"), (62.0, "62.0"), (0.7131, "0.713"), (0.0, "0.00")]
)
def test_three_digits(figures: ModuleType, number: float, text: str) -> None:
    assert figures.short(number) == text


def test_how_rare_something_is(figures: ModuleType) -> None:
    assert figures.one_in(0, 1e8) == "none in 100 million steps"
    assert figures.one_in(19_677, 1e8) == "one in 5,100 steps" and figures.one_in(26, 1e8) == "one in 3.8 million steps"


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README of one block, a template, results; the README's path."""
    (tmp_path / "readme").mkdir()
    template = (
        '{% set cpu = results("m") %}\nIt takes {{ short(cpu.ms("step", "A, step")) }} ms, `python  x.py` says.\n'
    )
    (tmp_path / "readme" / "one.md.j2").write_text(template)
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- figures:one -->\nold\n<!-- figures:end -->\nafter 3 ms\n")
    results.append(tmp_path / "m.csv", [row("mo_fused", 10.0)], {})
    monkeypatch.setattr(report, "README", readme)
    environment = report.environment
    monkeypatch.setattr(report, "environment", lambda: environment(tmp_path / "readme", tmp_path))
    return readme


def test_a_changed_result_changes_the_readme(
    report: ModuleType, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["--check"]) == 1 and "\n-old\n" in capsys.readouterr().out
    assert report.main([]) == 0 and report.main(["--check"]) == 0
    before = small.read_text()
    block = "<!-- figures:one -->\nIt takes 10.0 ms, `python  x.py` says.\n<!-- figures:end -->"
    assert before == f"before\n{block}\nafter 3 ms\n"
    file = small.parent / "m.csv"
    file.write_text(file.read_text().replace(",10.0,", ",10.1,"))
    capsys.readouterr()
    assert report.main(["--check"]) == 1 and small.read_text() == before
    assert "\n+It takes 10.1 ms" in capsys.readouterr().out
    assert report.main([]) == 0 and small.read_text() == before.replace("10.0", "10.1")


def test_what_cannot_be_made_is_one_error(report: ModuleType, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = small.read_text().replace("figures:one", "figures:two")
    small.write_text(before)
    assert (
        report.main([]) == 2
        and "expected one of one; found 'two'; write bench/readme/two.md.j2" in capsys.readouterr().err
    )
    small.write_text(before.replace("figures:two", "figures:one"))
    (small.parent / "m.csv").write_text(",".join(results.COLUMNS) + "\n")
    assert report.main([]) == 2 and "run `mo-fused bench step --output" in capsys.readouterr().err
    assert "old" in small.read_text()


# -- formats ----------------------------------------------------------------------------------------------------------


def test_the_table_of_formats(figures: ModuleType, scripts: tuple[ModuleType, ModuleType]) -> None:
    made = importlib.import_module("formats_table")
    name, timed = "text model, 400 steps, lr 0.0003", "GPT-2 124M bfloat16, clip + step, int8 moments"
    loss = {"bench": "train_formats", "difference": 0.25, "differences": [0.2, 0.3], "bytes_of_matrices": 7.09}
    found = figures.Figures(
        "f.csv",
        [
            row("mo_fused int8 split8", 20.0, timed, bench="formats"),
            row("mo_fused int8 kahan", 40.0, timed, bench="formats"),
            row("torch fused", 30.0, timed, bench="formats"),
            row("torch fused", 3.0, timed, OLD, bench="formats"),
            *(row(f"bf16-{master}-int8", None, name, **loss) for master in ("split8", "kahan")),
            row("fp32-none-int8", None, name, **loss),
            row("fp32-none-int8", None, "another rate", **{**loss, "bytes_of_matrices": 1e6}),
        ],
    )
    lines = made.formats_table(found, name).splitlines()
    assert lines[2:] == [
        "| bf16 | split8 | int8 | 7.09 | +0.25 % (+0.20, +0.30) | 1.50x |",
        "| bf16 | kahan | int8 | 7.09 | +0.25 % (+0.20, +0.30) | 0.75x |",
        "| fp32 | none | int8 | 7.09 | +0.25 % (+0.20, +0.30) |  |",
    ]
    assert made.below_torch(found, name) == "`kahan` with int8 moments"
