"""Ways in which ranks share parameters, as data, and helpers that worker functions of process_pool.py call in them.

Every rank draws all values from seeds, so each can run the same steps on plain tensors beside the shared ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import Case, noise
from oracle import assert_close, assert_same_bits
from torch import Tensor
from torch.nn import Parameter

import mo_fused

# More ranks than slices, fewer elements than ranks, none at all, sizes that 2 and 4 divide and that they do not, one
# longer than a chunk of the kernels. In one list all dtypes that a step may mix.
SHAPES: list[tuple[int, ...]] = [(7, 5), (8, 4), (1, 6), (), (0, 3), (3, 2, 5), (2,), (9001,), (33, 3)]
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
MIXED = [F32, BF16, F64, F32, F32, BF16, F32, F32, F64]


@dataclass(frozen=True)
class Arrangement:
    """A mesh, and the placements of each parameter in turn; None is a plain tensor that all ranks have."""

    name: str
    mesh: tuple[int, ...]
    turns: tuple[tuple[str, ...] | None, ...]
    within: str | None = None
    """Dimension of the mesh whose submesh the parameters of odd turns are on: tensor parallelism without FSDP."""

    def __str__(self) -> str:
        return f"{self.name}-{math.prod(self.mesh)}"

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)


SHARDED = Arrangement("sharded", (2,), (("0",),))
SHARDED_4 = Arrangement("sharded", (4,), (("0",),))
REPLICATED = Arrangement("replicated", (2,), (("R",),))
COLUMNS = Arrangement("columns", (4,), (("1",), ("0",)))
PARTLY_PLAIN = Arrangement("partly_plain", (2,), (("0",), None))
HYBRID = Arrangement("hybrid", (2, 2), (("R", "0"),))
TWICE = Arrangement("twice", (2, 2), (("0", "0"),))
GRID = Arrangement("grid", (2, 2), (("0", "1"), ("1", "0"), None, ("R", "1")))
STRIDED = Arrangement("strided", (2, 2), (("S", "0"), ("0", "1"), ("0", "R")))
NESTED = Arrangement("nested", (2, 2), (("0", "0"), ("0",), ("R", "0"), None), within="tp")
CUBE = Arrangement("cube", (2, 1, 2), (("0", "1", "2"), ("0", "2", "1")))
ARRANGEMENTS = [SHARDED, SHARDED_4, REPLICATED, COLUMNS, PARTLY_PLAIN, HYBRID, TWICE, GRID, STRIDED, NESTED]
# One of each kind, for tests whose subject is not where parameters lie.
FEW = [PARTLY_PLAIN, SHARDED_4, GRID, STRIDED, NESTED]

ADAMW = Case("AdamW", "default", dict(lr=0.1, weight_decay=0.1))
AMSGRAD = Case("Adam", "amsgrad", dict(lr=0.1, betas=(0.9, 0.5), weight_decay=0.1, amsgrad=True))
ASCENT = Case("AdamW", "maximize", dict(lr=0.1, weight_decay=0.1, maximize=True))
MOMENTUM = Case("SGD", "momentum", dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1))
PLAIN_SGD = Case("SGD", "plain", dict(lr=0.1))
CASES = [ADAMW, AMSGRAD, ASCENT, MOMENTUM, PLAIN_SGD]
RULES = [ADAMW, MOMENTUM]

NAMES = {1: ("all",), 2: ("dp", "tp"), 3: ("dp", "cp", "tp")}
# Factors whose sum is 1.
PARTS = {2: (1.5, -0.5), 4: (1.5, -0.5, 0.25, -0.25)}


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    """The mesh of all ranks, made once in each process."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])


