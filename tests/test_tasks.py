"""The tasks: each learns, the seed alone decides, the data go on where they stopped, the known best is right."""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mo_fused import AdamW
from mo_fused.training.clicks import TRAIN, VALIDATION, ClickStream, uniforms
from mo_fused.training.errors import InputError
from mo_fused.training.tasks import Task, build_task, ctr, vision
from mo_fused.training.text import load_text

CPU = torch.device("cpu")
TASKS = ("lm", "vision", "ctr")
EPOCH = 1437 // 64


def build(task: str, **changes: Any) -> Task:
    all_sizes: dict[str, dict[str, Any]] = {
        "lm": {"batch_size": 8, "context": 16, "layers": 1, "heads": 2, "width": 32, "text": None},
        "vision": {"batch_size": 64, "width": 8},
        "ctr": {"batch_size": 32, "context": 6, "width": 4},
    }
    config: Any = SimpleNamespace(**{"task": task, "seed": 0, **all_sizes[task], **changes})
    return build_task(config, CPU)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def take(task: Task, count: int) -> list[list[Tensor]]:
    batches = itertools.islice(endless(task.loader), count)
    return [list(batch.values()) if isinstance(batch, dict) else list(batch) for batch in batches]


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(torch.equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def train(task: Task, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, float]:
    peak = optimizer.param_groups[0]["lr"]
    for step, batch in enumerate(itertools.islice(endless(task.loader), steps)):
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps))
        task.loss_fn(task.model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return task.validate()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Numbers that don't depend on the cores of the machine, nor the time on its load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- every task learns


def test_lm_learns() -> None:
    task = build("lm")
    before = task.validate()
    assert before["val_metric"] == pytest.approx(8.0, abs=0.1), "bits per byte before the first step"
    after = train(task, AdamW(task.model.parameters(), lr=1e-2, max_grad_norm=1.0), 120)
    assert after["val_metric"] < 5.0
    assert after["val_metric"] == pytest.approx(after["val_loss"] / math.log(2))


def test_vision_learns() -> None:
    task = build("vision", width=16)
    assert task.validate()["val_metric"] < 0.4
    after = train(task, torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.9), 264)
    assert after["val_metric"] > 0.93


def test_ctr_comes_near_the_best() -> None:
    task = build("ctr", batch_size=256, context=20, width=16)
    assert abs(task.validate()["val_metric"] - 0.5) < 0.1
    after = train(task, AdamW(task.model.parameters(), lr=5e-3, max_grad_norm=1.0), 200)
    best = task.data["best_auc"]
    assert 0.75 * (best - 0.5) < after["val_metric"] - 0.5 < best - 0.5
    assert after["val_loss"] > task.data["best_loss"]


@pytest.mark.parametrize("name", TASKS)
def test_validation_measures_the_same_and_leaves_no_trace(name: str) -> None:
    task = build(name)
    state = task.loader.state_dict()  # type: ignore[attr-defined]
    first = task.validate()
    assert task.validate() == first
    assert task.model.training and all(p.grad is None for p in task.model.parameters())
    left = task.loader.state_dict()  # type: ignore[attr-defined]
    assert {key: str(value) for key, value in left.items()} == {key: str(value) for key, value in state.items()}


