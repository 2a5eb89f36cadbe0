"""Corner cases of options, skips and fallbacks, each with the values that a wrong step would give."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BACKENDS, DEVICE
from torch.nn import Parameter

import mo_fused


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_gradient_for_two_parameters_is_scaled_once(backend: str) -> None:
    a, b, g = Parameter(torch.zeros(4)), Parameter(torch.zeros(4)), torch.full((4,), 10.0)
    a.grad = b.grad = g
    mo_fused.SGD([a, b], lr=1.0, max_grad_norm=1.0, clip_in_place=True, backend=backend).step()
    want = torch.full((4,), 1 / math.sqrt(8))
    torch.testing.assert_close(a.detach(), -want)
    torch.testing.assert_close(b.detach(), -want)
    torch.testing.assert_close(g, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expanded_gradient_is_refused_and_nothing_changes(backend: str) -> None:
    # More than one chunk: each would scale the shared element once more.
    p = Parameter(torch.zeros(50000))
    p.grad = torch.full((1,), 10.0).expand(50000)
    opt = mo_fused.SGD([p], lr=1.0, max_grad_norm=1.0, clip_in_place=True, backend=backend)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        opt.step()
    assert not p.detach().any()
    assert (p.grad == 10).all()


def test_clip_key_of_a_group_survives_a_plain_torch_checkpoint() -> None:
    p, q = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
    opt = mo_fused.AdamW([{"params": [p]}, {"params": [q], "clip": False}], max_grad_norm=1.0)
    opt.load_state_dict(torch.optim.AdamW([{"params": [p]}, {"params": [q]}]).state_dict())
    p.grad, q.grad = torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])
    opt.step()
    assert float(opt.last_step.grad_norm) == pytest.approx(5.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_step_keeps_the_norm_of_the_parameters(backend: str) -> None:
    p = Parameter(torch.ones(4))
    opt = mo_fused.AdamW([p], lr=0.1, weight_decay=0.0, skip_nonfinite=True, stats=True, backend=backend)
    p.grad = torch.full((4,), math.nan)
    opt.step()
    assert bool(opt.last_step.skipped)
    assert math.isnan(float(opt.last_step.param_norm)), "no step has measured it"
    p.grad = torch.ones(4)
    opt.step()
    p.grad = torch.full((4,), math.inf)
    opt.step()
    last = opt.last_step
    assert (float(last.update_norm), float(last.stored_update_norm)) == (0.0, 0.0)
    assert float(last.param_norm) == pytest.approx(float(p.detach().norm()))
    assert last.per_param()[0].param_norm == pytest.approx(1.8)


def test_values_that_were_read_stay() -> None:
    p = Parameter(torch.zeros(3))
    opt = mo_fused.SGD([p], lr=0.0, stats=True)
    read = []
    for i in range(6):  # two more than there are buffers
        p.grad = torch.full((3,), float(i))
        opt.step()
        read.append(opt.last_step.grad_norm)
    assert [float(x) for x in read] == pytest.approx([i * math.sqrt(3) for i in range(6)])


@pytest.mark.parametrize("option", ["max_grad_norm", "stats", "backend"])
def test_options_are_refused_as_group_keys(option: str) -> None:
    with pytest.raises(ValueError, match=f"the group key '{option}' to be absent"):
        mo_fused.AdamW([{"params": [Parameter(torch.ones(1))], option: 1.0}])


def test_a_hook_that_raises_leaves_no_gate_behind() -> None:
    p = Parameter(torch.ones(2))
    opt = mo_fused.SGD([p], lr=1.0)
    scaler = mo_fused.GradScaler(DEVICE.type, init_scale=2.0)
    scaler.scale(torch.zeros(()))
    p.grad = torch.full((2,), 2.0)

    def refuse(*_: object) -> None:
        raise KeyError("no")

    handle = opt.register_step_pre_hook(refuse)
    with pytest.raises(KeyError):
        scaler.step(opt)
    handle.remove()
    p.grad = torch.tensor([math.inf, 1.0])
    opt.step()
    assert p.detach().tolist() == [-math.inf, 0.0], "a plain step is not gated by the scaler"


def test_meta_parameters_are_stepped_by_torch() -> None:
    p = Parameter(torch.ones(2, device="meta"))
    p.grad = torch.ones(2, device="meta")
    opt = mo_fused.AdamW([p])
    opt.step()
    assert opt.explain()[0].backend == "torch"
    assert float(opt.state[p]["step"]) == 1.0


def test_sgd_without_momentum_leaves_no_state_whoever_steps_it() -> None:
    p = Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    opt = mo_fused.SGD([p], lr=0.1)
    opt.step()
    assert opt.state_dict()["state"] == {}


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, mo_fused.GradScaler])
def test_a_watched_step_is_not_called_on_overflow(scaler_class: type[torch.amp.GradScaler]) -> None:
    # As Accelerate does it: the schedule advances when the replaced step was called.
    p = Parameter(torch.zeros(3))
    opt = mo_fused.SGD([p], lr=1.0, max_grad_norm=10.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch)
    scaler = scaler_class(DEVICE.type, init_scale=4.0)
    scaler.scale(torch.zeros(()))
    plain, calls = opt.step, []

    def watched(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return plain(*args, **kwargs)

    for value in (4.0, math.inf, 4.0):
        p.grad = torch.full((3,), value * scaler.get_scale() / 4)
        opt.step = watched
        scaler.step(opt)
        opt.step = plain
        scaler.update()
        if len(calls):
            scheduler.step()
        calls.clear()
    assert opt.param_groups[0]["lr"] == 0.25, "two steps were taken, one was skipped"
    torch.testing.assert_close(p.detach(), torch.full((3,), -1.0 - 0.5))


def test_a_scheduler_does_not_cost_the_fused_unscaling() -> None:
    opt = mo_fused.SGD([Parameter(torch.zeros(3))], lr=1.0)
    assert opt._step_supports_amp_scaling
    torch.optim.lr_scheduler.StepLR(opt, 1)
    assert opt._step_supports_amp_scaling
    assert not mo_fused.SGD([Parameter(torch.zeros(3))], lr=1.0, amp="torch")._step_supports_amp_scaling


def test_a_buffer_made_for_nothing_is_no_value_for_torchs_step() -> None:
    """Two parameters that share memory go to torch; dampening must not touch the first step."""
    base = torch.zeros(6)
    p, q = Parameter(base[:4]), Parameter(base[2:])
    opt = mo_fused.SGD([p, q], lr=1.0, momentum=0.9, dampening=0.5)
    p.grad, q.grad = torch.ones(4), torch.ones(4)
    opt.step()
    assert {r.backend for r in opt.explain()} == {"torch"}
    assert base.tolist() == [-1.0, -1.0, -2.0, -2.0, -1.0, -1.0]


@pytest.mark.parametrize("numbers", [torch.tensor(1 + 2j), torch.tensor([1 + 2j, 3 + 4j])], ids=["scalar", "strided"])
def test_a_gradient_may_become_a_lazily_negated_view(numbers: torch.Tensor) -> None:
    p = Parameter(torch.zeros(numbers.shape))
    opt = mo_fused.SGD([p], lr=1.0)
    p.grad = numbers.imag
    opt.step()
    p.grad = numbers.conj().imag
    assert p.grad.is_neg()
    opt.step()
    assert not p.detach().any(), "up and down again"
