"""Checkpoint files: written all or nothing, the last few and the best kept, none of a state that is not finite."""

from __future__ import annotations

import io
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_cases import Log, Samples, assert_same, class_loss, falling, model_of, padded_batches, simple

import mo_fused
from mo_fused.training import atomic, checkpoints
from mo_fused.training.atomic import write_atomically
from mo_fused.training.checkpoints import FORMAT_VERSION, KEYS, Checkpoints, load_checkpoint
from mo_fused.training.errors import InputError
from mo_fused.training.trainer import Trainer

pytestmark = pytest.mark.cpu_only(reason="files, on the host alone")

# --- atomic


class Stopped(BaseException):
    """As KeyboardInterrupt: not an Exception."""


FULL = OSError(28, "No space left on device")


def files(folder: Path) -> dict[str, bytes]:
    """Every file with its content, hidden ones too."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("error", [FULL, Stopped()])
@pytest.mark.parametrize("call", ["write", "flush", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise error

    path = tmp_path / "a.pt"
    write_atomically(path, lambda file: file.write(b"old"))
    assert files(tmp_path) == {"a.pt": b"old"}
    if call in ("fsync", "replace"):
        monkeypatch.setattr(atomic.os, call, fail)

    def write(file: Any) -> None:
        file.write(b"new, and longer")
        if call == "write":
            fail()
        if call == "flush":
            file.close()  # as a flush on a full disk: the file object can't be used any more

    with pytest.raises(ValueError if call == "flush" else type(error)):
        write_atomically(path, write)
    assert files(tmp_path) == {"a.pt": b"old"}


def test_content_is_on_the_disk_before_it_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, fsync, replace = [], os.fsync, os.replace
    path = tmp_path / "a.pt"

    def watched_fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("fsync", "folder" if target == tmp_path.resolve() else target.read_bytes()))
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        calls.append(("replace", Path(source).read_bytes()))
        replace(source, target)

    monkeypatch.setattr(atomic.os, "fsync", watched_fsync)
    monkeypatch.setattr(atomic.os, "replace", watched_replace)
    write_atomically(path, lambda file: file.write(b"all"))
    assert calls == [("fsync", b"all"), ("replace", b"all"), ("fsync", "folder")]


# --- what is in them


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint after three steps."""
    trainer, loader = simple(tmp_path_factory.mktemp("saved"), config={"lr": 0.02, "sizes": [6, 16]})
    trainer.fit(loader, 3)
    assert trainer.checkpoints is not None
    return trainer.checkpoints.path(3).read_bytes()


