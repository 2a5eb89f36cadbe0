"""Tables of layers' gradient norms in the first steps, and the layers that they name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from watcher_loop import set_gradients, three_layers

import mo_fused
from mo_fused.training.errors import InputError
from mo_fused.training.layers_watch import layer_norms


def train(optimizer: Any, model: nn.Module, steps: int, change: Callable[[int], None] = lambda step: None) -> None:
    for step in range(1, steps + 1):
        set_gradients(model, 0.1)
        change(step)
        optimizer.step()
        optimizer.zero_grad()


def norm_of(module: nn.Module, value: float = 0.1) -> float:
    return value * math.sqrt(sum(parameter.numel() for parameter in module.parameters()))


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch": lambda model: torch.optim.AdamW(model.named_parameters()),
    "torch SGD": lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1),
    "ours": lambda model: mo_fused.AdamW(model.named_parameters()),
    "stats": lambda model: mo_fused.AdamW(model.named_parameters(), stats=True),
    "clips": lambda model: mo_fused.SGD(model.named_parameters(), lr=0.1, max_grad_norm=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_lines_table_and_silence(kind: str, by: str) -> None:
    model, lines = three_layers(), list[str]()
    optimizer = OPTIMIZERS[kind](model)
    bystander = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    handle = layer_norms(model if by == "model" else optimizer, every=2, until=5, write=lines.append)
    bystander.step()  # another model's
    train(optimizer, model, 20)
    assert list(handle.steps) == [1, 2, 4]
    assert list(handle.steps[4]) == ["0", "1", "2"]
    for step in (1, 2, 4):
        assert handle.steps[step] == pytest.approx({name: norm_of(one) for name, one in model.named_children()})
        assert handle.totals[step] == pytest.approx(norm_of(model))
    assert lines[0] == "gradient norms, step 1: all 1.27 (usual), median layer 0.849"
    assert len(lines) == 4 and lines[3] == handle.table()
    rows = [line.split() for line in lines[3].splitlines()]
    assert rows[1] == ["0", "72", "0.849", "0.849", "0.849", "1"]
    assert rows[3] == ["2", "18", "0.424", "0.424", "0.424", "0.5"]
    assert rows[4] == ["all", "layers", "1.27", "1.27", "1.27", "usual"]
    handle.close()
    assert len(lines) == 4
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("kind", ["torch", "ours", "stats"])
def test_vanishing_and_exploding_layers_are_named(kind: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)))
    optimizer, lines = OPTIMIZERS[kind](model), list[str]()

    def plant(step: int) -> None:
        for layer, factor in (("1", 1e-9), ("4", 0.0), ("5", 0.009), ("6", 1e3)):
            for parameter in model.get_submodule(layer).parameters():
                assert parameter.grad is not None
                parameter.grad *= factor

    handle = layer_norms(optimizer, until=1, write=lines.append)
    train(optimizer, model, 1, plant)
    assert handle.vanishing(1) == ["1", "4"] and handle.exploding(1) == ["6"]
    assert lines[0].endswith("(above the usual 0.1 to 10), median layer 0.447; vanishing: 1, 4; exploding: 6")
    marks = {line.split()[0]: line.split()[-1] for line in lines[1].splitlines()}
    assert marks["1"] == marks["4"] == "vanishing" and marks["6"] == "exploding" and marks["5"] == "0.009"


def test_sigmoids_vanish_and_a_healthy_network_does_not() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    y = (x[:, 0] > 0).long()
    for activation, layers in ((nn.Sigmoid, ["0", "2"]), (nn.ReLU, [])):
        model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), activation())), nn.Linear(32, 2))
        for name, parameter in model.named_parameters():
            if activation is nn.ReLU and name.endswith("weight"):
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        handle = layer_norms(model, until=10, write=lambda _: None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(10):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle.vanishing(1)[: len(layers)] == layers and handle.exploding(1) == []
        assert bool(handle.vanishing(10)) is bool(layers)


def test_gradients_that_are_not_finite_or_small_or_missing() -> None:
    model, lines = three_layers(), list[str]()
    optimizer = mo_fused.AdamW(model.named_parameters(), skip_nonfinite=True, stats=True)
    handle = layer_norms(optimizer, every=1, until=3, write=lines.append)

    def plant(step: int) -> None:
        for parameter in model.parameters():
            if step == 1:
                parameter.grad = None
            elif step == 3:
                assert parameter.grad is not None
                parameter.grad *= 1e-3
        if step == 2:
            assert model[1].bias.grad is not None
            model[1].bias.grad[0] = math.nan

    train(optimizer, model, 3, plant)
    assert lines[0] == "gradient norms, step 1: no gradient"
    assert "all nan (not finite)" in lines[1] and lines[1].endswith("exploding: 1")
    assert "(below the usual 0.1 to 10)" in lines[2] and handle.vanishing(3) == handle.exploding(3) == []


@pytest.mark.parametrize("ours", [True, False])
def test_norms_are_unscaled(ours: bool) -> None:
    model = three_layers()
    optimizer: Any = (mo_fused.AdamW if ours else torch.optim.AdamW)(model.parameters())
    handle = layer_norms(optimizer, until=1, model=model, write=lambda _: None)
    scaler: Any = (mo_fused.GradScaler if ours else torch.amp.GradScaler)("cpu", init_scale=512.0)
    scaler.scale(torch.zeros((), requires_grad=True))
    set_gradients(model, 51.2)
    scaler.step(optimizer)
    scaler.update()
    assert handle.steps[1] == pytest.approx({name: norm_of(one) for name, one in model.named_children()})


def test_many_steps_fit_into_six_columns_and_a_short_run_gets_its_table() -> None:
    model, lines = three_layers(), list[str]()
    optimizer = OPTIMIZERS["stats"](model)
    handle = layer_norms(optimizer, every=1, until=100, write=lines.append)
    train(optimizer, model, 42)
    handle.close()
    assert len(lines) == 43 and "step 1  step 9  step 17  step 26  step 34  step 42" in lines[-1]
    names = layer_norms(mo_fused.SGD(model.parameters(), lr=0.1), write=lines.append)
    assert names._names[id(model[1].weight)] == "parameter 2 (group 0)"
    names.close()
    assert len(lines) == 43  # nothing was measured


def test_the_end_of_the_program_prints_the_table(run_python: Callable[..., Any]) -> None:
    code = """
