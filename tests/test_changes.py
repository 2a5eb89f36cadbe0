"""What changes between two steps is noticed on the next one: options, rates, groups, memory, states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import (
    ADAMW,
    BACKEND,
    BACKENDS,
    RULES,
    Case,
    assert_backend,
    drive,
    gradients,
    noise,
    parameters,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits, assert_states_close, reference, wide
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, LRScheduler, OneCycleLR, SequentialLR

import mo_fused

SHAPES = [(7,), (5, 3)]


def beside_torch(
    case: Case, steps: int, change: Callable[[Any, list[Parameter], int], None], backend: str = BACKEND, **options: Any
) -> None:
    """Runs ours in fp32 and torch's in float64 and applies `change(opt, params, t)` to both before step t."""
    values = weights(SHAPES)
    ours, truth = parameters(values), parameters([wide(v) for v in values])
    a, b = case.ours(ours, backend=backend, **options), case.torch(truth)
    for t in range(steps):
        change(a, ours, t)
        change(b, truth, t)
        for i, (p, q) in enumerate(zip(ours, truth, strict=True)):
            p.grad = noise(p.shape, 100 + 10 * t + i)
            q.grad = wide(p.grad).reshape(q.shape)
        a.step()
        b.step()
    assert_backend(a, backend)
    for i, (p, q) in enumerate(zip(ours, truth, strict=True)):
        assert_close(p, q.detach(), steps, f"parameter {i}")
        assert_states_close(states(a, [p])[0], states(b, [q])[0], steps, f"state {i}")


HYPER: dict[str, list[tuple[str, Any]]] = {
    "AdamW": [("lr", 0.02), ("weight_decay", 0.5), ("betas", (0.5, 0.7)), ("eps", 0.3), ("maximize", True)],
    "Adam": [("lr", 0.02), ("weight_decay", 0.5), ("decoupled_weight_decay", True), ("lr", torch.tensor(0.03))],
    "SGD": [
        ("lr", 0.02),
        ("weight_decay", 0.5),
        ("momentum", 0.2),
        ("dampening", 0.4),
        ("nesterov", True),
        ("momentum", 0.0),  # the buffer rests
    ],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind,key,value", [(kind, k, v) for kind, pairs in HYPER.items() for k, v in pairs])
def test_changed_hyper_parameter_counts_from_the_next_step(kind: str, key: str, value: Any, backend: str) -> None:
    def change(opt: Any, params: list[Parameter], t: int) -> None:
        if t == 2:
            opt.param_groups[0][key] = value

    beside_torch(next(c for c in RULES if c.kind == kind), 4, change, backend)


def test_momentum_switched_on_and_off() -> None:
    """A buffer starts from the first gradient with momentum, rests meanwhile, and goes on from where it was."""

    def change(opt: Any, params: list[Parameter], t: int) -> None:
        opt.param_groups[0]["momentum"] = (0.0, 0.9, 0.9, 0.0, 0.5)[t]

    for backend in BACKENDS:
        beside_torch(Case("SGD", "plain", dict(lr=0.1, weight_decay=0.1)), 5, change, backend)


def test_tensor_rate_written_in_place_is_read_anew() -> None:
    def change(opt: Any, params: list[Parameter], t: int) -> None:
        rate = opt.param_groups[0]["lr"]
        if isinstance(rate, Tensor):
            rate.fill_(0.1 * (t + 1))
        else:
            opt.param_groups[0]["lr"] = float(torch.tensor(0.1 * (t + 1)))

    beside_torch(Case("AdamW", "tensor_lr", dict(lr=torch.tensor(1.0))), 3, change)


SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "lambda": lambda o: LambdaLR(o, lambda e: 0.5**e),
    "cosine": lambda o: CosineAnnealingLR(o, 5),
    # These two write `betas` and `momentum` as well.
    "one_cycle": lambda o: OneCycleLR(o, max_lr=0.3, total_steps=8),
    "cyclic": lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.2, step_size_up=3, cycle_momentum=True),
    "sequence": lambda o: SequentialLR(o, [LambdaLR(o, lambda e: (e + 1) / 3), CosineAnnealingLR(o, 4)], [3]),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize("case", RULES, ids=str)
def test_schedulers(case: Case, name: str) -> None:
    made: dict[int, LRScheduler] = {}

    def change(opt: Any, params: list[Parameter], t: int) -> None:
        if t == 0:
            made[id(opt)] = SCHEDULERS[name](opt)
        else:
            made[id(opt)].step()

    beside_torch(case, 7, change)
    rates = [s.get_last_lr() for s in made.values()]
    assert rates[0] == rates[1] and rates[0] != [0.1]


