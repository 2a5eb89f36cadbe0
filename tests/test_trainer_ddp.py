"""The training loop in two processes: one step of all of them, one checkpoint, one end."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from process_pool import pool
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from trainer_cases import (
    Log,
    Samples,
    assert_same,
    class_loss,
    exact_loss,
    falling,
    frozen,
    model_of,
    padded_batches,
    together,
)

import mo_fused
from mo_fused.training import checkpoints as checkpoint_files
from mo_fused.training.checkpoints import Checkpoints, load_checkpoint
from mo_fused.training.errors import InputError
from mo_fused.training.trainer import Trainer

pytestmark = pytest.mark.cpu_only(reason="processes of their own, with gloo")

VALID = ([9, 1, 0, 2, 7, 3], [0, 0, 0, 1, 0, 20])
"""Targets that count in each batch of both ranks; in the first step of three the second rank has none."""


def counted(model: DistributedDataParallel) -> list[int]:
    """The numbers of gradients that each all-reduce has, as they come."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    sizes: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        sizes.append(bucket.buffer().numel())
        return allreduce_hook(state, bucket)

    model.register_comm_hook(model.process_group, hook)
    return sizes


def accumulated(rank: int, ours: bool) -> tuple[Any, ...]:
    model = DistributedDataParallel(model_of().double())
    sizes, log = counted(model), Log()
    kind = mo_fused.AdamW if ours else torch.optim.AdamW
    trainer = Trainer(model, kind(model.parameters(), lr=0.05), exact_loss, accumulate=3, monitor=log)
    trainer.fit(padded_batches(VALID[rank], seed=rank), 4)
    return frozen(model.module.state_dict()), sizes, log.of("loss"), log.of("targets"), log.of("batches")


def by_hand(exact: torch.nn.Module, max_grad_norm: float = math.inf) -> list[float]:
    """Four steps with the batches of both ranks as one; their losses."""
    optimizer = torch.optim.AdamW(exact.parameters(), lr=0.05)
    of_ranks = [padded_batches(valid, seed=rank) for rank, valid in enumerate(VALID)]
    losses = []
    for step in range(4):
        at = slice(0, 3) if step % 2 == 0 else slice(3, 6)
        loss = exact_loss(exact, together([*of_ranks[0][at], *of_ranks[1][at]]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(exact.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("ours", [True, False])
def test_two_processes_are_one_large_batch(ours: bool) -> None:
    first, second = pool(2).run(accumulated, ours)
    exact = model_of().double()
    losses = by_hand(exact)
    assert_same(first[0], second[0])
    for name, want in exact.state_dict().items():
        torch.testing.assert_close(first[0][name], want, rtol=0, atol=1e-6)
    numbers = sum(parameter.numel() for parameter in exact.parameters())
    for seen in (first, second):
        assert sum(seen[1]) == 4 * numbers, "each gradient once a step, whatever the number of batches"
        assert seen[2] == pytest.approx(losses, abs=1e-12), "the mean over the targets of both"
    assert (first[3], first[4]) == ([10, 12] * 2, [2, 3] * 2)
    assert (second[3], second[4]) == ([0, 21] * 2, [1, 2] * 2)


def sharded(rank: int) -> tuple[dict[str, Any], list[float]]:
    from torch.distributed.fsdp import fully_shard

    model, log = model_of().double(), Log()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer = Trainer(model, optimizer, exact_loss, accumulate=3, max_grad_norm=0.1, monitor=log)
    trainer.fit(padded_batches(VALID[rank], seed=rank), 4)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}, log.of("loss")


def test_a_model_in_shards_is_one_large_batch() -> None:
    first, second = pool(2).run(sharded)
    exact = model_of().double()
    losses = by_hand(exact, max_grad_norm=0.1)
    assert_same(first, second)
    for name, want in exact.state_dict().items():
        torch.testing.assert_close(first[0][name], want, rtol=0, atol=1e-6)
    assert first[1] == pytest.approx(losses, abs=1e-12)


def without_targets(rank: int) -> tuple[Any, ...]:
    model, log = DistributedDataParallel(model_of()), Log()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), class_loss, monitor=log)
    before, loader = frozen(model.module.state_dict()), padded_batches([0, 4])
    trainer.fit(loader, 1)
    assert_same(model.module.state_dict(), before)
    trainer.fit(loader, 2)
    return log.of("loss"), all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_step_without_any_target_changes_nothing() -> None:
    for losses, finite in pool(2).run(without_targets):
        assert losses[0] == 0.0 and losses[1] > 0.5 and finite


