"""A few samples learnt by heart, or the reason to look for a fault; and the trainer as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mo_fused
from mo_fused.training.errors import InputError
from mo_fused.training.overfit import OverfitCheck, cut, first_samples
from mo_fused.training.schedules import warmup_cosine
from mo_fused.training.trainer import Trainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: further threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loader_of(inputs: Tensor | None = None, size: int = 150) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 8, generator=generator) if inputs is None else inputs
    return DataLoader(TensorDataset(x, torch.randint(4, (size,), generator=generator)), batch_size=32, shuffle=True)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trainer_of(**options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    opt = mo_fused.AdamW(model.parameters(), lr=1e-2, weight_decay=1.0, max_grad_norm=1.0)
    return Trainer(model, opt, cross_entropy, schedule=warmup_cosine(opt, 1000, 500), **options)


def test_a_sound_model_gets_there() -> None:
    """Random labels, dropout and a schedule in its warm-up do not keep it from it."""

    class Nobody:
        def step(self, *_: Any) -> None:
            pytest.fail("nobody is told of these steps")

    trainer = trainer_of(monitor=Nobody(), accumulate=2)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    numbers = torch.get_rng_state()
    result = trainer.overfit_check(loader_of())
    assert result.ok and result.samples == 100 and result.steps < 400, str(result)
    assert result.losses[0][1] == pytest.approx(1.39, abs=0.15) and result.losses[-1][1] <= result.threshold
    assert result.threshold == pytest.approx(0.05 * result.losses[0][1])
    assert str(result).startswith(f"gets there after {result.steps} steps: 100 samples")
    assert all(torch.equal(p, kept) for p, kept in zip(trainer.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in trainer.model.parameters()) and not trainer.optimizer.state
    group = trainer.optimizer.param_groups[0]
    assert (group["weight_decay"], group["lr"]) == (1.0, pytest.approx(1e-2 / 500))
    assert trainer.step == 0 and torch.equal(torch.get_rng_state(), numbers)


def test_batch_norm_of_small_batches_gets_there() -> None:
    """Whose loss in eval mode does not: running statistics are not those of eight samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), cross_entropy)
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(4)]
    result = trainer.overfit_check(data, samples=32)
    assert result.ok, str(result)
    assert all(module.training for module in model.modules())


def fails(result: OverfitCheck, steps: int) -> None:
    assert not result.ok and result.steps == steps
    assert "does not get there: loss stays at" in str(result)
    assert "look at labels, loss function, frozen parameters, learning rate" in str(result)
    assert result.losses[-1][1] > 0.5


def test_identical_inputs_do_not() -> None:
    """Then the loss of the class frequencies is the best there is."""
    result = trainer_of().overfit_check(loader_of(torch.ones(150, 8)), max_steps=100)
    fails(result, 100)
    assert result.losses[-1][1] == pytest.approx(1.38, abs=0.1)


def test_a_frozen_model_does_not() -> None:
    trainer = trainer_of()
    for parameter in list(trainer.model.parameters())[:-1]:
        parameter.requires_grad_(False)
    fails(trainer.overfit_check(loader_of(), max_steps=60), 60)


def test_a_loss_that_is_no_longer_finite() -> None:
    trainer = trainer_of()
    trainer.loss_fn = lambda model, batch: (cross_entropy(model, batch) - 0.9).sqrt()
    result = trainer.overfit_check(loader_of())
    assert not result.ok and result.steps < 500 and "loss is nan" in str(result)


def test_the_samples_are_the_first_of_an_epoch() -> None:
    data = [
        (torch.arange(n, n + 10), {"y": torch.arange(n, n + 10)}, [str(i) for i in range(n, n + 10)]) for n in (0, 10)
    ]
    batches = first_samples(data, 14)
    assert [len(batch[0]) for batch in batches] == [10, 4]
    assert batches[1][0].tolist() == batches[1][1]["y"].tolist() == [10, 11, 12, 13]
    assert batches[1][2] == ["10", "11", "12", "13"]
    assert [len(batch[0]) for batch in first_samples(data, 11)] == [10], "batch norm can't train on a single one"
    assert [len(batch[0]) for batch in first_samples(data, 1)] == [1]
    assert [len(batch[0]) for batch in first_samples(data, 1000)] == [10, 10]
    assert cut(torch.tensor(3.0), 10, 4).item() == 3.0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="samples to be 1 or more; found 0"):
        trainer_of().overfit_check(loader_of(), samples=0)
    with pytest.raises(InputError, match="valid targets among its first 5 samples; found none"):
        trainer_of().overfit_check([(torch.ones(5, 8), torch.full((5,), -100))], samples=5)