import torch, mo_fused
from mo_fused.training.layers_watch import layer_norms
p = torch.nn.Parameter(torch.ones(4))
opt = torch.optim.SGD([("layer.weight", p)], lr=0.1)
layer_norms(opt)
p.grad = torch.ones(4)
opt.step()
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "gradient norms, step 1: all 2 (usual), median layer 2"
    assert done.stdout.splitlines()[2].split() == ["layer", "4", "2", "1"]


def test_bad_input() -> None:
    model = three_layers()
    optimizer = mo_fused.AdamW(model.parameters())
    with pytest.raises(InputError, match="expected a torch optimizer or a torch.nn.Module; found list"):
        layer_norms([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every"):
        layer_norms(optimizer, every=0)
    with pytest.raises(ValueError, match="until"):
        layer_norms(optimizer, until=1.5)  # type: ignore[arg-type]
    with mo_fused.gradient_release(model, optimizer), pytest.raises(InputError, match="stats=True"):
        layer_norms(optimizer)


def test_released_gradients_with_statistics() -> None:
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), stats=True)
    with mo_fused.gradient_release(model, optimizer):
        handle = layer_norms(optimizer, until=1, write=lambda _: None)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert handle.steps[1]["2"] == pytest.approx(handle.totals[1], rel=0.5) and len(handle.steps[1]) == 3


def test_other_hooks_of_the_step_are_left_alone() -> None:
    """torch goes through the hooks while the last step is looked at."""
    model, lines, seen = three_layers(), list[str](), list[int]()
    optimizer = mo_fused.AdamW(model.named_parameters(), stats=True)
    handle = layer_norms(optimizer, every=1, until=2, write=lines.append)
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    train(optimizer, model, 4)
    assert len(seen) == 4 and len(lines) == 3 and lines[-1] == handle.table()
    handle.close()
    assert len(lines) == 3 and len(optimizer._optimizer_step_post_hooks) == 1