def masked_by_hand(rank: int) -> Any:
    """0/0 on the rank without targets, also in its gradient."""

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        mask = targets != -100
        each = model(inputs).float().square().sum(-1)
        return (each * mask).sum() / mask.sum()

    model = DistributedDataParallel(model_of())
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    trainer.fit(padded_batches([[5], [0]][rank]), 1)
    return frozen(model.module.state_dict())


def test_a_loss_that_is_0_by_0_without_targets() -> None:
    first, second = pool(2).run(masked_by_hand)
    alone = model_of()
    inputs, targets = padded_batches([5])[0]
    mask = targets != -100
    ((alone(inputs).square().sum(-1) * mask).sum() / mask.sum()).backward()
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(first[name], (parameter - 0.1 * parameter.grad).detach(), rtol=0, atol=1e-6)
    assert_same(first, second)


def in_parts(rank: int, folder: str, at: int | None) -> Any:
    """ZeRO-1: each rank steps, and holds the moments of, its share of the parameters."""
    model = DistributedDataParallel(model_of(at or 0))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), mo_fused.AdamW, lr=0.02, max_grad_norm=0.5)
    loader = padded_batches([4, 9, 3, 5][2 * rank : 2 * rank + 2], seed=rank)
    trainer = Trainer(model, optimizer, class_loss, checkpoints=Checkpoints(folder, every=2, keep=9))
    if at is not None:
        trainer.resume(Path(folder) / f"step-{at:08d}.pt")
    trainer.fit(loader, 5)
    return frozen(model.module.state_dict())


def test_an_optimizer_in_parts_is_saved_whole(tmp_path: Path) -> None:
    first, second = pool(2).run(in_parts, str(tmp_path), None)
    assert_same(first, second)
    saved = load_checkpoint(tmp_path / "step-00000002.pt")
    assert len(saved["optimizer_state_dict"]["state"]) == 4, "the moments of all parameters"
    for again in pool(2).run(in_parts, str(tmp_path), 2):
        assert_same(again, first)


def build(folder: str | None, rank: int, *, seed: int = 0, **options: Any) -> tuple[Trainer, Any]:
    """A DistributedDataParallel of a model with dropout, and this rank's share of shuffled samples."""
    model = DistributedDataParallel(model_of(seed, dropout=0.2))
    optimizer = mo_fused.AdamW(model.parameters(), lr=0.02, max_grad_norm=0.5)
    torch.manual_seed(100 * seed + rank)
    source = Samples(24)
    loader = DataLoader(source, 3, sampler=DistributedSampler(source, 2, rank))
    options.setdefault("checkpoints", None if folder is None else Checkpoints(folder, every=2, keep=9))
    trainer = Trainer(model, optimizer, class_loss, schedule=falling(optimizer), accumulate=3, **options)
    return trainer, loader


def stopped(rank: int, folder: str, save: bool) -> tuple[Any, ...]:
    trainer, loader = build(None, rank, checkpoints=Checkpoints(folder))
    log = trainer.monitor = Log(lambda step: trainer.stop(save=save) if step == 3 and rank == 1 else None)
    done = trainer.fit(loader, 1000)
    words = len(trainer._stop_words)
    return done, log.of("step")[-1], words


@pytest.mark.parametrize("save", [True, False])
def test_one_stops_both(tmp_path: Path, save: bool) -> None:
    first, second = pool(2).run(stopped, str(tmp_path / "c"), save)
    assert first == second and first[0] == first[1] and first[0] in (4, 5)
    assert first[2] <= 2, "nothing grows with the number of steps"
    assert Checkpoints(tmp_path / "c").steps() == ([first[0]] if save else [])


def trained(rank: int, folder: str) -> Any:
    saves: list[Path] = []
    write = checkpoint_files.write_atomically
    checkpoint_files.write_atomically = lambda path, content: (saves.append(path), write(path, content))[1]
    try:
        trainer, loader = build(folder, rank)
        log = trainer.monitor = Log()
        trainer.fit(loader, 7)
    finally:
        checkpoint_files.write_atomically = write
    state = trainer.state_dict()
    return frozen(state), len(saves), log.of("loss")


