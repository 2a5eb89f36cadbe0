"""What a trainer refuses before it begins, and how it goes on after an error."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mo_fused
from mo_fused.training import Checkpoints, InputError, Trainer, cross_entropy, seed_everything


def _data() -> TensorDataset:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def _loader() -> DataLoader[Any]:
    return DataLoader(_data(), batch_size=4)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _trainer(**options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return Trainer(model, mo_fused.AdamW(model.parameters(), lr=0.1), options.pop("loss_fn", _loss), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_fn": nn.CrossEntropyLoss()}, "loss_fn to be a function of .model, batch.; found 'CrossEntropyLoss'"),
        ({"loss_fn": None}, "loss_fn to be a function of .model, batch.; found 'NoneType'"),
        ({"schedule": [1]}, "a schedule of this optimizer; found 'list'"),
        ({"monitor": print}, "an object with step.loss, batch_info.; found 'builtin_function_or_method'"),
    ],
)
def test_parts_that_the_loop_cannot_call_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _trainer(**options)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match="without a closure; found 'LBFGS'"):
        Trainer(model, torch.optim.LBFGS(model.parameters()), _loss)


@pytest.mark.parametrize("steps", ["10", None, 2.5])
def test_steps_is_a_whole_number(steps: Any) -> None:
    trainer = _trainer()
    with pytest.raises(ValueError, match="steps to be a whole number"):
        trainer.fit(_loader(), steps)
    assert trainer.step == 0


def test_more_steps_than_one_cycle_has_are_refused_before_the_first() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, _loss, schedule=OneCycleLR(optimizer, 0.1, total_steps=4))
    assert trainer.fit(_loader(), 2) == 2
    with pytest.raises(ValueError, match="steps to be at most 4"):
        trainer.fit(_loader(), 5)
    assert trainer.step == 2
    assert trainer.fit(_loader(), 4) == 4


def test_a_group_that_the_schedule_does_not_know() -> None:
    model, more = nn.Linear(4, 3), nn.Linear(2, 2)
    optimizer = mo_fused.AdamW(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, _loss, schedule=LambdaLR(optimizer, lambda _: 1.0))
    optimizer.add_param_group({"params": list(more.parameters())})
    with pytest.raises(ValueError, match="one for the optimizer's 2 groups"):
        trainer.fit(_loader(), 1)


@pytest.mark.parametrize("count", [0.5, float("nan"), None])
def test_a_fraction_of_a_target_is_refused(count: Any) -> None:
    with pytest.raises(TypeError, match="count: expected a whole number of valid targets"):
        _trainer(count=lambda _: count).fit(_loader(), 1)


@pytest.mark.parametrize("value", ["low", None, torch.ones(3)])
def test_values_of_a_validation_are_numbers(value: Any) -> None:
    with pytest.raises(TypeError, match="validate: expected numbers by name; found val_loss: "):
        _trainer(validate=lambda: {"val_loss": value}).fit(_loader(), 1)


def test_a_preflight_says_what_validate_should_return() -> None:
    validate: Any = lambda: 0.5  # noqa: E731
    with pytest.raises(TypeError, match="validate: expected numbers by name, as a dict; found float"):
        _trainer(validate=validate).preflight(_loader(), 2)


def test_a_dataset_is_no_loader() -> None:
    with pytest.raises(TypeError, match=r"single samples \(TensorDataset\); wrap it"):
        _trainer().fit(_data(), 1)  # type: ignore[arg-type]


def test_a_run_that_begins_anew_does_not_mix_its_checkpoints_with_an_earlier_runs(tmp_path: Path) -> None:
    _trainer(checkpoints=tmp_path).fit(_loader(), 6)
    before = (tmp_path / "step-00000006.pt").read_bytes()
    anew = _trainer(checkpoints=Checkpoints(tmp_path, every=1))
    with pytest.raises(InputError, match=r"an earlier run, up to step 6; call resume\(\)"):
        anew.fit(_loader(), 2)
    assert anew.step == 0 and [path.name for path in tmp_path.iterdir()] == ["step-00000006.pt"]
    assert (tmp_path / "step-00000006.pt").read_bytes() == before
    anew.preflight(_loader(), 2)
    anew.resume()
    assert anew.fit(_loader(), 8) == 8


def test_trained_parameters_that_a_checkpoint_would_not_hold(tmp_path: Path) -> None:
    model, criterion = nn.Linear(4, 4), nn.Linear(4, 3)
    optimizer = mo_fused.AdamW([*model.parameters(), *criterion.parameters()], lr=0.1)

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(criterion(module(batch[0])), batch[1])

    with pytest.raises(InputError, match=r"found 2 others, of shapes \(3, 4\), \(3,\)"):
        Trainer(model, optimizer, loss, checkpoints=tmp_path)
    assert Trainer(model, optimizer, loss).fit(_loader(), 1) == 1


def test_a_compiled_model_has_the_checkpoints_of_the_plain_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = mo_fused.AdamW(model.parameters(), lr=0.1)
    Trainer(compiled, optimizer, _loss, checkpoints=tmp_path).fit(_loader(), 3)
    plain = _trainer(checkpoints=tmp_path)
    plain.resume()
    assert plain.step == 3
    assert torch.equal(plain.model.weight, model.weight)  # type: ignore[arg-type]


class _FailsOnce(Dataset[Any]):
    """Of which one sample cannot be read the first time."""

    def __init__(self, at: int) -> None:
        self._data, self._at, self._failed = _data(), at, at < 0
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if index == self._at and not self._failed:
            self._failed = True
            raise OSError("not now")
        self.read.append(index)
        return self._data[index]


@pytest.mark.parametrize("at", [-1, 3, 17])
def test_after_an_error_of_the_loader_no_batch_is_lost(at: int, tmp_path: Path) -> None:
    """In the same process, and from a checkpoint that is written between the error and the next fit."""

    def run(fails: int, folder: Path, resumed: bool) -> list[Tensor]:
        seeds = seed_everything(0)
        loader = DataLoader(_FailsOnce(fails), batch_size=4, shuffle=True, **seeds)
        trainer = _trainer(accumulate=2, checkpoints=folder)
        try:
            trainer.fit(loader, 7)
        except OSError:
            trainer.save()
            if resumed:
                trainer = _trainer(accumulate=2, checkpoints=folder)
                trainer.resume()
            trainer.fit(loader, 7)
        assert trainer.epoch == 2
        return [parameter.detach() for parameter in trainer.model.parameters()]

    undisturbed = run(-1, tmp_path / "a", False)
    for resumed in (False, True):
        for one, other in zip(undisturbed, run(at, tmp_path / str(resumed), resumed), strict=True):
            assert torch.equal(one, other)


class _Interrupted:
    """A loader whose iterator is a generator, which gives nothing more after an error."""

    def __init__(self) -> None:
        self.drawn: list[int] = []
        self._failed = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(6):
            if number == 3 and not self._failed:
                self._failed = True
                raise KeyboardInterrupt
            self.drawn.append(number)
            yield torch.full((2, 4), float(number)), torch.tensor([0, 1])


def test_an_interrupt_in_the_loader_does_not_end_its_epoch() -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(int(batch[0][0, 0]))
        return _loss(model, batch)

    loader, trainer = _Interrupted(), _trainer(accumulate=2, loss_fn=loss)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(loader, 3)
    assert trainer.fit(loader, 3) == 3
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", [mo_fused.SGD, torch.optim.SGD])
def test_after_an_error_in_a_step_the_scaler_unscales_again(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    failed: list[int] = []

    def fail(*_: object) -> None:
        if not failed:
            failed.append(1)
            raise RuntimeError("once")

    optimizer.register_step_pre_hook(fail)
    trainer = Trainer(model, optimizer, _loss, precision="fp16", max_grad_norm=1.0)
    loader = _loader()
    with pytest.raises(RuntimeError, match="once"):
        trainer.fit(loader, 2)
    assert trainer.fit(loader, 2) == 2


class _Encoding(UserDict[str, Tensor]):
    """As transformers' BatchEncoding: entries are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]

    def to(self, device: torch.device) -> _Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def test_a_batch_that_is_cut_keeps_its_class() -> None:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> _Encoding:
        inputs, labels = zip(*samples, strict=True)
        return _Encoding({"input_ids": torch.stack(inputs), "labels": torch.stack(labels)})

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = SimpleNamespace(loss=cross_entropy(model(batch.input_ids), batch.labels))
        return output.loss

    loader = DataLoader(_data(), batch_size=4, collate_fn=collate)
    assert _trainer(loss_fn=loss).overfit_check(loader, 6, max_steps=2).samples == 6


