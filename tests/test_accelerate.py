"""Accelerate's loop with our optimizers beside torch's: accumulation, clipping, saving, loss scaling, schedules."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_cases import (
    ADAMW,
    BF16,
    FP16,
    FP32,
    LIMIT,
    PAIRS,
    Pair,
    assert_differ,
    assert_losses,
    batches,
    falling,
    net,
    one_thread,  # noqa: F401  (an autouse fixture)
)

if importlib.util.find_spec("accelerate") is None:
    pytest.skip("accelerate is not installed", allow_module_level=True)
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="the subject is what Accelerate does around the step, on the host")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its settings in the process."""
    yield
    for kept in (AcceleratorState, GradientState, PartialState):
        kept._reset_state()


def start(precision: str = "no", accumulate: int = 1, scaler: torch.amp.GradScaler | None = None) -> Accelerator:
    """An accelerator of the CPU.

    With fp16 Accelerate switches neither autocast nor a scaler on there. These two lines are what it does on a GPU,
    with a scaler of the CPU: everything after them, the patched step and the skipped schedule too, is Accelerate's own.
    """
    for kept in (AcceleratorState, GradientState, PartialState):
        kept._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate)
    if precision == "fp16":
        assert accelerator.scaler is None, "Accelerate does it by itself now"
        accelerator.native_amp, accelerator.scaler = True, scaler
    return accelerator


class Loop:
    """The loop of Accelerate's documentation."""

    def __init__(self, accelerator: Accelerator, make: Any, clip: float | None = None, dropout: float = 0.0) -> None:
        self.accelerator, self.clip = accelerator, clip
        model = net(dropout)
        self.bare = make(model.parameters())
        prepared = accelerator.prepare(model, self.bare, falling(self.bare))
        self.model, self.optimizer, self.schedule = prepared
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.skipped: list[bool] = []

    def run(self, data: list[Any], overflow: tuple[int, ...] = ()) -> Loop:
        """``overflow``: batches whose loss is infinite."""
        for t, (x, y) in enumerate(data):
            with self.accelerator.accumulate(self.model):
                loss = self.model(x, y)["loss"]
                self.accelerator.backward(loss * float("inf") if t in overflow else loss)
                if self.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.rates.append(self.schedule.get_last_lr()[0])
            self.skipped.append(self.optimizer.step_was_skipped)
        return self


@pytest.mark.parametrize("clip", [None, LIMIT])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_accumulation_and_clipping(pair: Pair, clip: float | None) -> None:
    """Clipped by Accelerate or by the step: the losses of torch's optimizer that Accelerate clips for."""
    data = batches(8)
    theirs = Loop(start(accumulate=2), pair.torch, clip).run(data)
    ours = Loop(start(accumulate=2), pair.ours, clip).run(data)
    inside = Loop(start(accumulate=2), lambda p: pair.ours(p, max_grad_norm=clip)).run(data)
    for found in (ours, inside):
        assert_losses(found.losses, theirs.losses, **FP32)
        assert found.rates == theirs.rates
    if clip is not None:
        assert float(inside.bare.last_step.clip_coef) < 0.5
    if clip is not None and pair.kind == "SGD":
        assert_differ(ours.losses, Loop(start(accumulate=2), pair.torch).run(data).losses, **FP32)


@pytest.mark.parametrize("clip", ["none", "accelerate", "step"])
def test_bf16(clip: str) -> None:
    data = batches(6)
    limit = None if clip == "none" else LIMIT
    theirs = Loop(start("bf16"), ADAMW.torch, limit).run(data)
    inside = limit if clip == "step" else None
    ours = Loop(start("bf16"), lambda p: ADAMW.ours(p, max_grad_norm=inside), None if inside else limit).run(data)
    assert_losses(ours.losses, theirs.losses, **BF16)
    assert_differ(theirs.losses, Loop(start(), ADAMW.torch, limit).run(data).losses, rtol=1e-6, atol=1e-7)


SCALERS = {"torch": torch.amp.GradScaler, "ours": mo_fused.GradScaler}


@pytest.mark.parametrize("clip", ["none", "accelerate", "step"])
@pytest.mark.parametrize("amp", ["fused", "torch"])
@pytest.mark.parametrize("scaler", list(SCALERS))
@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
def test_fp16_scaler_and_skipped_steps(pair: Pair, scaler: str, amp: str, clip: str) -> None:
    """Two of seven batches overflow: neither the optimizer nor the schedule moves, and the scale is halved."""
    data, overflow = batches(7), (1, 4)
    limit = None if clip == "none" else LIMIT
    options: dict[str, Any] = dict(init_scale=2.0**10)
    theirs = Loop(start("fp16", scaler=torch.amp.GradScaler("cpu", **options)), pair.torch, limit).run(data, overflow)
    inside = limit if clip == "step" else None
    accelerator = start("fp16", scaler=SCALERS[scaler]("cpu", **options))
    make = lambda p: pair.ours(p, max_grad_norm=inside, amp=amp)  # noqa: E731
    ours = Loop(accelerator, make, None if inside else limit).run(data, overflow)
    assert_losses(ours.losses, theirs.losses, **FP16)
    assert ours.skipped == theirs.skipped == [t in overflow for t in range(7)]
    assert ours.rates == theirs.rates == [pair.options["lr"] * 0.9**n for n in (1, 1, 2, 3, 3, 4, 5)]
    assert accelerator.scaler.get_scale() == 2.0**8


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_saved_and_loaded_state_goes_on_as_if_never_stopped(pair: Pair, precision: str, tmp_path: Path) -> None:
    """To the bit, dropout, scale and schedule included."""
    data = batches(6)

    def loop() -> Loop:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        make = lambda p: pair.ours(p, max_grad_norm=LIMIT)  # noqa: E731
        return Loop(start(precision, scaler=scaler), make, dropout=0.3)

    straight = loop().run(data[:3])
    straight.accelerator.save_state(str(tmp_path))
    straight.run(data[3:])
    resumed = loop()
    resumed.accelerator.load_state(str(tmp_path))
    resumed.run(data[3:])
    assert resumed.losses == straight.losses[3:] and resumed.rates == straight.rates[3:]
    assert len(set(straight.losses)) == 6
