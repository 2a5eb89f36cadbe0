"""mo-fused bench: races, what is counted, files of results, verdicts, and the command itself in small."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mo_fused import cli
from mo_fused.bench import accuracy, command, facts, memory, peers, results, room, steps, verdict
from mo_fused.bench.case import COPY, Case, Outcome, Settings
from mo_fused.bench.peers import ADAMW, FUSED, OURS, Peer
from mo_fused.bench.race import Contender, HostClock, Race, Sample, sample
from mo_fused.bench.workloads import WORKLOADS, Workload, in_groups
from mo_fused.training.errors import InputError

pytestmark = pytest.mark.cpu_only(reason="what is measured on the CPU, with its backends by name")

QUICK = Settings(quick=True, peers=())


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One: a team of torch's costs tiny tensors more than it does for them, and on a busy machine a thousand times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- races ------------------------------------------------------------------------------------------------------------


def test_turns_rotate_and_slots_are_filled() -> None:
    order: list[str] = []

    def call(name: str, seconds: float) -> Callable[[], None]:
        def sleep() -> None:
            order.append(name)
            time.sleep(seconds)

        return sleep

    race = Race([Contender("a", call("a", 0.01)), Contender("b", call("b", 0.001))], 0.02, pause_s=0.0)
    race.warm_up()
    assert order == ["a", "a", "b", "b", "a", "b"], "two calls each, then one to see how long it takes"
    order.clear()
    race.round()
    race.round()
    calls = {name: s.calls for name, s in race.samples().items()}
    assert calls["a"] in (1, 2) and 8 <= calls["b"] <= 20
    a, b = ["a"] * calls["a"], ["b"] * calls["b"]
    assert order == [*a, *b, *b, *a]
    found = race.samples()
    assert found["a"].rounds == 2 and found["a"].median > 0.01 > found["b"].median > 0.001


def test_cold_caches_are_emptied_before_each_call() -> None:
    seen: list[float] = []
    race = Race([Contender("a", lambda: seen.append(float(race._evicted[0])))], 0.02, cold=torch.device("cpu"))  # type: ignore[index]
    race.warm_up()
    race.round()
    race.round()
    assert seen == [0.0, 0.0, 0.0, 1.0, 2.0], "written once a round, and one call a round"
    assert race._evicted is not None and race._evicted.nbytes == 1 << 28


def test_one_that_raises_is_out_and_the_others_go_on() -> None:
    def failing(at: int) -> Callable[[], None]:
        calls = iter(range(1000))

        def call() -> None:
            if next(calls) == at:
                raise ValueError(f"at {at}")

        return call

    said: list[str] = []
    fine = Contender(OURS, lambda: time.sleep(0.001))
    racing = [fine, Contender("early", failing(0)), Contender("late", failing(3)), Contender("last", fine.call)]
    race = Race(racing, 0.0, pause_s=0.0, says=said.append)
    race.warm_up()
    race.round()
    race.round()
    assert said == ["early is out of the race: ValueError: at 0", "late is out of the race: ValueError: at 3"]
    assert {name: s.rounds for name, s in race.samples().items()} == {OURS: 2, "last": 2}
    for says, bad in ((None, [fine, Contender("x", failing(0))]), (said.append, [Contender(OURS, failing(0)), fine])):
        with pytest.raises(ValueError, match="at 0"):
            Race(bad, 0.0, pause_s=0.0, says=says).warm_up()


def test_quartiles() -> None:
    found = sample([1.0, 2.0, 3.0, 4.0, 9.0], 7)
    assert (found.low, found.median, found.high, found.rounds, found.calls) == (2.0, 3.0, 4.0, 5, 7)
    assert found.spread == pytest.approx(2 / 3)
    assert sample([0.5], 1) == Sample(0.5, 0.5, 0.5, 1, 1)


def test_a_slot_is_seconds_a_call() -> None:
    slot = HostClock().slot(lambda: time.sleep(0.002), 5, 0.0)
    assert 0.002 <= slot.alone < 0.01 and slot.alone == slot.ahead == slot.host


# -- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("gpt2", 148, 124_439_808),
        ("llama", 9, 218_112_000),
        ("vit", 296, 304_326_632),  # torchvision's vit_l_16
        ("resnet", 161, 25_557_032),  # torchvision's resnet50
        ("lora", 2000, 16_384_000),
        ("small", 1000, 64_000),
        ("tiny", 10_000, 160_000),
        ("huge", 1, 2**31 + 64),
    ],
)
def test_workloads_have_the_sizes_of_their_models(name: str, tensors: int, elements: int) -> None:
    for word in ("fp32", "bf16"):
        shapes = WORKLOADS[f"{name}-{word}"].shapes
        assert (len(shapes), sum(math.prod(s) for s in shapes)) == (tensors, elements)


def test_bytes_are_counted_by_each_ones_own_algorithm() -> None:
    workload = replace(WORKLOADS["gpt2-fp32"], shapes=[(100,)], quick=[(100,)])
    own_state = Peer("other", peers.torch_fused, own_state=True)
    rounded = replace(own_state, name="quantised", exact=False)
    of = (*ADAMW[:2], own_state, rounded)
    for how, moved in (("step", [28, 28, 28, 0]), ("clip", [32, 40, 40, 0]), ("amp", [32, 40, 48, 48, 0])):
        found = steps.Suite(how, of, how).contenders(workload, replace(QUICK, peers=None))
        assert [c.bytes / 100 for c in found if c.name != COPY] == moved, how
        assert found[-1].name == COPY
    half = steps.Suite("clip", of, "clip").contenders(
        replace(workload, dtype=torch.bfloat16), replace(QUICK, peers=None)
    )
    assert [c.bytes / 100 for c in half[:-1]] == [16, 20, 0, 0], "what others keep of 16 bits is not known"


def test_all_step_the_same_tensors_and_states() -> None:
    workload = Workload("three", [(7, 5), (3,)], [(7, 5), (3,)], torch.float32, False)
    made: list[torch.optim.Optimizer] = []

    def kept(make: peers.Make) -> peers.Make:
        def call(params: Any, **options: Any) -> torch.optim.Optimizer:
            made.append(make(params, **options))
            return made[-1]

        return call

    of = tuple(replace(p, make=kept(p.make)) for p in ADAMW[:3])
    there = steps.Suite("step", of, "step").contenders(workload, replace(QUICK, peers=None))
    made = made[-3:]  # those before were made to see whether they run
    assert [c.name for c in there] == [OURS, FUSED, "torch foreach"]
    for p, entry in made[0].state.items():
        assert all(other.state[p]["exp_avg"].data_ptr() == entry["exp_avg"].data_ptr() for other in made[1:])
    before = float(next(iter(made[0].state.values()))["step"])
    for contender in there:
        contender.call()
    assert float(next(iter(made[0].state.values()))["step"]) == before + 3


def test_a_scaler_neither_skips_nor_grows() -> None:
    workload = Workload("one", [(9,)], [(9,)], torch.float32, False)
    found = steps.Suite("amp", ADAMW[:2], "amp").contenders(workload, replace(QUICK, peers=None))
    assert [c.name for c in found] == [steps.OUR_SCALER, steps.TORCH_SCALER, FUSED]
    for contender in found:
        contender.call()
        contender.call()


@pytest.mark.parametrize("how", ["step", "clip", "amp"])
def test_all_clip_to_the_same_norm_and_only_where_it_is_said(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    clipped: list[None] = []

    def make(params: Any, **options: Any) -> torch.optim.Optimizer:
        asked.append(options.get("max_grad_norm"))
        return peers.ours(params, **options)

    params = WORKLOADS["small-fp32"].parameters(True)
    before = [p.grad.clone() for p in params if p.grad is not None]
    monkeypatch.setattr(Workload, "parameters", lambda *_: params)
    monkeypatch.setattr(steps, "clip_", lambda _: clipped.append(None))
    of = (replace(ADAMW[0], make=make), ADAMW[1])
    for contender in steps.Suite(how, of, how).contenders(WORKLOADS["small-fp32"], replace(QUICK, peers=None)):
        contender.call()
    assert asked[-1] == (None if how == "step" else steps.MAX_NORM)
    assert len(clipped) == (how != "step"), "the other one's, by hand"
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True) if p.grad is not None), "scale 1"


def test_accuracy_tells_a_wrong_rule_from_rounding() -> None:
    oracle = next(p for p in ADAMW if p.name == peers.FOR_LOOP)
    cpu = torch.device("cpu")
    ours = accuracy.error(ADAMW[0], oracle, torch.float32, cpu)
    assert 0 < ours < 1e-4 < accuracy.DISAGREES
    assert accuracy.error(ADAMW[0], oracle, torch.bfloat16, cpu) > 100 * ours
    wrong = Peer("wrong", lambda params, **o: torch.optim.AdamW(params, lr=1.1e-4, weight_decay=0.1))
    assert accuracy.error(wrong, oracle, torch.float32, cpu) == pytest.approx(0.1, rel=0.1)
    workload = Workload("one", [(9,)], [(9,)], torch.float32, False)
    suite = steps.Suite("step", (ADAMW[0], oracle, wrong), "step")
    said: list[str] = []
    racing = suite.contenders(workload, replace(QUICK, peers=None, says=said.append))
    assert [c.name for c in racing] == [OURS, peers.FOR_LOOP]
    assert re.fullmatch(r"wrong is left out: it ends 1\d\.\d% away from float64, expected less than 2%, so .*", said[0])


def test_a_peer_that_makes_nan_is_no_peer() -> None:
    oracle = next(p for p in ADAMW if p.name == peers.FOR_LOOP)
    nan = Peer("nan", lambda params, **o: torch.optim.AdamW(params, lr=math.inf))
    workload = Workload("one", [(9,)], [(9,)], torch.float32, False)
    racing = steps.Suite("step", (ADAMW[0], oracle, nan), "step").contenders(workload, replace(QUICK, peers=None))
    assert [c.name for c in racing] == [OURS, peers.FOR_LOOP]


def test_every_case_compiles_anew() -> None:
    with pytest.MonkeyPatch.context() as patch:
        resets: list[None] = []
        patch.setattr(torch._dynamo, "reset", lambda: resets.append(None))
        peers._compiled(lambda: None)
    assert resets == [None]


def test_the_count_of_steps_is_where_its_optimizer_keeps_it() -> None:
    meta = torch.ones((), device="meta")  # plays the GPU's
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    ours, fused = (peer.make([p]) for peer in ADAMW[:2])
    ours.step()
    count, ours.state[p]["step"] = ours.state[p]["step"], meta
    ours.step = lambda: None  # type: ignore[assignment,method-assign,misc]
    peers.share_state([ours, fused])
    assert fused.state[p]["step"] is meta
    with pytest.raises(NotImplementedError, match="meta"):
        peers.share_state([ours, ADAMW[2].make([p])])  # copies it to the host
    assert not count.is_meta


def test_growth_of_memory_is_seen() -> None:
    kept: list[torch.Tensor] = []
    assert memory.growth(lambda: kept.append(torch.ones(4 << 20))) == pytest.approx(16 << 20, rel=0.05)
    assert memory.growth(lambda: torch.ones(4 << 20).sum()) == pytest.approx(16 << 20, rel=0.05), "at its highest"
    assert memory.growth(lambda: kept[0].add_(1.0)) < 1 << 20


def test_bytes_of_a_state_count_each_tensor_once() -> None:
    p = torch.nn.Parameter(torch.zeros(10))
    opt = torch.optim.SGD([p], lr=0.1)
    shared = torch.zeros(100)
    opt.state[p] = {"a": shared, "b": {"c": [shared, torch.zeros(5, dtype=torch.int8)]}, "step": 3}
    assert memory.state_bytes(opt) == 405


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 1e9)
    settings = replace(QUICK, quick=False)
    assert room.too_large(WORKLOADS["gpt2-fp32"], settings) == "needs about 5 GB, and 1 GB are free"
    assert room.too_large(WORKLOADS["small-fp32"], settings) == ""
    assert room.too_large(WORKLOADS["huge-bf16"], settings) == "is for GPUs"
    said: list[str] = []
    assert steps.STEPS["step-gpt2-fp32"].run(replace(settings, says=said.append)) is None
    assert said == ["GPT-2 124M float32 is left out: needs about 5 GB, and 1 GB are free"]


# -- peers ------------------------------------------------------------------------------------------------------------


def test_who_is_left_out_is_said_with_the_reason() -> None:
    missing = Peer("missing", peers._of("no_such_module", "Adam"), "no-such-distribution")
    broken = Peer("broken", lambda params, **o: torch.optim.AdamW(params, lr=-1.0))
    gpu = Peer("for GPUs", peers.torch_fused, devices=("cuda",))
    said: list[str] = []
    there = peers.available((*ADAMW[:2], missing, broken, gpu), torch.device("cpu"), None, said.append)
    assert [p.name for p in there] == [OURS, FUSED]
    assert said == [
        "missing is left out: is not installed (No module named 'no_such_module')",
        "broken is left out: does not run here (Invalid learning rate: -1.0)",
        "for GPUs is left out: runs on cuda only",
    ]


def test_wanted_peers_are_parts_of_names() -> None:
    cpu = torch.device("cpu")
    assert [p.name for p in peers.available(ADAMW, cpu, ["FUSED"], lambda _: None) if "torch" in p.name] == [FUSED]
    assert [p.name for p in peers.available(ADAMW, cpu, [], lambda _: None)] == [OURS]
    assert peers.wanted_peers("--peers", ["fused", " ", "Transformers "]) == ["fused", "Transformers"], (
        "Adafactor has it"
    )
    with pytest.raises(
        InputError, match="--peers: expected parts of the names mo_fused, torch fused, .*; found 'lion'"
    ):
        peers.wanted_peers("--peers", ["fused", "lion"])


def test_a_peer_is_spared_what_it_cannot_do_in_time() -> None:
    params = WORKLOADS["small-fp32"].parameters(False)
    slow = Peer("slow", peers.torch_fused, tensors=999)
    assert (
        slow.why_not(params) == "takes too long with 1000 tensors" and replace(slow, tensors=1000).why_not(params) == ""
    )
    mixed = WORKLOADS["resnet-fp32"].parameters(True)
    assert "compiles for each shape" in Peer("slow", peers.torch_fused, shapes=8).why_not(mixed)
    assert Peer("slow", peers.torch_fused, shapes=1).why_not(params) == ""
    assert Peer("slow", peers.torch_fused, elements=63_999).why_not(params) == "takes seconds a step at this size"


def test_groups_differ() -> None:
    groups = in_groups(WORKLOADS["small-fp32"].parameters(True), 7)
    assert sum(len(g["params"]) for g in groups) == 50 and len({g["lr"] for g in groups}) == 7
    assert {g["weight_decay"] for g in groups} == {0.0, 0.1}


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


# -- the command ------------------------------------------------------------------------------------------------------


def run(*words: str) -> int:
    return cli.main(["bench", "--device", "cpu", "--threads", "1", *words])


def test_the_command_measures_prints_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "results.csv", tmp_path / "bars.png"
    words = ["step", "amp", "overhead", "--only", "small-fp32", "--quick", "--peers", "torch fused"]
    assert run(*words, "--output", str(file), "--plot", str(picture)) == 0
    out = capsys.readouterr().out
    assert "[step-small-fp32] 1000 x 64 float32, step\n" in out and "[amp-small-fp32]" in out
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
