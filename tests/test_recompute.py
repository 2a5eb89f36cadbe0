"""Activations that are computed again: same bits, of the named blocks alone, less that is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mo_fused.training.recompute import checkpoint_activations, keep_activations


class Block(nn.Module):
    """With dropout, a batch norm and a keyword that torch's checkpoint has too; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.outer = nn.Linear(64, 16)
        self.forwards = 0

    def forward(self, x: Tensor, debug: float = 1.0) -> Tensor:
        self.forwards += 1
        hidden = nn.functional.dropout(torch.relu(self.norm(self.inner(x))), 0.3, self.training)
        return x + debug * nn.functional.dropout(self.outer(hidden), 0.3, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, debug=0.5)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, autocast: bool = False) -> tuple[list[Tensor], int]:
    """Gradients of all parameters and the bytes kept for the backward."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", enabled=autocast):
        loss = model(X).square().mean()
    torch.rand(5)  # the recomputation must not depend on what was drawn in between
    return list(torch.autograd.grad(loss, list(model.parameters()))), sum(kept.values())


def forwards(model: Any) -> list[int]:
    counts = [block.forwards for block in model.blocks]
    for block in model.blocks:
        block.forwards = 0
    return counts


@pytest.mark.parametrize("autocast", [False, True])
def test_same_bits_of_the_named_blocks_with_less_kept(model: Model, autocast: bool) -> None:
    plain = copy.deepcopy(model)
    expected, plain_bytes = gradients(plain, autocast)
    keys = list(model.state_dict())
    assert checkpoint_activations(model, "blocks.[01]") == ["blocks.0", "blocks.1"]
    assert list(model.state_dict()) == keys
    forwards(model)
    found, some_bytes = gradients(model, autocast)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert forwards(model) == [2, 2, 1]
    for (name, a), b in zip(model.named_buffers(), plain.buffers()):
        assert torch.equal(a, b), f"{name}: running statistics are those of one forward"
    assert checkpoint_activations(model, "blocks.*") == ["blocks.0", "blocks.1", "blocks.2"]
    _, fewest_bytes = gradients(model, autocast)
    assert forwards(model) == [2, 2, 2]
    one_block = plain_bytes - some_bytes
    assert one_block > 2 * 2 * 32 * 64 * (2 if autocast else 4), "two blocks keep their hidden layers no more"
    assert fewest_bytes < some_bytes < plain_bytes


def test_evaluation_runs_as_ever(model: Model) -> None:
    checkpoint_activations(model, "blocks.*")
    torch.manual_seed(3)
    with torch.no_grad():
        model(X)
    assert forwards(model) == [1, 1, 1]
    model.eval()
    model(X).sum().backward()
    assert forwards(model) == [1, 1, 1]


def test_copies_and_undoing(model: Model) -> None:
    plain = copy.deepcopy(model)
    expected, _ = gradients(plain)
    checkpoint_activations(model, "blocks.*")
    other = copy.deepcopy(model)
    forwards(other)
    found, _ = gradients(other)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert forwards(other) == [2, 2, 2] and forwards(model) == [0, 0, 0]
    assert keep_activations(other) == ["blocks.0", "blocks.1", "blocks.2"]
    gradients(other)
    assert forwards(other) == [1, 1, 1] and type(other.blocks[0]) is Block
    assert keep_activations(other) == []
    gradients(model)
    assert forwards(model) == [2, 2, 2]


def test_two_backwards_through_one_graph(model: Model) -> None:
    checkpoint_activations(model, "blocks.*")
    loss = model(X).square().mean()
    before = [buffer.clone() for buffer in model.buffers()]
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers()))


def test_a_pattern_that_matches_nothing_is_an_error(model: Model) -> None:
    with pytest.raises(ValueError, match=r"found 'block.\*'; mend it; of modules' names near it are blocks"):
        checkpoint_activations(model, "block.*")
    with pytest.raises(ValueError, match=r"found 'blocks'; name its parts: blocks\.\*"):
        checkpoint_activations(model, "blocks")
    gradients(model)
    assert forwards(model) == [1, 1, 1]
