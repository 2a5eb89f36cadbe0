"""States in a file: equal bits, the entry that behaves as a dict, a limit on memory, resume, space in the file."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LAYOUTS, Case, Layout, drive, gradients, noise, parameters, states, weights
from oracle import assert_same_bits

import mo_fused
from mo_fused.offload import ring
from mo_fused.offload.files import OnDisk

pytestmark = pytest.mark.cpu_only(reason="states in a file are stepped by the CPU's kernels, whatever the device")

# Several chunks, parts of one, blocks of quantised moments with and without a last one that is short; what is tiny.
SHAPES = [(150, 257), (18, 256), (33, 384), (40_001,), (33,), ()]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (mo_fused.AdamW, dict(lr=1e-2, weight_decay=0.1)),
    "amsgrad": (mo_fused.AdamW, dict(lr=1e-2, betas=(0.9, 0.5), amsgrad=True)),
    "sgd": (mo_fused.SGD, dict(lr=1e-2, momentum=0.9, weight_decay=0.1)),
    "adafactor": (mo_fused.Adafactor, dict(lr=1e-2)),
}
CLIP = dict(max_grad_norm=1.0)
FORMATS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    *[(kind, dtype, {}) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)],
    *[("adamw", torch.bfloat16, dict(master_weights=m)) for m in ("fp32", "split", "split8", "kahan", "stochastic")],
    *[(kind, torch.float32, dict(state_dtype=s)) for kind in ("adamw", "sgd") for s in ("int8", "int4", "bf16")],
    ("adamw", torch.float16, dict(state_dtype="int8", master_weights="fp32")),
    ("adamw", torch.bfloat16, dict(state_dtype="int4", master_weights="split8")),
]
SLOW = [f for f in FORMATS if f[0] == "adafactor" or f[2] in ({}, dict(state_dtype="int4", master_weights="split8"))]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three chunks of AdamW's states: tensors are cut, and slots are used again within a step."""
    monkeypatch.setattr(ring, "SLOT_BYTES", 300_000)


def make(kind: str, dtype: torch.dtype, shapes: Any = SHAPES, **options: Any) -> tuple[list[Any], Any]:
    params = parameters(weights(shapes, dtype))
    maker, arguments = KINDS[kind]
    return params, maker(params, **{**arguments, **options})


def file_of(opt: Any) -> Path:
    (path,) = {Path(e.file.path) for entry in opt.state.values() for e in entry.extents.values()}
    return path


