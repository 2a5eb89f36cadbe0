"""Adafactor where ranks hold parts of larger parameters: every step is that of the whole within rounding.

Ranks are threads of which one runs at a time, each with an optimizer over its parts; they meet to exchange their sums.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from adafactor_reference import BOTH, FORMS, MOMENTUM, TORCH, TRANSFORMERS, Form
from cases import (
    BACKEND,
    BACKENDS,
    HALF,
    Gradients,
    assert_backend,
    gradients,
    parameters,
    short,
    some,
    states,
    weights,
)
from oracle import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from mo_fused.distributed.factored import Among, Whole
from mo_fused.optim.planning import RowPlanner

STEPS = some([10], [3])[0]


class World:
    """Ranks that run by turns, and what they add up."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.exchanges: list[int] = [0] * ranks
        """How often each rank has taken part in a sum."""
        self._turn = threading.Lock()
        self._groups: dict[tuple[int, ...], threading.Barrier] = {}
        self._given: dict[int, Tensor] = {}
        self._reduces: dict[tuple[int, tuple[int, ...]], Callable[[Tensor], None]] = {}

    def reduce(self, rank: int, group: tuple[int, ...]) -> Callable[[Tensor], None]:
        """The same function for the same ranks, as of a process group."""
        barrier = self._groups.setdefault(group, threading.Barrier(len(group), timeout=120))

        def reduce(flat: Tensor) -> None:
            assert flat.dim() == 1 and flat.dtype == torch.float64
            self.exchanges[rank] += 1
            self._given[rank] = flat.clone()
            self._turn.release()
            barrier.wait()
            self._turn.acquire()
            flat.copy_(torch.stack([self._given[r] for r in group]).sum(0))
            self._turn.release()
            barrier.wait()
            self._turn.acquire()

        return self._reduces.setdefault((rank, group), reduce)

    def run(self, work: Callable[[int], None]) -> None:
        failed: list[BaseException] = []

        def member(rank: int) -> None:
            try:
                with self._turn:
                    work(rank)
            except BaseException as error:
                failed.append(error)
                for barrier in self._groups.values():
                    barrier.abort()

        threads = [threading.Thread(target=member, args=(r,)) for r in range(self.ranks)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failed:
            raise next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])


