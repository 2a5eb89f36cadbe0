"""Work that is pending while something else happens: loads, swapped memory, interrupts; and parameters that leave."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch import nn

import mo_fused
from mo_fused.offload import files, gradients, step, streams

pytestmark = pytest.mark.cpu_only(reason="what waits are threads of the host, for its own kernels")

WHERE = ["cpu", "disk"]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece waits before it is updated, so that whoever does not wait for it comes first."""
    update = step.PieceOfJob.update

    def slow(self: Any, slot: Any) -> None:
        time.sleep(0.05)
        update(self, slot)

    monkeypatch.setattr(step.PieceOfJob, "update", slow)


def kind_of(where: str, folder: Path) -> str:
    return "cpu" if where == "cpu" else f"disk:{folder}"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 40)).square().sum().backward()


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("where", WHERE)
def test_a_first_momentum_that_is_made_beside_the_backward(
    where: str, backend: str | None, tmp_path: Path, late: None
) -> None:
    options: dict[str, Any] = dict(lr=0.1, momentum=0.9, dampening=0.5, backend=backend)
    plain, model = layers(), layers()
    other = mo_fused.SGD(plain.parameters(), **options)
    opt = mo_fused.SGD(model.parameters(), offload=kind_of(where, tmp_path), **options)
    with mo_fused.gradient_release(model, opt):
        for m, o in ((plain, other), (model, opt)):
            for _ in range(2):
                backward(m)
                o.step()
                o.zero_grad()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


@pytest.mark.parametrize("where", WHERE)
def test_what_is_loaded_is_not_overwritten_by_what_is_pending(where: str, tmp_path: Path, late: None) -> None:
    model = layers()
    opt = mo_fused.AdamW(model.parameters(), lr=0.1, offload=kind_of(where, tmp_path))
    with mo_fused.gradient_release(model, opt):
        backward(model)
        opt.step()
        saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
        backward(model)
        opt.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
        opt.step()
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in saved[0].items())
        entries = opt.state_dict()["state"]
        assert all(torch.equal(v, entries[i][k]) for i, e in saved[1]["state"].items() for k, v in e.items())


@pytest.mark.parametrize("where", WHERE)
def test_memory_that_a_parameter_has_left_stays_until_it_was_written(where: str, tmp_path: Path, late: None) -> None:
    model = layers()
    opt = mo_fused.AdamW(model.parameters(), lr=0.1, offload=kind_of(where, tmp_path))
    with mo_fused.gradient_release(model, opt):
        backward(model)
        for p in model.parameters():
            p.data = p.data.clone()
        others = [torch.zeros_like(p) for p in model.parameters() for _ in range(4)]
        opt.step()
        assert not any(other.any() for other in others)


@pytest.mark.parametrize("where", WHERE)
def test_micro_batches_are_added_before_they_are_used(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gradients._add

    def slow(total: Any, more: Any) -> None:
        time.sleep(0.05)
        add(total, more)

    monkeypatch.setattr(gradients, "_add", slow)
    plain, model = layers(), layers()
    other = mo_fused.AdamW(plain.parameters(), lr=0.1)
    opt = mo_fused.AdamW(model.parameters(), lr=0.1, offload=kind_of(where, tmp_path), offload_gradients=True)
    for m, o in ((plain, other), (model, opt)):
        for _ in range(2):
            for scale in (1.0, -3.0):  # the sum has another sign than the first
                (scale * m(torch.ones(2, 40)).square().sum()).backward()
            o.step()
            o.zero_grad()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


@pytest.mark.parametrize("taken", [False, True])
def test_a_parameter_that_was_taken_out_keeps_its_gradient(taken: bool) -> None:
    a, b = (nn.Parameter(torch.ones(4)) for _ in range(2))
    opt = mo_fused.AdamW([a, b], lr=0.1, offload="cpu", offload_gradients=taken)
    for _ in range(2):
        (a + b).sum().backward()
        opt.step()
        opt.zero_grad()
        opt.param_groups[0]["params"] = [a]
    (a + b).sum().backward()
    assert b.grad is not None and not b._post_accumulate_grad_hooks


def test_a_parameter_that_is_not_among_the_largest_any_more(tmp_path: Path) -> None:
    p, q = nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(1000))
    plain = [nn.Parameter(t.detach().clone()) for t in (p, q)]
    opt = mo_fused.AdamW([p], lr=0.1, offload=f"disk:{tmp_path}", offload_fraction=0.5)
    other = mo_fused.AdamW(plain[:1], lr=0.1)
    for t in range(4):
        if t == 1:
            opt.add_param_group({"params": [q]})
            other.add_param_group({"params": plain[1:]})
        for x, y in ((p, q), plain):
            (x.square().sum() + y.square().sum()).backward()
        opt.step()
        other.step()
    assert torch.equal(p, plain[0]) and torch.equal(q, plain[1])
    assert ["state in a file" in e.reason for e in opt.explain()] == [False, True]


