"""Checkpoint files that are broken or of another kind are passed over; others are loaded whole or not at all."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainer_cases import assert_same, class_loss, falling, frozen, model_of, padded_batches, simple

import mo_fused
from mo_fused.training.checkpoints import FORMAT_VERSION, load_checkpoint
from mo_fused.training.errors import InputError
from mo_fused.training.schedules import inverse_sqrt, warmup_cosine
from mo_fused.training.trainer import Trainer

pytestmark = pytest.mark.cpu_only(reason="files, on the host alone")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint after three steps."""
    trainer, loader = simple(tmp_path_factory.mktemp("saved"), config={"lr": 0.02, "sizes": [6, 16]})
    trainer.fit(loader, 3)
    assert trainer.checkpoints is not None
    return trainer.checkpoints.path(3).read_bytes()


# --- broken and foreign files


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_checkpoint(path)
    text = str(caught.value)
    assert text.startswith(f"checkpoint {path}: expected a checkpoint: a file of torch.save with a dictionary")
    assert "; found " in text and text.endswith("those of a run lie in its folder checkpoints/")
    assert "\n" not in text
    return text.split("; found ")[1].split("; give another")[0]


def test_a_file_of_any_length_is_refused(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "step-00000003.pt"
    lengths = {*range(8), *range(len(saved) - 40, len(saved)), *range(0, len(saved), 509)}
    for length in sorted(lengths):
        path.write_bytes(saved[:length])
        found = refusal(path)
        assert "torch.load" in found or f"({length} bytes" in found
    path.write_bytes(saved)
    assert load_checkpoint(path)["step"] == 3


@settings(max_examples=150)
@given(st.integers(0, 2**40), st.integers(0, 7))
def test_a_flipped_bit_is_found_or_means_nothing(tmp_path_factory: Any, saved: bytes, at: int, bit: int) -> None:
    damaged = bytearray(saved)
    damaged[at % len(saved)] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped.pt"
    path.write_bytes(damaged)
    with warnings.catch_warnings(record=True):
        try:
            state = load_checkpoint(path)
        except InputError:
            return
    assert_same(state, torch.load(io.BytesIO(saved), weights_only=True))


def test_every_bit_of_the_values_is_checked(tmp_path: Path, saved: bytes) -> None:
    """In each part of the archive."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        members = [member for member in archive.infolist() if member.file_size]
    for member in members:
        start = member.header_offset + 30
        lengths = saved[start - 4 : start]
        start += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        damaged = bytearray(saved)
        damaged[start + member.file_size // 2] ^= 1
        path.write_bytes(damaged)
        assert f"the checksum of {member.filename} does not fit" in refusal(path)


class Code:
    """Would write a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def foreign(kind: str, path: Path, mark: Path) -> None:
    model = model_of()
    if kind == "nothing":
        return
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("step: 3\nlr: 0.1\n")
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "hello")
    elif kind == "pickle with code":
        path.write_bytes(pickle.dumps({"model_state_dict": Code(mark)}))
    elif kind == "torch.save with code":
        torch.save({"model_state_dict": model.state_dict(), "x": Code(mark)}, path)
    elif kind == "legacy with code":
        torch.save({"model_state_dict": Code(mark)}, path, _use_new_zipfile_serialization=False)
    elif kind == "model":
        torch.save(model, path)
    elif kind == "state_dict":
        torch.save(model.state_dict(), path)
    elif kind == "tensor":
        torch.save(torch.zeros(3), path)
    elif kind == "newer":
        torch.save({"format_version": FORMAT_VERSION + 1, "model_state_dict": {}}, path)
    elif kind == "TorchScript":
        torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.zeros(1, 1)), path)


