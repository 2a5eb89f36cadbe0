"""The thread pool: across fork and spawn, under several Python threads, quiet between steps, outside the GIL."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import ADAMW, SGD, drive, gradients, noise, parameters, weights
from child_process import SHAPES, put_trained, trained
from oracle import assert_same_bits
from torch import Tensor
from torch.nn import Parameter


@pytest.fixture(autouse=True)
def three_threads(teams_as_asked: None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def same(params: list[Parameter], want: list[Tensor]) -> bool:
    return all(torch.equal(p.detach(), w) for p, w in zip(params, want, strict=True))


@pytest.fixture(scope="module")
def five_steps() -> list[Tensor]:
    return [p.detach().clone() for p in trained(5)[1]]


def in_forked_child(work: Callable[[], bool], seconds: float = 30.0) -> str:
    """Runs `work` in a forked child and says how it ended; a child that hangs is killed."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return {0: "right", 1: "wrong values", 3: "exception"}.get(
                os.waitstatus_to_exitcode(status), f"status {status}"
            )
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def test_fork_after_a_step(five_steps: list[Tensor]) -> None:
    """The child has the pool's memory but not its threads."""
    opt, params = trained(2)
    rest = gradients(SHAPES, 5)[2:]
    shared = [p.detach().clone() for p in params]

    def work() -> bool:
        drive(opt, params, rest)
        return same(params, five_steps)

    assert in_forked_child(work) == "right"
    assert same(params, shared), "the child wrote into the parent"
    drive(opt, params, rest)  # the parent's pool still works
    assert same(params, five_steps)


def test_fork_of_a_fork_and_fork_before_the_first_step(five_steps: list[Tensor]) -> None:
    def grandchild() -> bool:
        return same(trained(5)[1], five_steps)

    def child() -> bool:
        first = same(trained(5)[1], five_steps)
        return first and in_forked_child(grandchild, 10.0) == "right" and same(trained(5)[1], five_steps)

    assert in_forked_child(child) == "right"


def test_fork_while_another_thread_steps(five_steps: list[Tensor]) -> None:
    """The moment of the fork is not ours to choose: a lock held by the other thread must not stay locked forever."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            trained(1)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(3):
            assert in_forked_child(lambda: same(trained(5)[1], five_steps), 20.0) == "right"
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(method: str, five_steps: list[Tensor]) -> None:
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=put_trained, args=(queue,))
    process.start()
    try:
        got = queue.get(timeout=60)
        process.join(30)
        assert process.exitcode == 0
    finally:
        if process.is_alive():
            process.kill()
    assert got == b"".join(w.numpy().tobytes() for w in five_steps)


def test_two_optimizers_in_two_threads(five_steps: list[Tensor]) -> None:
    results: dict[int, list[Tensor]] = {}

    def work(key: int) -> None:
        for _ in range(5):
            results[key] = [p.detach() for p in trained(5)[1]]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1, 2], "a thread did not finish"
    for got in results.values():
        assert_same_bits(got, five_steps)


def test_changing_the_thread_count_between_steps(five_steps: list[Tensor]) -> None:
    params = parameters(weights(SHAPES))
    opt = ADAMW.ours(params, backend="cpu", max_grad_norm=1.0)
    # Up, down, far more than there are cores, and back.
    for count, row in zip((1, 3, 2, 8, 1), gradients(SHAPES, 5), strict=True):
        torch.set_num_threads(count)
        drive(opt, params, [row])
    assert_same_bits([p.detach() for p in params], five_steps)


def test_no_thread_spins_between_steps() -> None:
    """A waiting pool must sleep: spinning slows the forward pass that comes next."""
    p = Parameter(noise((400_000,), 1))
    opt = SGD.ours([p], backend="cpu", max_grad_norm=1.0)
    p.grad = noise((400_000,), 2)
    opt.step()
    time.sleep(0.3)  # torch's own threads, which made the gradient, come to rest
    opt.step()
    before = time.process_time()
    time.sleep(0.3)
    used = time.process_time() - before
    assert used < 0.05, f"{used:.3f} s of processor time in 0.3 s of sleep"


def test_step_releases_the_gil() -> None:
    """Another Python thread goes on while the native code runs: data loaders and loggers live there."""
    n = 6_000_000  # long enough (some ms) to tell native time from the few Python instructions around it
    p = Parameter(torch.zeros(n))
    opt = SGD.ours([p], backend="cpu")
    p.grad = torch.zeros(n)
    torch.set_num_threads(1)  # leaves a core to the other thread
    opt.step()
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        best = 0.0
        for _ in range(10):
            ticks.clear()
            start = time.perf_counter()
            opt.step()
            end = time.perf_counter()
            # In how many of ten equal parts of the step did the other thread run?
            parts = {int(10 * (t - start) / (end - start)) for t in list(ticks) if start <= t < end}
            best = max(best, len(parts) / 10)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert best >= 0.7, f"the other thread ran in {best:.0%} of the step at most"
