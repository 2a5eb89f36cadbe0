"""DistributedDataParallel: nothing special is needed, and the communication hook that takes the norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from process_pool import pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mo_fused
from mo_fused.distributed import norm_hook

pytestmark = pytest.mark.cpu_only(reason="processes of their own, with the CPU's backends")

BUCKET_MB = 0.002
"""Several buckets."""


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


def groups_of(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].parameters())},
        {"params": list(model[2].parameters()), "clip": False},
        {"params": list(model[4].parameters())},
    ]


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(rank: int, case: dict[str, Any], hooked: bool) -> tuple[Any, ...]:
    model = model_of()
    kind = getattr(mo_fused, case.get("kind", "AdamW"))
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=case.get("view", False), find_unused_parameters=True
    )
    opt = kind(groups_of(model), lr=0.05, **case.get("options", {}))
    hook = norm_hook(ddp, opt) if hooked else None
    scaler = mo_fused.GradScaler("cpu", init_scale=64.0) if case.get("scaler") else None
    found = []
    for step in range(5):
        if step in case.get("accumulate", ()):
            with ddp.no_sync():
                ddp(inputs(rank, 50 + step)).square().sum().backward()
        x = inputs(rank, step)
        if step == case.get("bad") and rank == 1:
            x[0, 0] = float("inf")
        loss = ddp(x).square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step in case.get("edit", ()):
            model[0].weight.grad.mul_(0.5)
        if step in case.get("replace", ()):
            model[0].weight.grad = model[0].weight.grad * 0.5
        if step in case.get("local", ()):  # a backward that nobody communicates, after one that was
            opt.zero_grad()
            with ddp.no_sync():
                for _ in range(2):
                    ddp(inputs(7, step)).square().sum().backward()
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()
        last = opt.last_step
        found.append((float(last.grad_norm), float(last.clip_coef), bool(last.skipped), str(last.per_param())))
        opt.zero_grad()
    return found, [p.detach().clone() for p in model.parameters()], None if hook is None else hook.hits


CASES = {
    "clip": ({"options": {"max_grad_norm": 0.5}}, 5),
    "bucket view": ({"options": {"max_grad_norm": 0.5}, "view": True}, 5),
    "stats": ({"options": {"max_grad_norm": 0.5, "stats": True}}, 5),
    "sgd": ({"kind": "SGD", "options": {"momentum": 0.9, "max_grad_norm": 0.5}}, 5),
    "in place": ({"options": {"max_grad_norm": 0.5, "clip_in_place": True}}, 5),
    "skip": ({"options": {"skip_nonfinite": True}, "bad": 2}, 5),
    "scaler": ({"options": {"max_grad_norm": 0.5}, "scaler": True, "bad": 1}, 5),
    "accumulation": ({"options": {"max_grad_norm": 0.5}, "accumulate": (1, 2)}, 5),
    "accumulation in views": ({"options": {"max_grad_norm": 0.5}, "accumulate": (1, 2), "view": True}, 5),
    "edited": ({"options": {"max_grad_norm": 0.5}, "edit": (1, 3)}, 3),
    "edited views": ({"options": {"max_grad_norm": 0.5}, "edit": (1, 3), "view": True}, 3),
    "replaced": ({"options": {"max_grad_norm": 0.5}, "replace": (1,)}, 4),
    "not communicated": ({"options": {"max_grad_norm": 0.5}, "local": (2,)}, 4),
    "not gated": ({"options": {"stats": True}}, 0),
    "offload": ({"options": {"max_grad_norm": 0.5, "offload": "cpu"}}, 0),
}


def both(rank: int, case: dict[str, Any]) -> tuple[Any, ...]:
    plain, hooked = train(rank, case, False), train(rank, case, True)
    assert repr(plain[0]) == repr(hooked[0])  # a NaN is not itself
    for a, b in zip(plain[1], hooked[1], strict=True):
        assert torch.equal(a, b)
    return plain[0], [p.tolist() for p in plain[1]], hooked[2]


@pytest.mark.parametrize("name", CASES)
def test_the_hook_changes_nothing_but_the_pass(name: str) -> None:
    case, hits = CASES[name]
    first, second = pool(2).run(both, case)
    assert first[2] == second[2] == hits
    assert repr(first[0]) == repr(second[0])
    assert first[1] == second[1]
    if "bad" in case:
        assert [s[2] for s in first[0]] == [step == case["bad"] for step in range(5)]


def test_ddp_is_the_average_over_processes() -> None:
    _, found = zip(*[r[:2] for r in pool(2).run(both, {"options": {"max_grad_norm": 0.5}})], strict=True)
    model = model_of().double()
    opt = mo_fused.AdamW(groups_of(model), lr=0.05, max_grad_norm=0.5)
    for step in range(5):
        losses = [model(inputs(rank, step).double()).square().sum() for rank in range(2)]
        (sum(losses) / 2).backward()
        opt.step()
        opt.zero_grad()
    for value, p in zip(found[0], model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(value, dtype=torch.float64), p.detach(), rtol=2e-4, atol=2e-6)


def other_hook(rank: int) -> tuple[int, float, float]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = model_of()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    opt = mo_fused.AdamW(model.parameters(), lr=0.05, max_grad_norm=0.5)
    hook = norm_hook(ddp, opt, bf16_compress_hook, ddp.process_group)
    ddp(inputs(rank, 0)).square().sum().backward()
    expected = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    opt.step()
    return hook.hits, float(opt.last_step.grad_norm), float(expected)


def test_what_another_hook_has_communicated_is_measured() -> None:
    for hits, norm, expected in pool(2).run(other_hook):
        assert hits == 1
        assert norm == pytest.approx(expected, rel=1e-6)


def half_of_the_model(rank: int) -> tuple[int, float, float]:
    model = model_of()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    opt = mo_fused.AdamW(model[0].parameters(), lr=0.05, max_grad_norm=0.5)
    hook = norm_hook(ddp, opt)
    ddp(inputs(rank, 0)).square().sum().backward()
    expected = torch.stack([p.grad.double().norm() for p in model[0].parameters()]).norm()
    opt.step()
    return hook.hits, float(opt.last_step.grad_norm), float(expected)


def test_parameters_of_another_optimizer_do_not_count() -> None:
    for hits, norm, expected in pool(2).run(half_of_the_model):
        assert hits == 1
        assert norm == pytest.approx(expected, rel=1e-6)


def refusals(rank: int) -> list[str]:
    model = model_of()
    ddp = DistributedDataParallel(model)
    found = []
    for model_, opt in (
        (model, mo_fused.AdamW(model.parameters())),
        (ddp, torch.optim.AdamW(model.parameters())),
        (ddp, mo_fused.Adafactor(model.parameters())),
    ):
        try:
            norm_hook(model_, opt)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    norm_hook(ddp, mo_fused.AdamW(model.parameters()))  # none of them has registered a hook
    return found


def test_refusals() -> None:
    for found in pool(2).run(refusals):
        assert len(found) == 3
        words = ("DistributedDataParallel", "optimizer of this package", "Adafactor")
        for text, word in zip(found, words, strict=True):
            assert word in text
