"""Several processes: what must not hang, what is refused, and optimizers whose ranks step other parameters."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import distributed_cases as d
import pytest
import torch
import torch.distributed as dist
from cases import noise
from process_pool import Pool, pool
from torch.nn import Parameter

import mo_fused
from mo_fused.distributed import norm_hook, partitioned, shards

pytestmark = pytest.mark.cpu_only(reason="processes of their own, with the CPU's backends")


def stages(rank: int, copied: bool) -> Any:
    """Two stages of a pipeline, each over two ranks: parameters of its own on a mesh of its own."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = d.mesh_of((2, 2))
    stage = rank // 2
    values = [[noise((5, 4), 1, torch.float32), noise((3,), 2, torch.float32)], [noise((7, 2), 3, torch.float32)]]
    grads = [[noise((5, 4), 11, torch.float32), noise((3,), 12, torch.float32)], [noise((7, 2), 13, torch.float32)]]
    params = [Parameter(distribute_tensor(v.clone(), mesh["tp"], [Shard(0)])) for v in values[stage]]
    opt = mo_fused.AdamW(params, lr=0.1, max_grad_norm=0.5, skip_nonfinite=True, stats=True)
    partitioned(opt, mesh.get_group("dp"))
    if copied:
        opt = copy.deepcopy(opt)
        params = opt.param_groups[0]["params"]
    plain = [[Parameter(v.clone()) for v in of_stage] for of_stage in values]
    alone = mo_fused.AdamW([*plain[0], *plain[1]], lr=0.1, max_grad_norm=0.5, skip_nonfinite=True, stats=True)
    for step in range(3):
        for s in (0, 1):
            for i, q in enumerate(plain[s]):
                q.grad = grads[s][i] * (step + 1)
                if step == 1 and s == 1:
                    q.grad[-1, -1] = math.nan
        for p, q in zip(params, plain[stage], strict=True):
            p.grad = distribute_tensor(q.grad.clone(), mesh["tp"], [Shard(0)])
        opt.step()
        alone.step()
        assert bool(opt.last_step.skipped) == bool(alone.last_step.skipped) == (step == 1)
        for field in ("grad_norm", "update_norm", "param_norm"):
            found, wanted = float(getattr(opt.last_step, field)), float(getattr(alone.last_step, field))
            assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True), (field, step)
    for p, q in zip(params, plain[stage], strict=True):
        torch.testing.assert_close(d.whole(p), q.detach(), rtol=1e-6, atol=1e-7)
    return d.told(opt.last_step)


@pytest.mark.parametrize("copied", [False, True])
def test_stages_of_a_pipeline_clip_by_one_norm(copied: bool) -> None:
    found = pool(4).run(stages, copied)
    assert all(repr(x) == repr(found[0]) for x in found)


def lacking(rank: int, options: dict[str, Any]) -> Any:
    """Parameters that torch steps, of which one rank has no gradient."""
    params = [Parameter(d.placed(noise((5, 3), 7 + i, torch.complex64), d.SHARDED, 0)) for i in range(2)]
    opt = mo_fused.SGD(params, lr=0.1, momentum=0.9, **options)
    for step in range(2):
        for i, p in enumerate(params):
            grad = noise((5, 3), 20 + 2 * step + i, torch.complex64)
            p.grad = None if rank == 1 and i == 1 else d.placed(grad, d.SHARDED, 0)
        opt.step()
    assert {e.backend for e in opt.explain()} <= {"torch"}
    norm = mo_fused.clip_grad_norm_(params, 1e9)
    assert norm.dtype == torch.float32
    here = torch.stack([d.part(p.grad).abs().square().sum() for p in params if p.grad is not None]).sum().double()
    dist.all_reduce(here)
    assert float(norm) == pytest.approx(math.sqrt(float(here)), rel=1e-5)
    assert float(opt.last_step.grad_norm) == pytest.approx(math.sqrt(float(here)), rel=1e-5)
    return d.told(opt.last_step)


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"stats": True, "skip_nonfinite": True}], ids=str)
def test_a_rank_lacks_a_gradient_that_torch_steps(options: dict[str, Any]) -> None:
    first, second = pool(2).run(lacking, options)
    assert repr(first) == repr(second)


