"""The training loop against loops written by hand: accumulation, precision, clipping, schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_cases import (
    IGNORED,
    Batch,
    Log,
    Samples,
    assert_same,
    class_loss,
    exact_loss,
    falling,
    frozen,
    model_of,
    padded_batches,
    simple,
    together,
)

import mo_fused
from mo_fused.training.errors import InputError
from mo_fused.training.trainer import Trainer

pytestmark = pytest.mark.cpu_only(reason="the loop around the step, on the host alone")

UNEVEN = [10, 1, 0, 3, 25, 1, 1, 2, 0, 7, 1]
"""Targets that count in each batch: three steps of 4, 4 and 3 batches an epoch."""


def chunks(batches: list[Batch], size: int, epochs: int) -> Iterator[list[Batch]]:
    for _ in range(epochs):
        yield from (batches[i : i + size] for i in range(0, len(batches), size))


def by_hand(model: nn.Module, optimizer: Any, loss_fn: Any, steps: Iterator[list[Batch]]) -> list[float]:
    """One large batch a step."""
    losses = []
    for batches in steps:
        loss = loss_fn(model, together(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# --- accumulation


def test_accumulating_is_one_large_batch() -> None:
    batches, log = padded_batches(UNEVEN), Log()
    model = model_of()
    Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), class_loss, accumulate=4, monitor=log
    ).fit(batches, 6)
    exact = model_of().double()
    losses = by_hand(
        exact, torch.optim.SGD(exact.parameters(), lr=0.3, momentum=0.9), exact_loss, chunks(batches, 4, epochs=2)
    )
    start = model_of()
    for got, want, first in zip(model.parameters(), exact.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
        assert (got - first).abs().max() > 1e-2, "the steps are far larger than what is compared to"
    assert log.of("loss") == pytest.approx(losses, abs=1e-6)
    assert log.of("targets") == [14, 29, 8] * 2
    assert log.of("batches") == [3, 4, 2] * 2, "batches without a target that counts are left out"


@pytest.mark.parametrize("ours", [True, False])
def test_accumulating_is_one_large_batch_for_adamw(ours: bool) -> None:
    batches = padded_batches(UNEVEN)
    kind = mo_fused.AdamW if ours else torch.optim.AdamW
    model, exact = model_of().double(), model_of().double()
    Trainer(model, kind(model.parameters(), lr=0.05), exact_loss, accumulate=4).fit(batches, 6)
    by_hand(exact, torch.optim.AdamW(exact.parameters(), lr=0.05), exact_loss, chunks(batches, 4, epochs=2))
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_samples_without_padding_weigh_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 4, (n,), generator=generator)) for n in (7, 1, 3, 5)
    ]
    log, model, exact = Log(), model_of().double(), model_of().double()
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.3), exact_loss, accumulate=3, monitor=log).fit(batches, 4)
    by_hand(exact, torch.optim.SGD(exact.parameters(), lr=0.3), exact_loss, chunks(batches, 3, epochs=2))
    assert_close(model, exact, 1e-12)
    assert log.of("samples") == log.of("targets") == [11, 5, 11, 5]


def test_regression_targets_weigh_by_samples() -> None:
    def squares(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0].double()), batch[1].double())

    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(n, 6, generator=generator), torch.randn(n, 4, generator=generator)) for n in (2, 9, 1, 4, 4)
    ]
    model, exact = model_of().double(), model_of().double()
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.3), squares, accumulate=2).fit(batches, 6)
    by_hand(exact, torch.optim.SGD(exact.parameters(), lr=0.3), squares, chunks(batches, 2, epochs=2))
    assert_close(model, exact, 1e-12)


def test_own_count_decides_the_weights() -> None:
    """Targets that are marked with another number than -100."""

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0].double()).flatten(0, -2), batch[1].flatten(), ignore_index=7)

    batches = [(x, torch.where(y == IGNORED, 7, y)) for x, y in padded_batches([9, 1, 0, 4])]
    model, exact = model_of().double(), model_of().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    Trainer(model, optimizer, loss_fn, accumulate=4, count=lambda batch: int((batch[1] != 7).sum())).fit(batches, 3)
    by_hand(exact, torch.optim.SGD(exact.parameters(), lr=0.3), loss_fn, chunks(batches, 4, epochs=3))
    assert_close(model, exact, 1e-12)


def assert_close(model: nn.Module, exact: nn.Module, tolerance: float) -> None:
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def test_a_step_without_targets_is_no_step() -> None:
    batches, log = padded_batches([0, 3, 0, 0, 2]), Log()
    trainer, _ = simple(monitor=log)
    trainer.fit(batches, 4)
    assert log.of("targets") == [3, 2, 3, 2] and trainer.schedule.last_epoch == 4


@pytest.mark.parametrize("endless", [False, True])
def test_no_target_anywhere_is_an_error(endless: bool) -> None:
    def for_ever() -> Iterator[Batch]:
        while True:
            yield from padded_batches([0, 0])

    trainer, _ = simple()
    before = frozen(trainer.model.state_dict())
    with pytest.raises(InputError, match=r"loader: expected batches with valid targets; found .* without any; look at"):
        trainer.fit(for_ever() if endless else padded_batches([0, 0]), 2)
    assert trainer.step == 0
    assert_same(trainer.model.state_dict(), before)


@pytest.mark.parametrize("ours", [True, False])
def test_one_batch_a_step_has_the_bits_of_a_plain_loop(ours: bool) -> None:
    kind = mo_fused.AdamW if ours else torch.optim.AdamW
    seen = {}
    for plain in (True, False):
        model = model_of(dropout=0.3)
        optimizer = kind(model.parameters(), lr=0.02)
        schedule = falling(optimizer)
        loader = DataLoader(Samples(22, noise=0.1), batch_size=4, shuffle=True)
        torch.manual_seed(5)
        np.random.seed(5)
        if plain:
            for _ in range(2):
                for batch in loader:
                    optimizer.zero_grad()
                    class_loss(model, batch).backward()
                    optimizer.step()
                    schedule.step()
        else:
            Trainer(model, optimizer, class_loss, schedule=schedule).fit(loader, 12)
        seen[plain] = (model.state_dict(), optimizer.state_dict(), schedule.state_dict(), torch.get_rng_state())
    assert_same(seen[False], seen[True])


def test_gradients_that_are_there_count_with_the_first_step() -> None:
    batches = padded_batches([6, 2])
    model, other = model_of(), model_of()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, other)]
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5)
    Trainer(model, optimizers[0], class_loss).fit(batches, 2)
    by_hand(other, optimizers[1], class_loss, chunks(batches, 1, epochs=1))
    assert_same(model.state_dict(), other.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())


# --- precision


@pytest.mark.parametrize("kind", ["ours", "ours, unscaled by torch", "torch"])
def test_fp16_skips_hold_the_schedule(kind: str) -> None:
    """Each overflow halves the scale until the gradients fit into float16."""
    skips = 4
    batches, log, model = padded_batches([8]), Log(), model_of()
    amp = {"amp": "torch"} if "unscaled" in kind else {}
    optimizer: Any = (
        torch.optim.AdamW(model.parameters(), lr=1e-4)
        if kind == "torch"
        else mo_fused.AdamW(model.parameters(), lr=1e-4, **amp)
    )
    first = overflowing_scale(batches)
    scaler_type: Any = torch.amp.GradScaler if kind == "torch" else mo_fused.GradScaler
    scaler = scaler_type("cpu", init_scale=first * 2 ** (skips - 1))
    trainer = Trainer(
        model, optimizer, class_loss, schedule=falling(optimizer), precision="fp16", scaler=scaler, monitor=log
    )
    trainer.fit(batches, 1)
    assert_same(model.state_dict(), model_of().state_dict())
    trainer.fit(batches, 9)
    assert [row["skipped"] for row in log.of("measured")] == [True] * skips + [False] * 5
    late = kind == "ours"  # which learns of a skip one step later, and so holds the schedule one step later
    counts = [0, 1, 1, 1, 1, 1, 2, 3, 4] if late else [0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert log.of("lr") == pytest.approx([1e-4 / (1 + count) for count in counts])
    assert scaler.get_scale() == first / 2


def overflowing_scale(batches: list[Batch]) -> float:
    """The smallest power of two that makes gradients overflow, found with torch alone."""
    scale = 1.0
    while True:
        model = model_of()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = class_loss(model, batches[0])
        (loss * scale).backward()
        if not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
            return scale
        scale *= 2


def test_bf16_is_autocast() -> None:
    model, other, kinds = model_of(), model_of(), []
    batches = padded_batches([8, 3])

    def watched(model: nn.Module, batch: Batch) -> Tensor:
        kinds.append(model(batch[0]).dtype)
        return class_loss(model, batch)

    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.3), watched, precision="bf16").fit(batches, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    for batch in batches * 2:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = class_loss(other, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert kinds == [torch.bfloat16] * 4
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_is_that_of_torch(precision: str) -> None:
    batches, log = padded_batches([8, 3, 5]), Log()
    model, other = model_of(), model_of()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, other))
    Trainer(model, optimizer, class_loss, precision=precision, max_grad_norm=0.2, monitor=log).fit(batches, 3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    norms = []
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.float16, enabled=precision == "fp16"):
            loss = class_loss(other, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(plain)
        norms.append(float(nn.utils.clip_grad_norm_(other.parameters(), 0.2)))
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
    assert min(norms) > 0.2
    assert_same(model.state_dict(), other.state_dict())
    measured = log.of("measured")
    assert [row["grad_norm"] for row in measured] == norms
    assert [row["clip_coef"] for row in measured] == pytest.approx([0.2 / norm for norm in norms], rel=1e-5)


def test_groups_that_are_not_clipped_are_not_measured_either() -> None:
    batch, log, model = padded_batches([8]), Log(), model_of()
    apart, clipped = model[0], model[2]
    groups = [{"params": list(apart.parameters()), "clip": False}, {"params": list(clipped.parameters())}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    other = model_of()
    class_loss(other, batch[0]).backward()
    gradients = [parameter.grad for parameter in other.parameters() if parameter.grad is not None]
    norm = float(torch.cat([gradient.flatten() for gradient in gradients[2:]]).norm())
    Trainer(model, optimizer, class_loss, max_grad_norm=norm / 4, monitor=log).fit(batch, 1)
    assert log.rows[0]["measured"]["grad_norm"] == pytest.approx(norm)
    pairs = zip(model.parameters(), other.parameters(), gradients, (1.0, 1.0, 0.25, 0.25), strict=True)
    for got, first, gradient, factor in pairs:
        torch.testing.assert_close(got, first - factor * gradient, rtol=1e-4, atol=1e-6)


def test_a_skipped_step_holds_the_schedule_one_step_later() -> None:
    batches = padded_batches([8, 8, 8, 8, 8])
    batches[1][0][0, 0] = float("nan")
    log, model = Log(), model_of()
    optimizer = mo_fused.AdamW(model.parameters(), lr=0.02, skip_nonfinite=True)
    trainer = Trainer(model, optimizer, class_loss, schedule=falling(optimizer), monitor=log)
    trainer.fit(batches, 5)
    assert [row["skipped"] for row in log.of("measured")] == [0, 1, 0, 0, 0]
    assert log.of("lr") == pytest.approx([0.02 / (1 + count) for count in (0, 1, 2, 2, 3)])
    assert trainer.schedule.last_epoch == 4, "steps that changed something"