FOREIGN = {
    "nothing": "no such file",
    "folder": "a folder",
    "empty": r"\(0 bytes|torch.load refuses",
    "text": "torch.load refuses",
    "zip": "torch.load refuses",
    "pickle with code": "torch.load refuses",
    "torch.save with code": "torch.load refuses",
    "legacy with code": "torch.load refuses",
    "model": "torch.load refuses",
    "state_dict": r"a dictionary with 0.weight, 0.bias, 2.weight, 2.bias",
    "tensor": "a Tensor",
    "newer": f"format {FORMAT_VERSION + 1}, made by a newer version .this one reads up to {FORMAT_VERSION}",
    "TorchScript": "torch.load refuses",
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files(tmp_path: Path, kind: str) -> None:

    path, mark = tmp_path / "step-00000009.pt", tmp_path / "executed"
    with warnings.catch_warnings(record=True):
        foreign(kind, path, mark)
        assert re.search(FOREIGN[kind], refusal(path))
    assert not mark.exists(), "code of the file was run"


@pytest.mark.parametrize("kind", [kind for kind in FOREIGN if kind != "nothing"])
def test_the_one_before_it_is_used(tmp_path: Path, kind: str) -> None:
    trainer, loader = simple(tmp_path)
    trainer.fit(loader, 4)
    with warnings.catch_warnings(record=True):
        foreign(kind, tmp_path / "step-00000006.pt", tmp_path / "executed")
    again, _ = simple(tmp_path, seed=1)
    with pytest.warns(RuntimeWarning, match=r"step-00000006.pt: .* The checkpoint before it is tried\.$"):
        assert again.resume() == tmp_path / "step-00000004.pt"
    assert again.step == 4
    assert_same(again.model.state_dict(), trainer.model.state_dict())


def test_none_can_be_read(tmp_path: Path) -> None:
    trainer, loader = simple(tmp_path)
    assert trainer.resume() is None and trainer.step == 0, "there is none yet"
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}.pt").write_bytes(b"x")
    before = frozen(trainer.state_dict())
    said = r"checkpoints in .*: expected at least one that can be read; found none of 2; take them away"
    with pytest.warns(RuntimeWarning), pytest.raises(InputError, match=said):
        trainer.resume()
    assert_same(trainer.state_dict(), before)