def test_a_checkpoint_is_a_plain_dictionary(saved: bytes) -> None:
    state = torch.load(io.BytesIO(saved), weights_only=True)
    assert tuple(state) == KEYS
    assert (state["format_version"], state["step"], state["epoch"]) == (FORMAT_VERSION, 3, 0)
    assert state["config"] == {"lr": 0.02, "sizes": [6, 16]}
    assert state["scaler_state_dict"] is None and len(state["data"]) == len(state["rng"]) == 1
    model = model_of(1, dropout=0.2)
    model.load_state_dict(state["model_state_dict"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(state["optimizer_state_dict"])
    assert optimizer.state_dict()["state"][0]["step"] == 3
    schedule = falling(optimizer)
    schedule.load_state_dict(state["scheduler_state_dict"])
    assert schedule.last_epoch == 3


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    trainer, loader = simple(tmp_path, config={"lr": np.float64(0.5), "n": (np.int64(3), {"x": np.bool_(True)})})
    trainer.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    trainer.fit(loader, 1)
    state = load_checkpoint(tmp_path / "step-00000001.pt")
    assert state["config"] == {"lr": 0.5, "n": (3, {"x": True})} and type(state["config"]["lr"]) is float
    assert type(state["optimizer_state_dict"]["param_groups"][0]["lr"]) is float


def test_what_could_not_be_read_again_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^config\['data'\]\[1\]: expected a value that torch.load reads .*; found a pathlib.*; give"
    ):
        simple(tmp_path, config={"data": [1, Path("x")]})
    simple(None, config={"data": Path("x")})

    class Place(list[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {"order": np.arange(3)}

        def load_state_dict(self, state: Any) -> None: ...

    trainer, _ = simple(tmp_path)
    with pytest.raises(InputError, match=r"^data\[0\]\['loader'\]\['order'\]: .*found a numpy.ndarray"):
        trainer.fit(Place(padded_batches([3] * 9)), 9)
    assert files(tmp_path) == {}


# --- keeping


def steps_of(folder: Path) -> list[int]:
    return Checkpoints(folder).steps()


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    values = iter([3.0, 1.0, 2.0, float("nan"), 1.5, 0.5, 4.0, 0.7])
    trainer, loader = simple(
        checkpoints=Checkpoints(tmp_path, every=1, keep=2),
        validate=lambda: {"val_loss": next(values)},
        validate_every=1,
    )
    kept, best = [], []

    def look(step: int) -> None:  # is called before the step is saved
        kept.append(steps_of(tmp_path))
        best.append((tmp_path / "best.pt").resolve().name[:13] if (tmp_path / "best.pt").exists() else None)

    trainer.monitor = Log(look)
    trainer.fit(loader, 8)
    assert kept == [[], [1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7]]
    assert best == [None] + [f"step-{k:08d}" for k in (1, 2, 2, 2, 2, 6, 6)]
    assert steps_of(tmp_path) == [6, 7, 8]
    assert os.readlink(tmp_path / "best.pt") == "step-00000006.pt"
    assert load_checkpoint(tmp_path / "best.pt")["trainer"] == {"skipped": False, "best_step": 6, "best_value": 0.5}


def test_an_improvement_is_saved_between_the_others(tmp_path: Path) -> None:
    values = iter([1.0, 2.0, 3.0, 2.5])
    trainer, loader = simple(
        checkpoints=Checkpoints(tmp_path, every=5, keep=1, best="accuracy", higher_is_better=True),
        validate=lambda: {"accuracy": next(values)},
        validate_every=3,
    )
    trainer.fit(loader, 12)
    assert steps_of(tmp_path) == [9, 12] and (tmp_path / "best.pt").resolve() == tmp_path / "step-00000009.pt"


def test_a_best_that_could_not_be_saved_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the link would point to a file that is gone, and what comes next would be compared with nothing."""
    values = iter([5.0, 1.0, 2.0, 6.0, 7.0])
    trainer, loader = simple(
        checkpoints=Checkpoints(tmp_path, every=1, keep=1),
        validate=lambda: {"val_loss": next(values)},
        validate_every=1,
    )
    write = write_atomically

    def failing(path: Path, content: Any) -> None:
        if path.name == "step-00000002.pt":
            raise FULL
        write(path, content)

    monkeypatch.setattr(checkpoints, "write_atomically", failing)
    with pytest.warns(RuntimeWarning, match="step 2: no checkpoint was written: .*No space left"):
        trainer.fit(loader, 5)
    assert steps_of(tmp_path) == [3, 5]
    assert load_checkpoint(tmp_path / "best.pt")["trainer"]["best_value"] == 2.0


def test_going_back_leaves_later_ones_aside(tmp_path: Path) -> None:
    """Nothing is lost, and a restart goes on with the line that was chosen."""
    trainer, loader = simple(tmp_path, checkpoints=Checkpoints(tmp_path, every=2, keep=3))
    trainer.fit(loader, 8)
    kept = (tmp_path / "step-00000008.pt").read_bytes()
    trainer, loader = simple(tmp_path, checkpoints=Checkpoints(tmp_path, every=3, keep=3))
    trainer.resume(tmp_path / "step-00000004.pt")
    assert Checkpoints(tmp_path).steps() == [4, 6, 8], "until there is something to go on with"
    trainer.fit(loader, 7)
    assert Checkpoints(tmp_path).steps() == [4, 6, 7]
    assert (tmp_path / "step-00000008.pt.abandoned").read_bytes() == kept
    trainer, loader = simple(tmp_path)
    assert trainer.resume() == tmp_path / "step-00000007.pt"


def test_a_best_value_that_validation_does_not_return(tmp_path: Path) -> None:
    trainer, loader = simple(tmp_path, validate=lambda: {"accuracy": 0.5}, validate_every=1)
    with pytest.warns(RuntimeWarning, match="validate returned accuracy, not val_loss; name one") as caught:
        trainer.fit(loader, 3)
    assert len(caught) == 1


def test_without_links_checkpoints_are_kept_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    trainer, loader = simple(tmp_path, validate=lambda: {"val_loss": float(trainer.step)}, validate_every=1)
    with pytest.warns(RuntimeWarning, match="best.pt could not be made"):
        trainer.fit(loader, 6)
    assert Checkpoints(tmp_path).steps() == [1, 4, 6]


def test_what_a_kill_left_behind_goes_away(tmp_path: Path) -> None:
    for name in (".step-00000001.pt.77.part", ".best.pt.77.part"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".other.part").write_bytes(b"x")
    trainer, loader = simple(tmp_path)
    trainer.fit(loader, 1)
    assert sorted(files(tmp_path)) == [".other.part", "step-00000001.pt"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": -1}, "every to be a whole number of steps, 0 or more; found -1; give"),
        ({"every": 2.5}, "every to be a whole number of steps, 0 or more; found 2.5; give"),
        ({"keep": 0}, "keep to be a whole number, 1 or more; found 0; keep at least the latest"),
        ({"keep": 1.5}, "keep to be a whole number, 1 or more; found 1.5; keep at least the latest"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^expected {said}"):
        Checkpoints(tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


# --- what is not saved, and saves that fail


def poison_parameter(trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters())[0, 0] = float("inf")


def poison_buffer(trainer: Trainer) -> None:
    trainer.model[1].running_mean[0] = float("nan")


@pytest.mark.parametrize("poison", [poison_parameter, poison_buffer])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path, poison: Callable[[Trainer], None]) -> None:
    model = model_of(norm=True)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.0), class_loss, checkpoints=Checkpoints(tmp_path, every=2)
    )
    loader = [(samples.inputs, samples.targets) for samples in [Samples(4)]]
    trainer.fit(loader, 3)
    trainer.monitor = Log(lambda step: poison(trainer))
    with pytest.warns(RuntimeWarning, match="no checkpoint was written: the loss, a parameter or a buffer is not"):
        assert trainer.fit(loader, 5) == 5
    assert steps_of(tmp_path) == [2, 3]


@pytest.mark.parametrize("ours", [True, False])
def test_a_skipped_step_is_saved(tmp_path: Path, ours: bool) -> None:
    """Its loss is not finite, and what it left is as sound as before."""
    model, batches = model_of(), padded_batches([4, 4])
    batches[1][0][0, 0] = float("nan")
    optimizer = (mo_fused.AdamW if ours else torch.optim.AdamW)(model.parameters(), lr=0.02)
    trainer = Trainer(
        model, optimizer, class_loss, schedule=falling(optimizer), precision="fp16", checkpoints=Checkpoints(tmp_path)
    )
    trainer.fit(batches, 2)
    state = load_checkpoint(tmp_path / "step-00000002.pt")
    assert state["trainer"]["skipped"] is ours
    assert_same(state["model_state_dict"], model.state_dict())


def test_a_loss_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    model, batches = model_of(), padded_batches([4])
    batches[0][0][0, 0] = float("nan")
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), class_loss, checkpoints=tmp_path)
    with pytest.warns(RuntimeWarning, match="not finite"):
        trainer.fit(batches, 1)
    assert not tmp_path.exists() or steps_of(tmp_path) == []


def test_infinity_in_a_buffer_is_a_mask(tmp_path: Path) -> None:
    model = model_of()
    model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), class_loss, checkpoints=tmp_path).fit(
        padded_batches([4]), 1
    )
    assert steps_of(tmp_path) == [1]


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file of this process may grow above ``limit`` bytes; Python ignores the signal, so that a write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 1000, 9000])
def test_a_full_disk_is_a_warning_and_an_error_at_the_end(tmp_path: Path, saved: bytes, limit: int) -> None:
    assert limit < len(saved)
    trainer, loader = simple(tmp_path)
    trainer.fit(loader, 2)
    before = files(tmp_path)
    with small_files(limit):
        with warnings.catch_warnings(record=True) as caught, pytest.raises(OSError, match="step-00000005.pt|too large"):
            warnings.simplefilter("always")
            trainer.fit(loader, 5)
        assert trainer.step == 5
        assert [str(w.message)[:35] for w in caught] == ["step 4: no checkpoint was written: "]
        assert files(tmp_path) == before
    assert trainer.save() == tmp_path / "step-00000005.pt"
    again, _ = simple(tmp_path, seed=1)
    again.resume()
    assert_same(again.model.state_dict(), trainer.model.state_dict())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    trainer, loader = simple(checkpoints=Checkpoints(tmp_path / "file" / "checkpoints", every=1))
    with pytest.warns(RuntimeWarning, match="step 1: no checkpoint was written"), pytest.raises(OSError):
        trainer.fit(loader, 2)
    assert trainer.step == 2
