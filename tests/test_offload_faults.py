"""States in a file when something goes wrong: a full disk, a lost file, reads and writes that fail; processes."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import drive, gradients, parameters, weights
from oracle import assert_same_bits

import mo_fused
from mo_fused.offload import ring

pytestmark = pytest.mark.cpu_only(reason="states in a file are stepped by the CPU's kernels, whatever the device")

SHAPES = [(150, 257), (33,), (40_001,)]
ROWS = gradients(SHAPES, 3)
Run = Callable[..., subprocess.CompletedProcess[str]]


def adamw(folder: Path | str | None, **options: Any) -> tuple[list[Any], Any]:
    params = parameters(weights(SHAPES))
    where = None if folder is None else f"disk:{folder}"
    return params, mo_fused.AdamW(params, lr=1e-2, max_grad_norm=1.0, offload=where, **options)


def values(params: list[Any]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params]


def states_file(folder: Path) -> Path:
    (found,) = folder.glob("mo_fused-*.states")
    return found


def wait_for(truth: Callable[[], bool]) -> None:
    """For what happens as soon as a thread has let go of its last piece of work."""
    end = time.monotonic() + 10
    gc.collect()
    while not truth():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# -- a folder that cannot be used -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["file", "below a file", "not writable"])
def test_a_folder_that_cannot_be_used_is_refused_at_construction(tmp_path: Path, what: str) -> None:
    file = tmp_path / "taken"
    file.write_text("mine")
    # Nobody makes files in /proc, not even root.
    folder = {"file": file, "below a file": file / "below", "not writable": Path("/proc/self/fdinfo")}[what]
    with pytest.raises(OSError, match="to name a folder that can be written; found .*; name another folder") as raised:
        adamw(folder)
    assert f"offload='disk:{folder}'" in str(raised.value)
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]


def test_a_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    params, opt = adamw(folder)
    drive(opt, params, ROWS)
    assert states_file(folder).stat().st_size >= 8 * sum(p.numel() for p in params)


# -- a full disk ------------------------------------------------------------------------------------------------------

FULL = """
import json, resource, sys
import torch
import mo_fused

torch.set_num_threads(1)
folder, = json.loads(sys.argv[1])
generator = torch.Generator().manual_seed(0)
sizes = [(3000,), (40_000,), (3000,)]
first = [torch.randn(size, generator=generator) for size in sizes]
grads = [torch.randn(size, generator=generator) for size in sizes]

def make(where):
    params = [torch.nn.Parameter(value.clone()) for value in first]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    return params, mo_fused.AdamW(params, lr=1e-2, max_grad_norm=1.0, offload=where)

def same(params, others):
    return all(torch.equal(p.detach(), q.detach()) for p, q in zip(params, others))

plain, other = make(None)
other.step()
# A file of this size has room for the states of the first tensor and one moment of the second.
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, most))
params, opt = make(f"disk:{folder}")
said = []
for _ in range(2):
    try:
        opt.step()
    except OSError as error:
        said.append(str(error))
    assert same(params, first), "a parameter was changed"
    assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in opt.state.values()), "half a state"
    assert all(float(entry["step"]) == 0 for entry in opt.state.values())
# Training goes on with these parameters: with a new optimizer, or with this one when there is room again.
new = mo_fused.AdamW(params, lr=1e-2, max_grad_norm=1.0)
new.step()
assert same(params, plain)
with torch.no_grad():
    for p, value in zip(params, first):
        p.copy_(value)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
