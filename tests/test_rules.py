"""Parameter rules: what each parameter gets, errors for what matches nothing, and that optimizers follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mo_fused
from mo_fused.training.layerwise import layer_decay
from mo_fused.training.model import ByteGPT
from mo_fused.training.name_patterns import abbreviated
from mo_fused.training.param_table import ParamGroups
from mo_fused.training.rules import NO_DECAY, Rule, embedding_rule, param_groups
from mo_fused.training.schedules import warmup_linear


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 2))


class Small(nn.Module):
    """embedding and head tied, one block, an own norm whose gain has two dimensions, a table that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))])
        self.norm = OwnRMSNorm()
        self.head = nn.Linear(4, 5, bias=True)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Embedding(3, 2)
        self.frozen.weight.requires_grad_(False)


def settings_by_name(groups: list[dict[str, Any]]) -> dict[str, tuple[float, float, bool]]:
    return {
        name: (round(float(g["lr"]), 12), g["weight_decay"], g.get("clip", True))
        for g in groups
        for name, _ in g["params"]
    }


def test_rules_apply_in_order() -> None:
    groups = param_groups(
        Small(),
        [
            *NO_DECAY,
            embedding_rule(),
            Rule("head.*", lr_factor=0.5),
            Rule("blocks.0.?.bias", weight_decay=0.7, clip=False),
            Rule("*.1.*", clip=True),
        ],
        lr=0.1,
        weight_decay=0.2,
    )
    assert settings_by_name(groups) == {
        "embedding.weight": (0.015, 0.2, False),  # the rule for the head's weight is the embedding's too
        "blocks.0.0.weight": (0.1, 0.2, True),
        "blocks.0.0.bias": (0.1, 0.7, False),
        "blocks.0.1.weight": (0.1, 0.0, True),
        "blocks.0.1.bias": (0.1, 0.7, True),
        "norm.gain": (0.1, 0.0, True),
        "head.bias": (0.05, 0.0, True),
    }
    rates = [group["lr"] / 0.1 for group in groups]
    assert rates == pytest.approx([1, 1, 1, 1, 0.5, 0.15]), "the base rate first, then by falling rate"
    assert [group["weight_decay"] for group in groups[:4]] == [0.7, 0.7, 0.2, 0.0]


def test_without_rules_there_is_one_group() -> None:
    model = Small()
    (group,) = param_groups(model, [], lr=0.1)
    assert [name for name, _ in group["params"]] == [n for n, p in model.named_parameters() if p.requires_grad]
    assert group["weight_decay"] == 0.0 and "clip" not in group


