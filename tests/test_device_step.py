"""What is particular to backends of a device: long runs, no waiting, the table, and rows on both sides.

Everything else that they must do is in the other modules, which tests/test_triton_suite.py and tests/test_cuda_suite.py
run against them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import (
    ADAMW,
    AMSGRAD,
    BACKEND,
    CASES,
    DAMPENED,
    DEVICE,
    DTYPES,
    RULES,
    SGD,
    Case,
    Gradients,
    assert_backend,
    drive,
    gradients,
    noise,
    parameters,
    place,
    short,
    states,
    weights,
)
from device_watch import Waited, count_launches, watch
from oracle import assert_close, assert_same_bits, norm64
from torch import Tensor
from torch.nn import Parameter

import mo_fused
from mo_fused import dispatch
from mo_fused.device_gradients import on_one_device

pytestmark = pytest.mark.device_only(reason="test_triton_suite.py and test_cuda_suite.py run it")

SHAPES = [(7,), (33, 3), (), (0,), (2300,)]


def part_of(opt: Any) -> Any:
    """The part of the step that the first (here the only) device has."""
    return opt._rows().devices[0]


# -- long runs --------------------------------------------------------------------------------------------------------

TINY = [(3,), (2, 5), (), (17,), (6,)]
TINY_DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float64]


def long_run(case: Case, backend: str, steps: int, overflow_at: Callable[[int], bool]) -> list[Any]:
    """Parameters and state_dict after every tenth step of an eventful run; see the test below."""
    device = place(backend)
    params = parameters(
        [noise(s, 10 + i, d).to(device) for i, (s, d) in enumerate(zip(TINY, TINY_DTYPES, strict=True))]
    )
    other = {"lr": 0.03, "weight_decay": 0.3, "clip": False}
    other |= {"momentum": 0.5} if case.kind == "SGD" else {"betas": (0.8, 0.95), "eps": 1e-3}
    groups = [{"params": params[:2]}, {"params": params[2:4], **other}, {"params": params[4:], "maximize": True}]
    opt = case.ours(groups, skip_nonfinite=True, backend=backend)
    seen = []
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = noise(p.shape, 1000 + 10 * t + i, p.dtype, 3.0).to(device)
            if (t + i) % 6 == 5:  # comes and goes
                p.grad = None
        if overflow_at(t):
            last = next(p for p in reversed(params) if p.grad is not None and p.numel())
            assert last.grad is not None
            last.grad.view(-1)[-1] = (math.inf, math.nan, -math.inf)[t % 3]
        opt.grad_scale = torch.tensor(2.0 ** (t % 7), device=device) if t % 4 == 1 else None
        opt.found_inf = torch.tensor(float(t % 9 == 4), device=device)
        opt.step()
        if t % 10 == 9 or t == 3:
            seen.append(([p.detach().clone() for p in params], opt.state_dict()["state"]))
    assert_backend(opt, backend)
    return seen


@pytest.mark.parametrize(
    "case,first",
    [(ADAMW, False), (AMSGRAD, True), (DAMPENED, False), (DAMPENED, True)],
    ids=["adamw", "amsgrad_skipped_first", "sgd", "sgd_skipped_first"],
)
def test_a_long_eventful_run_has_the_bits_of_the_native_kernels(case: Case, first: bool) -> None:
    """Groups that differ, dtypes that differ, steps skipped for both reasons, gradients that come and go.

    ``first``: the first two steps are skipped, so that a momentum buffer exists before it has a value.
    """

    def overflow_at(t: int) -> bool:
        return t % 5 == 2 or (first and t < 2)

    got, want = (long_run(case, name, 50, overflow_at) for name in (BACKEND, "cpu"))
    assert len(want) == 6
    for i, ((params, state), (native, native_state)) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(params, native, f"record {i}, parameter")
        assert_same_bits(state, native_state, f"record {i}, state")


# -- nothing waits ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    return watch(monkeypatch)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "if": lambda x: 1 if x > 0 else 0,
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "equal": lambda x: torch.equal(x, x),
    "index": lambda x: [1, 2, 3][x.long()],
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("way", list(READS))
def test_reading_is_noticed(way: str, no_waiting: Callable[[], Any]) -> None:
    """The tests that follow can fail."""
    x = torch.ones((), device=DEVICE)
    with no_waiting(), pytest.raises((Waited, RuntimeError)):
        READS[way](x)
    assert float(x) == 1.0, "and the patch is undone"


# Every option on its own and all of them together; AMP's attributes; tensors as hyper-parameters, on the device.
QUIET: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"max_grad_norm": 1.0},
    "skip": {"skip_nonfinite": True},
    "stats": {"stats": True},
    "in_place": {"max_grad_norm": 1.0, "clip_in_place": True},
    "all": {"max_grad_norm": 1.0, "skip_nonfinite": True, "stats": True, "clip_in_place": True},
}


def on_device(case: Case) -> dict[str, Any]:
    """The case's arguments with tensors where they may be tensors: read by the kernels, not by the host."""
    kwargs = case.arguments()
    kwargs["lr"] = torch.as_tensor(kwargs["lr"]).float().to(DEVICE)
    return kwargs


