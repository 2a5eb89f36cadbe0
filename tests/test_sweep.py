"""Batch sizes measured in processes of their own: what fits, what doesn't and why, and which is recommended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import sweep_parts
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, SubsetRandomSampler

import mo_fused
from mo_fused.training.errors import InputError
from mo_fused.training.sweep import Row, Sweep
from mo_fused.training.sweep_run import Resized, resized
from mo_fused.training.trainer import Trainer


def trainer_of(loss_fn: Any = sweep_parts.squares, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = sweep_parts.Net()
    return Trainer(model, mo_fused.AdamW(model.parameters(), max_grad_norm=1.0), loss_fn, **options)


def test_every_way_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(sweep_parts.by_batch_size)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    result = trainer.sweep([1, 2, 3, 4, 5, 6], loader=sweep_parts.loader(), steps=2, limit=6.0)
    killed, refused, raised, slow, gone, fine = result.rows
    assert (killed.outcome, "killed" in killed.note) == ("out of memory", True)
    assert (refused.outcome, refused.note) == ("out of memory", "")
    assert (raised.outcome, raised.note) == ("error", "ArithmeticError: three is a crowd")
    assert (slow.outcome, slow.note) == ("time limit", "more than 6 s")
    assert (gone.outcome, "exit code 7" in gone.note) == ("error", True)
    assert fine.outcome == "ok" and result.recommended == fine
    assert fine.samples_per_second and fine.seconds_per_step and fine.peak_memory
    assert [row.samples_per_second for row in result.rows[:5]] == [None] * 5
    assert all(torch.equal(p, kept) for p, kept in zip(trainer.model.parameters(), before, strict=True))
    assert list(tmp_path.iterdir()) == [], "a run of a sweep may not write where the user works"
    table = str(result).splitlines()
    assert len(table) == 7 and table[0].startswith("batch size  accumulate  recompute  samples/s")
    assert table[3].endswith("error: ArithmeticError: three is a crowd") and table[6].endswith("recommended")


def test_after_work_on_many_threads() -> None:
    """A child forked from here would wait for threads that it doesn't have."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        weight = torch.ones(1200, 1200)
        assert float((weight @ weight)[0, 0]) == 1200.0
        row = trainer_of(sweep_parts.large).sweep([8], loader=sweep_parts.loader(), steps=2, limit=30.0).rows[0]
    finally:
        torch.set_num_threads(before)
    assert row.outcome == "ok", row


def test_rates() -> None:
    """20 ms a batch: four times the batch is nearly four times the rate."""
    result = trainer_of(sweep_parts.slow).sweep([4, 16], loader=sweep_parts.loader(), accumulate=(1, 2), steps=3)
    assert [(row.batch_size, row.accumulate) for row in result.rows] == [(4, 1), (4, 2), (16, 1), (16, 2)]
    for row in result.rows:
        assert row.outcome == "ok" and row.seconds_per_step is not None and row.samples_per_second is not None, row
        assert row.seconds_per_step >= 0.02 * row.accumulate
        samples = row.batch_size * row.accumulate
        assert row.samples_per_second == pytest.approx(samples / row.seconds_per_step, rel=0.5)
        assert row.samples_per_second < samples / (0.02 * row.accumulate)
    assert result.recommended in result.rows[2:], str(result)


def test_peak_memory() -> None:
    """4 MiB a sample: 64 MiB more for 16 more samples."""
    small, large = trainer_of(sweep_parts.hungry).sweep([16, 32], loader=sweep_parts.loader(), steps=1).rows
    assert small.peak_memory is not None and large.peak_memory is not None
    assert large.peak_memory - small.peak_memory == pytest.approx(64 << 20, rel=0.1)


def row(size: int, rate: float | None, memory: int, outcome: str = "ok") -> Row:
    return Row(size, 1, None, outcome, rate, None if rate is None else size / rate, memory)


def test_the_recommended_one() -> None:
    rows = (row(8, 50.0, 10), row(16, 96.0, 20), row(32, 100.0, 40), row(64, None, 80, "out of memory"))
    assert Sweep(rows).recommended == rows[1], "within 5 % of the fastest the one with less memory"
    assert Sweep((rows[0], row(16, 94.0, 20), rows[2])).recommended == rows[2]
    assert Sweep((rows[3],)).recommended is None
    assert str(Sweep((rows[3],))).endswith("80 B         out of memory")


