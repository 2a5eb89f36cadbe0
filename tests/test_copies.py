"""Copies of an optimizer that has stepped: every pickle protocol, whole files, other processes, other threads."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ADAMW, AMSGRAD, RULES, Case, drive, gradients, noise, parameters, states, weights
from child_process import SHAPES as CHILD_SHAPES
from child_process import put_continued, trained
from oracle import assert_same_bits
from torch.nn import Parameter

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="test_state.py copies on every backend; these are the ways around it")

SHAPES = [(33, 3), (7,), ()]
ADAFACTOR = Case("Adafactor", "default", dict(lr=0.05))

WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"protocol {n}": lambda o, n=n: pickle.loads(pickle.dumps(o, n)) for n in range(2, pickle.HIGHEST_PROTOCOL + 1)},
    "file": lambda o: _through_file(o),
    "in Python": lambda o: pickle._loads(pickle._dumps(o)),  # type: ignore[attr-defined]
}


def _through_file(opt: Any) -> Any:
    file = io.BytesIO()
    torch.save(opt, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_goes_on_with_the_same_bits(way: str) -> None:
    formats = dict(master_weights="split", state_dtype="fp32")
    for case, dtype, options in (
        *((case, torch.float32, {}) for case in (*RULES, AMSGRAD, ADAFACTOR)),
        (ADAMW, torch.bfloat16, formats),
    ):
        params = parameters(weights(SHAPES, dtype))
        opt = case.ours(params, max_grad_norm=0.5, skip_nonfinite=True, **options)
        drive(opt, params, gradients(SHAPES, 2, dtype))
        new = WAYS[way](opt)
        assert type(new) is type(opt) and {**new.defaults, **opt.defaults} == new.defaults
        copies = new.param_groups[0]["params"]
        more = gradients(SHAPES, 2, dtype, seed=5)
        drive(opt, params, more)
        drive(new, copies, more)
        assert_same_bits([q.detach() for q in copies], [p.detach() for p in params])
        assert_same_bits(states(new, copies), states(opt, params))


def test_an_optimizer_is_passed_to_a_spawned_process() -> None:
    """torch shares its memory: the child's steps are the parent's too, who then goes on with what it knows of them."""
    opt, params = trained(2)
    whole, want = trained(6)
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    process = context.Process(target=put_continued, args=(queue, opt))
    process.start()
    got, steps = queue.get(timeout=60)
    process.join(30)
    assert process.exitcode == 0 and steps == 5
    five = b"".join(p.detach().numpy().tobytes() for p in trained(5)[1])
    assert got == five
    assert b"".join(p.detach().numpy().tobytes() for p in params) == five, "memory that torch shares"
    drive(opt, params, gradients(CHILD_SHAPES, 6)[5:])  # whose tensors have moved to shared memory since its last step
    assert_same_bits([p.detach() for p in params], [p.detach() for p in want])
    assert whole.last_step is not None and float(opt.last_step.grad_norm) == float(whole.last_step.grad_norm)


def test_threads_that_each_train_a_model() -> None:
    """Forward, backward, clip and step of different optimizers at the same time, as one after the other."""
    kinds: list[Callable[[Any], Any]] = [
        lambda p: mo_fused.AdamW(p, lr=0.01, max_grad_norm=0.5, stats=True),
        lambda p: mo_fused.SGD(p, lr=0.1, momentum=0.9),
        lambda p: mo_fused.Adafactor(p, lr=0.01, max_grad_norm=0.5),
    ]

    def run(kind: int) -> list[torch.Tensor]:
        ws = [Parameter(noise(shape, 10 * kind + i) / 16) for i, shape in enumerate([(300, 64), (64, 300)])]
        opt = kinds[kind](ws)
        for t in range(6):
            loss = (noise((32, 300), 90 + t) @ ws[0]).relu().mm(ws[1]).square().mean()
            loss.backward()
            if kind == 1:
                mo_fused.clip_grad_norm_(ws, 0.5)
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in ws] + [v for p in ws for v in opt.state[p].values()]

    # Sums inside torch's matrix products depend on its number of threads, which is each Python thread's own.
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        serial = [run(kind) for kind in range(len(kinds))]
        found: dict[tuple[int, int], list[torch.Tensor]] = {}
        start = threading.Barrier(2 * len(kinds))

        def work(kind: int, turn: int) -> None:
            torch.set_num_threads(1)
            start.wait(30)
            found[kind, turn] = run(kind)

        threads = [threading.Thread(target=work, args=(k, t)) for k in range(len(kinds)) for t in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        torch.set_num_threads(count)
    assert len(found) == 2 * len(kinds), "a thread did not finish"
    for (kind, _), got in found.items():
        assert_same_bits(got, serial[kind])