@pytest.mark.parametrize("options", list(QUIET))
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensor_lr"])
@pytest.mark.parametrize("case", [*RULES, AMSGRAD, DAMPENED], ids=str)
def test_no_step_waits(
    case: Case, tensors: bool, options: str, no_waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and steady steps, overflow, AMP, gradients that appear, and a schedule, over three dtypes and strides."""
    params = [p for dtype in DTYPES[:3] for p in parameters(weights([(7,), (5, 3)], dtype))]
    params.append(Parameter(noise((6, 4), 3).t()))
    count_launches(monkeypatch, run=options == "all")
    kwargs = on_device(case) if tensors else case.arguments()
    opt = getattr(mo_fused, case.kind)(
        [{"params": params[:4]}, {"params": params[4:], "lr": kwargs["lr"]}], **{**kwargs, **QUIET[options]}
    )
    rows: Gradients = [[noise(p.shape, 50 * t + i, p.dtype) for i, p in enumerate(params)] for t in range(5)]
    rows[0][1] = None
    bad = rows[2][0]
    assert bad is not None
    bad[3] = math.nan
    scale, found = torch.tensor(4.0, device=DEVICE), torch.tensor(0.0, device=DEVICE)
    for t, row in enumerate(rows):
        for p, g in zip(params, row, strict=True):
            p.grad = g
        if t == 3:
            opt.grad_scale, opt.found_inf = scale, found
        if t == 4:
            opt._found_inf_report = torch.zeros((), device=DEVICE)  # as mo_fused.GradScaler leaves it
        with no_waiting():
            opt.step()
            if tensors:
                kwargs["lr"].mul_(0.5)
            else:
                opt.param_groups[0]["lr"] = 0.05 / (t + 1)
            last = opt.last_step
            assert last is not None
            _ = last.skipped, last.grad_norm  # tensors on the device: making them is not reading them
    assert_backend(opt, BACKEND)
    if options == "all":
        assert float(params[0].detach().isfinite().all())


def test_no_step_of_a_scaled_run_waits(no_waiting: Callable[[], Any]) -> None:
    """Until scaler.update(), which is torch's."""
    p = Parameter(noise((40,), 1))
    opt = ADAMW.ours([p], max_grad_norm=1.0)
    scaler = mo_fused.GradScaler(DEVICE.type, init_scale=4.0)
    scaler.scale(torch.zeros((), device=DEVICE))
    for bad in (False, True, False):
        p.grad = noise((40,), 2)
        if bad:
            p.grad[7] = math.inf
        start = p.detach().clone()
        with no_waiting():
            scaler.step(opt)
        scaler.update()
        assert bool(opt.last_step.skipped) is bad
        assert torch.equal(p.detach(), start) is bad


def test_gradient_utilities_run_here_and_do_not_wait(no_waiting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(monkeypatch)
    grads = [noise(s, 5 + i) for i, s in enumerate(SHAPES)]
    params = parameters([torch.zeros_like(g) for g in grads])
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    stats = mo_fused.grad_stats(params)  # whose numbers are the tensors' own are known to the host: this waits, once
    launches.clear()
    with no_waiting():
        total = mo_fused.get_total_norm(grads)
        largest = mo_fused.get_total_norm(grads, math.inf)
        before = mo_fused.clip_grad_norm_(params, 0.5)
        mo_fused.clip_grads_with_norm_(params, 0.25, total)
    assert set(launches) == {"grad_stats_kernel", "finish_kernel", "scale_grad_kernel"}
    for value in (stats.total_norm, total, before):
        assert float(value) == pytest.approx(norm64(grads), rel=1e-6)
    assert float(largest) == max(float(g.abs().max()) for g in grads if g.numel())
    for p, g in zip(params, grads, strict=True):
        assert p.grad is not None
        assert_close(p.grad, g.double() * (0.5 / norm64(grads)) * (0.25 / norm64(grads)), 3)


# -- tensors as learning rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=short)
@pytest.mark.parametrize("case", [ADAMW, SGD], ids=str)
def test_rate_in_a_tensor_has_the_bits_of_the_number(case: Case, dtype: torch.dtype, where: str) -> None:
    """Written in place between steps, and replaced by another tensor, in one of two groups."""
    rates = [0.1, 0.03, 0.003, 0.7, 1e-5, 0.2]
    values, grads = weights(TINY), gradients(TINY, len(rates))
    results = []
    for tensor in (False, True):
        params = parameters(values)
        lr: Any = torch.zeros((), dtype=dtype, device=DEVICE if where == "device" else "cpu")
        opt = case.ours([{"params": params[:3]}, {"params": params[3:], "lr": 0.01}], lr=lr if tensor else 1.0)
        for t, (rate, row) in enumerate(zip(rates, grads, strict=True)):
            exact = float(torch.tensor(rate, dtype=dtype))
            if not tensor:
                opt.param_groups[0]["lr"] = exact
            elif t == 3:
                opt.param_groups[0]["lr"] = lr = torch.full_like(lr, exact)
            else:
                lr.fill_(exact)
            drive(opt, params, [row])
        assert_backend(opt, BACKEND)
        if tensor and where == "device":
            assert part_of(opt).table.from_tensors, "the host has read the tensor"
        results.append(([p.detach() for p in params], states(opt, params)))
    assert_same_bits(results[1], results[0])


# -- statistics -------------------------------------------------------------------------------------------------------


def measured(count: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Tensor], Any, Any]:
    """(norms, parameters, per_param, table) of a run on a device with so many multiprocessors."""
    with monkeypatch.context() as patch:
        if count is not None:
            patch.setattr(dispatch, "multiprocessors", lambda device: count)
        shapes = [*[(n,) for n in range(1, 41)], (5000,), (41, 61)]
        params = parameters(weights(shapes))
        opt = ADAMW.ours(params, max_grad_norm=1.0, stats=True)
        drive(opt, params, gradients(shapes, 1))
        last = opt.last_step
        numbers = [last.grad_norm, last.clip_coef, last.grad_amax]
        numbers += [last.update_norm, last.stored_update_norm, last.param_norm]
        return numbers, [p.detach() for p in params], last.per_param(), part_of(opt).table


def test_statistics_depend_on_the_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the run nor on how many multiprocessors the work is dealt out to."""
    runs = [measured(count, monkeypatch) for count in (None, None, 1, 132)]
    for numbers, params, records, _ in runs[1:]:
        assert_same_bits(numbers, runs[0][0], "statistics")
        assert_same_bits(params, runs[0][1], "parameter")
        assert records == runs[0][2]
    few, many = ([one.programs for one in run[3].work.launches] for run in runs[2:])
    assert runs[2][3].n_chunks == runs[3][3].n_chunks == 40 + 3 + 2
    assert len(few) == len(many) == 1 and few[0] <= 16 and many[0] >= 40, (
        "with few multiprocessors tensors share programs"
    )


# -- the table --------------------------------------------------------------------------------------------------------


def test_only_rows_that_changed_are_sent_again() -> None:
    params = parameters(weights([(40,)] * 6))
    opt = ADAMW.ours(params, max_grad_norm=1.0)
    for p in params:
        p.grad = torch.ones_like(p)

    def sent() -> int:
        before = part_of(opt).table.sent_rows if opt._rows().devices else 0
        opt.step()
        return int(part_of(opt).table.sent_rows) - before

    assert sent() == 6, "all, once"
    assert (sent(), sent()) == (0, 0), "nothing has changed"
    kept = [params[2].grad, params[3].grad]
    params[2].grad = torch.ones_like(params[2])
    assert sent() == 1
    params[3].grad = torch.ones_like(params[3])
    params[2].grad.mul_(2)  # type: ignore[union-attr]  # new values are no news to the table
    assert sent() == 1
    params[2].grad, params[3].grad = kept
    assert sent() == 2, "two neighbours"
    opt.param_groups[0]["lr"] = 0.01
    assert sent() == 0, "hyper-parameters are not in the rows"
    params[5].grad = None
    assert sent() == 1, "a parameter without gradient is inactive"
    moved = opt.state[params[0]]["exp_avg"]
    opt.state[params[0]]["exp_avg"] = moved.clone()
    assert sent() == 1
    assert sent() == 0


def test_settings_are_sent_when_they_change() -> None:
    """The counterpart: what is not sent must not be needed."""
    values, grads = weights([(40,), (9,)]), gradients([(40,), (9,)], 4)
    rates = [0.1, 0.1, 0.02, 0.3]
    params, twins = parameters(values), parameters([v.double() for v in values])
    opt, theirs = SGD.ours(params), SGD.torch(twins)
    for rate, row in zip(rates, grads, strict=True):
        for o, ps in ((opt, params), (theirs, twins)):
            o.param_groups[0]["lr"] = rate
            drive(o, ps, [[None if g is None else g.to(ps[0].dtype) for g in row]])
    for p, q in zip(params, twins, strict=True):
        assert_close(p, q.detach(), 4)


def test_every_case_is_a_case_of_this_backend() -> None:
    """explain() before a step says the same as after it, for every optimizer."""
    for case in CASES:
        p = Parameter(torch.ones(3))
        opt = case.ours([p])
        assert_backend(opt, BACKEND)
        drive(opt, [p], [[torch.ones(3)]])
        assert_backend(opt, BACKEND)


# -- CUDA graphs ------------------------------------------------------------------------------------------------------


def test_utilities_leave_a_capture_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of theirs would have to live as long as the graph, and its memory be sent while nothing may be."""
    params = parameters(weights(SHAPES))
    for p, g in zip(params, gradients(SHAPES, 1)[0], strict=True):
        p.grad = g
    grads = [p.grad for p in params if p.grad is not None]
    assert on_one_device(grads) is not None
    monkeypatch.setattr(dispatch, "is_capturing", lambda device: True)
    assert on_one_device(grads) is None
    want = [g.clone() for g in grads]
    others = [Parameter(torch.empty_like(g)) for g in want]
    for other, g in zip(others, want, strict=True):
        other.grad = g
    norm = torch.nn.utils.clip_grad_norm_(others, 0.5)
    assert float(mo_fused.clip_grad_norm_(params, 0.5)) == pytest.approx(float(norm), rel=1e-6)
    for found, expected in zip(grads, want, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