def test_a_first_step_that_finds_the_disk_full_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its momentum is a first one still: the gradient, not dampened."""
    options: dict[str, Any] = dict(lr=0.1, momentum=0.9, dampening=0.5)
    values = [torch.full((2000,), float(i)) for i in range(3)]
    plain, params = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    other, opt = mo_fused.SGD(plain, **options), mo_fused.SGD(params, offload=f"disk:{tmp_path}", **options)
    for p in (*plain, *params):
        p.grad = torch.ones_like(p)
    allocate, calls = files.StateFile.allocate, []

    def full(self: Any, size: int) -> int:
        calls.append(size)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "full")
        return allocate(self, size)

    monkeypatch.setattr(files.StateFile, "allocate", full)
    with pytest.raises(OSError, match="full"):
        opt.step()
    assert not opt.state_dict()["state"]
    opt.step()
    other.step()
    assert all(map(torch.equal, plain, params))


def test_a_checkpoint_of_more_states_than_files_may_be_open(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.full((3,), float(i))) for i in range(120)]
    opt = mo_fused.AdamW(params, lr=0.1, offload=f"disk:{tmp_path}")
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    try:
        torch.save(opt.state_dict(), tmp_path / "checkpoint.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert all(float(saved["state"][i]["exp_avg"][0]) == pytest.approx(0.1) for i in range(120))


def test_a_relative_folder_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opt = mo_fused.AdamW([nn.Parameter(torch.ones(3))], offload="disk:states")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    twin = copy.deepcopy(opt)
    assert twin.defaults["offload"] == f"disk:{tmp_path / 'states'}"
    assert len(list((tmp_path / "states").iterdir())) == 2 and not list((tmp_path / "elsewhere").iterdir())


INTERRUPTED = """
import random, signal, sys, time, torch, mo_fused
from mo_fused.offload import ring
random.seed(1)
torch.manual_seed(0)
ring.SLOT_BYTES = 100_000
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
where = sys.argv[1]

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
end, hit = time.monotonic() + 4, 0
while time.monotonic() < end:
    try:
        opt = mo_fused.AdamW(model.parameters(), lr=1e-3, offload=where)
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.03))
            for _ in range(50):
                with torch.enable_grad():
                    model(torch.ones(1, 64)).sum().backward()
                opt.step()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        hit += 1
    except Exception:  # an interrupt has left something of torch's or ours behind, and it says so
        pass
print("hit", hit)
"""


@pytest.mark.parametrize("where", WHERE)
def test_interrupts_do_not_hang(where: str, tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]) -> None:
    done = run_python("-c", INTERRUPTED, kind_of(where, tmp_path), timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[1]) > 10


class Registrations:
    """In the place of CUDA's runtime: which addresses are pinned."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.status = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.status:
            self.ranges[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.ranges[address]
        return 0


def test_pinned_memory_has_pages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Registrations()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    kept = [streams.host_memory(size, pinned=True) for size in (1, 3, 4096, 4097, 100_000)]
    assert [m.numel() for m in kept] == [1, 3, 4096, 4097, 100_000]
    for memory in kept:
        memory.fill_(7)
        assert memory.data_ptr() % 4096 == 0 and found.ranges[memory.data_ptr()] % 4096 == 0
    spans = sorted(found.ranges.items())
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    views = [m[:1].view(torch.uint8) for m in kept]
    del kept, memory
    assert len(found.ranges) == 5, "memory that a view holds is let go of"
    assert all(int(v) == 7 for v in views)
    del views
    gc.collect()
    assert not found.ranges
    found.status = 2
    with pytest.raises(RuntimeError, match="10 bytes of the host's memory to be pinned .* CUDA error 2"):
        streams.host_memory(10, pinned=True)


EXIT = """
import atexit, sys, time, weakref, torch, mo_fused
from mo_fused.offload import step
update = step.PieceOfJob.update
def slow(self, slot):
    time.sleep(0.02)
    update(self, slot)
step.PieceOfJob.update = slow
if sys.argv[2] == "late":  # as if nobody had made a finalizer before
    atexit.unregister(weakref.finalize._exitfunc)
    weakref.finalize._registered_with_atexit = False
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
opt = mo_fused.AdamW(model.parameters(), offload=sys.argv[1])
mo_fused.gradient_release(model, opt)
model(torch.ones(1, 64)).sum().backward()
print("pending", len(opt._offload._waiting) > 0)
"""


@pytest.mark.parametrize("finalizers", ["early", "late"])
@pytest.mark.parametrize("where", WHERE)
def test_the_process_ends_with_work_pending(
    where: str, finalizers: str, tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    """Whether the finalizers of weakref come before or after those of this package."""
    done = run_python("-c", EXIT, kind_of(where, tmp_path), finalizers, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "pending True\n", "")
    assert not list(tmp_path.iterdir())
