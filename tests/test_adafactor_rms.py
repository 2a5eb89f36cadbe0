"""RMS(p), which Adafactor scales its steps by: carried from the last write, taken again when somebody else wrote."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from adafactor_reference import BOTH, MOMENTUM, Form
from cases import (
    BACKEND,
    BACKENDS,
    DEVICE,
    DTYPES,
    assert_backend,
    drive,
    gradients,
    noise,
    parameters,
    short,
    some,
    states,
    weights,
)
from oracle import assert_close, assert_same_bits
from torch.nn import Parameter

# alpha = RMS(p) rho: a wrong RMS shows as a step of another size.
SCALED = Form("scaled", "torch", dict(lr=0.1, relative_step=False))
RMS_SHAPES = [(), (40,), (12, 9), some([(300, 700)], [(27, 90)])[0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some(DTYPES, DTYPES[:2]), ids=short)
@pytest.mark.parametrize("form", some(BOTH, [MOMENTUM]), ids=str)
def test_carrying_the_rms_has_the_bits_of_measuring_it(form: Form, dtype: torch.dtype, backend: str) -> None:
    """What a step leaves of the parameter's sum of squares is, bit for bit, what the next one would find."""
    results = []
    for again in (False, True):
        params = parameters(weights(RMS_SHAPES, dtype))
        # One that is walked through a layout.
        params.append(Parameter(noise((14, 25), 3, dtype).t()))
        opt = form.ours(params, backend=backend)
        for row in gradients([*RMS_SHAPES, (25, 14)], 3, dtype):
            if again and "_row_set" in opt.__dict__:
                opt._row_set.known_params.seen[:] = -1
            drive(opt, params, [row])
        assert_backend(opt, backend)
        results.append(([p.detach() for p in params], states(opt, params)))
    assert_same_bits(results[1], results[0])


def change_data(p: Parameter, opt: Any) -> None:
    p.data = p.data * 3


def change_in_place(p: Parameter, opt: Any) -> None:
    with torch.no_grad():
        p.mul_(3)


def change_by_view(p: Parameter, opt: Any) -> None:
    with torch.no_grad():
        p.view(-1)[:5] = 9.0


def change_and_load(p: Parameter, opt: Any) -> None:
    p.data.mul_(3)  # which leaves no trace
    opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "change", some([change_data, change_in_place, change_by_view, change_and_load], [change_data, change_in_place])
)
def test_the_rms_is_taken_again_when_the_parameter_was_written(change: Any, backend: str) -> None:
    values, grads = weights(RMS_SHAPES), gradients(RMS_SHAPES, 4)
    params = parameters(values)
    opt = SCALED.ours(params, backend=backend)
    drive(opt, params, grads[:2])
    _, entries = SCALED.exact(values, grads[:2])
    for p in params:
        if p.numel() > 5 or change is not change_by_view:
            change(p, opt)
    want, _ = SCALED.exact([p.detach() for p in params], grads[2:], states=entries)
    drive(opt, params, grads[2:])
    assert_backend(opt, backend)
    for p, w in zip(params, want, strict=True):
        assert_close(p, w, 4, f"{tuple(p.shape)}")


def test_a_write_that_leaves_no_trace_is_noticed_one_step_later() -> None:
    """``p.data.mul_(...)`` changes neither address nor version: one step has the old size."""
    p = Parameter(noise((40, 30), 1))
    opt = SCALED.ours([p], backend=BACKEND)
    rows = gradients([(40, 30)], 4)
    drive(opt, [p], rows[:2])
    p.data.mul_(4)
    drive(opt, [p], rows[2:3])
    _, entries = SCALED.exact([noise((40, 30), 1)], rows[:3])
    want, _ = SCALED.exact([p.detach()], rows[3:], states=entries)
    drive(opt, [p], rows[3:])
    assert_close(p, want[0], 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rms_of_parameters_that_come_and_go(backend: str) -> None:
    """Without a gradient for a step, written meanwhile, in another group, added later; each step against float64."""
    shapes = [(40,), (12, 9), (5, 4, 3)]
    params = parameters(weights(shapes))
    opt = SCALED.ours(params[:2], backend=backend)
    entries: list[Any] = [{} for _ in shapes]
    for t, row in enumerate(gradients(shapes, 9)):
        if t == 2:
            row[0] = None
        if t == 3:
            row[0] = row[1] = None
        if t == 4:
            opt.add_param_group({"params": [params[2]]})
        if t == 6:
            change_in_place(params[0], opt)
            row[0] = None
        if t == 8:
            opt.param_groups[1]["params"].insert(0, opt.param_groups[0]["params"].pop())
        if t < 4:
            row[2] = None
        before = [p.detach().clone() for p in params]
        want, entries = SCALED.exact(before, [row], states=entries)
        drive(opt, params, [row])
        for p, w in zip(params, want, strict=True):
            assert_close(p, w, 2, f"step {t}: {tuple(p.shape)}")
    assert_backend(opt, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rms_after_a_skipped_step(backend: str) -> None:
    """First, or in between with the parameter written just before; whoever decided it; with stats or without."""
    shape = (40, 30)
    for first, stats, who in itertools.product((True, False), some((False, True), (False,)), ("skip", "scaler")):
        p = Parameter(noise(shape, 1))
        opt = SCALED.ours([p], backend=backend, stats=stats, skip_nonfinite=who == "skip")
        entries: list[Any] = [{}]
        rows = gradients([shape], 5)
        for t, row in enumerate(rows):
            bad = t == (0 if first else 2)
            if t == 2:
                change_in_place(p, opt)
            p.grad = torch.full(shape, float("inf"), device=DEVICE) if bad else row[0]
            want = [p.detach().double().cpu()]
            if not bad:
                want, entries = SCALED.exact([p.detach()], [row], states=entries)
            if who == "skip":
                opt.step()
            else:
                # What torch's GradScaler does: the decision is made before the step, which need not measure anything.
                opt.grad_scale = torch.tensor(1.0, device=DEVICE)
                opt.found_inf = torch.tensor(float(bad), device=DEVICE)
                opt.step()
                del opt.grad_scale, opt.found_inf
            assert_close(p, want[0], 2, f"{first} {stats} {who}, step {t}")