def assert_alike(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> None:
    (a, first), (b, second) = one, other
    assert_same_bits([p.detach() for p in a], [p.detach() for p in b], "parameters")
    assert_same_bits(states(first, a), states(second, b), "state")


def name_of(kind: str, dtype: torch.dtype, options: dict[str, Any]) -> str:
    return "-".join([kind, str(dtype).removeprefix("torch."), *map(str, options.values())])


# -- equal bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, CLIP], ids=["plain", "clip"])
@pytest.mark.parametrize(("kind", "dtype", "options"), FORMATS, ids=[name_of(*f) for f in FORMATS])
def test_bits_are_those_of_no_offload(
    tmp_path: Path, kind: str, dtype: torch.dtype, options: dict[str, Any], more: dict[str, Any]
) -> None:
    assert_equal_steps(tmp_path, kind, dtype, {**options, **more, "backend": "cpu"})


@pytest.mark.parametrize(("kind", "dtype", "options"), SLOW, ids=[name_of(*f) for f in SLOW])
def test_bits_with_the_eager_backend(tmp_path: Path, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert_equal_steps(tmp_path, kind, dtype, {**options, **CLIP, "backend": "eager"})


def assert_equal_steps(tmp_path: Path, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    given = {**options, "stats": True}
    plain = make(kind, dtype, **given)
    there = make(kind, dtype, offload=f"disk:{tmp_path}", **given)
    for row in gradients(SHAPES, 3, dtype):
        for params, opt in (plain, there):
            drive(opt, params, [row])
        for name in ("grad_norm", "update_norm", "param_norm"):
            a, b = float(getattr(plain[1].last_step, name)), float(getattr(there[1].last_step, name))
            # The eager backend adds up updates and parameters in the order of the pieces.
            assert (
                a == b if options["backend"] == "cpu" or name == "grad_norm" else math.isclose(a, b, rel_tol=1e-14)
            ), name
        assert_alike(plain, there)
    # What a parameter without moments would prove: nothing.
    moved = [p for p in there[0] if any(isinstance(v, torch.Tensor) and v.dim() for v in there[1].state[p].values())]
    assert all(there[1].state[p].extents for p in moved) and len(moved) >= 5
    assert [f.name for f in tmp_path.iterdir()] == [file_of(there[1]).name]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_layouts(tmp_path: Path, kind: str, layout: Layout) -> None:
    sides = []
    for where in (None, f"disk:{tmp_path}"):
        p = torch.nn.Parameter(layout.param(noise(layout.shape, 1)))
        opt = KINDS[kind][0]([p], **KINDS[kind][1], offload=where, **CLIP)
        for t in range(3):
            p.grad = layout.grad(noise(layout.shape, 2 + t))
            opt.step()
        sides.append(([p], opt))
    assert_alike(sides[0], sides[1])


def test_a_part_of_the_states(tmp_path: Path) -> None:
    plain = make("adamw", torch.float32, **CLIP)
    there = make("adamw", torch.float32, offload=f"disk:{tmp_path}", offload_fraction=0.4, **CLIP)
    for params, opt in (plain, there):
        drive(opt, params, gradients(SHAPES, 3))
    assert [isinstance(there[1].state[p], OnDisk) for p in there[0]] == [False, False, False, True, False, False]
    assert_alike(plain, there)


def test_skipped_steps_and_missing_gradients(tmp_path: Path) -> None:
    plain = make("sgd", torch.float32, skip_nonfinite=True)
    there = make("sgd", torch.float32, skip_nonfinite=True, offload=f"disk:{tmp_path}")
    rows = gradients(SHAPES, 4)
    rows[0][1][0, 0] = rows[2][0][0, 0] = float("inf")  # a first step that makes no momentum, and a later one
    rows[1][3] = rows[3][0] = None
    for row in rows:
        for params, opt in (plain, there):
            drive(opt, params, [row])
        assert bool(plain[1].last_step.skipped) == bool(there[1].last_step.skipped)
        assert_alike(plain, there)


def test_offloaded_gradients(tmp_path: Path) -> None:
    """Taken by a hook of the backward and added up beside it."""
    sides = []
    for options in ({}, dict(offload=f"disk:{tmp_path}"), dict(offload=f"disk:{tmp_path}", offload_gradients=True)):
        params, opt = make("adamw", torch.float32, **CLIP, **options)
        for t in range(3):
            for micro in range(2):
                loss = sum((p * noise(p.shape, 10 * t + micro + i)).sum() for i, p in enumerate(params))
                loss.backward()
                taken = all(p.grad is None for p in params)
                assert taken == bool(options.get("offload_gradients"))
            opt.step()
            opt.zero_grad()
        sides.append((params, opt))
    assert_alike(sides[0], sides[1])
    assert_alike(sides[0], sides[2])


# -- checkpoints ------------------------------------------------------------------------------------------------------

RESUMED = [
    ("adamw", torch.float32, {}),
    ("sgd", torch.float32, {}),
    ("adafactor", torch.float32, {}),
    ("adamw", torch.bfloat16, dict(master_weights="split", state_dtype="int4")),
]


@pytest.mark.parametrize(("kind", "dtype", "options"), RESUMED, ids=[name_of(*f) for f in RESUMED])
def test_resume(tmp_path: Path, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A checkpoint is one of an optimizer without offload: same keys, same values, loaded by either into either."""
    where = dict(offload=f"disk:{tmp_path}")
    rows = gradients(SHAPES, 5, dtype)
    whole = make(kind, dtype, **options, **CLIP)
    drive(whole[1], whole[0], rows[:2])
    there = make(kind, dtype, **options, **CLIP, **where)
    drive(there[1], there[0], rows[:2])
    saved = []
    for _, opt in (whole, there):
        buffer = io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        buffer.seek(0)
        saved.append(torch.load(buffer, weights_only=True))
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    assert {i: list(e) for i, e in saved[0]["state"].items()} == {i: list(e) for i, e in saved[1]["state"].items()}
    assert_same_bits(list(saved[0]["state"].values()), list(saved[1]["state"].values()), "checkpoint")
    values = [p.detach().clone() for p in there[0]]
    drive(whole[1], whole[0], rows[2:])
    for checkpoint in saved:
        for offload in ({}, where):
            params, opt = make(kind, dtype, **options, **CLIP, **offload)
            with torch.no_grad():
                for p, value in zip(params, values, strict=True):
                    p.copy_(value)
            opt.load_state_dict(checkpoint)
            drive(opt, params, rows[2:])
            assert_alike(whole, (params, opt))


def test_a_checkpoint_stays_as_it_was(tmp_path: Path) -> None:
    """What state_dict() returned is loaded into the same optimizer; torch's other copies are independent too."""
    params, opt = make("adamw", torch.float32, offload=f"disk:{tmp_path}")
    rows = gradients(SHAPES, 3)
    drive(opt, params, rows[:1])
    kept = opt.state_dict()
    assert all(type(entry) is dict for entry in kept["state"].values())
    opt.load_state_dict(kept)
    before = [{k: v.clone() for k, v in entry.items()} for entry in kept["state"].values()]
    drive(opt, params, rows[1:])
    assert_same_bits(list(kept["state"].values()), before, "the state_dict that was loaded")


# -- the entry as a dict ----------------------------------------------------------------------------------------------


def test_an_entry_behaves_as_a_dict(tmp_path: Path) -> None:
    plain = make("adamw", torch.float32)
    there = make("adamw", torch.float32, offload=f"disk:{tmp_path}")
    for params, opt in (plain, there):
        drive(opt, params, gradients(SHAPES, 2))
    usual, entry = plain[1].state[plain[0][0]], there[1].state[there[0][0]]
    keys = ["step", "exp_avg", "exp_avg_sq"]
    assert isinstance(entry, dict) and list(entry) == list(entry.keys()) == list(usual) == keys
    assert len(entry) == 3 and bool(entry) and "exp_avg" in entry and "nothing" not in entry
    for key, value in entry.items():
        assert type(value) is torch.Tensor and torch.equal(value, usual[key]) and value.dtype == usual[key].dtype
    assert_same_bits(list(entry.values()), list(usual.values()), "values()")
    assert_same_bits(dict(entry), usual, "dict()")
    assert_same_bits({**entry}, usual, "**")
    assert_same_bits(entry.copy(), usual, "copy()")
    assert torch.equal(entry.get("exp_avg"), usual["exp_avg"])
    assert entry.get("nothing") is None and entry.get("nothing", 5) == 5
    assert torch.equal(entry.setdefault("exp_avg", 5), usual["exp_avg"])
    assert entry.setdefault("mine", 5) == 5 and entry["mine"] == 5 and entry.pop("mine") == 5
    entry.update(mine=6)
    del entry["mine"]
    for key in ("nothing", "mine"):
        with pytest.raises(KeyError):
            entry[key]
        with pytest.raises(KeyError):
            del entry[key]
        with pytest.raises(KeyError):
            entry.pop(key)
        assert entry.pop(key, 7) == 7
    assert "exp_avg_sq" in repr(entry)
    popped = entry.pop("exp_avg")
    assert torch.equal(popped, usual["exp_avg"]) and list(entry) == ["step", "exp_avg_sq"] and len(entry) == 2
    entry.clear()
    assert not entry and list(entry) == [] and torch.equal(popped, usual["exp_avg"])


def test_state_that_is_taken_out_is_made_again(tmp_path: Path) -> None:
    sides = []
    for offload in ({}, dict(offload=f"disk:{tmp_path}")):
        params, opt = make("adamw", torch.float32, **offload)
        rows = gradients(SHAPES, 4)
        drive(opt, params, rows[:1])
        opt.state[params[0]].pop("exp_avg")
        drive(opt, params, rows[1:2])
        opt.state[params[0]].clear()
        drive(opt, params, rows[2:3])
        del opt.state[params[1]]
        drive(opt, params, rows[3:])
        sides.append((params, opt))
    assert_alike(sides[0], sides[1])


def test_what_is_written_to_a_state_takes_effect(tmp_path: Path) -> None:
    """Through the mapping at once; another tensor is kept in memory until the step, which moves it to the file."""
    sides = []
    for offload in ({}, dict(offload=f"disk:{tmp_path}")):
        params, opt = make("adamw", torch.float32, **offload)
        rows = gradients(SHAPES, 6)
        drive(opt, params, rows[:1])
        for i, p in enumerate(params):
            entry = opt.state[p]
            entry["exp_avg"].mul_(0.5)
            drive(opt, params, rows[1:2])
            entry["exp_avg"] = noise(p.shape, 70 + i)
            assert not offload or "exp_avg" not in entry.extents
            drive(opt, params, rows[2:3])
            entry["exp_avg_sq"] *= 2.0  # read, written in place, and put in again
            drive(opt, params, rows[3:4])
            entry["exp_avg"] = noise(p.shape, 80 + i, torch.float64)  # of another dtype: it stays one
            entry["step"] = 3  # a number, as old checkpoints have it
            drive(opt, params, rows[4:])
            assert not offload or set(entry.extents) == {"exp_avg_sq", "exp_avg"}
        sides.append((params, opt))
    assert_alike(sides[0], sides[1])
    assert file_of(sides[1][1]).parent == tmp_path


# -- memory -----------------------------------------------------------------------------------------------------------

LIMITED = """
import hashlib, json, resource, sys
import torch
import mo_fused
from mo_fused.offload import ring

torch.set_num_threads(2)
ring.SLOT_BYTES = 4 << 20
where, limited = json.loads(sys.argv[1])
MAY = 64 << 20
# Moments of four times what may be allocated; those of the largest tensor alone are more than that.
sizes = [(5000, 2560)] + [(1280, 2560)] * 7 + [(2560,)] * 4
generator = torch.Generator().manual_seed(0)
params = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
for p in params:
    p.grad = torch.randn(p.shape, generator=generator)
moments = sum(8 * p.numel() for p in params)
assert moments >= 4 * MAY and 8 * params[0].numel() > MAY, moments
opt = mo_fused.AdamW(params, lr=1e-2, max_grad_norm=1.0, offload=where)
small = torch.nn.Parameter(torch.ones(8))
small.grad = torch.ones(8)
mo_fused.AdamW([small], max_grad_norm=1.0).step()  # imports what a first step imports
if limited:
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + MAY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for _ in range(2):
    opt.step()
    for p in params:
        p.grad.mul_(-0.5)
digest = hashlib.sha256()
for p in params:
    digest.update(p.detach().numpy())
print(digest.hexdigest(), float(opt.last_step.grad_norm))
"""


def test_trains_within_a_limit_on_memory(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # One arena of malloc: others would reserve 64 MiB of addresses for each thread.
    env = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "2"}

    def train(where: str | None, limited: bool) -> subprocess.CompletedProcess[str]:
        return run_python("-c", LIMITED, json.dumps([where, limited]), env=env)

    reference = train(None, False)
    assert reference.returncode == 0, reference.stderr
    failed = train(None, True)
    assert failed.returncode == 1 and "allocate" in failed.stderr, failed.stderr
    folder = tmp_path / "states"
    found = train(f"disk:{folder}", True)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout == reference.stdout
    assert list(folder.iterdir()) == []


# -- space in the file ------------------------------------------------------------------------------------------------


def test_space_is_used_again(tmp_path: Path) -> None:
    params, opt = make("adamw", torch.float32, offload=f"disk:{tmp_path}")
    rows = gradients(SHAPES, 1)
    drive(opt, params, rows)
    used = file_of(opt).stat().st_size
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    for _ in range(4):
        buffer.seek(0)
        opt.load_state_dict(torch.load(buffer, weights_only=True))
        drive(opt, params, rows)
        assert file_of(opt).stat().st_size <= 2 * used  # the new states are there before the old ones go
    for _ in range(4):
        opt.state[params[0]]["exp_avg"] = noise(SHAPES[0], 3)
        drive(opt, params, rows)
    assert file_of(opt).stat().st_size <= 2 * used


def test_space_of_a_mapped_tensor_is_left_alone(tmp_path: Path) -> None:
    params, opt = make("adamw", torch.float32, offload=f"disk:{tmp_path}")
    rows = gradients(SHAPES, 1)
    drive(opt, params, rows)
    checkpoint = {**opt.state_dict()}
    checkpoint["state"] = {i: {k: v.clone() for k, v in e.items()} for i, e in checkpoint["state"].items()}
    held = [opt.state[p]["exp_avg"] for p in params]
    view = opt.state[params[0]]["exp_avg_sq"].view(-1)[5:9]  # a part holds all of it
    before, part = [t.clone() for t in held], view.clone()
    for _ in range(3):
        opt.load_state_dict(checkpoint)
        drive(opt, params, rows)
        gc.collect()
        assert_same_bits(held, before, "tensors that somebody holds")
        assert_same_bits([view], [part], "a part that somebody holds")
    assert not torch.equal(opt.state[params[0]]["exp_avg"], before[0])


@pytest.mark.parametrize("how", ["load", "put"])
def test_space_that_was_held_is_used_again_when_it_is_let_go(tmp_path: Path, how: str) -> None:
    params, opt = make("adamw", torch.float32, offload=f"disk:{tmp_path}")
    rows = gradients(SHAPES, 1)
    drive(opt, params, rows)
    used = file_of(opt).stat().st_size
    for _ in range(8):
        if how == "load":
            kept = opt.state_dict()  # which is there until the next one is
            opt.load_state_dict(kept)
        else:
            for p in params:
                opt.state[p]["exp_avg"] *= 0.5
        drive(opt, params, rows)
        gc.collect()
    assert file_of(opt).stat().st_size <= 3 * used


def test_the_file_has_the_size_of_the_states(tmp_path: Path) -> None:
    kind = Case("AdamW", "int8", dict(lr=1e-2, state_dtype="int8"))
    params = parameters(weights([(512, 256)] * 4))
    opt = kind.ours(params, offload=f"disk:{tmp_path}")
    drive(opt, params, gradients([(512, 256)] * 4, 1))
    needed = 4 * 2 * (512 * 256 + 512 * 4)
    size = file_of(opt).stat().st_size
    assert needed <= size <= needed + 4 * 4 * os.sysconf("SC_PAGE_SIZE")


def test_a_folder_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    opt = mo_fused.AdamW([torch.nn.Parameter(torch.ones(3))], offload="disk:~/inside/states")
    assert [p.suffix for p in (tmp_path / "inside" / "states").iterdir()] == [".states"]
    del opt