# --- the seed alone decides, and the position is exact


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_alone_decides(name: str) -> None:
    first = build(name, seed=1)
    torch.rand(3)  # neither the global generators' positions nor another task matter
    np.random.rand(3)
    second, other = build(name, seed=1), build(name, seed=2)
    weights = [torch.cat([p.detach().flatten() for p in task.model.parameters()]) for task in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    batches = [take(task, 30) for task in (first, second, other)]
    assert same(batches[0], batches[1]) and not same(batches[0], batches[2])
    assert first.validate() == second.validate()


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("stop", [0, 3, EPOCH - 1, EPOCH, EPOCH + 5])
def test_a_loader_goes_on_where_it_stopped(name: str, stop: int) -> None:
    """Within an epoch, at its end and in the next; the state passes through a checkpoint."""
    task, resumed = build(name), build(name)
    take(task, stop)
    file = io.BytesIO()
    torch.save(task.loader.state_dict(), file)  # type: ignore[attr-defined]
    file.seek(0)
    resumed.loader.load_state_dict(torch.load(file, weights_only=True))  # type: ignore[attr-defined]
    assert same(take(task, EPOCH + 3), take(resumed, EPOCH + 3))


@pytest.mark.parametrize(("name", "other"), [("lm", "ctr"), ("vision", "lm"), ("ctr", "vision")])
def test_another_tasks_position_is_refused(name: str, other: str) -> None:
    task, state = build(name), build(other).loader.state_dict()  # type: ignore[attr-defined]
    before = str(task.loader.state_dict())  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="checkpoint: expected this task's position in its data"):
        task.loader.load_state_dict(state)  # type: ignore[attr-defined]
    assert str(task.loader.state_dict()) == before  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "module"), [("vision", "sklearn.datasets"), ("ctr", "sklearn.metrics")])
def test_scikit_learn_is_named_when_missing(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf'--task {name}: expected .* pip install "mo_fused\[train\]"'):
        build(name)


# --- lm


def test_the_seed_draws_other_windows_and_validates_on_the_same() -> None:
    first, second = (build("lm", seed=seed) for seed in (1, 2))
    second.model.load_state_dict(first.model.state_dict())
    assert first.validate() == second.validate()
    assert not torch.equal(next(iter(first.loader))[0], next(iter(second.loader))[0])


def test_lm_windows_and_loss_are_those_of_the_seed() -> None:
    task = build("lm", seed=5)
    text, generator = load_text(None, 16), torch.Generator().manual_seed(5)
    for inputs, targets in take(task, 3):
        expected = text.draw(8, 16, generator)
        assert torch.equal(inputs, expected[0]) and torch.equal(targets, expected[1])
    mean = F.cross_entropy(task.model(inputs).flatten(0, 1), targets.flatten())
    assert task.loss_fn(task.model, (inputs, targets)).item() == pytest.approx(mean.item(), rel=1e-6)
    assert task.tokens_per_batch == 8 * 16 == targets.numel()


# --- vision


def test_images_are_shifted_by_up_to_a_pixel() -> None:
    images = torch.arange(2 * 100.0).view(2, 10, 10)
    moved = vision.shifted(images, torch.tensor([0, 2]), torch.tensor([1, 0]))
    assert torch.equal(moved[0, 0], images[0, 0:8, 1:9]) and torch.equal(moved[1, 0], images[1, 2:10, 0:8])
    loader = build("vision", batch_size=1).loader
    assert isinstance(loader, vision.ImageLoader)
    kinds: dict[tuple[int, int], int] = {}
    for drawn, label in itertools.islice(loader, 300):
        for down, right in itertools.product(range(3), repeat=2):
            hits = (loader.images[:, down : down + 8, right : right + 8] == drawn[0, 0]).all(dim=2).all(dim=1)
            if hits.any():
                assert (loader.labels[hits] == label).all()
                kinds[down, right] = kinds.get((down, right), 0) + 1
    assert len(kinds) == 9 and min(kinds.values()) > 15, "each of the nine shifts about 33 times"


def test_an_epoch_has_every_image_once() -> None:
    task = build("vision", batch_size=1)
    loader = task.loader
    assert isinstance(loader, vision.ImageLoader) and len(loader) == 1437
    first, second = [int(label) for _, label in loader], [int(label) for _, label in loader]
    assert sorted(first) == sorted(second) == sorted(loader.labels.tolist())
    assert first != second
    assert loader.state_dict() == {"epoch": 2, "batch": 0}


def test_the_split_is_no_matter_of_the_seed() -> None:
    first, second = build("vision", seed=1), build("vision", seed=2)
    second.model.load_state_dict(first.model.state_dict())
    assert first.validate() == second.validate()
    assert first.data["train_images"] + first.data["validation_images"] == 1797


def test_sizes_that_the_data_cannot_have_are_refused() -> None:
    with pytest.raises(InputError, match="--batch-size: expected at most the 1437 images .* found 1438"):
        build("vision", batch_size=1438)
    with pytest.raises(InputError, match="--context: expected a history of at most 500 items; found 501"):
        build("ctr", context=501)