def place_of(how: Arrangement, i: int, shape: Sequence[int]) -> tuple[Any, list[Any]] | None:
    """Mesh and placements of parameter ``i``; a dimension that the shape lacks is not cut."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    turn = how.turns[i % len(how.turns)]
    if turn is None:
        return None
    mesh = mesh_of(how.mesh)
    if how.within is not None and len(turn) == 1:
        mesh = mesh[how.within]
    found: list[Any] = []
    for word in turn:
        if word == "R" or int(word.replace("S", "0")) >= len(shape):
            found.append(Replicate())
        elif word == "S":  # the other dimension of the mesh has cut first, as fully_shard does over tensor parallelism
            found.append(_StridedShard(0, split_factor=2))
        else:
            found.append(Shard(int(word)))
    return mesh, found


def replicas_of(how: Arrangement, i: int, shape: Sequence[int]) -> int:
    """How many ranks have the same part of parameter ``i``, as far as DTensors know."""
    place = place_of(how, i, shape)
    if place is None:
        return 1
    return math.prod(n for n, x in zip(place[0].shape, place[1], strict=True) if not hasattr(x, "dim"))


def placed(value: Tensor, how: Arrangement, i: int) -> Tensor:
    """A tensor as parameter ``i`` lies: this rank's part, without a word to the others."""
    from torch.distributed.tensor import distribute_tensor

    place = place_of(how, i, value.shape)
    if place is None:
        return value.clone()
    return distribute_tensor(value.clone(), place[0], place[1], src_data_rank=None)


def whole(t: Tensor) -> Tensor:
    """All of a tensor, collected by torch."""
    return t.detach().full_tensor() if hasattr(t, "full_tensor") else t.detach()


def part(t: Any) -> Tensor:
    """This rank's part, without autograd."""
    here: Tensor = t._local_tensor if hasattr(t, "_local_tensor") else t.detach()
    return here


def values_of(shapes: Sequence[Sequence[int]] = SHAPES, dtypes: Sequence[torch.dtype] = MIXED) -> list[Tensor]:
    """Starting values."""
    return [noise(s, 100 + i, d) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]


def grads_of(values: Sequence[Tensor], step: int, scale: float = 1.0) -> list[Tensor]:
    """Gradients of one step, in no dtype rounded by a factor of two or a conversion."""
    return [(noise(v.shape, 1000 * (step + 1) + i, BF16) * scale).to(v.dtype) for i, v in enumerate(values)]


def in_quarters(grad: Tensor) -> Tensor:
    """Rounded so far that PARTS of it add up to it exactly, in every dtype; without negative zeros, which sums lose."""
    return (grad * 4).round() / 4 + 0.0


