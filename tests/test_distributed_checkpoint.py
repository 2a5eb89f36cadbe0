"""Distributed checkpoints (torch.distributed.checkpoint): what is saved on four ranks goes on anywhere, to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import BF16, CASES, Case, build, same, train, whole
from process_pool import pool
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import mo_fused
from mo_fused.optim.base import OPTIONS

pytestmark = [
    pytest.mark.cpu_only(reason="processes of their own, with the CPU's backends"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # what is tested where it is
]

FULL = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


# --- dcp.save on four ranks


def train_and_save(rank: int, name: str, folder: Path) -> None:
    case = CASES[name]
    model, opt = build(case, sharded=True)
    train(model, opt, range(3))
    entry = opt.state[model.wide.weight]
    assert case.key in entry and all(e.backend == "cpu" for e in opt.explain())
    for key, value in entry.items():  # as FSDP2's own: the parts of a tensor are its parameter's, a count is plain
        assert isinstance(value, DTensor) == (key != "step")
        assert key == "step" or tuple(value.placements) == tuple(model.wide.weight.placements)
    assert model.few.weight.to_local().numel() == (33 if rank < 3 else 0)
    parts = dict(zip(("model", "opt"), dsd.get_state_dict(model, opt, options=case.saving()), strict=True))
    if not case.flat:
        assert set(parts["opt"]) == {"state", "param_groups"}
        assert not any(set(OPTIONS) & set(group) for group in parts["opt"]["param_groups"])
        assert [group.get("clip") for group in parts["opt"]["param_groups"]] == [None, False]
    dcp.save(parts, checkpoint_id=folder / "saved")
    train(model, opt, range(3, 6))
    end = whole(model, opt)
    if rank == 0:
        torch.save(end, folder / "end.pt")


def load_and_go_on(rank: int, name: str, folder: Path, sharded: bool = True) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    model, opt = build(case, sharded, lr=0.5)  # the checkpoint's rate counts
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(9.0)
    parts = dict(zip(("model", "opt"), dsd.get_state_dict(model, opt, options=case.saving()), strict=True))
    dcp.load(parts, checkpoint_id=folder / "saved", no_dist=not sharded)
    dsd.set_state_dict(
        model, opt, model_state_dict=parts["model"], optim_state_dict=parts["opt"], options=case.saving()
    )
    train(model, opt, range(3, 6))
    same(whole(model, opt), torch.load(folder / "end.pt"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_goes_on_on_other_numbers_of_ranks(name: str, tmp_path: Path, one_thread: None) -> None:
    pool(4).run(train_and_save, name, tmp_path)
    pool(2).run(load_and_go_on, name, tmp_path)
    pool(1).run(load_and_go_on, name, tmp_path)
    load_and_go_on(0, name, tmp_path, sharded=False)
    model, opt = build(CASES[name], sharded=False)
    train(model, opt, range(6))  # never saved, never cut
    same(whole(model, opt), torch.load(tmp_path / "end.pt"))


# --- a fresh optimizer, for which torch makes a state by a step of zeros


def ask_fresh(rank: int, name: str) -> None:
    case = CASES[name]
    for changes in ({}, {"lr": torch.tensor(0.01)}, {"max_grad_norm": 1.0, "skip_nonfinite": True, "stats": True}):
        if case.kind == "SGD" and "lr" in changes and "master_weights" in case.options:
            continue
        model, opt = build(case, sharded=True, **changes)
        with torch.no_grad():
            for p in model.parameters():
                if p.to_local().numel() and "kahan" not in name:  # whose 0 has no sign once a rest is added
                    p.to_local().view(-1)[0] = -0.0
        before = [p.to_local().clone() for p in model.parameters()]
        found = dsd.get_optimizer_state_dict(model, opt)
        bits = torch.int16 if case.dtype == BF16 else torch.int32
        for p, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(p.to_local().view(bits), old.view(bits)) and p.grad is None
        assert case.key in found["state"]["wide.weight"]
        steps = {float(entry["step"]) for entry in found["state"].values() if "step" in entry}
        assert steps <= {1.0} and (steps or case.kind == "SGD")
        assert all(g["lr"] == opt.defaults["lr"] for g in opt.param_groups)


@pytest.mark.parametrize("name", ["adamw-int8", "amsgrad", "sgd-int4", "split", "kahan-int4", "sgd-stochastic"])
def test_a_fresh_optimizer_moves_nothing(name: str) -> None:
    pool(4).run(ask_fresh, name)


# --- whole states on one rank


def gather_and_spread(rank: int, name: str) -> None:
    case = CASES[name]
    model, opt = build(case, sharded=True)
    train(model, opt, range(3))
    weights, states = dsd.get_state_dict(model, opt, options=FULL)
    fresh, other = build(case, sharded=True, lr=0.5)
    dsd.set_model_state_dict(fresh, weights, options=BROADCAST)
    dsd.set_optimizer_state_dict(fresh, other, states, options=BROADCAST)
    loaded, end = whole(fresh, other), whole(model, opt)
    states = copy.deepcopy(states)  # counts of steps are the optimizer's own
    train(model, opt, range(3, 6))
    train(fresh, other, range(3, 6))
    went_on = whole(fresh, other), whole(model, opt)
    same(loaded, end)
    same(*went_on)
    if rank:
        assert not weights and not states
        return
    plain, its = build(case, sharded=False)
    train(plain, its, range(3))
    wanted = dsd.get_optimizer_state_dict(plain, its)
    assert list(states["state"]) == list(wanted["state"]) and states["param_groups"] == wanted["param_groups"]
    for fqn, entry in wanted["state"].items():
        same(states["state"][fqn], entry)


@pytest.mark.parametrize("name", ["adamw", "amsgrad-int8", "sgd-int4", "fp32", "split8-int8"])
def test_full_state_dict_on_rank_0_and_back(name: str) -> None:
    pool(4).run(gather_and_spread, name)


# --- torch's checkpoints


def between_classes(rank: int, folder: Path) -> None:
    def make(ours: bool) -> tuple[nn.Module, Any]:
        model, opt = build(CASES["adamw"], sharded=True)
        plain = Case("AdamW", "exp_avg")
        return model, opt if ours else plain.optimizer(model, {"lr": 0.01}, kind=torch.optim.AdamW)

    for ours in (True, False):
        model, opt = make(ours)
        train(model, opt, range(3))
        weights, states = dsd.get_state_dict(model, opt)
        for group in states["param_groups"]:
            group.pop("clip", None)
        dcp.save({"model": weights, "opt": states}, checkpoint_id=folder / str(ours))
        fresh, other = make(not ours)
        weights, states = dsd.get_state_dict(fresh, other)
        for group in states["param_groups"]:
            group.pop("clip", None)  # a checkpoint of torch's class has none
        parts = {"model": weights, "opt": states}
        dcp.load(parts, checkpoint_id=folder / str(ours))
        dsd.set_state_dict(fresh, other, model_state_dict=parts["model"], optim_state_dict=parts["opt"])
        if not ours:
            assert [group.get("clip") for group in other.param_groups] == [None, False]
        same(moments(fresh, other), moments(model, opt))
        train(model, opt, range(3, 6))
        train(fresh, other, range(3, 6))
        found, wanted = moments(fresh, other), moments(model, opt)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-7, msg=name)


def moments(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    return {name: value.float() for name, value in whole(model, opt).items() if not name[0].isdigit()}


def test_torch_reads_ours_and_we_read_torchs(tmp_path: Path) -> None:
    pool(4).run(between_classes, tmp_path)


# --- opt.load_state_dict by itself


def load_directly(rank: int, saved: str, name: str) -> None:
    warnings.simplefilter("ignore")  # kept in other formats
    plain, its = build(CASES[saved], sharded=False)
    train(plain, its, range(3))
    cut, cuts = build(CASES[saved], sharded=True)
    train(cut, cuts, range(3))
    weights, before = copy.deepcopy(plain.state_dict()), copy.deepcopy(its.state_dict())
    ends = []
    for source in (its, cuts):
        for sharded in (False, True):  # of whole tensors and of DTensors into either
            model, opt = build(CASES[name], sharded)
            dsd.set_model_state_dict(model, copy.deepcopy(weights), options=dsd.StateDictOptions(full_state_dict=True))
            opt.load_state_dict(source.state_dict())
            train(model, opt, range(3, 5))
            ends.append(whole(model, opt))
    for end in ends[1:]:
        same(end, ends[0])
    for key, entry in before["state"].items():  # copied, not shared
        same(its.state_dict()["state"][key], entry)


@pytest.mark.parametrize(
    "saved, name",
    [
        ("adamw-bf16", "adamw-bf16"),
        ("split", "split"),
        ("split8-int8", "split8-int8"),
        ("sgd-int4", "sgd-int8"),
        ("adamw", "adamw-int4"),
        ("adamw-int8", "adamw"),
        ("fp32", "split8-int8"),
        ("split8-int8", "stochastic"),
    ],
)
def test_load_state_dict_of_whole_tensors_and_of_parts(saved: str, name: str) -> None:
    pool(4).run(load_directly, saved, name)


def load_across(rank: int, state_dtype: str) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    start = torch.randn(16, 512, generator=torch.Generator().manual_seed(3))
    ends = []
    for placement in (None, Shard(0), Shard(1)):
        source = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        first = mo_fused.AdamW([source], lr=0.1, state_dtype=state_dtype)
        source.grad = distribute_tensor(start + 1.0, mesh, [Shard(0)])
        first.step()
        p = source.detach().full_tensor().clone()
        p = nn.Parameter(p if placement is None else distribute_tensor(p, mesh, [placement]))
        opt = mo_fused.AdamW([p], lr=0.1)  # moments become plain, in the next step
        opt.load_state_dict(first.state_dict())
        p.grad = start.sin() if placement is None else distribute_tensor(start.sin(), mesh, [placement])
        opt.step()
        values = {"": p.detach(), **opt.state[p]}
        ends.append({k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in values.items()})
    same(ends[1], ends[0])
    same(ends[2], ends[0])


@pytest.mark.parametrize("state_dtype", ["int8", "int4"])
def test_codes_of_rows_load_into_columns(state_dtype: str) -> None:
    """Along dimension 1 blocks are cut in two: the codes of whole slices have to be read before they are cut."""
    pool(2).run(load_across, state_dtype)