@pytest.mark.parametrize(
    ("rule", "matched"),
    [
        (Rule(types=(nn.Linear,)), {"blocks.0.0.weight", "blocks.0.0.bias", "embedding.weight", "head.bias"}),
        (Rule(types=("Linear",), max_dims=1), {"blocks.0.0.bias", "head.bias"}),
        (Rule("blocks*", types=("norm",)), {"blocks.0.1.weight", "blocks.0.1.bias"}),
        (Rule(types=("norm",), min_dims=2), {"norm.gain"}),
        (Rule(types=(OwnRMSNorm, "Embedding")), {"norm.gain", "embedding.weight"}),
        (Rule("head.weight", types=(nn.Embedding,), optional=True), set()),  # one name has to meet both
        (Rule("frozen.*"), set()),  # no typing error: it matches, but is not trained
        (Rule("HEAD.*", optional=True), set()),
    ],
)
def test_what_a_rule_matches(rule: Rule, matched: set[str]) -> None:
    factors = settings_by_name(param_groups(Small(), [replace(rule, lr_factor=0.5)], lr=1.0))
    assert {name for name, (lr, _, _) in factors.items() if lr == 0.5} == matched


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3, affine=True)])
def test_norm_is_every_norm_of_torch(norm: nn.Module) -> None:
    (group,) = param_groups(nn.Sequential(norm), [Rule(types=("norm",), lr_factor=0.5)], lr=1.0)
    assert group["lr"] == 0.5


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule("bloks.*", lr_factor=0.5), r"Rule\(pattern='bloks.\*', lr_factor=0.5\).*near it are blocks\.\*"),
        (Rule("head.wieght"), "near it are head.weight"),
        (Rule(types=(nn.Conv2d,)), r"types=\(Conv2d,\)\).*modules of type Embedding, Linear, LayerNorm, OwnRMSNorm"),
        (Rule("blocks.*", min_dims=3), "none of such dimensions"),
        (Rule("zzz"), "there are embedding.weight, head.weight, blocks"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rule: Rule, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*; mend the rule, or give it optional=True"):
        param_groups(Small(), [*NO_DECAY, rule], lr=1.0)


def test_other_errors() -> None:
    with pytest.raises(ValueError, match=r"expected rules to be Rule objects.*write \[\*NO_DECAY"):
        param_groups(Small(), [NO_DECAY], lr=1.0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="types to be a tuple"):
        Rule(types=nn.Embedding)  # type: ignore[arg-type]
    for wrong in ({"lr_factor": -1.0}, {"lr_factor": float("nan")}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} to be a finite number of 0 or more"):
            Rule(**wrong)  # type: ignore[arg-type]
    for wrong in ({"lr_factor": "2"}, {"lr_factor": None}, {"min_dims": "1"}, {"pattern": None}, {"clip": "no"}):
        with pytest.raises(ValueError, match=f"expected {next(iter(wrong))} to be .*; found .*; (give|write) "):
            Rule(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected lr to be a finite number of 0 or more; found '1'"):
        param_groups(Small(), [], lr="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr to be"):
        param_groups(Small(), [], lr=-1.0)
    with pytest.raises(ValueError, match="3 of which none does"):
        param_groups(nn.Sequential(nn.LayerNorm(2), nn.PReLU()).requires_grad_(False), [], lr=1.0)


def test_the_table_says_what_fell_where() -> None:
    model = ByteGPT(context=4, layers=3, heads=1, width=8)
    model.position.requires_grad_(False)
    groups = param_groups(model, [*NO_DECAY, embedding_rule()], lr=1e-3, weight_decay=0.1)
    optimizer = mo_fused.AdamW(groups)  # which changes the groups that it is given
    optimizer.param_groups[0]["lr"] = 7.0
    lines = str(groups).splitlines()
    assert lines[0].split() == ["lr", "weight", "decay", "clip", "tensors", "elements", "parameters"]
    assert lines[1].split("  ")[-1] == "blocks.*.qkv.weight x 3, blocks.*.attention_out.weight x 3,"
    assert lines[1].split()[:5] == ["0.001", "0.1", "yes", "12", "2,304"]  # 3 blocks of (3 + 1 + 4 + 4) * 8 * 8
    assert any(line.split()[:5] == ["0.001", "0", "yes", "26", "328"] for line in lines)
    assert any(line.split() == ["0.0003", "0.1", "no", "1", "2,048", "embedding.weight"] for line in lines)
    assert lines[-2:] == ["not trained (no gradient needed):", "  position.weight"]
    assert max(map(len, lines)) <= 120
    for length in range(40, 70):  # one of these has the end of the line in each place of "name x 2, name"
        names = [f"{'n' * length}.0", f"{'n' * length}.1", "m"]
        groups = ParamGroups([{"params": [(n, torch.zeros(1)) for n in names], "lr": 1.0, "weight_decay": 0.0}])
        shown = [line.split("  ")[-1].strip() for line in str(groups).splitlines()[1:]]
        assert shown in ([f"{'n' * length}.* x 2, m"], [f"{'n' * length}.* x 2,", "m"]), "broken after commas alone"


def test_names_are_abbreviated_by_the_numbers_that_differ() -> None:
    names = ["layers.1.conv1.weight", "bias", "layers.1.conv12.weight", "layers.1.bn1.weight", "layers.1.conv1.bias"]
    assert abbreviated(names) == ["layers.1.conv*.weight x 2", "bias", "layers.1.bn1.weight", "layers.1.conv1.bias"]
    assert abbreviated(["b.0.1", "b.1.0", "b.10.1"]) == ["b.*.* x 3"]


def test_names_travel_and_a_tensor_rate_stays_one() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    groups = param_groups(Small(), [*NO_DECAY, embedding_rule()], lr=rate)
    optimizer = torch.optim.AdamW(groups, foreach=False)
    schedule = warmup_linear(optimizer, 10, 4)
    assert [g["param_names"] for g in optimizer.param_groups][-1] == ["embedding.weight"]
    rates = [g["lr"] for g in optimizer.param_groups]
    assert [float(r) for r in rates] == pytest.approx([0.025, 0.0075])
    optimizer.step()
    schedule.step()
    assert [float(r) for r in rates] == pytest.approx([0.05, 0.015]), "in place: what a captured step reads"
    assert float(rate) == 0.1


@pytest.mark.parametrize("library", ["mo_fused", "torch"])
def test_optimizers_follow(library: str) -> None:
    """AdamW's first step moves every element by its rate, plus decay; clip=False is out of norm and clipping."""
    model = Small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    groups = param_groups(model, [*NO_DECAY, embedding_rule()], lr=0.1, weight_decay=0.5)
    optimizer: Any
    if library == "mo_fused":
        optimizer = mo_fused.AdamW(groups, max_grad_norm=1.0, stats=True)
    else:
        optimizer = torch.optim.AdamW(groups)
    schedule = warmup_linear(optimizer, 3, 2)  # the first step at half the peak
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 2.0)
    model.embedding.weight.grad = torch.full((5, 4), 1000.0)
    optimizer.step()
    if library == "mo_fused":
        # 16 + 4 of the linear layer, 4 + 4 of the norm, 4 of the own norm and 5 of the head's bias, each 2
        norm = 2 * 37**0.5
        assert float(optimizer.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
        assert float(optimizer.last_step.clip_coef) == pytest.approx(1 / norm, rel=1e-5)
        moments = optimizer.state[model.head.bias]["exp_avg"]
        assert moments.tolist() == pytest.approx([0.1 * 2.0 / norm] * 5, rel=1e-5)
        assert optimizer.state[model.embedding.weight]["exp_avg"].mean().item() == pytest.approx(100.0, rel=1e-6)
    moved = {name: 1.0 - parameter.detach().mean().item() for name, parameter in model.named_parameters()}
    assert moved == pytest.approx(
        {
            "embedding.weight": 0.015 * 1.5,  # 0.3 x 0.05, decay 0.5
            "blocks.0.0.weight": 0.05 * 1.5,
            "blocks.0.0.bias": 0.05,
            "blocks.0.1.weight": 0.05,
            "blocks.0.1.bias": 0.05,
            "norm.gain": 0.05,
            "head.bias": 0.05,
            "frozen.weight": 0.0,
        },
        rel=1e-5,
    )
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1, 0.03])


