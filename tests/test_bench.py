"""What mo-fused bench measures with: races, what is counted, who takes part."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mo_fused.bench import accuracy, memory, peers, room, steps
from mo_fused.bench.case import COPY, Settings
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
