"""ZeRO-1 (ZeroRedundancyOptimizer): ranks step parameters of their own, and norm, clip and skip are everybody's."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import noise, weights
from oracle import assert_same_bits
from process_pool import pool
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="processes of their own, with the CPU's backends")

# Several for each of four ranks, some unaligned in a bucket; and fewer than ranks: one rank owns nothing, and no
# rank has parts of both groups.
MANY = [(64, 130), (33,), (7, 5), (), (129,), (64, 65), (3,), (40, 40)]
FEW = [(64, 65), (33,), (7, 5)]
FAR, NEAR = 1e6, 0.5
"""Limits that no norm reaches, and that every norm is above."""
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"weight_decay": 0.1}),
    "AMSGrad": ("Adam", {"amsgrad": True}),
    "SGD": ("SGD", {"momentum": 0.9}),
    "formats": ("AdamW", {"master_weights": "split8", "state_dtype": "int8"}),
}


def groups(params: list[Parameter]) -> list[dict[str, Any]]:
    """The last parameters have another rate, and take no part in the norm."""
    return [{"params": params[:-2]}, {"params": params[-2:], "lr": 0.02, "clip": False}]


class Run:
    """The same training by one optimizer for everything and by ZeRO, whose ranks all have the same gradients."""

    def __init__(
        self, name: str, shapes: list[tuple[int, ...]], view: bool = False, process_group: Any = None, **options: Any
    ) -> None:
        kind, own = OPTIMIZERS[name]
        dtype = torch.bfloat16 if "master_weights" in own else torch.float32
        self.dtype, self.seed = dtype, 0
        self.single_params = [Parameter(x) for x in weights(shapes, dtype)]
        self.params = [Parameter(x) for x in weights(shapes, dtype)]
        options = {"lr": 0.01, **own, **options}
        self.single = getattr(mo_fused, kind)(groups(self.single_params), **options)
        self.zero = ZeroRedundancyOptimizer(
            groups(self.params),
            optimizer_class=getattr(mo_fused, kind),
            parameters_as_bucket_view=view,
            process_group=process_group,
            **options,
        )

    def step(self, at: int, spoil: int | None = None) -> None:
        for ours in (self.single_params, self.params):
            for i, p in enumerate(ours):
                p.grad = noise(p.shape, self.seed + 100 * at + i, self.dtype)
            if spoil is not None:
                ours[spoil].grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
        self.single.step()
        self.zero.step()

    def check(self, exact: bool = True, measured: bool = True) -> None:
        """Parameters, the states that are here, and what the steps tell."""
        for i, (p, q) in enumerate(zip(self.params, self.single_params, strict=True)):
            pairs = [(p.detach(), q.detach())]
            if p in self.zero.optim.state:
                entry, wanted = self.zero.optim.state[p], self.single.state[q]
                assert list(entry) == list(wanted)
                pairs += [(torch.as_tensor(entry[key]), torch.as_tensor(wanted[key])) for key in wanted]
            for found, want in pairs:
                if exact:
                    assert_same_bits(found, want, f"parameter {i}")
                else:
                    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)
        if not measured:
            return
        found, want = self.zero.optim.last_step, self.single.last_step
        assert bool(found.skipped) == bool(want.skipped) and float(found.nonfinite) == float(want.nonfinite)
        for field in ("grad_norm", "grad_amax", "clip_coef", "update_norm", "stored_update_norm", "param_norm"):
            a, b = getattr(found, field), getattr(want, field)
            assert (a is None) == (b is None), field
            if a is not None and not math.isnan(float(b)):
                assert float(a) == pytest.approx(float(b), rel=1e-6), field


def same_everywhere(params: list[Parameter]) -> None:
    for p in params:
        low, high = p.detach().clone(), p.detach().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        assert torch.equal(low, high)


# --- steps


def steps(rank: int, name: str, shapes: list[tuple[int, ...]], view: bool, options: dict[str, Any]) -> int:
    exact = options.get("max_grad_norm") != NEAR
    run = Run(name, shapes, view, **options)
    measured = bool(options)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1.0 / (k + 1)) for o in (run.single, run.zero)]
    for at in range(3):
        run.step(at)
        run.check(exact, measured)
        for schedule in schedules:
            schedule.step()
    assert [g["lr"] for g in run.zero.optim.param_groups] == pytest.approx([0.01 / 3, 0.02 / 3])
    extra = [Parameter(x) for x in weights([(65, 3), (2,)])]
    its = [Parameter(x.detach().clone()) for x in extra]
    run.zero.add_param_group({"params": extra, "lr": 0.5, "weight_decay": 0.2})
    run.single.add_param_group({"params": its, "lr": 0.5, "weight_decay": 0.2})
    run.params += extra
    run.single_params += its
    for at in range(3, 5):
        run.step(at)
        run.check(exact, measured)
    same_everywhere(run.params)
    assert all(e.backend == "cpu" for e in run.zero.optim.explain())
    return sum(len(g["params"]) for g in run.zero.optim.param_groups)


@pytest.mark.parametrize("view", [False, True], ids=["tensors", "buckets"])
@pytest.mark.parametrize(
    "name, options",
    [
        ("AdamW", {"max_grad_norm": NEAR}),
        ("AdamW", {"max_grad_norm": FAR, "stats": True}),
        ("AMSGrad", {}),
        ("SGD", {"max_grad_norm": NEAR, "stats": True, "skip_nonfinite": True}),
    ],
    ids=["AdamW-clipped", "AdamW-stats", "AMSGrad-bare", "SGD-clipped"],
)
def test_steps_as_one_optimizer(name: str, options: dict[str, Any], view: bool) -> None:
    assert sum(pool(2).run(steps, name, MANY, view, options)) == len(MANY) + 2
    owned = pool(4).run(steps, name, FEW, view, options)
    assert sum(owned) == len(FEW) + 2
    pool(4).run(steps, name, MANY, view, options)


# --- steps that are skipped


def skip(rank: int, shapes: list[tuple[int, ...]], options: dict[str, Any]) -> list[bool]:
    """One gradient that has a NaN, of each parameter in turn, whoever owns it; also of those that are not clipped."""
    run = Run("AdamW", shapes, **options)
    run.step(0)
    owners = []
    for i in range(len(shapes)):
        owners.append(run.params[i] in run.zero.optim.state)
        before = [p.detach().clone() for p in run.params]
        counts = [float(entry["step"]) for entry in run.zero.optim.state.values()]
        run.step(1, spoil=i)
        assert bool(run.zero.optim.last_step.skipped)
        assert [float(entry["step"]) for entry in run.zero.optim.state.values()] == counts
        for p, old in zip(run.params, before, strict=True):
            assert_same_bits(p.detach(), old, f"parameter {i}")
        run.check()
        run.step(2 + i)
        assert not bool(run.zero.optim.last_step.skipped)
    run.check()
    return owners


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": FAR, "stats": True}], ids=["bare", "stats"])
def test_all_ranks_skip_when_one_has_a_nan(options: dict[str, Any]) -> None:
    found = pool(4).run(skip, FEW, {"skip_nonfinite": True, **options})
    assert [sum(column) for column in zip(*found, strict=True)] == [1] * len(FEW), "each has one owner"
    assert not any(found[3]), "the last rank owns nothing"


def scale(rank: int) -> None:
    run = Run("AdamW", FEW, max_grad_norm=NEAR)
    scaler = mo_fused.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    scales = []
    for at in range(3):
        for i, (p, q) in enumerate(zip(run.params, run.single_params, strict=True)):
            q.grad = noise(p.shape, 100 * at + i)
            p.grad = q.grad * scaler.scale(torch.tensor(1.0))
        if at == 1:
            run.params[0].grad.view(-1)[3] = math.inf  # type: ignore[union-attr]
        else:
            run.single.step()
        scaler.step(run.zero)
        scaler.update()
        scales.append(scaler.get_scale())
        run.check(exact=False, measured=False)
    assert scales == [1024.0, 512.0, 512.0]


def test_grad_scaler() -> None:
    pool(4).run(scale)


# --- process groups


def pairs(rank: int) -> None:
    """Two ZeRO groups at a time, with gradients of their own: the norm is a group's, not the world's."""
    teams = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    run = Run("AdamW", MANY, process_group=teams[rank // 2], max_grad_norm=NEAR, stats=True)
    run.seed = 10_000 * (rank // 2)
    for at in range(2 + rank // 2):  # nor do they wait for each other
        run.step(at)
        run.check(exact=False)


def test_norm_of_a_process_group() -> None:
    pool(4).run(pairs)


# --- state


def save(rank: int, name: str, folder: Path) -> None:
    run = Run(name, MANY, max_grad_norm=FAR)
    for at in range(3):
        run.step(at)
    run.zero.consolidate_state_dict(to=1)
    if rank != 1:
        with pytest.raises(RuntimeError, match="consolidated"):
            run.zero.state_dict()
    else:
        found, wanted = run.zero.state_dict(), run.single.state_dict()
        assert set(found) == {"state", "param_groups"}
        assert [g.get("clip") for g in found["param_groups"]] == [None, False]
        assert [g["params"] for g in found["param_groups"]] == [g["params"] for g in wanted["param_groups"]]
        assert [list(entry) for entry in found["state"].values()] == [list(e) for e in wanted["state"].values()]
        if name != "formats":  # whose random numbers are those of a parameter's place in its rank's list
            assert_same_bits(found["state"], wanted["state"], "state")
        torch.save((found, [p.detach() for p in run.params]), folder / "saved.pt")
    for at in range(3, 5):
        run.step(at)
    if rank == 1:
        torch.save([p.detach() for p in run.params], folder / f"end-{dist.get_world_size()}.pt")


def resume(rank: int, name: str, folder: Path, exact: bool) -> None:
    saved, values = torch.load(folder / "saved.pt")
    run = Run(name, MANY, max_grad_norm=FAR, lr=9.0)
    for params, opt in ((run.params, run.zero), (run.single_params, run.single)):
        opt.load_state_dict(copy.deepcopy(saved))
        with torch.no_grad():
            for p, value in zip(params, values, strict=True):
                p.copy_(value)
    assert [g["lr"] for g in run.zero.optim.param_groups] == [0.01, 0.02]
    for at in range(3, 5):
        run.step(at)
    if exact:
        run.check()  # beside one optimizer that has loaded the same
    end = folder / f"end-{dist.get_world_size()}.pt"
    if end.exists():
        for i, (p, want) in enumerate(zip(run.params, torch.load(end), strict=True)):
            assert_same_bits(p.detach(), want, f"parameter {i}")


@pytest.mark.parametrize("name", ["AdamW", "AMSGrad", "SGD", "formats"])
def test_consolidated_state_goes_on(name: str, tmp_path: Path) -> None:
    pool(4).run(save, name, tmp_path)
    pool(4).run(resume, name, tmp_path, name != "formats")
    if name != "formats":
        pool(2).run(resume, name, tmp_path, True)


# --- beside DistributedDataParallel


class Model(torch.nn.Module):
    """Gradients that need no matrix product, whose bits could depend on addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([Parameter(x) for x in weights(MANY)])

    def forward(self, at: int) -> Tensor:
        return sum((p.square() / 2 + p * noise(p.shape, 10 * at + i)).sum() for i, p in enumerate(self.weights))  # type: ignore[return-value]


def beside_ddp(rank: int, view: bool) -> None:
    single, model = Model(), Model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    options = {"lr": 0.01, "max_grad_norm": NEAR, "skip_nonfinite": True}
    one = mo_fused.AdamW(single.parameters(), **options)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=mo_fused.AdamW, parameters_as_bucket_view=view, **options
    )
    for at in range(4):
        # The first rank has all of the loss, so that their mean has the bits of one process.
        broken = math.nan if at == 2 else 1.0
        (single(at) * broken).backward()
        (ddp(at) * (dist.get_world_size() * broken if rank == 0 else 0.0)).backward()
        one.step()
        zero.step()
        assert bool(zero.optim.last_step.skipped) == (at == 2)
        assert float(one.last_step.clip_coef) < 1.0 or at == 2
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-7)
        one.zero_grad()
        zero.zero_grad()
    same_everywhere(list(model.parameters()))


@pytest.mark.parametrize("view", [False, True], ids=["tensors", "buckets"])
def test_beside_distributed_data_parallel(view: bool) -> None:
    pool(2).run(beside_ddp, view)
