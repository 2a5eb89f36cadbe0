"""The place in the training data: saved after any number of batches, and gone on from in a fresh loader."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from trainer_cases import Samples, assert_same, frozen

from mo_fused.training.errors import InputError
from mo_fused.training.feed import Feed
from mo_fused.training.rng import rng_state, set_rng_state

pytestmark = pytest.mark.cpu_only(reason="loaders are on the host")

NOISY = Samples(11, noise=0.1)
"""Random augmentation, as far as it draws from global generators in this process."""


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Stream(IterableDataset[Any]):
    """Samples of a length that nobody knows before, other ones in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(7 + self.epoch):
            yield torch.tensor([100.0 * self.epoch + i]) + 0.1 * torch.rand(())


class Crops(Dataset[Any]):
    """A dataset with a generator of its own."""

    def __init__(self) -> None:
        self.generator = generator()

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand((), generator=self.generator)


class Own:
    """An endless loader that keeps its own place, here that of its generator."""

    def __init__(self) -> None:
        self.generator = generator()

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.rand(2, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class OwnEpochs(Own):
    """The same with epochs of three batches, of a length that is known or not."""

    drawn = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.drawn < 3:
            self.drawn += 1
            yield torch.rand(2, generator=self.generator)
        self.drawn = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.drawn = state["drawn"]


class OwnEpochsOfLength(OwnEpochs):
    def __len__(self) -> int:
        return 3


class Positions(DataLoader[Any]):
    """A DataLoader with a state: the batches drawn, and not its generator. As torchdata's it makes an epoch that was
    over when it was saved once more, to see that, before it begins the next."""

    drawn = 0
    loaded: int | None = None

    def __iter__(self) -> Any:
        skipped, self.loaded = self.loaded or 0, None
        iterator = super().__iter__()
        if skipped == len(self):
            skipped, iterator = 0, super().__iter__()
        for _ in range(skipped):
            next(iterator)
        return self.counted(iterator, skipped)

    def counted(self, iterator: Iterator[Any], skipped: int) -> Iterator[Any]:
        for self.drawn, batch in enumerate(iterator, skipped + 1):
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = self.loaded = state["drawn"]


def batches(count: int = 4) -> list[torch.Tensor]:
    return [torch.full((2,), float(i)) for i in range(count)]


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "in order": lambda: DataLoader(NOISY, batch_size=3),
    "shuffled": lambda: DataLoader(NOISY, batch_size=3, shuffle=True),
    "shuffled, last left out": lambda: DataLoader(NOISY, batch_size=3, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(NOISY, batch_size=3, shuffle=True, generator=generator()),
    "sampler with a generator": lambda: DataLoader(NOISY, 3, sampler=RandomSampler(NOISY, generator=generator())),
    "two generators": lambda: DataLoader(
        NOISY, 3, sampler=RandomSampler(NOISY, generator=generator(1)), generator=generator(2)
    ),
    "with replacement": lambda: DataLoader(
        NOISY, 3, sampler=RandomSampler(NOISY, replacement=True, num_samples=70, generator=generator())
    ),
    "batch sampler": lambda: DataLoader(NOISY, batch_sampler=BatchSampler(RandomSampler(NOISY), 4, drop_last=False)),
    "batch sampler with a generator": lambda: DataLoader(
        NOISY, batch_sampler=BatchSampler(RandomSampler(NOISY, generator=generator()), 4, drop_last=True)
    ),
    "single samples": lambda: DataLoader(Samples(5, noise=0.1), batch_size=None, shuffle=True),
    "distributed": lambda: DataLoader(NOISY, 2, sampler=DistributedSampler(NOISY, num_replicas=2, rank=1, seed=3)),
    "weighted": lambda: DataLoader(NOISY, 3, sampler=WeightedRandomSampler(torch.arange(11) + 1.0, 10)),
    "weighted with a generator": lambda: DataLoader(
        NOISY, 3, sampler=WeightedRandomSampler(torch.arange(11) + 1.0, 10, generator=generator())
    ),
    "subset": lambda: DataLoader(NOISY, 3, sampler=SubsetRandomSampler(range(2, 9))),
    "iterable": lambda: DataLoader(Stream(), batch_size=3),
    "iterable without batches": Stream,
    "dataset with a generator": lambda: DataLoader(Crops(), batch_size=2, shuffle=True),
    "own state, endless": Own,
    "own state, epochs": OwnEpochs,
    "own state, epochs of known length": OwnEpochsOfLength,
    "own state, a DataLoader": lambda: Positions(NOISY, batch_size=3),
    "own state, a DataLoader with a generator": lambda: Positions(NOISY, batch_size=3, generator=generator()),
    "list": batches,
    "tuple": lambda: tuple(batches()),
    "list of one": lambda: batches(1),
}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def draw_as_a_model_does() -> None:
    torch.rand(3)
    np.random.rand()


def recorded(feed: Feed, counts: list[int]) -> list[Any]:
    """What each ``take`` gave, where the feed stood then, and both states for going on from there."""
    rows = []
    for count in counts:
        taken = frozen(feed.take(count))
        draw_as_a_model_does()
        rows.append((taken, feed.epoch, through_a_file((feed.state_dict(), rng_state()))))
    return rows


def assert_goes_on(make: Callable[[], Iterable[Any]], rows: list[Any], counts: list[int], at: int) -> None:
    """A fresh loader, set to where the first ``at`` takes ended, gives what the others gave."""
    seed_everything(99)  # another process stands elsewhere
    feed = Feed(make())
    place, numbers = rows[at - 1][2]
    feed.load_state_dict(place)
    set_rng_state(numbers)
    for number, (taken, epoch, (state, numbers)) in enumerate(recorded(feed, counts[at:]), at):
        assert_same((taken, epoch), rows[number][:2], f"take {number} after going on at {at}")
        assert_same((state, numbers), rows[number][2], f"state {number} after going on at {at}")


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("count", [1, 3])
def test_goes_on_from_everywhere(kind: str, count: int) -> None:
    counts = [count] * (9 if count == 3 else 14)
    seed_everything(0)
    rows = recorded(Feed(LOADERS[kind]()), counts)
    if kind != "own state, endless":
        assert rows[-1][1] >= 1 or "replacement" in kind, "more than one epoch"
    for at in range(1, len(counts)):
        assert_goes_on(LOADERS[kind], rows, counts, at)


@settings(max_examples=40)
@given(st.data())
def test_goes_on_with_any_shape(data: st.DataObject) -> None:
    size, batch_size = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 7))
    shuffle, own = data.draw(st.booleans()), data.draw(st.booleans())
    last_left_out = data.draw(st.booleans()) and size >= batch_size
    counts = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=12))

    def make() -> DataLoader[Any]:
        source = Samples(size, noise=0.1)
        drawn = generator() if own else None
        return DataLoader(source, batch_size, shuffle=shuffle, drop_last=last_left_out, generator=drawn)

    seed_everything(0)
    rows = recorded(Feed(make()), counts)
    seen = sum(len(taken) for taken, _, _ in rows)
    length = len(make())
    assert rows[-1][1] == seen // length, "epochs that are over"
    assert_goes_on(make, rows, counts, data.draw(st.integers(1, len(counts) - 1)))


