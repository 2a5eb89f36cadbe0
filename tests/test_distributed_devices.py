"""Parts of parameters on the backends of devices: two processes against one, each with the backend under test."""

from __future__ import annotations

from typing import Any

import distributed_cases as d
import pytest
import torch
from cases import BACKEND, noise
from process_pool import pool
from torch.nn import Parameter

import mo_fused

pytestmark = pytest.mark.device_only(reason="the CPU's backends are the subject of test_distributed_step.py")

SHAPES: list[tuple[int, ...]] = [(7, 64), (130, 64), (1, 6), (5,), (0, 3)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("AdamW", dict(lr=0.05, max_grad_norm=0.5, skip_nonfinite=True, stats=True)),
    "bits": ("AdamW", dict(lr=0.05, max_grad_norm=1e9)),
    "momentum": ("SGD", dict(lr=0.05, momentum=0.9, stats=True)),
    "formats": ("AdamW", dict(lr=0.05, state_dtype="int8", master_weights="split8")),
    "adafactor": ("Adafactor", dict(lr=0.05, max_grad_norm=0.5, stats=True)),
}


def steps(rank: int, name: str) -> Any:
    kind, options = CASES[name]
    dtype = torch.bfloat16 if name == "formats" else torch.float32
    values = [noise(s, 10 + i, torch.float32).to(dtype) for i, s in enumerate(SHAPES)]
    how = d.PARTLY_PLAIN if name in ("bits", "momentum") else d.SHARDED
    shared = [Parameter(d.placed(v, how, i)) for i, v in enumerate(values)]
    plain = [Parameter(v.clone()) for v in values]
    opt, alone = getattr(mo_fused, kind)(shared, **options), getattr(mo_fused, kind)(plain, **options)
    for step in range(3):
        for i, (p, q) in enumerate(zip(shared, plain, strict=True)):
            grad = noise(q.shape, 1000 * (step + 1) + i, torch.float32).to(dtype)
            if name == "clip" and step == 1 and i == 1:
                grad[-1, -1] = float("nan")  # of the second rank
            p.grad, q.grad = d.placed(grad, how, i), grad
        opt.step()
        alone.step()
        skipped = name == "clip" and step == 1
        assert bool(opt.last_step.skipped) == skipped
    assert {e.backend for e in opt.explain()} == {BACKEND}
    for p, q in zip(shared, plain, strict=True):
        if name in ("clip", "adafactor"):
            torch.testing.assert_close(d.whole(p), q.detach(), rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(d.whole(p), q.detach())
    if options.get("stats"):
        mine, theirs = opt.last_step.per_param(), alone.last_step.per_param()
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            for field in ("grad_norm", "grad_amax", "update_norm", "stored_update_norm", "param_norm"):
                assert getattr(mine[key], field) == pytest.approx(getattr(value, field), rel=1e-5, abs=1e-12)
            assert mine[key].all_zero == value.all_zero and mine[key].nonfinite == value.nonfinite
        for field in ("grad_norm", "grad_amax", "update_norm", "stored_update_norm", "param_norm", "clip_coef"):
            found, wanted = getattr(opt.last_step, field), getattr(alone.last_step, field)
            assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    # The utilities, on the same gradients.
    there = [p for p in shared if p.grad is not None]
    stats, reference = mo_fused.grad_stats(there), mo_fused.grad_stats(plain)
    torch.testing.assert_close(stats.norms, reference.norms, rtol=1e-6, atol=0.0)
    assert torch.equal(stats.zero_counts, reference.zero_counts)
    norm = mo_fused.clip_grad_norm_(there, 0.25)
    assert float(norm) == pytest.approx(float(mo_fused.clip_grad_norm_(plain, 0.25)), rel=1e-5)
    for p, q in zip(shared, plain, strict=True):
        torch.testing.assert_close(d.whole(p.grad), q.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    return d.told(opt.last_step)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name: str) -> None:
    first, second = pool(2).run(steps, name)
    assert repr(first) == repr(second)


def bad_plain_gradient(rank: int) -> tuple[bool, list[float]]:
    """A plain parameter's gradient, which should be the same everywhere, is not finite on one rank."""
    shared = Parameter(d.placed(noise((7, 64), 1, torch.float32), d.SHARDED, 0))
    plain = Parameter(noise((5,), 2, torch.float32))
    opt = mo_fused.AdamW([shared, plain], lr=0.05, skip_nonfinite=True)
    before = plain.detach().clone()
    shared.grad = d.placed(noise((7, 64), 3, torch.float32), d.SHARDED, 0)
    plain.grad = torch.full((5,), float("nan") if rank == 1 else 1.0)
    opt.step()
    assert torch.equal(plain.detach(), before)
    return bool(opt.last_step.skipped), [float(opt.state[p]["step"]) for p in (shared, plain)]


def test_what_one_rank_has_seen_skips_on_all() -> None:
    assert pool(2).run(bad_plain_gradient) == [(True, [0.0, 0.0])] * 2