# --- layer-wise decay


def test_layer_decay_is_a_power_of_the_depth() -> None:
    model = ByteGPT(context=4, layers=3, heads=1, width=8)
    rates = settings_by_name(param_groups(model, layer_decay(model, 0.5), lr=1.0))
    expected = {
        "embedding": 1 / 16,
        "position": 1 / 16,
        "blocks.0": 1 / 8,
        "blocks.1": 1 / 4,
        "blocks.2": 1 / 2,
        "norm": 1,
    }
    assert {name: lr for name, (lr, _, _) in rates.items()} == {
        name: next(rate for prefix, rate in expected.items() if name.startswith(f"{prefix}."))
        for name, _ in model.named_parameters()
    }


def test_layer_decay_of_ten_blocks_elsewhere_and_a_tied_head() -> None:
    """Block 1 is not block 10; the embedding is the lowest although the head shares it."""
    core = nn.ModuleDict({"embed[0]": nn.Embedding(3, 2), "layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(11))})
    model = nn.ModuleDict({"core": core, "head": nn.Linear(2, 3)})
    model["head"].weight = core["embed[0]"].weight
    rates = settings_by_name(param_groups(model, layer_decay(model, 0.5, "core.layers"), lr=1.0))
    assert rates["core.layers.1.bias"][0] == pytest.approx(2.0**-10) and rates["core.layers.10.weight"][0] == 0.5
    assert rates["core.embed[0].weight"][0] == pytest.approx(2.0**-12) and rates["head.bias"][0] == 1.0


def test_layer_decay_errors() -> None:
    model = ByteGPT(context=4, layers=2, heads=1, width=8)
    for blocks in ("block", "", "norm"):
        with pytest.raises(ValueError, match="module that holds blocks.*(near it|there) are blocks"):
            layer_decay(model, 0.5, blocks)
    for factor in (0.0, 1.5):
        with pytest.raises(ValueError, match="factor"):
            layer_decay(model, factor)
    shared = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"found blocks\.0\.weight = blocks\.1\.weight"):
        layer_decay(nn.ModuleDict({"blocks": nn.ModuleList([shared, shared])}), 0.5)