@dataclass(frozen=True)
class Cut:
    """A parameter and the lengths of its slices along the dimensions that are cut; the last varies fastest."""

    shape: tuple[int, ...]
    slices: Mapping[int, tuple[int, ...]]

    def place(self, rank: int) -> dict[int, int]:
        """Which slice of each dimension a rank has; ranks beyond the last hold the same parts again."""
        found = {}
        for dim, lengths in reversed(self.slices.items()):
            rank, found[dim] = divmod(rank, len(lengths))
        return found

    def part(self, rank: int, x: Tensor) -> Tensor:
        """A rank's part of a tensor of this shape, or one that has 1 in the place of some dimensions."""
        for dim, at in self.place(rank).items():
            if x.shape[dim] == self.shape[dim] and (x.shape[dim] != 1 or self.shape[dim] == 1):
                x = x.split(list(self.slices[dim]), dim)[at]
        return x.clone()

    def whole(self, rank: int, world: World) -> Whole | None:
        if not self.slices:
            return None
        mine = self.place(rank)
        along = {}
        for dim in self.slices:
            group = [r for r in range(world.ranks) if all(self.place(r)[d] == mine[d] for d in mine if d != dim)]
            along[dim] = self._ranks(world, rank, group, len(self.slices[dim]))
        parts = 1
        for lengths in self.slices.values():
            parts *= len(lengths)
        return Whole(self.shape, along, self._ranks(world, rank, range(world.ranks), parts))

    @staticmethod
    def _ranks(world: World, rank: int, group: Sequence[int], parts: int) -> Among:
        return Among(world.reduce(rank, tuple(group)), len(group) // parts)


# Two ranks: along each dimension, evenly and not, with empty parts; vectors; some that every rank has whole.
PAIR = [
    Cut((12, 9), {0: (5, 7)}),
    Cut((12, 9), {0: (6, 6)}),
    Cut((12, 9), {1: (4, 5)}),
    Cut((13, 10), {0: (13, 0)}),
    Cut((13, 10), {1: (0, 10)}),
    Cut((4, 6, 5), {0: (3, 1)}),
    Cut((4, 6, 5), {0: (4, 0)}),
    Cut((4, 6, 5), {1: (2, 4)}),
    Cut((4, 6, 5), {2: (3, 2)}),
    Cut((3, 6, 5), {2: (5, 0)}),
    Cut((40,), {0: (13, 27)}),
    Cut((7,), {0: (0, 7)}),
    Cut((8, 8), {}),
    Cut((5,), {}),
]
# Matrices whose parts have several tiles from top to bottom, or side by side: see the limits in mo_fused/factored.py.
TALL, WIDE, LONG = some([(1100, 4200, 270_000)], [(400, 1060, 5000)])[0]
LARGE = [
    Cut((TALL, 6), {0: (TALL - 7, 7)}),
    Cut((TALL, 6), {1: (4, 2)}),
    Cut((TALL, 6), {0: (0, TALL)}),
    Cut((5, WIDE), {1: (WIDE // 2 + 3, WIDE // 2 - 3)}),
    Cut((5, WIDE), {0: (3, 2)}),
    Cut((2, 5, WIDE), {2: (WIDE, 0)}),
    Cut((LONG,), {0: (LONG - 9, 9)}),
    Cut((5, WIDE), {}),
]


@pytest.fixture(autouse=True)
def _rows_know_their_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowPlanner.row

    def row(self: RowPlanner, optimizer: Any, position: int, g: int, p: Tensor, grad: Tensor) -> Any:
        made = original(self, optimizer, position, g, p, grad)
        made.whole = getattr(p, "whole_of_the_test", None)
        return made

    monkeypatch.setattr(RowPlanner, "row", row)


@dataclass
class Run:
    """What the ranks have come to."""

    cuts: list[Cut]
    world: World
    params: list[list[Tensor]]
    states: list[list[dict[str, Tensor]]]

    def check(self, want: list[Tensor], entries: list[dict[str, Tensor]], rtol: float, of_params: float) -> None:
        """Against parameters and states of the wholes."""
        for rank in range(self.world.ranks):
            for i, cut in enumerate(self.cuts):
                what = f"rank {rank} of {cut}"
                close(self.params[rank][i], cut.part(rank, want[i]), of_params, f"parameter, {what}")
                assert self.states[rank][i].keys() == entries[i].keys()
                for key, entry in entries[i].items():
                    of_key = of_params if key == "exp_avg" else rtol
                    part = entry if key == "step" else cut.part(rank, entry)
                    close(self.states[rank][i][key], part, of_key, f"{key}, {what}")

    def check_replicated(self) -> None:
        """What several ranks keep has the same bits on all of them."""
        for (a, b), (i, cut) in itertools.product(
            itertools.combinations(range(self.world.ranks), 2), enumerate(self.cuts)
        ):
            x, y = self.states[a][i], self.states[b][i]
            here, there = cut.place(a), cut.place(b)
            for key, dim in (("row_var", -1), ("col_var", -2)):
                apart = {d for d in here if here[d] != there[d]}
                if key in x and apart <= {len(cut.shape) + dim}:
                    assert_same_bits([y[key]], [x[key]])


def close(got: Tensor, want: Tensor, rtol: float, what: str) -> None:
    assert got.shape == want.shape, what
    scale = float(want.abs().max()) if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=rtol, atol=0.1 * rtol * scale, msg=lambda text: f"{what}: {text}")


def in_parts(
    form: Form,
    cuts: list[Cut],
    ranks: int,
    values: list[Tensor],
    grads: Gradients,
    before: Callable[[int, int, Any, list[Parameter]], None] | None = None,
    **options: Any,
) -> Run:
    """``before(rank, step, optimizer, parameters)`` is called when the gradients are there."""
    world = World(ranks)
    run = Run(cuts, world, [[]] * ranks, [[]] * ranks)
    everybody = [
        [parameters([cut.part(rank, v)])[0] for cut, v in zip(cuts, values, strict=True)] for rank in range(ranks)
    ]
    for rank, params in enumerate(everybody):
        for p, cut in zip(params, cuts, strict=True):
            p.whole_of_the_test = cut.whole(rank, world)  # type: ignore[attr-defined]

    def work(rank: int) -> None:
        params = everybody[rank]
        opt = form.ours(params, **options)
        for t, row in enumerate(grads):
            for p, cut, g in zip(params, cuts, row, strict=True):
                p.grad = None if g is None else cut.part(rank, g)
            if before is not None:
                before(rank, t, opt, params)
            opt.step()
        assert_backend(opt, options["backend"])
        run.params[rank] = [p.detach() for p in params]
        run.states[rank] = states(opt, params)

    world.run(work)
    return run


def at_once(
    form: Form, values: list[Tensor], grads: Gradients, before: Any = None, **options: Any
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    params = parameters(values)
    opt = form.ours(params, **options)
    for t, row in enumerate(grads):
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else g.clone()
        if before is not None:
            before(0, t, opt, params)
        opt.step()
    return [p.detach() for p in params], states(opt, params)


def check(form: Form, cuts: list[Cut], ranks: int, dtype: torch.dtype, backend: str, **options: Any) -> Run:
    shapes = [cut.shape for cut in cuts]
    values, grads = weights(shapes, dtype), gradients(shapes, STEPS, dtype, scale=2.0)
    want, entries = at_once(form, values, grads, backend=backend, **options)
    run = in_parts(form, cuts, ranks, values, grads, backend=backend, **options)
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    run.check(want, entries, rtol, {torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(dtype, rtol))
    run.check_replicated()
    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", some(FORMS, [TORCH]), ids=str)
def test_every_form(form: Form, backend: str) -> None:
    check(form, PAIR, 2, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some([torch.float64, torch.bfloat16, torch.float16], HALF), ids=short)
@pytest.mark.parametrize("form", some(BOTH, [MOMENTUM]), ids=str)
def test_every_dtype(form: Form, dtype: torch.dtype, backend: str) -> None:
    check(form, PAIR, 2, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.float64, torch.bfloat16], [torch.float32]), ids=short)
def test_matrices_of_several_tiles(dtype: torch.dtype, backend: str) -> None:
    check(TORCH, LARGE, 2, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_ranks(backend: str) -> None:
    cuts = [
        Cut((11, 6), {0: (4, 4, 3)}),
        Cut((11, 6), {0: (6, 5, 0)}),
        Cut((2, 6), {0: (1, 1, 0)}),
        Cut((6, 11), {1: (11, 0, 0)}),
        Cut((5, 3, 4), {0: (2, 2, 1)}),
        Cut((17,), {0: (6, 6, 5)}),
    ]
    for form, dtype in some([(TORCH, torch.float32), (TRANSFORMERS, torch.float64)], [(TORCH, torch.float32)]):
        check(form, cuts, 3, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cut_along_two_dimensions_and_replicated(backend: str) -> None:
    cuts = [
        Cut((11, 6), {0: (6, 5), 1: (2, 4)}),
        Cut((6, 8), {0: (6, 0), 1: (8, 0)}),
        Cut((4, 6, 5), {0: (3, 1), 2: (2, 3)}),
        Cut((4, 6, 5), {0: (2, 2), 1: (2, 4)}),
        Cut((3, 6, 5), {1: (5, 1), 2: (2, 3)}),
        Cut((12, 5), {0: (5, 7)}),  # twice
        Cut((5, 12), {1: (5, 7)}),
        Cut((31,), {0: (15, 16)}),
        Cut((9, 4), {0: (3, 2, 2, 2)}),
    ]
    for form, dtype in some([(MOMENTUM, torch.float32), (TORCH, torch.float64)], [(MOMENTUM, torch.float32)]):
        check(form, cuts, 4, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_scaled_and_statistics(backend: str) -> None:
    """The means are exchanged of gradients as they are; the coefficient comes later."""

    def scaled(rank: int, t: int, opt: Any, params: list[Parameter]) -> None:
        opt.grad_scale = torch.tensor(8.0 if t % 2 else 0.5)

    cuts = some(PAIR, [PAIR[0], PAIR[2], PAIR[7], PAIR[10]])
    shapes = [cut.shape for cut in cuts]
    values, grads = weights(shapes), gradients(shapes, STEPS)
    want, entries = at_once(MOMENTUM, values, grads, scaled, backend=backend)
    for options in ({}, {"stats": True}, {"clip_in_place": True, "max_grad_norm": 1e9}):
        run = in_parts(MOMENTUM, list(cuts), 2, values, grads, scaled, backend=backend, **options)
        run.check(want, entries, 1e-5, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_without_gradients(backend: str) -> None:
    """For everybody: as of the whole. For one rank: its part and state stay, and nobody waits for it."""
    shapes = [cut.shape for cut in PAIR]
    values, grads = weights(shapes), gradients(shapes, STEPS)
    for i in range(len(PAIR)):
        grads[1 + i % 2][i] = None
    want, entries = at_once(TORCH, values, grads, backend=backend)
    in_parts(TORCH, PAIR, 2, values, grads, backend=backend).check(want, entries, 1e-5, 1e-5)

    kept: dict[tuple[int, int], Tensor] = {}

    def lacking(rank: int, t: int, opt: Any, params: list[Parameter]) -> None:
        for i, p in enumerate(params):
            if (rank, i) in kept:
                assert_same_bits([p.detach()], [kept.pop((rank, i))])
            if t > 0 and (t + rank + i) % 3 == 0:
                p.grad = None
                kept[rank, i] = p.detach().clone()

    grads = gradients(shapes, STEPS)
    found = []
    for other in (backend, "eager"):
        run = in_parts(TORCH, PAIR, 2, values, grads, lacking, backend=other)
        for params in run.params:
            assert all(p.isfinite().all() for p in params)
        found.append(run)
        assert all(min(float(e["step"]) for e in entries) < STEPS for entries in run.states)
        kept.clear()
    for mine, its, entries, theirs in zip(
        found[0].params, found[1].params, found[0].states, found[1].states, strict=True
    ):
        for p, q, e, o in zip(mine, its, entries, theirs, strict=True):
            close(p, q, 1e-5, "as the eager backend")
            for key in e:
                close(e[key], o[key], 1e-5, key)


@pytest.mark.parametrize("backend", BACKENDS)
def test_skipped_steps_change_nothing(backend: str) -> None:
    shapes = [cut.shape for cut in PAIR]
    values, grads = weights(shapes), gradients(shapes, 4)

    def spoiled(rank: int, t: int, opt: Any, params: list[Parameter]) -> None:
        if t == 2:
            grad = params[-1].grad  # every rank has it
            assert grad is not None
            grad[3] = float("nan")

    want, entries = at_once(TORCH, values, [g for t, g in enumerate(grads) if t != 2], backend=backend)
    run = in_parts(TORCH, PAIR, 2, values, grads, spoiled, backend=backend, skip_nonfinite=True)
    run.check(want, entries, 1e-5, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_and_tiny_gradients(backend: str) -> None:
    cuts = [
        Cut((12, 9), {0: (5, 7)}),
        Cut((12, 9), {1: (4, 5)}),
        Cut((13, 10), {0: (13, 0)}),
        Cut((40,), {0: (13, 27)}),
    ]
    shapes = [cut.shape for cut in cuts]
    for scale in (1e16, 1e-16):
        values, grads = weights(shapes), gradients(shapes, 3, scale=scale)
        want, entries = at_once(TRANSFORMERS, values, grads, backend=backend)
        in_parts(TRANSFORMERS, cuts, 2, values, grads, backend=backend).check(want, entries, 1e-5, 1e-5)


def test_sums_are_exchanged_twice_a_step() -> None:
    shapes = [cut.shape for cut in PAIR]
    values, grads = weights(shapes), gradients(shapes, 3)
    run = in_parts(TORCH, PAIR, 2, values, grads, backend=BACKEND)
    assert run.world.exchanges == [2 * 3] * 2


def test_whose_sums_are_those_of_a_matrix() -> None:
    """Ranks with other matrices of the same parameter have no say in the mean of one."""
    of = [Among(lambda flat: None) for _ in range(5)]
    cut_along = {0: of[0], 1: of[1], 2: of[2]}
    assert Whole((2, 3, 4), cut_along, of[3], of[4]).of_matrices is of[4]
    assert Whole((3, 4), {0: of[1], 1: of[2]}, of[3]).of_matrices is of[3]
    assert Whole((2, 3, 4), {0: of[0], 1: of[1]}, of[3], of[1]).of_matrices is of[1]
    assert Whole((2, 3, 4), {0: of[0]}, of[0]).of_matrices is None
