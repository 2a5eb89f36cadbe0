"""Batches of sequences of different lengths: padding changes neither the loss nor the gradients."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from mo_fused.training.model import ByteGPT
from mo_fused.training.padding import count_targets, cross_entropy, pad_batch
from mo_fused.training.tasks import lm

CONTEXT = 12


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are tiny: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Pair = tuple[Tensor, Tensor]


@st.composite
def pairs(draw: st.DrawFn) -> list[Pair]:
    """Up to five sequences, some of whose targets don't count."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    ignored = draw(st.sampled_from([0.0, 0.3, 1.0]))
    made = []
    for n in lengths:
        inputs, targets = torch.randint(0, 256, (2, n), generator=generator)
        made.append((inputs, targets.masked_fill(torch.rand(n, generator=generator) < ignored, -100)))
    return made


def small_model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(context=CONTEXT, layers=2, heads=2, width=8).double()


def gradients(model: ByteGPT, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@settings(max_examples=25)
@given(
    sequences=pairs(), pad_value=st.sampled_from([0, 255]), multiple_of=st.sampled_from([1, 4]), cut=st.integers(0, 5)
)
def test_a_padded_batch_is_its_sequences(sequences: list[Pair], pad_value: int, multiple_of: int, cut: int) -> None:
    """One batch, two batches weighted as accumulation weighs them, and every sequence alone: the same step."""
    model = small_model()

    def weighted(batches: list[Any]) -> tuple[Tensor, list[Tensor]]:
        weights = [count_targets(batch) for batch in batches]
        losses = [lm.loss_fn(model, batch) for batch in batches]
        loss = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / max(1, sum(weights))
        assert isinstance(loss, Tensor)
        return loss.detach(), gradients(model, loss)

    alone = weighted([(inputs[None], targets[None]) for inputs, targets in sequences])
    options = {"pad_value": pad_value, "multiple_of": multiple_of}
    for parts in ([sequences], [sequences[:cut], sequences[cut:]]):
        loss, grads = weighted([pad_batch(part, **options) for part in parts if part])
        torch.testing.assert_close(loss, alone[0], rtol=0, atol=1e-10)
        for one, other in zip(grads, alone[1], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_what_stands_where() -> None:
    batch = pad_batch([([1, 2, 3], [2, 3, 4]), (torch.tensor([7]), torch.tensor([8])), ([], [])], multiple_of=4)
    assert batch.inputs.tolist() == [[1, 2, 3, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, 4, -100], [8, -100, -100, -100], [-100] * 4]
    assert batch.mask.sum(dim=1).tolist() == [3, 1, 0]
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    other = pad_batch([([1], [2]), ([3, 4], [5, 6])], pad_value=9, ignore_index=-1)
    assert other.inputs.tolist() == [[1, 9], [3, 4]] and other.targets.tolist() == [[2, -1], [5, 6]]


def test_serves_a_data_loader() -> None:
    data = [(list(range(n)), list(range(1, n + 1))) for n in (2, 5, 1, 3)]
    loader: Any = DataLoader(data, batch_size=2, collate_fn=pad_batch)  # type: ignore[arg-type]
    assert [(tuple(batch.inputs.shape), count_targets(batch)) for batch in loader] == [((2, 5), 7), ((2, 3), 4)]


@pytest.mark.parametrize(
    ("sequences", "options", "said"),
    [
        ([], {}, "found none"),
        ([([1, 2], [1])], {}, "sequence 0 .* found lengths 2, 1"),
        ([([1], [1]), ([1],)], {}, "sequence 1 .* pair"),
        ([([1], [1.5])], {}, "sequence 0 .* found torch.float32"),
        ([([[1]], [[1]])], {}, r"found torch.int64 of shape \(1, 1\)"),
        ([([1], [1])], {"multiple_of": 0}, "multiple_of to be 1 or more; found 0"),
    ],
)
def test_what_cannot_be_padded(sequences: Any, options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pad_batch(sequences, **options)


# --- the loss


@settings(max_examples=50)
@given(st.integers(0, 999), st.integers(1, 6), st.sampled_from([0.0, 0.5]), st.sampled_from([-100, 3]))
def test_the_loss_is_torchs_mean(seed: int, length: int, ignored: float, ignore_index: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, length, 7, generator=generator).requires_grad_()
    targets = torch.randint(0, 7, (2, length), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = ignore_index
    targets[0, 0] = 1
    ours = cross_entropy(logits, targets, ignore_index)
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (a,), (b,) = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_no_target_at_all_is_no_step() -> None:
    model = small_model()
    batch = pad_batch([([1, 2], [-100, -100])])
    assert count_targets(batch) == 0
    loss = lm.loss_fn(model, batch)
    assert loss.item() == 0.0 and loss.requires_grad
    assert all(bool((g == 0).all()) for g in gradients(model, loss))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_added_up_in_fp32(dtype: torch.dtype) -> None:
    """20,000 targets of ln 256: a sum of 110,904 is infinite in fp16 and wrong by hundreds in bf16."""
    loss = cross_entropy(torch.zeros(20_000, 256, dtype=dtype), torch.zeros(20_000, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(256), rel=1e-5)


# --- how many targets a batch has


class Named(NamedTuple):
    labels: Tensor
    inputs: Tensor


def test_how_many_targets() -> None:
    images, classes = torch.zeros(4, 2, 3), torch.tensor([1, -100, 2, 0])
    tokens = torch.tensor([[1, 2, -100], [-100, -100, 5]])
    for batch, expected in [
        ({"inputs": images, "labels": classes}, 3),
        ({"inputs": images, "targets": tokens}, 3),
        (UserDict({"labels": tokens, "targets": images}), 3),
        ((images, classes), 3),
        ([tokens, classes, images], 3),
        (Named(classes, torch.zeros(2, 9, dtype=torch.int64)), 3),
        ((images, torch.tensor([1, 2, 3, 4], dtype=torch.uint8)), 4),
        ((images, torch.zeros(4, 2)), 4),
        ({"inputs": images, "labels": torch.zeros(4)}, 4),
        ((images, torch.ones(4, 7, dtype=torch.bool)), 4),
        (images, 4),
        ((images,), 4),
        ({"user": {"age": images}, "text": ["a", "b"]}, 4),
        ((images, {"boxes": classes}), 4),
    ]:
        assert count_targets(batch) == expected
    assert count_targets((images, classes), ignore_index=0) == 3
    with pytest.raises(TypeError, match="a batch with tensors in it; found list"):
        count_targets(["a", 3])