opt.step()
assert same(params, plain)
assert all(torch.equal(opt.state[p][k], v) for p, q in zip(params, plain) for k, v in other.state[q].items())
print(json.dumps(said))
"""


def test_a_full_disk_is_noticed_before_anything_has_changed(tmp_path: Path, run_python: Run) -> None:
    done = run_python("-c", FULL, json.dumps([str(tmp_path / "states")]))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) == 2
    for text in said:
        assert text.startswith("expected 163,840 bytes for a state under "), text  # of 4 KiB pages, 160,000 bytes
        assert "found File too large; " in text
        assert "bytes are free; make room or name another folder; parameters and states are as before" in text
    assert list((tmp_path / "states").iterdir()) == []


def test_a_full_disk_while_a_checkpoint_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, opt = adamw(tmp_path)
    drive(opt, params, ROWS[:1])
    checkpoint = {**opt.state_dict()}
    checkpoint["state"] = {i: {k: v.clone() for k, v in e.items()} for i, e in checkpoint["state"].items()}
    reference, other = adamw(None)
    drive(other, reference, ROWS)
    for i, p in enumerate(params):
        opt.state[p]["exp_avg"].fill_(i)
    before = values(params)
    states = [{k: v.clone() for k, v in opt.state[p].items()} for p in params]
    with monkeypatch.context() as patch:
        calls = []

        def full(*_: Any) -> None:
            calls.append(1)
            if len(calls) > 3:
                raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="bytes for a state under .* bytes are free; make room"):
            opt.load_state_dict(checkpoint)
    assert_same_bits(values(params), before)
    assert_same_bits([dict(opt.state[p].items()) for p in params], states, "states")
    opt.load_state_dict(checkpoint)
    drive(opt, params, ROWS[1:])
    assert_same_bits(values(params), values(reference))


# -- a file that is not there any more --------------------------------------------------------------------------------


def remove(file: Path) -> None:
    file.unlink()


def remove_folder(file: Path) -> None:
    file.unlink()
    file.parent.rmdir()


def folder_becomes_a_file(file: Path) -> None:
    remove_folder(file)
    file.parent.write_text("mine")


def cut_short(file: Path) -> None:
    os.truncate(file, 4096)


def replace_it(file: Path) -> None:
    size = file.stat().st_size
    file.unlink()
    file.write_bytes(bytes(size))


@pytest.mark.parametrize("loss", [remove, remove_folder, folder_becomes_a_file, cut_short, replace_it])
def test_a_lost_file_is_noticed_before_anything_has_changed(tmp_path: Path, loss: Callable[[Path], None]) -> None:
    folder = tmp_path / "states"
    params, opt = adamw(folder)
    drive(opt, params, ROWS[:2])
    before, file = values(params), states_file(folder)
    loss(file)
    for _ in range(2):
        with pytest.raises(OSError, match="to stay while the optimizer lives; found .*; load the last checkpoint") as e:
            drive(opt, params, ROWS[2:])
        assert str(file) in str(e.value)
        assert_same_bits(values(params), before)
    # Training goes on with a new optimizer: there is nothing wrong with the parameters.
    other = mo_fused.AdamW(params, lr=1e-2, offload=f"disk:{tmp_path / 'other'}")
    drive(other, params, ROWS[2:])
    assert all(not torch.equal(p, old) for p, old in zip(values(params), before, strict=True))


@pytest.mark.filterwarnings("error")  # what a finaliser raises
@pytest.mark.parametrize("loss", [remove, remove_folder, folder_becomes_a_file, cut_short, replace_it])
def test_an_optimizer_without_its_file_goes_quietly(
    tmp_path: Path, loss: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "states"
    params, opt = adamw(folder)
    drive(opt, params, ROWS[:1])
    file = states_file(folder)
    loss(file)
    held = weakref.ref(opt._offload.home.file)
    del opt
    wait_for(lambda: held() is None)
    assert capsys.readouterr().err == ""
    if loss is replace_it:
        assert file.exists(), "somebody else's file was removed"
    elif loss is folder_becomes_a_file:
        assert folder.read_text() == "mine"
    else:
        assert not file.exists()


# -- reads and writes that fail ---------------------------------------------------------------------------------------


class Flaky:
    """os.preadv or os.pwritev, which fails at one call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, fails_at: int) -> None:
        self.calls = 0
        self._fails_at = fails_at
        self._call = getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any) -> int:
        self.calls += 1
        if self.calls - 1 == self._fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(self._call(*args))


CALLS = 14  # three chunks of the first and of the last tensor and one of the second, two moments each


