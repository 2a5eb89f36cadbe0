"""Presets: their values, what they refuse, and the groups, optimizers and schedules that they build."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mo_fused
from mo_fused.training import schedules
from mo_fused.training.presets import PRESETS, RECOMMENDATION, SCHEDULES, TEXT, VISION, Preset


class Clicks(nn.Module):
    """An embedding table, a norm and a matrix with a bias: one parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 1)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.items(items))).squeeze(-1)
        return out


def model() -> Clicks:
    torch.manual_seed(0)
    return Clicks()


def by_name(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The group of each parameter."""
    return {name: group for group in optimizer.param_groups for name in group["param_names"]}


def test_the_values_of_the_presets() -> None:
    assert PRESETS == {"text": TEXT, "vision": VISION, "recommendation": RECOMMENDATION}
    assert (TEXT.optimizer, TEXT.lr, TEXT.betas, TEXT.eps) == ("AdamW", 3e-4, (0.9, 0.95), 1e-8)
    assert (TEXT.weight_decay, TEXT.max_grad_norm, TEXT.schedule) == (0.01, 1.0, "warmup_cosine")
    assert (TEXT.warmup_steps, TEXT.min_lr_ratio) == (None, 0.1)
    assert (TEXT.embedding_lr_factor, TEXT.clip_embeddings) == (1.0, True)
    assert (VISION.optimizer, VISION.lr, VISION.momentum, VISION.nesterov) == ("SGD", 0.1, 0.9, False)
    assert (VISION.weight_decay, VISION.max_grad_norm, VISION.min_lr_ratio) == (5e-4, None, 0.0)
    assert (RECOMMENDATION.optimizer, RECOMMENDATION.lr, RECOMMENDATION.betas) == ("AdamW", 1e-3, (0.9, 0.999))
    assert (RECOMMENDATION.weight_decay, RECOMMENDATION.max_grad_norm, RECOMMENDATION.min_lr_ratio) == (0.01, 1.0, 0.1)
    for preset in PRESETS.values():
        assert (preset.schedule, preset.warmup_steps) == ("warmup_cosine", None)
    assert (RECOMMENDATION.embedding_lr_factor, RECOMMENDATION.clip_embeddings) == (0.3, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "Lion"}, "optimizer to be one of AdamW, SGD; found 'Lion'"),
        ({"lr": 0.0}, "lr to be a finite number above 0; found 0.0"),
        ({"lr": None}, "lr to be a finite number above 0; found None"),
        ({"betas": (0.9, 1.0)}, "betas to be two numbers from 0 to below 1"),
        ({"betas": 0.9}, "betas to be two numbers"),
        ({"betas": (0.9,)}, "betas to be two numbers"),
        ({"eps": -1e-8}, "eps to be a finite number above 0"),
        ({"momentum": 1.0}, "momentum to be a number from 0 to below 1"),
        ({"nesterov": True, "momentum": 0.0}, "momentum to be above 0 with nesterov"),
        ({"weight_decay": math.inf}, "weight_decay to be a finite number of 0 or more"),
        ({"max_grad_norm": 0.0}, "max_grad_norm to be a finite number above 0"),
        ({"schedule": "cosine"}, "schedule to be one of warmup_cosine, "),
        ({"warmup_steps": -1}, "warmup_steps to be a whole number of 0 or more"),
        ({"warmup_steps": 0.1}, "warmup_steps to be a whole number"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio to be a number from 0 to 1"),
        ({"embedding_lr_factor": 0.0}, "embedding_lr_factor to be a finite number above 0"),
        ({"clip_embeddings": None}, "clip_embeddings to be true or false; found None"),
    ],
)
def test_what_a_preset_cannot_hold(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(TEXT, **changes)


@pytest.mark.parametrize("library", ["mo_fused", "torch"])
def test_decay_and_embeddings_fall_into_groups(library: str) -> None:
    optimizer = replace(RECOMMENDATION, lr=0.1, weight_decay=0.5).build_optimizer(model(), library)
    groups = by_name(optimizer)
    assert type(optimizer) is (mo_fused.AdamW if library == "mo_fused" else torch.optim.AdamW)
    assert {name: (group["lr"], group["weight_decay"], group.get("clip", True)) for name, group in groups.items()} == {
        "items.weight": (pytest.approx(0.03), 0.5, False),
        "norm.weight": (0.1, 0.0, True),
        "norm.bias": (0.1, 0.0, True),
        "head.weight": (0.1, 0.5, True),
        "head.bias": (0.1, 0.0, True),
    }
    assert len(optimizer.param_groups) == 3


def test_text_and_vision_have_two_groups_and_need_no_embeddings() -> None:
    for preset in (TEXT, VISION):
        groups = preset.groups(model())
        assert [(g["lr"], g["weight_decay"], g.get("clip", True)) for g in groups] == [
            (preset.lr, preset.weight_decay, True),
            (preset.lr, 0.0, True),
        ]
    (group,) = RECOMMENDATION.groups(nn.Linear(2, 2, bias=False))
    assert (group["lr"], group["weight_decay"]) == (RECOMMENDATION.lr, RECOMMENDATION.weight_decay)
    (moved,) = (g for g in replace(TEXT, embedding_lr_factor=2.0).groups(model()) if g["lr"] != TEXT.lr)
    assert moved["lr"] == 2 * TEXT.lr and "clip" not in moved, "the factor alone says nothing about clipping"


@pytest.mark.parametrize("preset", [TEXT, VISION, replace(VISION, nesterov=True, momentum=0.5), RECOMMENDATION])
def test_both_libraries_get_the_same_step(preset: Preset) -> None:
    """Three steps of each, without clipping, which torch's optimizers leave to the loop."""
    preset = replace(preset, max_grad_norm=None, lr=0.01)
    items, clicked = torch.tensor([0, 1, 2, 2]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    ends = []
    for library in ("mo_fused", "torch"):
        net = model()
        optimizer = preset.build_optimizer(net, library)
        start = [p.detach().clone() for p in net.parameters()]
        for _ in range(3):
            nn.functional.binary_cross_entropy_with_logits(net(items), clicked).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(not torch.equal(a, b) for a, b in zip(start, net.parameters(), strict=True))
        ends.append(list(net.parameters()))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_options_of_the_optimizer_arrive() -> None:
    vision = replace(VISION, momentum=0.5, nesterov=True).build_optimizer(model())
    assert (vision.defaults["momentum"], vision.defaults["nesterov"]) == (0.5, True)
    assert vision.defaults["max_grad_norm"] is None
    text = replace(TEXT, betas=(0.1, 0.2), eps=0.3).build_optimizer(model(), skip_nonfinite=True, eps=0.25)
    assert (text.defaults["betas"], text.defaults["eps"]) == ((0.1, 0.2), 0.25)
    assert (text.defaults["max_grad_norm"], text.defaults["skip_nonfinite"]) == (1.0, True)
    clicks = RECOMMENDATION.build_optimizer(model(), lr=2.0, weight_decay=0.5)
    assert sorted({(group["lr"], group["weight_decay"]) for group in clicks.param_groups}) == [
        (pytest.approx(0.6), 0.5),
        (2.0, 0.0),
        (2.0, 0.5),
    ]
    with pytest.raises(ValueError, match="library to be one of mo_fused, torch; found 'jax'"):
        TEXT.build_optimizer(model(), "jax")


def test_embeddings_are_neither_measured_nor_clipped() -> None:
    """Gradients of 3 everywhere: 4 for the table's elements would dominate a norm that counted them."""
    for clip_embeddings, counted in ((False, 3 + 3 + 3 + 1), (True, 15 + 3 + 3 + 3 + 1)):
        net = model()
        preset = replace(RECOMMENDATION, optimizer="SGD", momentum=0.0, lr=1.0, weight_decay=0.0)
        preset = replace(preset, clip_embeddings=clip_embeddings, embedding_lr_factor=0.5)
        optimizer = preset.build_optimizer(net, stats=True)
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
        optimizer.step()
        assert isinstance(optimizer, mo_fused.SGD)
        norm = 3 * math.sqrt(counted)
        assert float(optimizer.last_step.grad_norm) == pytest.approx(norm, rel=1e-5)
        table = 0.5 * 3 * (1 / norm if clip_embeddings else 1)
        for name, parameter in net.named_parameters():
            moved = (before[name] - parameter.detach()).flatten().tolist()
            assert moved == pytest.approx([table if name == "items.weight" else 3 / norm] * len(moved), rel=1e-4)


def test_the_schedule_keeps_each_groups_peak() -> None:
    preset = replace(RECOMMENDATION, lr=1.0)
    optimizer = preset.build_optimizer(model())
    schedule = preset.build_schedule(optimizer, total_steps=300)
    rates = []
    for _ in range(300):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    peaks = [group["initial_lr"] for group in optimizer.param_groups]
    assert sorted(peaks) == pytest.approx([0.3, 1.0, 1.0])
    for step, share in ((0, 1 / 3), (1, 2 / 3), (2, 1.0), (3, 1.0), (299, 0.1)):  # 1 % of 300 steps of warm-up
        assert rates[step] == pytest.approx([share * peak for peak in peaks])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gets_the_presets_values(name: str) -> None:
    def rates(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
        schedule = make(optimizer)
        found = []
        for _ in range(50):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    preset = replace(TEXT, schedule=name, warmup_steps=7, min_lr_ratio=0.25)
    values = {"total_steps": 50, "warmup_steps": 7, "min_ratio": 0.25}
    arguments = {key: values[key] for key in SCHEDULES[name]}
    found = rates(lambda optimizer: preset.build_schedule(optimizer, 50))
    assert found == rates(lambda optimizer: getattr(schedules, name)(optimizer, **arguments))
    assert found[:7] == pytest.approx([2.0 * k / 7 for k in range(1, 8)])
    if "min_ratio" in SCHEDULES[name]:
        assert found[-1] == pytest.approx(0.5)
    usual = rates(lambda optimizer: replace(preset, warmup_steps=None).build_schedule(optimizer, 250))
    assert usual[:2] == pytest.approx([1.0, 2.0]), "1 % of 250 steps are two"
    assert name != "warmup_constant" or found[6:] == [2.0] * 44
    with pytest.raises(ValueError, match="total_steps to be 1 or more; found 0"):
        preset.build_schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0), 0)
    with pytest.raises(ValueError, match=r"warmup_steps to be .* total_steps \(6\); found 7"):
        preset.build_schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0), 6)
