"""What surrounds the steps of the training loop: monitor, validation, stopping, errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from trainer_cases import (
    Batch,
    Log,
    Samples,
    assert_same,
    class_loss,
    falling,
    frozen,
    model_of,
    simple,
)

import mo_fused
from mo_fused.training.errors import InputError
from mo_fused.training.trainer import Trainer

pytestmark = pytest.mark.cpu_only(reason="the loop around the step, on the host alone")

# --- monitor, validation, stop


def test_the_monitor_is_told_of_every_step() -> None:
    model, log = model_of(), Log()
    optimizer = mo_fused.AdamW(model.parameters(), lr=0.02, max_grad_norm=0.1, stats=True)
    loader = DataLoader(Samples(10), batch_size=4)
    expected = float(class_loss(model, next(iter(loader))).detach())
    trainer = Trainer(model, optimizer, class_loss, schedule=falling(optimizer), monitor=log)
    assert trainer.fit(loader, 5) == 5
    assert log.of("step") == [1, 2, 3, 4, 5]
    assert log.of("samples") == log.of("targets") == [4, 4, 2, 4, 4] and log.of("batches") == [1] * 5
    assert log.of("loss")[0] == expected
    assert log.of("epoch") == [0, 0, 1, 1, 1], "epochs that are over"
    assert log.of("lr") == pytest.approx([0.02 / k for k in range(1, 6)])
    assert all(0 <= row["data_seconds"] <= row["seconds"] < 60 for row in log.rows)
    for row in log.of("measured"):
        assert row["clip_coef"] == pytest.approx(min(1.0, 0.1 / row["grad_norm"]), rel=1e-3) and row["skipped"] == 0
        assert row["update_norm"] > 0
    assert log.of("validation") == [None] * 5


@pytest.mark.parametrize(("every", "steps", "due"), [(2, 5, [2, 4, 5]), (0, 3, [3]), (3, 3, [3]), (1, 2, [1, 2])])
def test_validation_is_called_when_due(every: int, steps: int, due: list[int]) -> None:
    log, seen = Log(), []

    def validate() -> dict[str, float]:
        seen.append(trainer.step)
        trainer.model.eval()
        return {"val_loss": torch.tensor(trainer.step / 2)}  # type: ignore[dict-item]

    trainer, loader = simple(monitor=log, validate=validate, validate_every=every)
    trainer.fit(loader, steps)
    assert seen == due
    assert log.of("validation") == [{"val_loss": k / 2} if k in due else None for k in range(1, steps + 1)]


def test_validation_gives_back_the_modes() -> None:
    modes = []

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        modes.append([module.training for module in model.modules()])
        return class_loss(model, batch)

    def validate() -> dict[str, float]:
        model.eval()
        return {}

    def freeze(step: int) -> None:
        model[1].eval()

    model = model_of(norm=True)
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Samples(8), batch_size=4)
    Trainer(model, optimizer, loss_fn, validate=validate, validate_every=1, monitor=Log(freeze)).fit(loader, 3)
    frozen_norm = [True, True, False, True, True]
    assert modes == [[True] * 5, frozen_norm, frozen_norm]


def test_validation_leaves_no_trace_in_training() -> None:
    """A validation set in a DataLoader draws from the global generator, as dropout does."""
    states = []
    for every in (0, 1):

        def validate() -> dict[str, float]:
            return {"val_loss": float(sum(x.sum() for x, _ in DataLoader(Samples(8), shuffle=True)) + torch.rand(()))}

        trainer, loader = simple(validate=validate, validate_every=every)
        torch.manual_seed(1)
        trainer.fit(loader, 6)
        states.append((trainer.model.state_dict(), torch.get_rng_state()))
    assert_same(states[1], states[0])


def test_values_of_validation_have_to_have_names() -> None:
    trainer, loader = simple(validate=lambda: 0.5)
    with pytest.raises(TypeError, match="validate: expected numbers by name.*; found float; return"):
        trainer.fit(loader, 1)


def test_stop_from_the_monitor_ends_after_that_step() -> None:
    log = Log(lambda step: trainer.stop() if step == 3 else None)
    trainer, loader = simple(monitor=log)
    assert trainer.fit(loader, 100) == 3 and log.of("step") == [1, 2, 3]
    log.then = None
    assert trainer.fit(loader, 4) == 4, "a later call goes on"


def test_stop_from_another_thread() -> None:
    begun = threading.Event()
    log = Log(lambda step: begun.set() if step == 2 else None)
    trainer, loader = simple(monitor=log)

    def other() -> None:
        begun.wait(30)
        trainer.stop()

    thread = threading.Thread(target=other)
    thread.start()
    done = trainer.fit(loader, 1_000_000)
    thread.join()
    assert 2 <= done < 1_000_000 and log.of("step") == list(range(1, done + 1))


def test_a_step_that_was_asked_for_before_is_no_step() -> None:
    trainer, loader = simple()
    assert trainer.fit(loader, 3) == 3
    before = frozen(trainer.model.state_dict())
    assert trainer.fit(loader, 2) == 3
    assert_same(trainer.model.state_dict(), before)


# --- errors


class Constant:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (1.5, "float"),
        (None, "NoneType"),
        (torch.zeros(3, requires_grad=True), r"a tensor of shape \(3,\)"),
        (torch.zeros(1, requires_grad=True), r"a tensor of shape \(1,\)"),
        (torch.tensor(1.0), r"a tensor of shape \(\) without a gradient"),
        ((torch.tensor(1.0, requires_grad=True), {}), "tuple"),
    ],
)
def test_what_a_loss_function_returns(returned: Any, found: str) -> None:
    trainer, loader = simple()
    trainer.loss_fn = Constant(returned)
    before = frozen((trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.schedule.state_dict()))
    with pytest.raises(
        TypeError, match=f"^loss_fn: expected a 0-dim tensor to call backward on; found {found}; (return|look)"
    ):
        trainer.fit(loader, 2)
    assert trainer.step == 0
    assert_same((trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.schedule.state_dict()), before)


OPTIONS = [
    ({"accumulate": 0}, "accumulate to be a whole number, 1 or more; found 0; give the number of batches"),
    ({"accumulate": 1.5}, "accumulate to be a whole number, 1 or more; found 1.5; give the number of batches"),
    ({"validate_every": -1}, "validate_every to be a whole number, 0 or more; found -1; give a number of steps"),
    ({"validate_every": 2.5}, "validate_every to be a whole number, 0 or more; found 2.5; give a number of steps"),
    ({"max_grad_norm": 0.0}, "max_grad_norm to be above 0 or None; found 0.0; give the largest norm"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm to be above 0 or None; found nan; give the largest norm"),
    ({"precision": "fp8"}, "precision to be one of fp32, bf16, fp16; found 'fp8'; give one of these"),
    (
        {"scaler": torch.amp.GradScaler("cpu"), "precision": "bf16"},
        "scaler to be None with precision='bf16', which needs no loss scale; found 'GradScaler'; leave it out",
    ),
    ({"schedule": "other"}, "schedule to be a schedule of this optimizer; found 'one of another'; build it"),
    ({"schedule": "plateau"}, "schedule to be one that is stepped without a value; found 'ReduceLROnPlateau'; step it"),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=[said[:30] for _, said in OPTIONS])
def test_bad_options(options: dict[str, Any], said: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options.get("schedule") == "other":
        options = {"schedule": falling(torch.optim.SGD(model.parameters(), lr=0.1))}
    elif options.get("schedule") == "plateau":
        options = {"schedule": ReduceLROnPlateau(optimizer)}
    with pytest.raises(ValueError) as caught:
        Trainer(model, optimizer, class_loss, **options)
    assert str(caught.value).startswith(f"expected {said}")


def test_one_of_the_two_clips() -> None:
    model = model_of()
    optimizer = mo_fused.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
    with pytest.raises(
        ValueError, match="max_grad_norm to be None: this optimizer clips .*; found 2.0; give it to one"
    ):
        Trainer(model, optimizer, class_loss, max_grad_norm=2.0)
    Trainer(model, optimizer, class_loss)


def test_saving_needs_a_folder() -> None:
    trainer, _ = simple()
    with pytest.raises(ValueError, match="checkpoints to be a folder; found None; give checkpoints="):
        trainer.save()
    with pytest.raises(ValueError, match="source to be a checkpoint file; found None; name one"):
        trainer.resume()


def test_a_loader_without_batches() -> None:
    trainer, _ = simple()
    with pytest.raises(InputError, match="^loader: expected at least one batch in an epoch; found none; give"):
        trainer.fit([], 1)
    with pytest.raises(TypeError, match="^loader: expected batches to iterate over.*; found int; "):
        trainer.fit(5, 1)  # type: ignore[arg-type]


def test_half_a_step_leaves_no_gradients() -> None:
    """Ctrl-C in the second of two backward passes: the next fit begins with none."""
    calls = 0

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return class_loss(model, batch)

    trainer, loader = simple(accumulate=2)
    trainer.loss_fn = loss_fn
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(loader, 1)
    assert trainer.step == 0 and all(parameter.grad is None for parameter in trainer.model.parameters())