def refused(rank: int) -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = d.mesh_of((2,))
    p = Parameter(d.placed(noise((7, 3), 1, torch.float32), d.SHARDED, 0))
    before = d.part(p).clone()
    opt = mo_fused.AdamW([p], lr=0.1)
    found = []
    mirrored = DeviceMesh("cpu", [1, 0])
    sizes = (3, 3) if rank == 0 else (4, 3)
    for here, on in ((torch.ones_like(d.part(p)), mirrored), (torch.ones(sizes), mesh)):
        p.grad = DTensor.from_local(here, on, [Shard(0)], run_check=False, shape=(7, 3), stride=(3, 1))
        with pytest.raises(RuntimeError) as caught:
            opt.step()
        found.append(str(caught.value))
    assert torch.equal(d.part(p), before) and not opt.state
    groups = [dist.new_group([0]), dist.new_group([1])]
    with pytest.raises(ValueError) as not_member:
        partitioned(opt, groups[1 - rank])
    found.append(str(not_member.value))
    model = torch.nn.Linear(3, 2)
    release = mo_fused.AdamW(model.parameters(), lr=0.1)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    with mo_fused.gradient_release(model, release):
        for call in (lambda: partitioned(release), lambda: norm_hook(ddp, release)):
            with pytest.raises(ValueError) as caught:
                call()
            found.append(str(caught.value))
    with pytest.raises(TypeError) as caught:
        partitioned(torch.optim.SGD(model.parameters(), lr=0.1))
    found.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        mo_fused.gradient_release(torch.nn.ParameterList([p]), mo_fused.AdamW([p], lr=0.1))
    found.append(str(caught.value))
    return found


def test_refusals() -> None:
    words = ("mesh", "local shape", "process group", "gradient_release", "gradient_release", "package", "DTensor")
    for found in pool(2).run(refused):
        for text, word in zip(found, words, strict=True):
            assert text.startswith("expected ") and word in text, text


def offloaded(rank: int) -> str:
    p = Parameter(d.placed(noise((8, 4), 1, torch.float32), d.SHARDED, 0))
    opt = mo_fused.AdamW([p], lr=0.1, offload="cpu", max_grad_norm=1.0)
    p.grad = d.placed(noise((8, 4), 2, torch.float32), d.SHARDED, 0)
    opt.step()
    return opt.explain()[0].reason


def test_offload_says_that_it_leaves_dtensors_alone() -> None:
    assert all("not offloaded: a DTensor" in reason for reason in pool(2).run(offloaded))


def another_world(rank: int, store: str) -> float:
    """The groups that an exchange was made for are gone, and the mesh of the next world is equal to theirs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    norms = []
    for world in range(2):
        if world:
            dist.destroy_process_group()
            dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
        mesh = init_device_mesh("cpu", (2,))
        t = distribute_tensor(torch.full((4, 2), 2.0 + world), mesh, [Shard(0)])
        norms.append(float(mo_fused.get_total_norm([t])))
        found = [g for e in gradients_kept() for r in e._order for g in r._groups]
        assert found and all(g is dist.group.WORLD for g in found)
    return norms[1]


def gradients_kept() -> list[Any]:
    from mo_fused.distributed import gradients

    return list(gradients._kept.exchanges.values())


def test_exchanges_end_with_their_world(tmp_path: Path) -> None:
    own = Pool(2)
    try:
        assert own.run(another_world, str(tmp_path / "store")) == [pytest.approx(3.0 * math.sqrt(8))] * 2
    finally:
        own.stop()


def one_bad_replica(rank: int) -> tuple[float, str]:
    p = Parameter(d.placed(torch.ones(3), d.REPLICATED, 0))
    opt = mo_fused.SGD([p], lr=0.1, skip_nonfinite=True)
    p.grad = d.placed(torch.ones(3), d.REPLICATED, 0)
    opt.step()
    return float(opt.last_step.nonfinite), repr(opt.last_step)


def test_counts_are_not_below_zero() -> None:
    for count, text in pool(2).run(one_bad_replica):
        assert math.copysign(1.0, count) == 1.0 and "nonfinite=0" in text


@pytest.mark.parametrize("size", range(20))
@pytest.mark.parametrize(("fsdp", "tp"), [(2, 2), (4, 2), (2, 3)])
def test_slices_of_fsdp_over_tensor_parallelism(size: int, fsdp: int, tp: int) -> None:
    """Tensor parallelism cuts first, and FSDP what it has left."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    seen = []
    for t in range(tp):
        chunks = torch.arange(size).chunk(tp) if size else ()
        of_tp = chunks[t] if t < len(chunks) else torch.arange(0)
        for f in range(fsdp):
            parts = of_tp.chunk(fsdp) if len(of_tp) else ()
            wanted = parts[f] if f < len(parts) else of_tp[:0]
            strided = _StridedShard(0, split_factor=tp)
            found = shards._slices(size, [(fsdp, strided, f), (tp, Shard(0), t)])
            assert found.tolist() == wanted.tolist()
            seen += found.tolist()
    assert sorted(seen) == list(range(size))
