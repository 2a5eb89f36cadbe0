"""Steps with an outlying gradient are left out before they are made, and nothing else changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watcher_loop import Loop, set_gradients, three_layers
from watcher_loop import reads as reads

import mo_fused
from mo_fused.training.watchers import NormOutlier
from mo_fused.training.watchers.norm_gate import NormGate


def bits(model: nn.Module, optimizer: Any) -> list[Tensor]:
    state = [value.clone() for entry in optimizer.state.values() for value in entry.values()]
    return [*(p.detach().clone() for p in model.parameters()), *state]


@pytest.mark.parametrize("options", [{}, {"stats": True}, {"max_grad_norm": 1.0}, {"skip_nonfinite": True}])
def test_norm_outlier_skips_on_the_device(options: dict[str, Any]) -> None:
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), lr=1e-2, **options)
    watcher = NormOutlier(window=10, skip=True, action="log")
    loop = Loop(optimizer, watcher)
    skipped = []
    for step in range(1, 20):
        set_gradients(model, 5.0 if step in (8, 15) else 0.1)
        before = bits(model, optimizer)
        optimizer.step()
        assert optimizer.last_step is not None and "found_inf" not in optimizer.__dict__
        same = len(before) == len(bits(model, optimizer)) and all(map(torch.equal, before, bits(model, optimizer)))
        assert same == bool(optimizer.last_step.skipped)
        if same:
            skipped.append(step)
        norm = (5.0 if step in (8, 15) else 0.1) * math.sqrt(sum(p.numel() for p in model.parameters()))
        loop.step(grad_norm=norm)
    assert skipped == [15]  # at step 8 the window wasn't full
    assert [(event["step"], event["skipped"]) for event in loop.events] == [(15, True)]
    watcher.close()
    set_gradients(model, 50.0)
    optimizer.step()
    assert not bool(optimizer.last_step.skipped)


def test_skipping_alters_nothing_else() -> None:
    """Bit for bit the steps of a loop that leaves the same steps out by itself."""
    results = []
    for gated in (True, False):
        model = three_layers()
        optimizer = mo_fused.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=1.0)
        watcher = NormOutlier(window=8, skip=gated, optimizer=optimizer if gated else None, action="log")
        for step in range(1, 25):
            size = 30.0 if step % 7 == 3 else 0.1
            set_gradients(model, size)
            if gated or step < 9 or size == 0.1:
                optimizer.step()
            norm = size * math.sqrt(sum(p.numel() for p in model.parameters()))
            watcher.on_record({"step": step, "grad_norm": norm, "skipped": False})
        results.append(bits(model, optimizer))
        assert [event["step"] for event in watcher.events] == [10, 17, 24]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_skipping_leaves_the_loss_scale_to_the_scaler(ours: bool, unscale: bool) -> None:
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), lr=1e-2)
    scaler: Any = (mo_fused.GradScaler if ours else torch.amp.GradScaler)("cpu", init_scale=1024.0)
    watcher = NormOutlier(window=8, skip=True, optimizer=optimizer, action="log")
    for step in range(1, 9):
        watcher.on_record({"step": step, "grad_norm": 1.0})
    for value, skipped, scale in (
        (0.01, False, 1024.0),
        (5.0, True, 1024.0),
        (math.inf, True, 512.0),
        (math.nan, True, 256.0),
    ):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(torch.zeros((), requires_grad=True))
        set_gradients(model, value * scaler.get_scale())
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        same = all(map(torch.equal, before, [p.detach() for p in model.parameters()]))
        assert (same, scaler.get_scale()) == (skipped, scale)
        assert "found_inf" not in optimizer.__dict__ and "grad_scale" not in optimizer.__dict__


def test_a_step_that_raised_leaves_no_gate_behind() -> None:
    model = three_layers()
    optimizer = mo_fused.SGD(model.parameters(), lr=0.1)
    watcher = NormOutlier(window=8, skip=True, optimizer=optimizer, action="log")
    for step in range(1, 9):
        watcher.on_record({"step": step, "grad_norm": 1.0})
    set_gradients(model, 9.0)
    handle = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("planted")))
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()
    set_gradients(model, 0.01)
    optimizer.step()
    assert optimizer.last_step is not None and not bool(optimizer.last_step.skipped)


def test_a_gate_keeps_what_somebody_else_has_set() -> None:
    model = three_layers()
    optimizer = mo_fused.SGD(model.parameters(), lr=0.1)
    NormGate(optimizer, limit=1.0)
    for theirs in (torch.zeros(()), torch.ones(())):
        optimizer.found_inf = theirs
        for value in (0.01, 9.0):
            set_gradients(model, value)
            optimizer.step()
            assert optimizer.last_step is not None
            assert bool(optimizer.last_step.skipped) == (value == 9.0 or bool(theirs))
            assert optimizer.found_inf is theirs


def test_a_gate_lets_a_closure_through() -> None:
    model = three_layers()
    optimizer = mo_fused.SGD(model.parameters(), lr=0.1)
    NormGate(optimizer, limit=1.0)
    set_gradients(model, 9.0)
    optimizer.step(lambda: set_gradients(model, 0.01))
    assert optimizer.last_step is not None and not bool(optimizer.last_step.skipped)


def test_a_gate_looks_at_the_groups_that_are_clipped() -> None:
    model = three_layers()
    groups: list[dict[str, Any]] = [{"params": list(model[0].parameters())}]
    groups.append({"params": list(model[1].parameters()), "clip": False})
    optimizer = mo_fused.SGD(groups, lr=0.1, max_grad_norm=1.0)
    NormGate(optimizer, limit=1.0)
    for layer, skipped in ((1, False), (0, True)):
        set_gradients(model, 0.01)
        for parameter in model[layer].parameters():
            assert parameter.grad is not None
            parameter.grad *= 1000
        optimizer.step()
        assert optimizer.last_step is not None and bool(optimizer.last_step.skipped) is skipped


def test_skip_is_refused_where_it_cannot_be() -> None:
    model = three_layers()
    gone = mo_fused.AdamW(model.parameters())
    with mo_fused.gradient_release(model, gone), pytest.raises(mo_fused.training.InputError, match="gradient_release"):
        NormOutlier(skip=True, optimizer=gone)
    with pytest.raises(mo_fused.training.InputError, match="expected an optimizer of mo_fused"):
        Loop(torch.optim.AdamW(model.parameters()), NormOutlier(skip=True))


def test_a_gate_reads_no_tensor(reads: list[str]) -> None:
    """The decision goes into the step as a tensor; with parameters on the host the step itself then reads it."""
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters())
    gate = NormGate(optimizer, limit=1.0)
    for value, over in ((0.01, 0.0), (1.0, 1.0)):
        set_gradients(model, value)
        reads.clear()
        gate._look(optimizer, (optimizer,), {})
        assert reads == [] and optimizer.found_inf is not None
        assert float(optimizer.found_inf) == over
        gate._put_back()
