"""How many threads share a step on the host: by the work, by torch's number, by the cores and quota that there are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import mo_fused
from mo_fused import team
from mo_fused.backends import cpu
from mo_fused.table import CHUNK_ELEMENTS, ROW, Table

pytestmark = pytest.mark.cpu_only(reason="the subject is the team of threads of the CPU's kernels")

EACH = team.ELEMENTS_PER_THREAD


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """128 threads of torch's and as many cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(128)
    monkeypatch.setattr(team, "allowed_cores", lambda: 128)
    yield
    torch.set_num_threads(before)


def cut(*numel: int) -> Table:
    rows = np.zeros(len(numel), dtype=ROW)
    rows["numel"] = numel
    return Table(rows, {}, 1)


def size(table: Table) -> int:
    return team.team_size(table.useful_threads, len(table.batches) - 1)


@pytest.mark.parametrize(
    ("numel", "threads"),
    [
        ((), 1),
        ((0,), 1),
        ((1,), 1),
        ((CHUNK_ELEMENTS,), 1),  # one batch
        ((EACH,), 1),  # the caller's own share
        ((2 * EACH - 2100,), 1),  # with the cost of its sixteen chunks a little less than two shares
        ((2 * EACH,), 2),
        ((64,) * 1000, 1),
        ((1,) * 1000, 1),
        ((1,) * 10_000, 9),  # tiny tensors cost as much as 129 elements
        ((50 * EACH,), 50),
        ((1000 * EACH,), 128),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else f"{len(x)}x{max(x, default=0)}",
)
def test_team_of_work(numel: tuple[int, ...], threads: int, many: None) -> None:
    assert size(cut(*numel)) == threads


def test_never_more_than_batches_than_torch_or_than_is_asked(many: None) -> None:
    assert team.team_size(100, 1) == 1
    assert team.team_size(100, 3) == 3
    assert team.team_size(100, 100, threads=5) == 5
    torch.set_num_threads(2)
    assert team.team_size(100, 100) == 2


def test_never_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "allowed_cores", lambda: 3)
    assert team.team_size(100, 100, threads=64) == 3
    assert team.team_size(2, 100, threads=64) == 2


@pytest.mark.parametrize("threads", [1, 16, 17, 64, 128])
def test_every_thread_of_a_large_step_has_eight_batches(
    threads: int, many: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)
    table = cut(50_000_000, 3, 768, 20_000_000)
    batches = len(table.batches) - 1
    assert max(128, 8 * threads) <= batches <= 1.1 * max(128, 8 * threads)
    assert table.batches[0] == 0 and table.batches[-1] == len(table.chunks)
    assert (np.diff(table.batches) > 0).all(), "a batch without chunks, or chunks in two"


def test_batches_of_tiny_tensors_cost_about_a_chunk(many: None) -> None:
    batches = np.diff(cut(*[1] * 10_000).batches)
    assert abs(batches.astype(float) * (1 + team.CHUNK_COST) - CHUNK_ELEMENTS)[:-1].max() <= 1 + team.CHUNK_COST


def test_a_step_takes_the_team_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = cpu.run

    def watched(table: Table) -> None:
        run(table)
        seen.append(int(table.control["threads"][0]))

    monkeypatch.setattr(cpu, "run", watched)
    monkeypatch.setattr(team, "allowed_cores", lambda: 2)
    before = torch.get_num_threads()
    try:
        for threads in (1, 8):
            torch.set_num_threads(threads)
            for numel in (EACH, 3 * EACH):
                p = torch.nn.Parameter(torch.ones(numel))
                p.grad = torch.ones(numel)
                mo_fused.AdamW([p], backend="cpu", max_grad_norm=1.0).step()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 1, 2]


def test_affinity_bounds_the_team() -> None:
    """In a thread of its own, which takes all cores but one away from itself after torch was loaded."""
    seen = []

    def pinned() -> None:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        seen.append((team.allowed_cores(), team.team_size(100, 100, threads=8)))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert seen == [(1, 1)]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


NONE = 1 << 20


def test_quota_of_version_2_is_the_smallest_up_to_the_root(tmp_path: Path) -> None:
    write(tmp_path / "self", "0::/jobs/one\n")
    write(tmp_path / "fs/cpu.max", "max 100000\n")
    assert team.cpu_quota(tmp_path / "self", tmp_path / "fs") == NONE
    write(tmp_path / "fs/jobs/one/cpu.max", "max 100000\n")
    write(tmp_path / "fs/jobs/cpu.max", "250000 100000\n")
    assert team.cpu_quota(tmp_path / "self", tmp_path / "fs") == 3
    write(tmp_path / "fs/jobs/one/cpu.max", "50000 100000\n")
    assert team.cpu_quota(tmp_path / "self", tmp_path / "fs") == 1


def test_quota_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "self", "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n")
    for quota, cores in ((-1, NONE), (400000, 4), (100001, 2)):
        write(tmp_path / "fs/cpu/cpu.cfs_quota_us", f"{quota}\n")  # the container's own group is mounted as the root
        write(tmp_path / "fs/cpu/cpu.cfs_period_us", "100000\n")
        assert team.cpu_quota(tmp_path / "self", tmp_path / "fs") == cores


def test_no_control_groups_no_quota(tmp_path: Path) -> None:
    assert team.cpu_quota(tmp_path / "nothing", tmp_path) == NONE
    write(tmp_path / "self", "0::/\nnonsense\n")
    write(tmp_path / "cpu.max", "many 100000\n")
    assert team.cpu_quota(tmp_path / "self", tmp_path) == NONE


def test_allowed_cores_are_those_of_this_process() -> None:
    assert 1 <= team.allowed_cores() <= len(os.sched_getaffinity(0))