@pytest.mark.parametrize("at", [0, 1, 6, CALLS - 1])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_failing_read_or_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    monkeypatch.setattr(ring, "SLOT_BYTES", 140_000)  # one chunk of the states
    folder = tmp_path / "states"
    reference, other = adamw(tmp_path / "other")
    drive(other, reference, ROWS[:1])
    before = values(reference)
    with monkeypatch.context() as patch:
        count = Flaky(patch, name, -1)
        drive(other, reference, ROWS[1:2])
    assert count.calls == CALLS
    after = values(reference)

    params, opt = adamw(folder)
    drive(opt, params, ROWS[:1])
    assert_same_bits(values(params), before)
    what = "read" if name == "preadv" else "write"
    with monkeypatch.context() as patch:
        count = Flaky(patch, name, at)
        with pytest.raises(OSError, match=f"expected to {what} the file of states .*Input/output error") as raised:
            drive(opt, params, ROWS[1:2])
        assert str(states_file(folder)) in str(raised.value)
    changed = untouched = 0
    for p, old, new in zip(values(params), before, after, strict=True):
        for piece, was, will_be in zip(*(t.view(-1).split(16384) for t in (p, old, new)), strict=True):
            assert torch.equal(piece, was) or torch.equal(piece, will_be), "half a piece was updated"
            changed += torch.equal(piece, will_be)
            untouched += torch.equal(piece, was)
    # The first piece cannot have been updated without its states; the last one can only have failed to be written.
    assert changed + untouched == 7
    assert untouched if name == "preadv" else changed
    there = values(params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a step that failed halfway .*Input/output error.*load a checkpoint"):
            drive(opt, params, ROWS[2:])
        assert_same_bits(values(params), there)
    del opt, raised  # whose frames hold the optimizer
    wait_for(lambda: list(folder.iterdir()) == [])


def test_reads_and_writes_that_do_less_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, other = adamw(None)
    drive(other, reference, ROWS)
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read(fd, [into[0][:5000]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: write(fd, [data[0][:7001]], at))
    params, opt = adamw(tmp_path)
    drive(opt, params, ROWS)
    assert_same_bits(values(params), values(reference))
    assert_same_bits(
        [dict(opt.state[p].items()) for p in params], [other.state[p] for p in reference], "states of short writes"
    )


def test_a_file_that_is_cut_short_during_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "SLOT_BYTES", 140_000)
    params, opt = adamw(tmp_path)
    drive(opt, params, ROWS[:1])
    file, read = states_file(tmp_path), os.preadv
    calls = []

    def cutting(*args: Any) -> int:
        calls.append(1)
        if len(calls) == 1:  # later the writes would make it longer again, with holes
            os.truncate(file, 0)
        return read(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", cutting)
        with pytest.raises(OSError, match="to stay while the optimizer lives; found .* bytes of at least"):
            drive(opt, params, ROWS[1:2])
    assert all(bool(p.isfinite().all()) for p in params)
    with pytest.raises(RuntimeError, match="a step that failed halfway"):
        drive(opt, params, ROWS[2:])


# -- processes and several optimizers ---------------------------------------------------------------------------------


def test_two_optimizers_under_one_folder(tmp_path: Path) -> None:
    reference, other = adamw(None)
    sides = [adamw(tmp_path) for _ in range(2)]
    assert len(list(tmp_path.iterdir())) == 2
    for row in ROWS:
        drive(other, reference, [row])
        for params, opt in sides:
            drive(opt, params, [row])
    for params, _ in sides:
        assert_same_bits(values(params), values(reference))
    del sides[0], params, opt, _
    wait_for(lambda: len(list(tmp_path.iterdir())) == 1)
    sides.clear()
    wait_for(lambda: list(tmp_path.iterdir()) == [])


def test_a_tensor_of_a_state_outlives_its_optimizer(tmp_path: Path) -> None:
    params, opt = adamw(tmp_path)
    drive(opt, params, ROWS)
    held = opt.state[params[0]]["exp_avg"]
    before = held.clone()
    del opt
    wait_for(lambda: list(tmp_path.iterdir()) == [])
    assert_same_bits(held, before)


ENDS = """
import os, sys
import torch
import mo_fused

torch.set_num_threads(1)
folder, how = sys.argv[1:]
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
opt = mo_fused.AdamW([p], offload=f"disk:{folder}")
opt.step()
assert len(os.listdir(folder)) == 1
if how == "error":
    raise RuntimeError("the end")
sys.exit(3)
"""


@pytest.mark.parametrize(("how", "status"), [("error", 1), ("exit", 3)])
def test_the_file_goes_with_the_process(tmp_path: Path, run_python: Run, how: str, status: int) -> None:
    folder = tmp_path / "states"
    done = run_python("-c", ENDS, str(folder), how)
    assert done.returncode == status, done.stderr
    assert list(folder.iterdir()) == []
    assert ("the end" if how == "error" else "") in done.stderr and done.stderr.count("Traceback") == (how == "error")


FORKED = """
import gc, os, sys
import torch
import mo_fused

torch.set_num_threads(1)
folder, how = sys.argv[1:]

def make(where):
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (5000, 20000)]
    for p in params:
        p.grad = p.detach() * 2
    return params, mo_fused.AdamW(params, lr=1e-2, offload=where)

plain, other = make(None)
params, opt = make(f"disk:{folder}")
opt.step()
other.step()
child = os.fork()
if not child:
    if how == "deletes":
        del opt
        gc.collect()
    elif how == "steps":
        for p in params:
            p.grad = torch.full_like(p, 9.0)
        try:
            opt.step()
        except Exception as error:
            print(error)
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert len(os.listdir(folder)) == 1, os.listdir(folder)
for _ in range(2):
    opt.step()
    other.step()
for p, q in zip(params, plain):
    assert torch.equal(p, q), "the child changed the parent's parameters"
    assert all(torch.equal(opt.state[p][k], v) for k, v in other.state[q].items()), "the child changed a state"
"""


@pytest.mark.parametrize("how", ["exits", "deletes", "steps"])
def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path: Path, run_python: Run, how: str) -> None:
    folder = tmp_path / "states"
    done = run_python("-c", FORKED, str(folder), how)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
