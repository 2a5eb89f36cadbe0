"""Offloading while copies come late, with gradient release too: the order of work, and the same bits.

Copies, reads and writes are held up for random times, and the ring is small, so that many pieces pass through each slot
during one step. Tests with the waits taken out show that these tests notice when something does not wait.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ADAMW, SGD, Case, gradients, parameters, some, states, weights
from offload_pair import NESTEROV, ONE_OF_EACH, Pair, assert_same, backward, by_case, clipped, in_pieces, nets
from oracle import assert_same_bits
from torch import Tensor, nn

import mo_fused
from mo_fused.offload import files, pipeline, ring, step, streams

WHERE = some(["cpu", "taken", "disk", "disk taken"], ["cpu", "taken"])
MANY = some([(24_000,), (150, 90), (40, 3, 3, 10), (7,), (18_000,), (), (20_000,)], [(2100,), (30, 20), (7,), ()])


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch, 60_000)


def options_of(where: str, path: Path) -> dict[str, Any]:
    return dict(
        offload=f"disk:{path}" if "disk" in where else "cpu",
        offload_gradients="taken" in where,
    )


def hold_up(monkeypatch: pytest.MonkeyPatch, seed: int, most: float = 0.003) -> None:
    """Each copy, read and write waits before it begins, for a time that nobody knows."""
    numbers, lock = random.Random(seed), threading.Lock()

    def late(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            with lock:
                wait = numbers.random() * most if numbers.random() < 0.7 else 0.0
            time.sleep(wait)
            return work(*args)

        return wrapped

    monkeypatch.setattr(streams, "move", late(streams.move))
    monkeypatch.setattr(files.StateFile, "read", late(files.StateFile.read))
    monkeypatch.setattr(files.StateFile, "write", late(files.StateFile.write))


# -- late copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some([0, 1], [0]))
@pytest.mark.parametrize("where", WHERE)
@by_case(ONE_OF_EACH)
def test_late_copies_of_gradients_set_by_hand(
    case: Case, where: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Pair(case, weights(MANY, seed=seed), **clipped(1.0, "taken" in where), **options_of(where, tmp_path))
    hold_up(monkeypatch, seed)
    for t, row in enumerate(gradients(MANY, 4, seed=seed)):
        row[t % len(row)] = None
        two.drive([row])
        for params, _ in two.both:  # a step is over when it returns: nobody reads these any more
            for p in params:
                if p.grad is not None:
                    p.grad.fill_(torch.nan)
                with torch.no_grad():
                    p.mul_(0.5)


@pytest.mark.parametrize("seed", some([3], [3]))
@pytest.mark.parametrize("where", WHERE)
@by_case(ONE_OF_EACH)
def test_late_copies_of_a_backward(
    case: Case, where: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation, a discarded batch, gradients that are kept over a step, edits: all right after the backward."""
    plain, other, model, opt = nets(case, **clipped(0.5, "taken" in where), **options_of(where, tmp_path))
    hold_up(monkeypatch, seed)
    for t in range(6):
        for m, o in ((plain, other), (model, opt)):
            backward(m, t)
            if t == 1:
                o.zero_grad(set_to_none=False)
            if t in (1, 2, 4):
                backward(m, 20 + t)
            if t > 3 and "taken" not in where:
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3)
            o.step()
            if t != 3 or "taken" in where:
                o.zero_grad(set_to_none=t % 2 == 0)
        assert_same(model, opt, plain, other)


