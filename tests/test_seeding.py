"""One seed decides every random number, in the process and in loader workers, and no two of these draw the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mo_fused.training.seeding import seed_everything

Draw = tuple[float, float, float]


def draw() -> Draw:
    return random.random(), float(np.random.random()), float(torch.rand(1, dtype=torch.float64))


class Drawing(Dataset[Any]):
    """Every item: its index, the worker that made it and a number from each library."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        return index, -1 if worker is None else worker.id, draw()


def as_list(batch: list[Any]) -> list[Any]:
    return batch


def epochs(seed: int, workers: int, rank: int | None = None, number: int = 2) -> list[list[Any]]:
    seeds = seed_everything(seed, rank)
    loader = DataLoader(Drawing(), batch_size=2, shuffle=True, num_workers=workers, collate_fn=as_list, **seeds)
    return [[item for batch in loader for item in batch] for _ in range(number)]


def test_the_seed_decides_all_three() -> None:
    seed_everything(3)
    first, weights = draw(), torch.randn(4)
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    seed_everything(3)
    assert (draw(), torch.randn(4).tolist()) == (first, weights.tolist())
    seed_everything(4)
    assert not set(draw()) & set(first)
    torch.manual_seed(3)
    expected = torch.randn(4)
    seed_everything(3, rank=0)
    assert torch.equal(torch.randn(4), expected), "rank 0's weights are those of torch.manual_seed"


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_repeat_and_nothing_is_drawn_twice(workers: int) -> None:
    first = epochs(5, workers)
    assert epochs(5, workers) == first
    items = [item for epoch in first for item in epoch]
    assert {worker for _, worker, _ in items} == ({0, 1} if workers else {-1})
    for library in range(3):
        assert len({drawn[library] for _, _, drawn in items}) == 16, "workers and epochs differ"
    orders = [[index for index, _, _ in epoch] for epoch in first]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(8)) and orders[0] != orders[1]
    other = epochs(6, workers, number=1)[0]
    assert not {drawn for _, _, drawn in items} & {drawn for _, _, drawn in other}


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_draw_differently(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[float] = set()
    for rank in range(2):
        (items,) = epochs(5, workers, rank, number=1)
        seen |= {number for _, _, drawn in items for number in drawn}
    assert len(seen) == 2 * 8 * 3
    monkeypatch.setenv("RANK", "1")
    assert epochs(5, workers, number=1) == [items], "torchrun's variable is the rank"


def test_the_order_is_not_the_weights_numbers() -> None:
    seeds = seed_everything(0)
    assert not torch.equal(torch.rand(8, generator=seeds["generator"]), torch.rand(8))


@pytest.mark.parametrize(
    ("seed", "rank", "said"), [(-1, 0, "seed"), (2**63, 0, "seed"), (0.5, 0, "seed"), (1, -1, "rank")]
)
def test_bad_seeds_change_nothing(seed: Any, rank: int, said: str) -> None:
    seed_everything(1)
    expected = draw()
    seed_everything(1)
    with pytest.raises(ValueError, match=f"expected {said} to be .*; found .*; give"):
        seed_everything(seed, rank)
    assert draw() == expected