@pytest.mark.parametrize("lists", [{"batch_sizes": 8}, {"batch_sizes": [8], "accumulate": 2}])
def test_a_sweep_asks_for_lists(lists: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="to be whole numbers, 1 or more; found [82]; give at least one"):
        _trainer().sweep(**lists, loader=_loader())


def test_gradients_of_a_validation_are_no_part_of_the_next_step() -> None:
    def weights(backward: bool) -> Tensor:
        def validate() -> dict[str, float]:
            loss = _loss(trainer.model, _data()[:])
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            return {"val_loss": loss.item()}

        trainer = _trainer(validate=validate, validate_every=1)
        trainer.fit(_loader(), 3)
        return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])

    assert torch.equal(weights(True), weights(False))


def test_the_state_of_another_schedule_is_refused_before_anything_changes() -> None:
    model = nn.Linear(4, 3)
    optimizer = mo_fused.AdamW(model.parameters(), lr=0.1)
    saved = Trainer(model, optimizer, _loss, schedule=StepLR(optimizer, 3))
    saved.fit(_loader(), 2)
    other = mo_fused.AdamW(model.parameters(), lr=0.1)
    parts = [LambdaLR(other, lambda _: 1.0), StepLR(other, 2)]
    trainer = Trainer(model, other, _loss, schedule=SequentialLR(other, parts, [2]))
    with pytest.raises(InputError, match="the state of SequentialLR; found that of a schedule with .*step_size"):
        trainer.load_state_dict(saved.state_dict())
    assert not other.state and trainer.step == 0


@pytest.mark.filterwarnings("ignore:the checkpoint has no")
def test_what_somebody_saved_by_hand_under_our_names() -> None:
    trainer = _trainer()
    model = trainer.model.state_dict()
    with pytest.raises(InputError, match="step as a whole number; found 'last'"):
        trainer.load_state_dict({"model_state_dict": model, "step": "last"})
    trainer.load_state_dict({"model_state_dict": model, "step": torch.tensor(2), "rng": [1], "data": [2], "trainer": 3})
    assert trainer.fit(_loader(), 3) == 3