def test_what_cannot_be_pickled() -> None:
    def inside(model: nn.Module, batch: Any) -> Tensor:
        return sweep_parts.squares(model, batch)

    trainer = trainer_of(inside)
    with pytest.raises(InputError, match="loss_fn: expected something that can be pickled.*isolate=False"):
        trainer.sweep([4], loader=sweep_parts.loader())
    before = torch.get_rng_state()
    result = trainer.sweep([4, 8], loader=sweep_parts.loader(), steps=2, isolate=False)
    assert [one.outcome for one in result.rows] == ["ok", "ok"], str(result)
    assert not trainer.optimizer.state and torch.equal(torch.get_rng_state(), before)


def test_ends_in_this_process() -> None:
    result = trainer_of(sweep_parts.by_batch_size).sweep([2, 3, 6], loader=sweep_parts.loader(), steps=1, isolate=False)
    assert [one.outcome for one in result.rows] == ["out of memory", "error", "ok"]
    os.unlink("written.txt")
    slow = trainer_of(sweep_parts.slow).sweep([4], loader=sweep_parts.loader(), steps=50, limit=0.02, isolate=False)
    assert (slow.rows[0].outcome, slow.rows[0].note) == ("time limit", "more than 0.02 s")


def test_recompute_names_blocks() -> None:
    result = trainer_of().sweep([4], loader=sweep_parts.loader(), recompute=(None, "blocks.*", "bolcks.*"), steps=1)
    plain, recomputed, unknown = result.rows
    assert plain.outcome == recomputed.outcome == "ok", str(result)
    assert unknown.outcome == "error" and "bolcks" in unknown.note
    assert [line.split()[2] for line in str(result).splitlines()[1:]] == ["-", "blocks.*", "bolcks.*"]


def test_the_same_loader_of_another_size() -> None:
    data = sweep_parts.dataset(20)
    shuffled = resized(DataLoader(data, 4, shuffle=True, drop_last=True), 8)(8)
    assert len(shuffled) == 2 and shuffled.dataset is data
    order = torch.cat([batch[0] for batch in resized(DataLoader(data, 4), 8)(8)])
    assert torch.equal(order, data.tensors[0])
    subset = SubsetRandomSampler(range(6))
    chosen = resized(DataLoader(data, 4, sampler=subset, collate_fn=len), 3)(3)
    assert chosen.sampler is subset and list(chosen) == [3, 3]
    with pytest.raises(InputError, match="DataLoader with a batch_size.*found list; give make_loader="):
        resized([torch.ones(3)], 4)
    batches = torch.utils.data.BatchSampler(SequentialSampler(data), 4, False)
    with pytest.raises(InputError, match="DataLoader with a batch_sampler"):
        resized(DataLoader(data, batch_sampler=batches), 4)
    assert isinstance(resized(DataLoader(data, 4), 4), Resized)


def test_options_are_checked() -> None:
    loader = sweep_parts.loader()
    with pytest.raises(ValueError, match="batch_sizes to be whole numbers, 1 or more; found \\[0\\]"):
        trainer_of().sweep([0], loader=loader)
    with pytest.raises(ValueError, match="batch_sizes"):
        trainer_of().sweep([], loader=loader)
    with pytest.raises(ValueError, match="recompute to be a list"):
        trainer_of().sweep([4], loader=loader, recompute="blocks.*")
    with pytest.raises(ValueError, match="limit to be above 0"):
        trainer_of().sweep([4], loader=loader, limit=0.0)
    with pytest.raises(InputError, match="neither fit nor preflight has had one; give loader="):
        trainer_of().sweep([4])


def test_the_loader_of_the_last_fit_is_known() -> None:
    trainer = trainer_of()
    trainer.fit(sweep_parts.loader(), 1)
    assert [row.batch_size for row in trainer.sweep([4, 8], steps=1, isolate=False).rows] == [4, 8]
    assert "step" in str(trainer.overfit_check(samples=4, max_steps=2)).lower()


def test_a_loader_of_ones_own() -> None:
    row = trainer_of().sweep([4], steps=1, make_loader=sweep_parts.loader).rows[0]
    assert row.outcome == "ok", row