def test_too_little_memory_is_no_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passing over a whole checkpoint would throw its steps away."""
    trainer, loader = simple(tmp_path)
    trainer.fit(loader, 2)

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(MemoryError):
        trainer.resume()


# --- loading


def test_the_legacy_format_loads(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "old.pt"
    torch.save(torch.load(io.BytesIO(saved), weights_only=True), path, _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(path)
    trainer, _ = simple(seed=1)
    assert trainer.resume(path) == path and trainer.step == 3
    assert_same(trainer.model.state_dict(), torch.load(io.BytesIO(saved), weights_only=True)["model_state_dict"])


MISSING = {
    "optimizer_state_dict": "moments and step counts start from zero",
    "scheduler_state_dict": "schedule starts at its first step",
    "scaler_state_dict": "loss scale starts at its initial value",
    "step": "steps are counted from 0",
    "data": "loader begins its first epoch",
    "rng": "random numbers go on",
}


@pytest.mark.parametrize("left", [[], ["optimizer_state_dict"], ["step", "scheduler_state_dict"], ["data", "rng"]])
def test_pieces_saved_by_hand(tmp_path: Path, left: list[str]) -> None:
    first, loader = simple(precision="fp16", seed=2)
    first.fit(loader, 3)
    whole = first.state_dict()
    torch.save({key: whole[key] for key in ["model_state_dict", *left]}, tmp_path / "mine.pt")
    trainer, _ = simple(precision="fp16", seed=1)
    gone = [key for key in MISSING if key not in left]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.resume(tmp_path / "mine.pt")
    said = [str(one.message) for one in caught]
    assert len(said) == len(gone)
    for key, line in zip(gone, said, strict=True):
        assert line.startswith(f"the checkpoint has no {key}: the " if key not in ("step", "rng") else "the check")
        assert MISSING[key] in line and key in line
    assert_same(trainer.model.state_dict(), whole["model_state_dict"])
    assert trainer.step == (3 if "step" in left else 0)
    assert len(trainer.optimizer.state) == (4 if "optimizer_state_dict" in left else 0)
    trainer.fit(loader, 4)


def test_entries_in_another_form_are_as_if_they_were_not_there() -> None:
    trainer, loader = simple()
    trainer.fit(loader, 2)
    state = {**trainer.state_dict(), "rng": torch.get_rng_state(), "data": 7}
    again, _ = simple(seed=1)
    with pytest.warns(RuntimeWarning):
        lines = again.load_state_dict(state)
    assert [line.split(":")[0] for line in lines] == ["the checkpoint has no data", "the checkpoint has no rng"]
    assert again.fit(loader, 3) == 3


def other(kind: str) -> dict[str, Any]:
    """A checkpoint that does not fit the trainer of :func:`test_what_does_not_fit_changes_nothing`."""
    if kind == "SGD":
        model = model_of()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = Trainer(model, optimizer, class_loss)
        trainer.fit(padded_batches([4, 4]), 2)
        return trainer.state_dict()
    trainer, loader = simple(precision="fp16")
    trainer.fit(loader, 2)
    state = copy.deepcopy(trainer.state_dict())
    model_state, optimizer_state = state["model_state_dict"], state["optimizer_state_dict"]
    if kind == "missing":
        del model_state["3.weight"]
    elif kind == "more":
        model_state["9.weight"] = torch.zeros(1)
    elif kind == "shape":
        model_state["3.weight"] = torch.zeros(5, 16)
    elif kind == "number":
        model_state["3.weight"] = 1.0
    elif kind == "list":
        state["model_state_dict"] = [1]
    elif kind == "groups":
        optimizer_state["param_groups"].append(dict(optimizer_state["param_groups"][0], params=[4]))
    elif kind == "moments":
        optimizer_state["state"][3]["exp_avg"] = torch.zeros(3)
    elif kind == "optimizer":
        state["optimizer_state_dict"] = 3
    elif kind == "schedule":
        state["scheduler_state_dict"] = torch.zeros(1)
    return state


OTHER = {
    "missing": "the model that it was saved from; found no 3.weight; build",
    "more": "the model that it was saved from; found a 9.weight that the model doesn't have; build",
    "shape": r"the model that it was saved from; found 3.weight of shape \(5, 16\), not \(4, 16\); build",
    "number": "the model that it was saved from; found a float as 3.weight; build",
    "list": "model_state_dict with what state_dict.. returned; found a list; leave out",
    "groups": "an optimizer with groups of 4 parameters; found groups of 4, 1; build the groups",
    "moments": r"state 'exp_avg' of .* to have shape \(4,\); found \(3,\); load a checkpoint of the same model",
    "optimizer": "optimizer_state_dict with what state_dict.. returned; found a int; leave out",
    "schedule": "scheduler_state_dict with what state_dict.. returned; found a Tensor; leave out",
    "SGD": "the state of AdamW; found that of an optimizer with dampening, momentum, nesterov; build",
}


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("kind", OTHER)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, kind: str, ours: bool) -> None:
    model = model_of(5) if kind == "SGD" else model_of(5, dropout=0.2)
    optimizer = (mo_fused.AdamW if ours else torch.optim.AdamW)(model.parameters(), lr=0.3)
    trainer = Trainer(model, optimizer, class_loss, schedule=falling(optimizer), precision="fp16")
    loader = padded_batches([4, 4, 4])
    trainer.fit(loader, 3)
    state = other(kind)
    before = frozen(trainer.state_dict())
    if kind == "moments" and not ours:
        return  # torch's own optimizers look at the shape when they step
    with pytest.raises(ValueError, match=OTHER[kind]):
        trainer.load_state_dict(state)
    assert_same(trainer.state_dict(), before)
    assert trainer.fit(loader, 4) == 4


SCHEDULES: dict[str, Any] = {
    "cosine": lambda optimizer: warmup_cosine(optimizer, 20),
    "inverse_sqrt": lambda optimizer: inverse_sqrt(optimizer, 3),
    "torch": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "functions": falling,
}


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "said"),
    [
        (
            "cosine",
            "inverse_sqrt",
            "a schedule with warmup_steps in 1 groups; found that of one with total_st",
        ),
        ("inverse_sqrt", "cosine", "found that of one with warmup_steps in 1 groups; build the schedule of that run"),
        ("torch", "cosine", "found that of a schedule with T_max, eta_min; build the schedule"),
        ("functions", "cosine", None),
    ],
)
def test_the_schedule_has_to_be_of_the_kind_that_was_saved(saved_by: str, loaded_by: str, said: str | None) -> None:
    def trainer(name: str) -> Trainer:
        model = model_of(0 if name == saved_by else 5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return Trainer(model, optimizer, class_loss, schedule=SCHEDULES[name](optimizer))

    first, second = trainer(saved_by), trainer(loaded_by)
    first.fit(padded_batches([4, 4, 4]), 3)
    before = frozen(second.state_dict())
    if said is not None:
        with pytest.raises(InputError, match=said):
            second.load_state_dict(first.state_dict())
        assert_same(second.state_dict(), before)
    else:
        second.load_state_dict(first.state_dict())
        assert second.schedule is not None and second.schedule.last_epoch == 3


def test_another_order_of_parameters_changes_nothing() -> None:
    def build(turned: bool) -> Trainer:
        model = model_of(5)
        named = list(model.named_parameters())
        optimizer = mo_fused.AdamW(named[::-1] if turned else named, lr=0.3)
        return Trainer(model, optimizer, class_loss)

    first, second = build(False), build(True)
    for trainer in (first, second):
        trainer.fit(padded_batches([4]), 1)
    before = frozen(second.state_dict())
    with pytest.raises(ValueError, match="order"):
        second.load_state_dict(first.state_dict())
    assert_same(second.state_dict(), before)
