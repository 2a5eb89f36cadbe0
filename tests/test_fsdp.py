"""Models under fully_shard (FSDP2), with replicas and over tensor parallelism: training as in one process."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from distributed_cases import mesh_of, part, same_everywhere, told, whole
from oracle import assert_close, assert_same_bits
from process_pool import pool
from torch import Tensor, nn

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="processes of their own, with the CPU's backends")

Ranks = tuple[int, ...]
# Ranks of FSDP2 alone; (2, 2): replicas of shards; "tp": over tensor parallelism of two.
MODELS: list[tuple[Ranks, str]] = [((2,), "fsdp"), ((4,), "fsdp"), ((2, 2), "hybrid"), ((2, 2), "tp")]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", dict(lr=0.01, weight_decay=0.1)),
    ("Adam", dict(lr=0.01, amsgrad=True)),
    ("SGD", dict(lr=0.05, momentum=0.9, nesterov=True)),
]


class Net(nn.Module):
    """Sizes that four ranks do not divide (but for what tensor parallelism cuts), and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(3))  # fewer than ranks
        self.head = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.tanh(self.first(x)))
        found: Tensor = self.head(x) * self.scale + self.frozen
        return found


def made(ranks: Ranks, kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """(the model over the ranks, the same model in this process)."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(5)
    plain = Net().to(dtype)
    model = copy.deepcopy(plain)
    mesh = mesh_of(ranks)
    if kind == "tp":
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        mesh = mesh["dp"]
    else:
        fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, plain


def loss_of(model: nn.Module, step: int) -> Tensor:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    found: Tensor = (model(batch) - 1.0).square().mean()
    return found


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Decayed weights, and biases in a group of their own."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "bias" not in n]},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
    ]


def assert_models_close(model: nn.Module, other: nn.Module, steps: int) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(whole(p), whole(q).double(), steps, name)


def trained(rank: int, ranks: Ranks, kind: str, name: str, options: dict[str, Any]) -> Any:
    """With a schedule and a closure, beside one process and beside torch's optimizer and clip on the same model."""
    (model, plain), (theirs, _) = made(ranks, kind), made(ranks, kind)
    opt, alone = (
        getattr(mo_fused, name)(groups_of(m), max_grad_norm=0.5, stats=True, **options) for m in (model, plain)
    )
    torchs = getattr(torch.optim, name)(groups_of(theirs), **options)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.8**k) for o in (opt, alone, torchs)]
    for step in range(5):

        def closure(o: Any, m: nn.Module, step: int = step) -> Tensor:
            o.zero_grad()
            loss = loss_of(m, step)
            loss.backward()
            return loss

        loss, expected = (o.step(functools.partial(closure, o, m)) for o, m in ((opt, model), (alone, plain)))
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        closure(torchs, theirs)
        if kind == "tp":  # gradients on two meshes, which torch's refuses
            mo_fused.clip_grad_norm_(theirs.parameters(), 0.5)
        else:
            norm = whole(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
            assert float(opt.last_step.grad_norm) == pytest.approx(float(norm), rel=1e-5)
        torchs.step()
        got, want = told(opt.last_step), told(alone.last_step)
        for key in got:
            assert got[key] == pytest.approx(want[key], rel=1e-4), (step, key)
        assert step > 0 or got["clip_coef"] < 0.9, "the norm does not clip"
        for schedule in schedules:
            schedule.step()
    assert_models_close(model, plain, 60)
    assert_models_close(model, theirs, 60)
    assert {r.backend for r in opt.explain()} == {"cpu"}
    assert sum("local part" in r.reason for r in opt.explain()) == len(list(model.parameters()))
    for p in model.parameters():
        assert p.requires_grad == (p in opt.state)
        for key, value in opt.state.get(p, {}).items():
            assert value.placements == p.placements if key != "step" else type(value) is Tensor
    return told(opt.last_step), opt.last_step.per_param()


@pytest.mark.parametrize("name,options", OPTIMIZERS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("ranks,kind", MODELS, ids=str)
def test_training_beside_one_process_and_torch(ranks: Ranks, kind: str, name: str, options: dict[str, Any]) -> None:
    same_everywhere(pool(math.prod(ranks)).run(trained, ranks, kind, name, options))


def exactly(rank: int, ranks: Ranks, kind: str, dtype: torch.dtype) -> None:
    """All ranks have the same data, whose mean over 2 or 4 ranks is exact: so are the gradients, and the steps."""
    model, plain = made(ranks, kind, dtype)
    opt, alone = (mo_fused.AdamW(groups_of(m), lr=0.01, skip_nonfinite=True) for m in (model, plain))
    for step in range(3):
        for o, m in ((opt, model), (alone, plain)):
            o.zero_grad()
            loss_of(m, step).backward()
            o.step()
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert_same_bits(whole(p), q[1].detach(), f"step {step}: {name}")
            for key, value in alone.state.get(q[1], {}).items():
                assert_same_bits(whole(opt.state[p][key]), value, f"step {step}: {key} of {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks,kind", MODELS[:3], ids=str)
def test_bits_of_one_process(ranks: Ranks, kind: str, dtype: torch.dtype) -> None:
    pool(math.prod(ranks)).run(exactly, ranks, kind, dtype)


def overflowing(rank: int, ranks: Ranks, kind: str, scaler: str) -> Any:
    """One rank's data overflow in the third step; nobody steps, every scaler backs off, all go on together."""
    model, _ = made(ranks, kind)
    opt = mo_fused.AdamW(groups_of(model), lr=0.01, max_grad_norm=0.5)
    scaling = {"ours": mo_fused.GradScaler, "torch": torch.amp.GradScaler}[scaler]("cpu", init_scale=2.0**10)
    scales = []
    for step in range(5):
        opt.zero_grad()
        loss = loss_of(model, 10 * step + rank)
        if step == 2 and rank == 1:
            loss = loss * math.inf
        scaling.scale(loss).backward()
        before = [part(p).clone() for p in model.parameters()]
        if step == 3:
            scaling.unscale_(opt)
            norm = mo_fused.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        scaling.step(opt)
        if step == 3:
            assert float(opt.last_step.grad_norm) == pytest.approx(float(norm), rel=1e-6)
        scaling.update()
        scales.append(scaling.get_scale())
        after = [part(p).clone() for p in model.parameters()]
        if step == 2:
            assert_same_bits(after, before, "a skipped step changed a parameter")
        else:
            names = [n for n, p in model.named_parameters() if p.requires_grad and part(p).numel()]
            still = [
                n for (n, _), a, b in zip(model.named_parameters(), after, before, strict=True) if torch.equal(a, b)
            ]
            assert not set(still) & set(names), f"step {step}: {still}"
    assert scales == [2.0**10] * 2 + [2.0**9] * 3
    assert {float(s["step"]) for s in opt.state.values()} == {4.0}
    return told(opt.last_step)


@pytest.mark.parametrize("scaler", ["ours", "torch"])
@pytest.mark.parametrize("ranks,kind", MODELS[:3], ids=str)
def test_scaler_with_an_overflow_on_one_rank(ranks: Ranks, kind: str, scaler: str) -> None:
    same_everywhere(pool(math.prod(ranks)).run(overflowing, ranks, kind, scaler))


def accumulated(rank: int, ranks: Ranks, kind: str) -> Any:
    """Two micro-batches, of which the first is not reduced; then gradients beside torch's utilities."""
    (model, plain), (theirs, _) = made(ranks, kind), made(ranks, kind)
    size = math.prod(ranks)
    opt, alone = (mo_fused.SGD(groups_of(m), lr=0.1, momentum=0.9, max_grad_norm=1.0) for m in (model, plain))
    for step in range(2):
        for m in (model, theirs):
            m.zero_grad()
            m.set_requires_gradient_sync(False)
            loss_of(m, 100 * step + rank).backward()
            m.set_requires_gradient_sync(True)
            loss_of(m, 100 * step + 50 + rank).backward()
        alone.zero_grad()
        for r in range(size):
            ((loss_of(plain, 100 * step + r) + loss_of(plain, 100 * step + 50 + r)) / size).backward()
        opt.step()
        alone.step()
        assert float(opt.last_step.grad_norm) == pytest.approx(float(alone.last_step.grad_norm), rel=1e-5)
        assert_models_close(model, plain, 60)
        for p, q in zip(theirs.parameters(), model.parameters(), strict=True):
            p.detach().copy_(q.detach())
    both = [[p for p in m.parameters() if p.requires_grad] for m in (model, theirs)]
    mine = mo_fused.clip_grad_norm_(both[0], 0.1)
    torchs = whole(torch.nn.utils.clip_grad_norm_(both[1], 0.1))
    assert type(mine) is Tensor and float(mine) == pytest.approx(float(torchs), rel=1e-5)
    for p, q in zip(*both, strict=True):
        assert_close(part(p.grad), part(q.grad).double(), 60)
    return told(opt.last_step), float(mine)


@pytest.mark.parametrize("ranks,kind", MODELS[:3], ids=str)
def test_accumulation_and_clipping_by_hand(ranks: Ranks, kind: str) -> None:
    same_everywhere(pool(math.prod(ranks)).run(accumulated, ranks, kind))