def test_scheduler_with_a_tensor_rate() -> None:
    made: dict[int, LRScheduler] = {}

    def change(opt: Any, params: list[Parameter], t: int) -> None:
        if t == 0:
            made[id(opt)] = LambdaLR(opt, lambda e: 0.5**e)
        else:
            made[id(opt)].step()
        if t == 3:
            opt.param_groups[0]["lr"] = 0.05  # a loop may assign a plain float over the tensor

    beside_torch(Case("AdamW", "tensor_lr", dict(lr=torch.tensor(0.125))), 4, change)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", RULES, ids=str)
def test_late_parameters_count_their_own_steps(case: Case, backend: str) -> None:
    """A frozen parameter unfrozen at step 2, a group added at step 3, gradients that come and go."""
    shapes = [(7,), (5, 3), (4,)]
    values, grads = weights(shapes), gradients(shapes, 6)
    for t in range(6):
        if t < 2:
            grads[t][1] = None
        if t < 3:
            grads[t][2] = None
        if t in (3, 4):
            grads[t][0] = None
    want, want_states = reference(
        case, values, grads, groups=lambda p: [{"params": p[:2]}, {"params": p[2:], "lr": 0.05, "weight_decay": 0.0}]
    )
    params = parameters(values)
    params[1].requires_grad_(False)
    opt = case.ours(params[:2], backend=backend)
    for t in range(6):
        if t == 2:
            params[1].requires_grad_(True)
        if t == 3:
            opt.add_param_group({"params": params[2:], "lr": 0.05, "weight_decay": 0.0})
        drive(opt, params, grads[t : t + 1])
    assert_backend(opt, backend)
    for i, p in enumerate(params):
        assert_close(p, want[i], 6, f"parameter {i}")
        assert_states_close(states(opt, [p])[0], want_states[i], 6, f"state {i}")
    if case.kind != "SGD":
        assert [float(opt.state[p]["step"]) for p in params] == [4, 4, 3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", RULES, ids=str)
def test_gradients_that_come_and_go(case: Case, backend: str) -> None:
    """Nothing else changes between the steps: only which parameters have a gradient, down to none at all."""
    shapes = [(7,), (5, 3), (4,)]
    values, grads = weights(shapes), gradients(shapes, 7)
    seen = [(1, 1, 0, 1, 0, 1, 1), (1, 0, 1, 0, 0, 1, 0), (0, 0, 1, 1, 0, 0, 1)]
    for t, row in enumerate(grads):
        row[:] = [g if seen[i][t] else None for i, g in enumerate(row)]
    want, want_states = reference(case, values, grads)
    params = parameters(values)
    opt = case.ours(params, backend=backend, max_grad_norm=1e9, stats=True)
    for row in grads:
        drive(opt, params, [row])
        assert set(opt.last_step.per_param()) == {i for i, g in enumerate(row) if g is not None}
    for i, p in enumerate(params):
        assert_close(p, want[i], 7, f"parameter {i}")
        assert_states_close(states(opt, [p])[0], want_states[i], 7, f"state {i}")


# New address; new strides; a view into something larger. The state stays as it was.
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "address": lambda x: x.clone(),
    "strides": lambda x: x.t().contiguous().t(),
    "view": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("move", list(MOVES))
@pytest.mark.parametrize("case", RULES, ids=str)
def test_moved_data_is_noticed(case: Case, move: str, backend: str) -> None:
    old: list[Tensor] = []

    def change(opt: Any, params: list[Parameter], t: int) -> None:
        if t == 2:
            old.append(params[1].data.clone())
            old.append(params[1].data)
            params[1].data = MOVES[move](params[1].data)

    beside_torch(case, 4, change, backend)
    assert torch.equal(old[0], old[1]), "the memory that was left behind was written"


@pytest.mark.parametrize("case", RULES, ids=str)
def test_moved_gradients_and_states_are_noticed(case: Case) -> None:
    """Every tensor of the table gets a new address, or new contents, or both."""

    def change(opt: Any, params: list[Parameter], t: int) -> None:
        for p in params:
            for key, slot in opt.state[p].items():
                if t == 1:
                    opt.state[p][key] = slot.clone()  # replaced tensor
                elif t == 2:
                    slot.data = slot.data.clone()  # same tensor, new memory
                elif t == 3 and key != "step":
                    slot.mul_(0.5)  # same memory, new contents
                elif t == 4:
                    opt.state[p][key] = slot * 2 if key != "step" else slot + 10

    beside_torch(case, 6, change)


def test_emptied_state_starts_again() -> None:
    def change(opt: Any, params: list[Parameter], t: int) -> None:
        if t == 2:
            opt.state[params[0]] = {}
        if t == 3:
            opt.state.clear()

    for case in RULES:
        beside_torch(case, 5, change)


@pytest.mark.parametrize("case", RULES, ids=str)
def test_replaced_parameter_in_a_group(case: Case) -> None:
    old: list[tuple[Parameter, Tensor]] = []

    def change(opt: Any, params: list[Parameter], t: int) -> None:
        if t == 2:
            old.append((params[0], params[0].detach().clone()))
            params[0] = Parameter(params[0].detach() * 2)
            opt.param_groups[0]["params"][0] = params[0]
        if t == 3:  # the list itself, in another order
            opt.param_groups[0]["params"] = [params[1], params[0]]

    beside_torch(case, 5, change)
    for p, kept in old:
        assert torch.equal(p.detach(), kept), "a parameter that left the optimizer was written"


def test_parameter_of_another_shape_after_its_state_is_dropped() -> None:
    def change(opt: Any, params: list[Parameter], t: int) -> None:
        if t == 2:
            params[0].grad = None
            params[0].data = torch.linspace(-1, 1, 12, dtype=params[0].dtype, device=params[0].device).view(3, 4)
            opt.state.pop(params[0])

    for case in RULES:
        beside_torch(case, 4, change)


@pytest.mark.parametrize("case", RULES, ids=str)
def test_gradient_of_an_earlier_shape_is_refused(case: Case) -> None:
    """p.data was exchanged, p.grad was not: nothing may be read or written by the wrong size."""
    params = parameters(weights(SHAPES))
    opt = case.ours(params)
    drive(opt, params, gradients(SHAPES, 1))
    params[1].data = torch.ones(2, 2)
    opt.state.pop(params[1], None)
    before = [p.detach().clone() for p in params], states(opt, params[:1])
    with pytest.raises(RuntimeError, match=r"\(2, 2\).*\(5, 3\)"):
        opt.step()
    assert_same_bits([p.detach() for p in params], before[0])
    assert_same_bits(states(opt, params[:1]), before[1])


@pytest.mark.parametrize("when", [0, 2], ids=["first_step", "later_step"])
@pytest.mark.parametrize(
    "kind,key,value", [("SGD", "momentum", 0.9), ("SGD", "lr", 0.02), ("AdamW", "betas", (0.5, 0.7))]
)
def test_change_made_before_a_refused_step_still_counts(kind: str, key: str, value: Any, when: int) -> None:
    """A refusal changes nothing, also not what the optimizer knows of its groups."""

    def change(opt: Any, params: list[Parameter], t: int) -> None:
        if t != when:
            return
        opt.param_groups[0][key] = value
        if isinstance(opt, mo_fused.SGD | mo_fused.AdamW):
            params[0].grad = torch.ones(7)
            data, params[1].data = params[1].data, torch.ones(2, 2)
            params[1].grad = torch.ones(2, 2)
            params[1].data = data
            with pytest.raises(RuntimeError):
                opt.step()

    beside_torch(Case(kind, "plain", dict(lr=0.1)), 5, change)


def test_model_converted_to_double_goes_on() -> None:
    """module.double() swaps p.data; the moments stay fp32."""
    values, grads = weights(SHAPES), gradients(SHAPES, 4)
    want, _ = reference(ADAMW, values, grads)
    params = parameters(values)
    opt = ADAMW.ours(params)
    drive(opt, params, grads[:2])
    for p in params:
        p.grad = None
        p.data = p.data.double()
    drive(opt, params, [[g.double() for g in row if g is not None] for row in grads[2:]])
    assert_backend(opt, BACKEND)
    for p, w in zip(params, want, strict=True):
        assert p.dtype == torch.float64
        assert_close(p.detach().float(), w, 4)


def test_zero_grad_to_zeros_is_a_step_with_zero_gradients() -> None:
    def change(opt: Any, params: list[Parameter], t: int) -> None:
        if t == 2:
            opt.zero_grad(set_to_none=False)
            assert all(p.grad is not None and not p.grad.any() for p in params)
            opt.step()

    for case in RULES:
        beside_torch(case, 3, change)