@pytest.mark.parametrize("where", WHERE)
def test_late_copies_of_master_weights(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = dict(master_weights="split8", state_dtype="int8", seed=1)
    shapes: list[tuple[int, ...]] = some([(300, 64), (130, 128), (64, 320), (9,)], [(40, 64), (9,)])
    two = Pair(ADAMW, weights(shapes, torch.bfloat16), **options, **options_of(where, tmp_path))
    hold_up(monkeypatch, 5)
    two.drive(gradients(shapes, 4, torch.bfloat16))


# -- the order --------------------------------------------------------------------------------------------------------

EVEN = [(4000,)] * 9


class Moves:
    """When which copies between the ring and parameters took place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, params: list[Tensor], slow: str = "") -> None:
        self.found: list[tuple[int, str, float, float]] = []  # address in the ring, direction, begin, end
        addresses = {p.data_ptr() for p in params}
        move = streams.move

        def noted(destination: Tensor, source: Tensor) -> None:
            down = source.data_ptr() in addresses
            up = destination.data_ptr() in addresses
            if (up and slow == "up") or (down and slow == "down"):
                time.sleep(0.02)
            begin = time.perf_counter()
            move(destination, source)
            if down or up:
                inside = destination if down else source
                self.found.append((inside.data_ptr(), "down" if down else "up", begin, time.perf_counter()))

        monkeypatch.setattr(streams, "move", noted)

    def problems(self) -> list[str]:
        """Each place of the ring: down, up, down, up, none before the end of the one before."""
        out = []
        for place in {at for at, *_ in self.found}:
            mine = sorted((m for m in self.found if m[0] == place), key=lambda m: m[2])
            if [m[1] for m in mine] != ["down", "up"] * (len(mine) // 2):
                out.append(f"order {[m[1] for m in mine]}")
            out += [f"{b[1]} began before the end of {a[1]}" for a, b in itertools.pairwise(mine) if b[2] < a[3]]
        return out


def ready_pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Each parameter is a piece; everything exists, so that a step does nothing but its work."""
    monkeypatch.setattr(ring, "SLOT_BYTES", 33_000)
    two = Pair(SGD, weights(EVEN))
    two.drive(gradients(EVEN, 1))
    return two


@pytest.mark.cpu_only(reason="the subject are the threads that copy where there is no GPU")
@pytest.mark.parametrize("slow", ["", "up", "down"])
def test_a_slot_is_filled_again_when_its_results_have_been_sent(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two = ready_pair(monkeypatch)
    moves = Moves(monkeypatch, two.params, slow)
    two.drive(gradients(EVEN, 3, seed=7))
    assert len({at for at, *_ in moves.found}) == ring.SLOTS, "the slots of the ring"
    assert len(moves.found) == 3 * 2 * len(EVEN)
    assert moves.problems() == []


@pytest.mark.cpu_only(reason="the subject are the threads that copy where there is no GPU")
@pytest.mark.parametrize("missing", ["fetch after send", "update after fetch", "step after send"])
def test_without_a_wait_the_results_are_wrong(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests here look for would be found."""
    two = ready_pair(monkeypatch)
    run = streams.HostStream.run
    with monkeypatch.context() as patch:
        moves = Moves(patch, two.params, "down" if missing == "update after fetch" else "up")
        if missing == "fetch after send":
            patch.setattr(streams.HostStream, "run", lambda self, work, after=(): run(self, work, ()))
        elif missing == "update after fetch":
            patch.setattr(streams.HostMark, "wait", lambda self: None)
        else:
            patch.setattr(pipeline, "_hold", lambda mark: None)
            patch.setattr(streams.Lanes, "hold", lambda self: None)
        with pytest.raises(AssertionError, match="elements differ"):
            two.drive(gradients(EVEN, 1, seed=7))
        time.sleep(0.02 * len(EVEN) if missing == "step after send" else 0.0)
        assert (moves.problems() != []) is (missing != "step after send")


def test_parts_are_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetch of the next pieces is handed over before a piece is updated: that is what the ring is for."""
    two = ready_pair(monkeypatch)
    found: list[tuple[str, int]] = []
    for name in ("fetch", "update", "send"):
        before = getattr(step.PieceOfJob, name)

        def noted(self: Any, slot: Any, before: Any = before, name: str = name) -> Any:
            found.append((name, self.segments[0].of.index))
            return before(self, slot)

        monkeypatch.setattr(step.PieceOfJob, name, noted)
    two.drive(gradients(EVEN, 1, seed=7))
    names = [name for name, _ in found]
    assert names[: ring.SLOTS + 1] == ["fetch"] * ring.SLOTS + ["update"]
    for name in ("fetch", "update", "send"):
        assert [i for n, i in found if n == name] == [*reversed(range(len(EVEN)))], "the last gradient is there first"


@pytest.mark.cpu_only(reason="the subject are the threads that copy where there is no GPU")
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_copy_that_fails_stops_everything(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes out of step(), at once and with every later step; the threads end."""
    two = Pair(SGD, weights(MANY), **options_of(where, tmp_path))
    two.drive(gradients(MANY, 2))
    before = [p.detach().clone() for p in two.params]

    def broken(*args: Any) -> None:
        raise OSError("the cable was pulled")

    with monkeypatch.context() as patch:
        patch.setattr(streams, "move", broken)
        patch.setattr(files.StateFile, "read", broken)
        for p, g in zip(two.params, gradients(MANY, 1)[0], strict=True):
            assert g is not None
            p.grad = g.to(p.device)
        with pytest.raises(OSError, match="the cable was pulled"):
            two.opt.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed halfway .OSError: the cable was pulled"):
            two.opt.step()
    assert_same_bits([p.detach() for p in two.params], before, "nothing had been updated yet")
    fresh = SGD.ours(two.params, **options_of(where, tmp_path))
    fresh.step()


# -- gradient release -------------------------------------------------------------------------------------------------


def release(model: nn.Module, opt: Any, each: int = 1) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # clips by the norm of the previous step
        return mo_fused.gradient_release(model, opt, each)


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("where", WHERE)
@by_case(ONE_OF_EACH)
def test_release_has_the_bits_of_the_ordinary_loop(
    case: Case, where: str, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other, model, opt = nets(case, **options_of(where, tmp_path))
    release(model, opt, each)
    hold_up(monkeypatch, each)
    for t in range(4):
        for m, o in ((plain, other), (model, opt)):
            for k in range(each):
                backward(m, each * t + k)
            if m is model:
                assert all(p.grad is None for p in m.parameters())
            o.step()
            o.zero_grad()
        assert_same(model, opt, plain, other)


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
@by_case(ONE_OF_EACH)
def test_release_of_parameters_that_are_not_all_offloaded(
    case: Case, fraction: float, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other, model, opt = nets(case, offload_fraction=fraction)
    release(model, opt, each)
    hold_up(monkeypatch, 20 + each)
    for t in range(3):
        for m, o in ((plain, other), (model, opt)):
            for k in range(each):
                backward(m, each * t + k)
            o.step()
            o.zero_grad()
        assert_same(model, opt, plain, other)


@pytest.mark.cpu_only(reason="a device rounds what it divides gradients by to a float")
@pytest.mark.parametrize("where", ["cpu", "disk"])
@by_case(ONE_OF_EACH)
def test_release_that_clips(case: Case, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the norm of the step before, as it does without offload; statistics too."""
    plain, other, model, opt = nets(case, max_grad_norm=0.05, stats=True, **options_of(where, tmp_path))
    release(plain, other)
    release(model, opt)
    hold_up(monkeypatch, 11)
    for t in range(5):
        for m, o in ((plain, other), (model, opt)):
            backward(m, t, 1 + t)
            o.step()
            o.zero_grad()
        assert_same(model, opt, plain, other)
        for name in ("grad_norm", "clip_coef", "update_norm", "stored_update_norm", "grad_amax"):
            got, want = getattr(opt.last_step, name), getattr(other.last_step, name)
            assert float(got) == pytest.approx(float(want), rel=1e-12), name
        mine, theirs = opt.last_step.per_param(), other.last_step.per_param()
        assert {k: v.update_norm for k, v in mine.items()} == {
            k: pytest.approx(v.update_norm, rel=1e-12) for k, v in theirs.items()
        }


def test_release_removed_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step: what was handed over is done, the rest is left for opt.step()."""
    plain, other, model, opt = nets(ADAMW, offload_gradients=True)
    hold_up(monkeypatch, 12)
    for t in range(4):
        handle = release(model, opt) if t % 2 == 0 else None
        for m, o in ((plain, other), (model, opt)):
            backward(m, t)
            if m is model and handle is not None:
                handle.remove()
            o.step()
            o.zero_grad()
        assert_same(model, opt, plain, other)


def test_release_saved_between_backward_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """state_dict() waits for what goes on beside the backward."""
    plain, other, model, opt = nets(SGD)
    release(model, opt)
    hold_up(monkeypatch, 13)
    for t in range(3):
        backward(plain, t)
        other.step()
        backward(model, t)
        saved = opt.state_dict()["state"]
        assert_same_bits([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()])
        theirs = other.state_dict()["state"]
        assert_same_bits([saved[k] for k in theirs], [*theirs.values()])
        for o in (other, opt):
            if o is opt:
                o.step()
            o.zero_grad()


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_second_backward_is_an_error(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the step of the first one is what it would have been."""
    plain, other, model, opt = nets(ADAMW, **options_of(where, tmp_path))
    release(model, opt)
    backward(plain, 0)
    other.step()
    update = step.PieceOfJob.update

    over = threading.Event()

    def late(self: Any, slot: Any) -> None:
        over.wait(1.0)
        update(self, slot)

    monkeypatch.setattr(step.PieceOfJob, "update", late)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"expected 1 gradient\(s\) of "):
        backward(model, 1)
    for p in model.parameters():
        p.grad = None
    time.sleep(0.05)  # for the copy that the second one has begun
    over.set()
    opt.step()
    assert_same(model, opt, plain, other)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_fewer_micro_batches_than_asked_for(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other, model, opt = nets(NESTEROV, **options_of(where, tmp_path))
    release(model, opt, 3)
    hold_up(monkeypatch, 15)
    for t in range(3):
        for m, o in ((plain, other), (model, opt)):
            for k in range(2 + t % 2):
                backward(m, 3 * t + k)
            o.step()
            o.zero_grad()
        assert_same(model, opt, plain, other)


# -- from several threads ---------------------------------------------------------------------------------------------


def test_two_optimizers_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own ring and threads."""
    hold_up(monkeypatch, 16, 0.001)
    values, grads = weights(MANY), gradients(MANY, 4)
    plain = parameters(values)
    other = ADAMW.ours(plain)
    found: list[Any] = [None, None]

    def train(i: int) -> None:
        params = parameters(values)
        opt = ADAMW.ours(params, offload="cpu", offload_gradients=i == 1)
        drive(opt, params, grads)
        found[i] = [p.detach() for p in params], states(opt, params)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    drive(other, plain, grads)
    for thread in threads:
        thread.join()
    for params, entries in found:
        assert_same_bits(params, [p.detach() for p in plain])
        assert_same_bits(entries, states(other, plain))


def drive(opt: Any, params: Any, grads: Any) -> None:
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = g.to(p.device).clone()
        opt.step()


def test_a_backward_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_up(monkeypatch, 17)
    plain, other, model, opt = nets(SGD, offload_gradients=True)
    for t in range(3):
        before = [p.detach().clone() for p in plain.parameters()]
        for m in (plain, model):
            thread = threading.Thread(target=backward, args=(m, t))
            thread.start()
            thread.join()
        for o in (other, opt):
            o.step()
            o.zero_grad()
        assert not any(map(torch.equal, before, plain.parameters())), "no backward has run"
        assert_same(model, opt, plain, other)