@pytest.mark.parametrize("persistent", [False, True])
def test_goes_on_with_workers(persistent: bool) -> None:
    """Three batches an epoch; with workers that stay, only the first epoch starts them and draws a seed for them."""
    source = Samples(6) if persistent else Samples(6, noise=0.1)

    def make() -> DataLoader[Any]:
        return DataLoader(source, 2, shuffle=True, num_workers=2, persistent_workers=persistent)

    counts = [1] * 7
    seed_everything(0)
    feed = Feed(make())
    rows = recorded(feed, counts)
    for at in (2, 3, 4, 5):
        assert_goes_on(make, rows, counts, at)


def test_takes_end_with_the_epoch() -> None:
    feed = Feed(batches(5))
    assert [(len(feed.take(2)), feed.epoch, feed.batches) for _ in range(4)] == [
        (2, 0, 2),
        (2, 0, 4),
        (1, 1, 0),
        (2, 1, 2),
    ]


def test_epochs_are_told_to_samplers() -> None:
    source = Samples(6)
    sampler: DistributedSampler[Any] = DistributedSampler(source, num_replicas=1, rank=0, seed=5)
    feed = Feed(DataLoader(source, 6, sampler=sampler))
    for epoch in range(3):
        order = torch.randperm(6, generator=generator(5 + epoch))
        assert torch.equal(feed.take(1)[0][1], source.targets[order])


def test_a_generator_is_there_once() -> None:
    feed = Feed(batch for batch in batches(3))
    assert len(feed.take(2)) == 2
    assert len(feed.take(2)) == 1
    with pytest.raises(
        InputError, match="^loader: expected at least one batch in an epoch; found none; .* iterated again$"
    ):
        feed.take(2)
    assert_goes_on(lambda: (batch for batch in batches(3)), recorded(Feed(b for b in batches(3)), [1, 1]), [1, 1], at=1)


class Wrong:
    """A loader of four batches whose length says something else."""

    def __init__(self, says: int) -> None:
        self.says = says

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(batches(4))


@pytest.mark.parametrize("says", [1, 2, 3, 5, 9])
def test_a_wrong_length_loses_no_batch(says: int) -> None:
    counts = [1] * 10
    rows = recorded(Feed(Wrong(says)), counts)
    assert [float(taken[0][0]) for taken, _, _ in rows] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    for at in range(1, 10):
        assert_goes_on(lambda: Wrong(says), rows, counts, at)


def test_a_wrong_length_of_a_loader_with_a_state() -> None:
    class Longer(OwnEpochs):
        def __len__(self) -> int:
            return 2

    feed = Feed(Longer())
    feed.take(1)
    with pytest.raises(InputError, match=r"loader: expected as many batches .* length says \(2\); found one more; let"):
        feed.take(1)


@pytest.mark.parametrize(
    ("saved", "here", "said"),
    [
        (Own, batches, "loader: expected a loader with state_dict, .*; found a loader without state_dict; give"),
        (batches, Own, "loader: expected a loader without state_dict, .*; found a loader with state_dict; give"),
        (LOADERS["own generator"], LOADERS["shuffled"], "loader: expected 1 generators of its own, .*; found 0; give"),
        (lambda: batches(9), lambda: batches(5), "loader: expected an epoch of more than 5 .* 6; found an end after 5"),
    ],
)
def test_another_loader(saved: Any, here: Any, said: str) -> None:
    feed = Feed(saved())
    feed.take(6)
    if saved is LOADERS["own generator"]:
        feed.take(2)
    with pytest.raises(InputError, match=said):
        Feed(here()).load_state_dict(feed.state_dict())
