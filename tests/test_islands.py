"""fp32 islands in a model under autocast: dtypes, values, copies, undoing."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from mo_fused.training.islands import fp32_island, remove_fp32_islands
from mo_fused.training.recompute import checkpoint_activations, keep_activations


class Scores(NamedTuple):
    values: Tensor
    expert: int


class Router(nn.Module):
    """Takes and gives nested tensors, and notes what it was given and computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, extra: dict[str, Any]) -> dict[str, Any]:
        scores: Scores = extra["scores"][0]
        y = self.linear(x + scores.values)
        self.seen = [x.dtype, scores.values.dtype, y.dtype, extra["wide"].dtype, extra["ids"].dtype]
        return {"y": y, "list": [y.bfloat16(), Scores(y.half(), scores.expert)], "ids": extra["ids"]}


class Model(nn.Module):
    routers: Any

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.routers = nn.ModuleList([Router(), Router()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for router in self.routers:
            wide, ids = torch.ones(1, dtype=torch.float64), torch.tensor([3])
            x = router(x, extra={"scores": [Scores(x, 7)], "wide": wide, "ids": ids})["y"]
        return x


def bf16(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y: Tensor = model(x)
    return y


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


X = torch.linspace(-1, 1, 12).view(3, 4)


def test_inside_is_fp32_and_outside_is_not(model: Model) -> None:
    assert bf16(model, X).dtype == torch.bfloat16
    keys = list(model.state_dict())
    assert fp32_island(model, "routers.1") == ["routers.1"]
    assert list(model.state_dict()) == keys
    y = bf16(model, X)
    f32, half = torch.float32, torch.bfloat16
    assert model.routers[1].seen == [f32, f32, f32, torch.float64, torch.int64]
    assert model.routers[0].seen[:3] == [half, half, half]
    assert y.dtype == f32
    # the island's values are those of the same module outside of autocast, on the inputs made fp32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = model.routers[0](model.first(X), extra=extra(model.first(X)))["y"].float()
    assert torch.equal(y, model.routers[1].linear(x + x))
    gradients = torch.autograd.grad(y.sum(), list(model.parameters()))
    assert all(g.dtype == f32 and g.abs().max() > 0 for g in gradients)


def extra(x: Tensor) -> dict[str, Any]:
    return {"scores": [Scores(x, 7)], "wide": torch.ones(1, dtype=torch.float64), "ids": torch.tensor([3])}


def test_nested_outputs_become_fp32_and_keep_their_types() -> None:
    router = Router()
    assert fp32_island(router) == [""]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = router(X.bfloat16(), extra=extra(X.half()))
        assert nn.functional.linear(X, X).dtype == torch.bfloat16, "autocast goes on behind the island"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert router(X, extra=extra(X))["y"].dtype == torch.float32
    assert out["list"][0].dtype == out["list"][1].values.dtype == torch.float32
    assert isinstance(out["list"][1], Scores) and out["list"][1].expert == 7 and out["ids"].dtype == torch.int64


def test_without_autocast_nothing_changes(model: Model) -> None:
    expected = model(X)
    fp32_island(model, "routers.*")
    assert torch.equal(model(X), expected)
    double = nn.Linear(4, 4).double()
    fp32_island(double)
    assert double(X.double()).dtype == torch.float64
    for device in ("cpu", "meta"):  # meta has no autocast
        island = nn.ReLU()
        fp32_island(island)
        assert island(X.to(device, torch.bfloat16)).dtype == torch.float32


def test_copies_run_their_own_weights(model: Model) -> None:
    fp32_island(model, "routers.*")
    expected = bf16(model, X)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for other in copies:
        assert torch.equal(bf16(other, X), expected)
        with torch.no_grad():
            other.routers[1].linear.weight.zero_()
            other.routers[1].linear.bias.fill_(0.1)
        assert torch.equal(bf16(other, X), torch.full((3, 4), 0.1)), "the copy's weights, in fp32"
        assert isinstance(other.routers[1], Router) and repr(other) == repr(model)
    assert torch.equal(bf16(model, X), expected)
    plain = Model()
    plain.load_state_dict(model.state_dict())


def test_twice_is_once_and_it_can_be_undone(model: Model) -> None:
    before = bf16(model, X)
    assert fp32_island(model, "routers.*") == fp32_island(model, "routers.*") == ["routers.0", "routers.1"]
    assert remove_fp32_islands(model) == ["routers.0", "routers.1"]
    assert remove_fp32_islands(model) == []
    assert type(model.routers[0]) is Router
    assert torch.equal(bf16(model, X), before)


@pytest.mark.parametrize("island_first", [False, True])
def test_an_island_can_be_recomputed(model: Model, island_first: bool) -> None:
    """Both orders, through a copy, undone one without the other."""
    fp32_island(model, "routers.*")
    expected = torch.autograd.grad(bf16(model, X).sum(), list(model.parameters()))
    if not island_first:
        remove_fp32_islands(model)
    checkpoint_activations(model, "routers.*")
    fp32_island(model, "routers.*")
    for one in (model, pickle.loads(pickle.dumps(model))):
        assert type(one.routers[0]) is type(model.routers[0])
        found = torch.autograd.grad(bf16(one, X).sum(), list(one.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert remove_fp32_islands(model) == keep_activations(model) == ["routers.0", "routers.1"]
    assert type(model.routers[0]) is Router


def test_a_compiled_model_keeps_its_island() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    fp32_island(model, "1")
    expected = bf16(model, X)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    found = bf16(compiled, X)
    assert torch.equal(found, expected)


def test_errors_change_nothing(model: Model) -> None:
    with pytest.raises(ValueError, match="found 'router.*'; mend it; of modules' names near it are routers.*"):
        fp32_island(model, "router.*")
    with pytest.raises(
        ValueError, match=r"name of a module with a forward; found 'routers'; name its parts: routers\.\*"
    ):
        fp32_island(model, "routers")
    with pytest.raises(ValueError, match="with a forward; found 'ModuleList'"):
        fp32_island(model.routers)
    model.routers[1].bfloat16()
    with pytest.raises(ValueError, match=r"found routers\.1\.linear\.weight of torch.bfloat16; call .float\(\)"):
        fp32_island(model, "routers.*")
    assert remove_fp32_islands(model) == []
    other = nn.Linear(2, 2)
    fp32_island(other)
    nn.utils.parametrize.register_parametrization(other, "weight", nn.Identity())
    with pytest.raises(ValueError, match="found ParametrizedLinear; undo the later change"):
        remove_fp32_islands(other)
