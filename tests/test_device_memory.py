"""What a device's backend remembers between steps and calls: tables, addresses, buffers without a value."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import pytest
import torch
from cases import ADAMW, BACKEND, DEVICE, drive, noise, parameters
from oracle import norm64
from torch.nn import Parameter

import mo_fused

pytestmark = pytest.mark.device_only(reason="test_triton_suite.py and test_cuda_suite.py run it")


def test_threads_measure_their_own_gradients() -> None:
    """Tables of the utilities are kept by layout; two threads must not find each other's addresses in one."""
    wrong: list[float] = []

    def measure(value: float) -> None:
        grads = [torch.full((40,), value, device=DEVICE), torch.full((9,), value, device=DEVICE)]
        expected = value * math.sqrt(49)
        for _ in range(60 if BACKEND == "cuda" else 6):
            norm = float(mo_fused.get_total_norm(grads))
            if norm != pytest.approx(expected, rel=1e-6):
                wrong.append(norm)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        if BACKEND == "cuda":  # Triton's interpreter itself has one grid at a time
            threads = [threading.Thread(target=measure, args=(float(k),)) for k in (1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            measure(1.0)
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_tables_made_in_inference_mode_serve_training_too() -> None:
    grads = [noise((33,), 4), noise((7,), 5)]
    p = Parameter(noise((12,), 6))
    opt = ADAMW.ours([p], max_grad_norm=1.0)
    p.grad = noise((12,), 7)
    with torch.inference_mode():
        inside = float(mo_fused.get_total_norm(grads))
    grads = [g.clone() for g in grads]  # at other addresses: the table is written
    assert float(mo_fused.get_total_norm(grads)) == inside == pytest.approx(norm64(grads), rel=1e-6)
    drive(opt, [p], [[noise((12,), 8)], [noise((12,), 9)]])


def test_memory_of_a_tensor_rate_is_looked_at_in_every_step() -> None:
    """``lr.data = ...`` keeps the object and gives it other memory."""
    p = Parameter(torch.zeros(3))
    lr = torch.tensor(0.5, device=DEVICE)
    opt = mo_fused.SGD([p], lr=lr)
    for value, expected in ((0.5, -0.5), (2.0, -2.5), (0.25, -2.75)):
        lr.data = torch.tensor(value, device=DEVICE)
        drive(opt, [p], [[torch.ones(3)]])
        assert p.detach().tolist() == [expected] * 3


def skipped_first(**options: Any) -> tuple[Any, Parameter]:
    """SGD whose first step was skipped: dampening tells a buffer without a value from one of zeros."""
    p = Parameter(torch.zeros(2))
    opt = mo_fused.SGD([p], lr=1.0, momentum=0.9, dampening=0.5, skip_nonfinite=True, **options)
    drive(opt, [p], [[torch.full((2,), math.nan)]])
    return opt, p


def test_a_buffer_stays_fresh_until_it_has_a_value() -> None:
    opt, p = skipped_first()
    opt.param_groups[0]["momentum"] = 0.0
    drive(opt, [p], [[torch.zeros(2)]])
    opt.param_groups[0]["momentum"] = 0.9
    drive(opt, [p], [[torch.ones(2)]])
    assert p.detach().tolist() == [-1.0, -1.0], "momentum switched off and on"

    opt, p = skipped_first()
    p.grad = None
    p.data = torch.zeros(4)[::2]
    opt.step()
    drive(opt, [p], [[torch.ones(2)]])
    assert p.detach().tolist() == [-1.0, -1.0], "another layout while there was no gradient"


def test_asking_for_the_state_changes_nothing_of_the_statistics() -> None:
    p = Parameter(torch.tensor([3.0, 4.0]))
    opt = mo_fused.SGD([p], lr=0.0, momentum=0.9, skip_nonfinite=True, stats=True)
    drive(opt, [p], [[torch.ones(2)]])
    assert "momentum_buffer" in opt.state_dict()["state"][0]
    drive(opt, [p], [[torch.full((2,), math.nan)]])
    assert float(opt.last_step.param_norm) == 5.0, "the last one measured"


def test_a_group_that_is_not_clipped_has_no_say_in_the_norm() -> None:
    """Not even by a NaN, beside gradients so small that their squares vanish."""
    small, bad = parameters([torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)])
    opt = ADAMW.ours([{"params": [small]}, {"params": [bad], "clip": False}], max_grad_norm=1.0)
    drive(opt, [small, bad], [[torch.full((5,), 1e-200, dtype=torch.float64), torch.full((5,), math.nan).double()]])
    assert float(opt.last_step.grad_norm) == pytest.approx(math.sqrt(5) * 1e-200, rel=1e-12)
