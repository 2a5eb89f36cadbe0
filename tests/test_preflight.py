"""A preflight sees what would go wrong, and leaves no trace."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import mo_fused
from mo_fused.training.checkpoints import Checkpoints
from mo_fused.training.errors import InputError
from mo_fused.training.schedules import warmup_cosine
from mo_fused.training.snapshot import kept_state
from mo_fused.training.trainer import Trainer

CLASSES = 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: further threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples whose augmentation draws from every global generator."""

    def __init__(self, size: int = 48) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = self.x[:, :CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.01 * (torch.randn(6) + random.random() + float(np.random.rand()))
        return self.x[index] + noise, self.y[index]


class Windows:
    """A loader without end that keeps its own place."""

    def __init__(self) -> None:
        self.data = Noisy()
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            index = torch.randint(48, (8,), generator=self.generator)
            yield self.data.x[index], self.data.y[index]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def shuffled() -> Any:
    return DataLoader(Noisy(), batch_size=8, shuffle=True)


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffled": shuffled,
    "generator": lambda: DataLoader(Noisy(), 8, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "stateful": Windows,
    "list": lambda: [(torch.randn(8, 6), torch.arange(8) % CLASSES) for _ in range(5)],
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "mo_fused.AdamW": lambda p: mo_fused.AdamW(p, lr=3e-3, max_grad_norm=0.5, stats=True),
    "mo_fused.SGD": lambda p: mo_fused.SGD(p, lr=0.05, momentum=0.9),
    "mo_fused.Adafactor": lambda p: mo_fused.Adafactor(p, lr=1e-2),
    "offloaded": lambda p: mo_fused.AdamW(p, lr=3e-3, offload="cpu"),
    "torch.AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(3e-3), foreach=False),
    "torch.SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trainer_of(optimizer: str = "mo_fused.AdamW", precision: str = "fp32", **options: Any) -> Trainer:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    model = Net()
    built = OPTIMIZERS[optimizer](model.parameters())
    schedule = warmup_cosine(built, 40, 3)
    return Trainer(model, built, cross_entropy, schedule=schedule, precision=precision, **options)


def moment(trainer: Trainer) -> dict[str, Any]:
    """All that a run goes on from; every tensor as bytes."""
    trainer.state_dict()  # settles what is on its way
    state = copy.deepcopy(trainer.state_dict())
    state["grads"] = [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()]
    state["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    state["modes"] = [module.training for module in trainer.model.modules()]
    return {"state": bits(state)}


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    if isinstance(value, Mapping):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("begun", [0, 8])
@pytest.mark.parametrize(
    ("optimizer", "loader", "precision"),
    [
        ("mo_fused.AdamW", "shuffled", "fp32"),
        ("mo_fused.AdamW", "stateful", "fp16"),
        ("mo_fused.SGD", "generator", "fp32"),
        ("mo_fused.Adafactor", "list", "fp32"),
        ("offloaded", "shuffled", "fp32"),
        ("torch.AdamW", "generator", "fp32"),
        ("torch.SGD", "shuffled", "fp16"),
    ],
)
def test_a_run_after_a_preflight_has_the_same_bits(optimizer: str, loader: str, precision: str, begun: int) -> None:
    ends = []
    for look in (False, True):
        trainer = trainer_of(optimizer, precision, accumulate=2)
        batches = LOADERS[loader]()
        if begun:
            trainer.fit(batches, begun)  # 6 batches an epoch, two a step: in the middle of one
        if look:
            before, last = moment(trainer), getattr(trainer.optimizer, "last_step", None)
            objects = [id(x) for x in (*trainer.model.parameters(), *trainer.model.buffers())]
            report = trainer.preflight(batches, steps=9)
            assert report.steps == 9 and len(report.losses) == 9
            assert moment(trainer) == before and getattr(trainer.optimizer, "last_step", None) is last
            assert objects == [id(x) for x in (*trainer.model.parameters(), *trainer.model.buffers())]
            if not begun:
                assert not trainer.optimizer.state and trainer._feed is None
        trainer.fit(batches, begun + 7)
        ends.append(moment(trainer))
    assert ends[0] == ends[1]


def test_workers_that_stay() -> None:
    """Persistent workers go on with their random numbers from epoch to epoch; those of a trial are not the run's."""
    ends = []
    for look in (False, True):
        trainer = trainer_of("mo_fused.SGD")
        loader: Any = DataLoader(Noisy(), 16, shuffle=True, num_workers=1, persistent_workers=True)
        if look:
            trainer.preflight(loader, steps=4)
        trainer.fit(loader, 6)  # two epochs
        ends.append(moment(trainer))
    assert ends[0] == ends[1]


def test_in_the_middle_of_a_resume_too(tmp_path: Path) -> None:
    """Preflight between resume() and fit(): the place that waits for fit is still there."""
    first = trainer_of(checkpoints=tmp_path)
    loader = shuffled()
    first.fit(loader, 8)
    saved = first.checkpoints.latest() if first.checkpoints else None
    assert saved is not None
    first.fit(loader, 12)
    second = trainer_of(checkpoints=tmp_path)
    second.resume(saved[0])
    again = shuffled()
    second.preflight(again, steps=5)
    second.fit(again, 12)
    assert moment(first) == moment(second)


def test_put_back_when_it_raises() -> None:
    trainer = trainer_of("mo_fused.SGD", "fp16")
    loader = shuffled()
    trainer.fit(loader, 4)
    next(iter(trainer.model.parameters())).grad = torch.ones(12, 6)
    trainer.model.get_submodule("body").eval()
    before = moment(trainer)
    taken: list[int] = []

    def fails(model: nn.Module, batch: Any) -> Tensor:
        taken.append(1)
        if len(taken) == 5:
            raise RuntimeError("in the middle")
        return cross_entropy(model, batch)

    trainer.loss_fn = fails
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.preflight(loader, steps=9)
    trainer.loss_fn = cross_entropy
    assert moment(trainer) == before
    with pytest.raises(InputError, match="can be iterated again"), kept_state(trainer, iter([])):
        pass


def test_put_back_when_the_step_raises() -> None:
    """Between unscale_ and update of torch's scaler, which would refuse the next unscale_."""
    trainer = trainer_of("torch.SGD", "fp16", max_grad_norm=1.0)

    def fails(*_: Any) -> None:
        raise RuntimeError("in the step")

    handle = trainer.optimizer.register_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="in the step"):
        trainer.preflight(shuffled(), steps=2)
    handle.remove()
    assert trainer.fit(shuffled(), 2) == 2


def test_a_sound_run(tmp_path: Path) -> None:
    told: list[Mapping[str, Any]] = []

    class Log:
        def step(self, loss: Tensor, batch_info: Mapping[str, Any]) -> None:
            told.append(batch_info)

    folder = tmp_path / "run" / "checkpoints"
    options: dict[str, Any] = dict(monitor=Log(), validate=lambda: {"val_loss": 1.0}, validate_every=10)
    trainer = trainer_of(checkpoints=Checkpoints(folder, every=20), **options)
    trainer.schedule = warmup_cosine(trainer.optimizer, 1000, 3)
    trainer.optimizer.param_groups[0]["initial_lr"] = 0.05
    report = trainer.preflight(shuffled())
    assert report.ok, str(report)
    assert [finding.check for finding in report.findings] == [
        *("finite values", "gradients", "loss falls", "first loss", "logging", "checkpoint", "memory", "time")
    ]
    assert report["logging"].seen == "Log took 50 of 50 steps"
    assert [info["step"] for info in told] == list(range(1, 51)) and all(info["trial"] for info in told)
    assert "read back bit for bit" in report["checkpoint"].seen
    assert "ln(5) = 1.609" in report["first loss"].seen and "all 6 trained parameters" in report["gradients"].seen
    assert report.checkpoint_bytes is not None and report.checkpoint_bytes > 5000
    assert report.seconds_per_step is not None and report.checkpoint_seconds is not None
    steps_alone = 1000 * report.seconds_per_step
    assert report.total_seconds is not None
    assert report.total_seconds >= steps_alone + 50 * report.checkpoint_seconds * 0.999
    assert report.host_memory > 50 << 20 and report.device_memory is None
    assert str(report).startswith("preflight, 50 steps: ready (0 problems") and "of the process" in str(report)
    assert list(tmp_path.iterdir()) == [], "nothing of the trial may stay"
    trainer.validate, trainer.checkpoints, trainer.step = None, None, 990
    report = trainer.preflight(shuffled(), steps=5)
    assert report.total_seconds == pytest.approx(10 * (report.seconds_per_step or 0.0))
    assert "for the 10 steps left of 1000" in report["time"].seen


def test_values_that_are_not_finite() -> None:
    def at_zero(model: nn.Module, batch: Any) -> Tensor:
        row: Any = model.head.weight[0]  # type: ignore[index, union-attr]
        return (row - row.detach()).square().sum().sqrt() + cross_entropy(model, batch)

    trainer = trainer_of("torch.SGD")
    trainer.loss_fn = at_zero
    with pytest.warns(RuntimeWarning, match="no checkpoint was written"):
        finding = trainer.preflight(shuffled(), steps=6)["finite values"]
    assert finding.level == "problem"
    assert "the loss is nan at trial step 2" in finding.seen
    assert "first at trial step 1: head.weight;" in finding.seen
    assert "parameters are not finite: body.0.weight" in finding.seen


def test_parameters_that_nothing_reaches() -> None:
    trainer = trainer_of()
    model: Any = trainer.model
    model.spare = nn.Linear(2, 2)
    model.zero = nn.Parameter(torch.ones(3))
    params = [*model.parameters()]
    trainer = Trainer(model, mo_fused.AdamW(params), lambda m, b: cross_entropy(m, b) + 0.0 * m.zero.sum())
    report = trainer.preflight(shuffled(), steps=6)
    finding = report["gradients"]
    assert finding.level == "warning" and report.ok
    assert "2 of 9 parameters got no gradient: spare.weight, spare.bias" in finding.seen
    assert "1 of 9 had a gradient of exactly zero in every step: zero" in finding.seen


@pytest.mark.parametrize(
    ("rate", "sign", "level", "words"),
    [(0.1, 1.0, "ok", "median"), (1e-12, 1.0, "problem", "does not move"), (0.1, -1.0, "problem", "it rises")],
)
def test_whether_the_loss_falls(rate: float, sign: float, level: str, words: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, CLASSES)
    opt = torch.optim.SGD(model.parameters(), lr=rate, maximize=sign < 0)
    data = [(Noisy().x, Noisy().y)]
    finding = Trainer(model, opt, cross_entropy).preflight(data, steps=20)["loss falls"]
    assert (finding.level, words in finding.seen + finding.do) == (level, True)


def test_noise_is_told_from_a_fall() -> None:
    model = nn.Linear(6, CLASSES)
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    finding = Trainer(model, opt, cross_entropy).preflight(DataLoader(Noisy(), 4, shuffle=True), steps=30)["loss falls"]
    assert finding.level == "warning" and "noise" in finding.do


@pytest.mark.parametrize(
    ("factor", "classes", "level", "words"),
    [(0.0, None, "ok", "from the model"), (200.0, None, "warning", "above"), (0.0, 50, "warning", "below")],
)
def test_the_first_loss(factor: float, classes: int | None, level: str, words: str) -> None:
    model = nn.Linear(6, CLASSES)
    with torch.no_grad():
        model.weight.mul_(factor)
        model.bias.zero_()
    trainer = Trainer(model, mo_fused.SGD(model.parameters(), lr=0.01), cross_entropy)
    report = trainer.preflight(shuffled(), steps=2, classes=classes)
    finding = report["first loss"]
    assert (finding.level, words in finding.seen) == (level, True), finding
    if factor == 0.0:
        assert report.losses[0] == pytest.approx(math.log(CLASSES), rel=1e-6)


def test_no_classes_in_a_regression() -> None:
    model = nn.Linear(6, 2)
    trainer = Trainer(model, mo_fused.SGD(model.parameters(), lr=0.01), lambda m, b: F.mse_loss(m(b[0]), b[1]))
    report = trainer.preflight([(torch.randn(4, 6), torch.randn(4, 2))], steps=2)
    assert "no number of classes" in report["first loss"].seen


def test_a_monitor_that_raises() -> None:
    class Full:
        def step(self, loss: Tensor, batch_info: Mapping[str, Any]) -> None:
            if batch_info["step"] > 3:
                raise OSError(28, "No space left on device")

    report = trainer_of(monitor=Full()).preflight(shuffled(), steps=6)
    assert not report.ok
    assert "Full took 3 of 6 steps; step 4: OSError: [Errno 28] No space left" in report["logging"].seen


def test_a_monitor_for_trials() -> None:
    class Log:
        def __init__(self) -> None:
            self.steps = 0
            self.other: Log | None = None

        def step(self, loss: Tensor, batch_info: Mapping[str, Any]) -> None:
            self.steps += 1

        def for_trial(self) -> Log:
            self.other = Log()
            return self.other

    log = Log()
    trainer_of(monitor=log).preflight(shuffled(), steps=4)
    assert log.steps == 0 and log.other is not None and log.other.steps == 4


def test_a_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    report = trainer_of(checkpoints=tmp_path / "file" / "checkpoints").preflight(shuffled(), steps=3)
    assert report["checkpoint"].level == "problem" and "can't be written" in report["checkpoint"].seen
    trainer = trainer_of(checkpoints=tmp_path)
    trainer.config["f"] = print
    report = trainer.preflight(shuffled(), steps=3)
    assert report["checkpoint"].level == "problem" and "weights_only=True" in report["checkpoint"].seen


def test_an_overflow_of_the_loss_scale_is_no_fault() -> None:
    trainer = trainer_of("mo_fused.AdamW", "fp16", scaler=mo_fused.GradScaler("cpu", init_scale=2.0**24))
    report = trainer.preflight(shuffled(), steps=20)
    assert report["finite values"].level == "ok" and "skipped while" in report["finite values"].seen, str(report)


def test_an_overflow_that_never_ends_is_one() -> None:
    for optimizer in ("mo_fused.AdamW", "torch.SGD"):
        trainer = trainer_of(optimizer, "fp16")
        trainer.loss_fn = lambda model, batch: cross_entropy(model, batch) * 1e30
        finding = trainer.preflight(shuffled(), steps=8)["finite values"]
        assert finding.level == "problem" and "8 of 8 steps were skipped" in finding.seen


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="steps to be 1 or more; found 0"):
        trainer_of().preflight(shuffled(), steps=0)
    with pytest.raises(ValueError, match="classes to be 2 or more"):
        trainer_of().preflight(shuffled(), classes=1)