def resumed(rank: int, folder: str, at: int) -> Any:
    trainer, loader = build(None, rank, seed=at)
    trainer.resume(Path(folder) / f"step-{at:08d}.pt")
    log = trainer.monitor = Log()
    trainer.fit(loader, 7)
    return frozen(trainer.state_dict()), log.of("loss")


def test_one_checkpoint_of_both_and_going_on_is_exact(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    first, second = pool(2).run(trained, str(folder))
    assert Checkpoints(folder).steps() == [2, 4, 6, 7]
    assert (first[1], second[1]) == (4, 0), "the first one writes"
    assert_same(first[0], second[0])
    saved = load_checkpoint(folder / "step-00000007.pt")
    assert_same(saved, first[0])
    assert len(saved["data"]) == len(saved["rng"]) == 2
    assert not torch.equal(saved["rng"][0]["torch"], saved["rng"][1]["torch"])
    for at in (2, 4, 6):
        for state, losses in pool(2).run(resumed, str(folder), at):
            assert_same(state, first[0], f"stopped at {at}")
            assert losses == first[2][at:]
    alone = model_of(5, dropout=0.2)
    alone.load_state_dict(saved["model_state_dict"])
    assert_same(alone.state_dict(), first[0]["model_state_dict"])
    trainer = Trainer(alone, mo_fused.AdamW(alone.parameters(), lr=0.02), class_loss)
    with pytest.warns(RuntimeWarning, match="saved by 2 processes, here are 1: the epoch at hand begins again"):
        trainer.resume(folder / "step-00000007.pt")
    assert trainer.step == 7 and trainer.optimizer.state_dict()["state"][0]["step"] == 7
    assert trainer.fit(DataLoader(Samples(24), 24), 9) == 9, "its epochs of one batch are shorter than the saved place"
    assert trainer.epoch == saved["epoch"] + 2


def of_one_opinion(rank: int, folder: str) -> Any:
    """Each rank finds another step the best."""
    values = [[4.0, 1.0, 2.0, 3.0], [1.0, 3.0, 2.0, 4.0]][rank]
    trainer, loader = build(
        None,
        rank,
        checkpoints=Checkpoints(folder, every=100),
        validate=lambda: {"val_loss": values[trainer.step - 1]},
        validate_every=1,
    )
    trainer.fit(loader, 4)
    return trainer.state_dict()["trainer"]


def test_the_first_process_says_which_is_best(tmp_path: Path) -> None:
    for found in pool(2).run(of_one_opinion, str(tmp_path / "c")):
        assert (found["best_step"], found["best_value"]) == (2, 1.0)
    assert Checkpoints(tmp_path / "c").steps() == [1, 2, 4]
    assert (tmp_path / "c" / "best.pt").resolve().name == "step-00000002.pt"


def on_a_full_disk(rank: int, folder: str, ends: bool) -> tuple[int, list[str], str]:
    """Saving fails in the process that writes; ``ends``: in the last step, else in the one that ends with a stop."""
    trainer, loader = build(folder, rank)
    trainer.checkpoints.every = 2 if ends else 5
    trainer.monitor = Log(lambda step: trainer.stop() if not ends and step == 3 else None)
    write = checkpoint_files.write_atomically
    error = ""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    checkpoint_files.write_atomically = full
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(loader, 3 if ends else 100)
    except OSError as found:
        error = str(found)
    finally:
        checkpoint_files.write_atomically = write
    return trainer.step, [str(one.message) for one in caught], error


@pytest.mark.parametrize("ends", [True, False])
def test_a_save_that_fails_is_known_to_both(tmp_path: Path, ends: bool) -> None:
    for step, said, error in pool(2).run(on_a_full_disk, str(tmp_path / "c"), ends):
        assert step == (3 if ends else 5)
        assert said == [f"step {2 if ends else 5}: no checkpoint was written: [Errno 28] No space left on device"]
        assert error == "[Errno 28] No space left on device"


def broken(rank: int, folder: str) -> str:
    trainer, _ = build(folder, rank)
    try:
        with warnings.catch_warnings(record=True):
            trainer.resume()
    except InputError as error:
        return str(error)
    return ""


def test_files_that_cannot_be_read_are_an_error_of_both(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.pt").write_bytes(b"x")
    for said in pool(2).run(broken, str(tmp_path)):
        assert "expected at least one that can be read; found none of 1" in said