def test_an_image_is_seen_alone() -> None:
    """No statistics over the batch: a micro-batch's gradient is its part of the whole batch's."""
    task = build("vision")
    images, labels = take(task, 1)[0]
    with torch.no_grad():
        torch.testing.assert_close(task.model(images)[3:4], task.model(images[3:4]), rtol=0, atol=1e-5)


# --- ctr


def test_examples_are_functions_of_their_number() -> None:
    stream = ClickStream(seed=3, context=5)
    whole, parts = stream.examples(TRAIN, 10, 50), [stream.examples(TRAIN, 10, 20), stream.examples(TRAIN, 30, 30)]
    for name, value in vars(whole).items():
        assert np.array_equal(value, np.concatenate([getattr(part, name) for part in parts])), name
    held = stream.examples(VALIDATION, 10, 50)
    assert (whole.item != held.item).mean() > 0.5, "validation has examples of its own"


def test_uniforms_are_uniform() -> None:
    draws = uniforms(7, 0, 0, 20_000, 8)
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 8000) ** 2 / 8000).sum() < 43.8, "chi-squared of 19 degrees of freedom, one in a thousand"
    columns = np.corrcoef(draws, rowvar=False) - np.eye(8)
    following = np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]
    assert np.abs(columns).max() < 0.03 and abs(following) < 0.01


def test_clicks_happen_as_often_as_their_probability_says() -> None:
    examples = ClickStream(seed=0, context=20).examples(TRAIN, 0, 40_000)
    for low in np.arange(0.0, 1.0, 0.1):
        here = (examples.probability >= low) & (examples.probability < low + 0.1)
        expected = examples.probability[here].mean()
        deviation = math.sqrt(expected * (1 - expected) / here.sum())
        assert abs(examples.click[here].mean() - expected) < 4 * deviation


def test_the_known_best_is_a_count_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of (click, no click) pairs that the true probability puts in order."""
    monkeypatch.setattr(ctr, "_VALIDATION_EXAMPLES", 400)
    task = build("ctr")
    held = ClickStream(seed=0, context=6).examples(VALIDATION, 0, 400)
    right = total = 0.0
    for i in range(400):
        for j in range(400):
            if held.click[i] and not held.click[j]:
                p, q = held.probability[i], held.probability[j]
                right += 1.0 if p > q else 0.5 if p == q else 0.0
                total += 1
    assert task.data["best_auc"] == pytest.approx(right / total, abs=1e-12)
    entropy = -sum(math.log(p if click else 1 - p) for p, click in zip(held.probability, held.click, strict=True)) / 400
    assert task.data["best_loss"] == pytest.approx(entropy, rel=1e-9)


def test_the_probability_is_the_formula() -> None:
    stream = ClickStream(seed=1, context=7)
    examples = stream.examples(TRAIN, 0, 20)
    for i in range(20):
        near = sum(
            stream.nearness[examples.category[i], examples.history[i, j] % 64] for j in range(examples.length[i])
        )
        quality = stream.category_quality[examples.category[i]] + stream.item_quality[examples.item[i]]
        logit = -2.6 + 2.0 * math.log(1 + near) + quality
        assert examples.probability[i] == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-9)
    assert (examples.item % 64 == examples.category).all()
    assert set(ClickStream(seed=1, context=7).examples(TRAIN, 0, 500).length) == set(range(1, 8))


def test_what_the_mask_hides_is_not_seen() -> None:
    task = build("ctr")
    batch = next(iter(task.loader))
    hidden, seen = dict(batch), dict(batch)
    assert not batch["mask"].all() and batch["mask"][:, 0].all()
    hidden["history"] = torch.where(batch["mask"], batch["history"], 77)
    hidden["history_category"] = torch.where(batch["mask"], batch["history_category"], 7)
    seen["history_category"] = (batch["history_category"] + 1) % 64
    assert torch.equal(task.model(batch), task.model(hidden))
    assert (task.model(batch) != task.model(seen)).all()