class Pair:
    """The same optimizer over shared parameters and over plain ones in this process alone."""

    def __init__(
        self,
        case: Case,
        how: Arrangement,
        values: Sequence[Tensor] | None = None,
        unclipped: Sequence[int] = (),
        alone: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.how = how
        self.values = values_of() if values is None else list(values)
        self.unclipped = list(unclipped)
        self.shared = [Parameter(placed(v, how, i)) for i, v in enumerate(self.values)]
        self.plain = [Parameter(v.clone()) for v in self.values]
        self.opt = case.ours(self._groups(self.shared), **options)
        self.alone = case.ours(self._groups(self.plain), **(options if alone is None else alone))

    def _groups(self, params: list[Parameter]) -> list[dict[str, Any]]:
        """Two groups, and one of nothing, where some are not clipped."""
        if not self.unclipped:
            return [{"params": list(params)}]
        inside = [p for i, p in enumerate(params) if i not in self.unclipped]
        outside = [params[i] for i in self.unclipped]
        return [{"params": inside}, {"params": []}, {"params": outside, "clip": False, "lr": 0.05}]

    def give(self, grads: Sequence[Tensor | None]) -> None:
        """The gradients of a step, to both."""
        for i, g in enumerate(grads):
            self.shared[i].grad = None if g is None else placed(g, self.how, i)
            self.plain[i].grad = None if g is None else g.clone()

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One step of both."""
        self.give(grads)
        self.opt.step()
        self.alone.step()

    def _compared(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(what, this rank's part, that part of what the process alone has): torch cuts it, and nobody communicates."""
        for i, (p, q) in enumerate(zip(self.shared, self.plain, strict=True)):
            yield f"parameter {i}", part(p), part(placed(q.detach(), self.how, i))
            mine, theirs = self.opt.state.get(p, {}), self.alone.state.get(q, {})
            assert list(mine) == list(theirs), f"state of parameter {i}: {list(mine)} instead of {list(theirs)}"
            for key, value in theirs.items():
                cut = value if key == "step" else placed(value, self.how, i)
                yield f"{key} of parameter {i}", part(mine[key]), part(cut)

    def assert_same_bits(self, where: str = "") -> None:
        """Parameters and states are those of the process alone."""
        for what, got, want in self._compared():
            assert_same_bits(got, want, f"{where}: {what}")

    def assert_close(self, steps: int) -> None:
        """As above where sums were made in another order: ``step`` is the same, all else within rounding.

        The norm that clips is no better than one of float32, also for gradients in float64.
        """
        for what, got, want in self._compared():
            assert "step" not in what or float(got) == float(want), what
            assert got.dtype == want.dtype, what
            assert_close(got.float() if got.dtype == F64 else got, want, steps, what)

    def assert_whole(self) -> None:
        """What torch makes of the parts: everywhere the parameters and states of the process alone."""
        for i, (p, q) in enumerate(zip(self.shared, self.plain, strict=True)):
            assert_same_bits(whole(p), q.detach(), f"parameter {i}")
            for key, value in self.alone.state.get(q, {}).items():
                assert_same_bits(whole(self.opt.state[p][key]), value, f"{key} of parameter {i}")

    def here(self) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Copies of this rank's parts of parameters and states."""
        parts = [part(p).clone() for p in self.shared]
        return parts, [{k: part(v).clone() for k, v in self.opt.state.get(p, {}).items()} for p in self.shared]

    def assert_gradients(self, want: Sequence[Tensor | None], scaled: Sequence[int] = (), coef: float = 1.0) -> None:
        """``p.grad`` holds these, to the bit; ``scaled``: of these parameters times ``coef``, within rounding."""
        for i, (p, g) in enumerate(zip(self.shared, want, strict=True)):
            if g is None:
                assert p.grad is None
                continue
            assert p.grad is not None and p.grad.dtype == g.dtype
            got, cut = part(p.grad), part(placed(g, self.how, i))
            if i in scaled:
                assert_close(got.float() if got.dtype == F64 else got, cut.double() * coef, 4, f"gradient {i}")
            else:
                assert_same_bits(got, cut, f"gradient {i}")

    def assert_native(self) -> None:
        """Every parameter was stepped by the CPU's kernels, every state lies as its parameter does."""
        for record, p in zip(self.opt.explain(), _listed(self.opt), strict=True):
            assert record.backend == "cpu", str(record)
            assert ("local part" in record.reason) == hasattr(p, "placements"), str(record)
            assert record.shape == tuple(p.shape)
            for key, value in self.opt.state.get(p, {}).items():
                if key == "step" or not hasattr(p, "placements"):
                    assert type(value) is Tensor, key
                else:
                    assert value.placements == p.placements and value.device_mesh == p.device_mesh, key


def _listed(opt: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def told(stats: mo_fused.StepStats) -> dict[str, float | None]:
    """The fields of ``last_step``, as plain numbers."""
    names = ("grad_norm", "clip_coef", "skipped", "nonfinite", "grad_amax", "update_norm", "stored_update_norm")
    return {n: None if (x := getattr(stats, n)) is None else float(x) for n in (*names, "param_norm")}


def same_everywhere(results: Sequence[Any]) -> Any:
    """What all ranks returned: the same, to the last bit."""
    assert all(repr(r) == repr(results[0]) for r in results), results
    return results[0]
