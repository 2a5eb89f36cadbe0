"""Checks of results: bits, statistics, norms, skipped steps. They run in Triton's interpreter too, on tiny tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_place import Place, check, close, differences, fields, same_bits
from torch import Tensor
from torch.nn import Parameter

import mo_fused
from mo_fused import dispatch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# -- bits -------------------------------------------------------------------------------------------------------------

RULES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "AdamW": (mo_fused.AdamW, dict(lr=1e-2, weight_decay=0.1)),
    "AMSGrad": (mo_fused.AdamW, dict(lr=1e-2, betas=(0.9, 0.5), weight_decay=0.1, amsgrad=True)),
    "Adam L2": (mo_fused.Adam, dict(lr=1e-2, weight_decay=0.1)),
    "SGD momentum": (mo_fused.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1)),
    "SGD nesterov": (mo_fused.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
}
PRECISIONS = {"fp32": (F32, F32), "bf16": (BF16, BF16), "fp16": (F16, F16), "bf16, fp32 moments": (BF16, F32)}


def _offset(x: Tensor) -> Tensor:
    """One element behind an aligned address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def _second(x: Tensor) -> Tensor:
    return torch.empty(2 * x.numel(), dtype=x.dtype, device=x.device)[::2].view(x.shape).copy_(x)


def _channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last, copy=True)


Lay = Callable[[Tensor], Tensor]


def _tensors(big: bool, dry: bool) -> list[tuple[tuple[int, ...], Lay, Lay]]:
    """(shape, layout of the parameter, layout of the gradient)."""
    sizes = (1, 33, 300) if dry else (1, 33, 4097, 1_000_003)
    image = (3, 2, 4, 3) if dry else (64, 32, 7, 5)
    out: list[tuple[tuple[int, ...], Lay, Lay]] = [((n,), Tensor.clone, Tensor.clone) for n in sizes]
    out += [((sizes[-1] // 2,), _offset, Tensor.clone), ((sizes[-2],), Tensor.clone, _offset)]
    out += [(image, _channels_last, _channels_last), (image, _channels_last, Tensor.clone)]
    out += [((sizes[-2],), _second, Tensor.clone)]
    return [*out, (((1 << 24) + 5,), Tensor.clone, Tensor.clone)] if big else out


def _bits_of(place: Place, rule: str, precision: str, big: bool, scale: float) -> tuple[list[str], int]:
    """Ten steps here and with the CPU's kernels; what differs, and how many elements were compared."""
    kind, arguments = RULES[rule]
    dtype, moments = PRECISIONS[precision]
    steps = 3 if place.dry else 10
    on_host = "cpu" if dispatch.native() is not None else "eager"
    layouts = _tensors(big, place.dry)
    values = [place.normal(shape, i, dtype) for i, (shape, _, _) in enumerate(layouts)]
    bases = [place.normal(shape, 100 + i) for i, (shape, _, _) in enumerate(layouts)]
    here = [Parameter(lay(v)) for v, (_, lay, _) in zip(values, layouts)]
    there = [Parameter(lay(v.cpu())) for v, (_, lay, _) in zip(values, layouts)]
    ours, other = kind(here, **arguments, **place.options), kind(there, **arguments, backend=on_host)
    if moments != dtype:
        for opt, params in ((ours, here), (other, there)):
            for p in params:
                slots = opt._rule.slots(opt.param_groups[0], p)
                opt.state[p] = {k: torch.zeros_like(p, dtype=moments, requires_grad=False) for k in slots}
    for t in range(steps):
        for base, p, q, (shape, _, lay) in zip(bases, here, there, layouts):
            grad = (base.view(-1).roll(7 * t).view(shape) * (1.0 - 0.7 * t)).to(dtype)
            p.grad, q.grad = lay(grad), lay(grad.cpu())
        for opt in (ours, other):
            device = here[0].device if opt is ours else there[0].device
            opt.grad_scale = torch.tensor(scale, device=device)
            opt.found_inf = torch.tensor(float(t == steps // 2), device=device)
            opt.step()
    place.must_serve(ours)
    if "step" in ours.state[here[0]]:
        check(float(ours.state[here[0]]["step"]) == steps - 1, "the step with found_inf was not left out")
    return differences(ours, here, other, there), sum(p.numel() for p in here)


def bits(place: Place, rule: str) -> str:
    """Parameters and state after ten steps have the CPU's bits: dtypes, sizes, layouts, grad_scale, found_inf."""
    elements = 0
    wrong = []
    at = list(RULES).index(rule)
    # In the interpreter one dtype a rule, another one each time.
    precisions = [list(PRECISIONS)[at % len(PRECISIONS)]] if place.dry else list(PRECISIONS)
    for i, precision in enumerate(precisions):
        # A power of two leaves every bit of the fraction alone; the other scale does not.
        scale = 4.0 if i % 2 else 3.7
        found, compared = _bits_of(place, rule, precision, (at + i) % 3 == 0 and not place.dry, scale)
        elements += compared
        wrong += [f"{precision}: {text}" for text in found]
    check(not wrong, f"{len(wrong)} tensors differ from the CPU's: " + "; ".join(wrong[:4]))
    backend = "native kernels" if dispatch.native() is not None else "eager backend (no native part)"
    return f"{', '.join(precisions)}; {elements:,} elements as with the CPU's {backend}"


# -- statistics -------------------------------------------------------------------------------------------------------


def repeatable(place: Place) -> str:
    """Two runs of the same steps give the same bits of statistics, and so of parameters."""
    shapes = [(50,), (7, 3), (1,)] if place.dry else [(1_000_003,), (4097,), *[(64,)] * 500, (3001, 1003)]
    runs = []
    for _ in range(2):
        params = place.parameters(shapes)
        opt = mo_fused.AdamW(params, lr=1e-2, max_grad_norm=1.0, stats=True, **place.options)
        seen = []
        for t in range(2 if place.dry else 3):
            for p in params:
                assert p.grad is not None
                p.grad = p.grad.mul(1.0 + t)
            opt.step()
            seen.append(fields(opt))
        place.must_serve(opt)
        runs.append((seen, [vars(s) for s in opt.last_step.per_param().values()], params))
    (first, per_first, one), (second, per_second, other) = runs
    for t, (a, b) in enumerate(zip(first, second, strict=True)):
        wrong = [name for name in a if not same_bits(a[name], b[name])]
        check(not wrong, f"step {t}: {', '.join(wrong)} differ between two runs")
        check(float(a["clip_coef"]) < 1.0, "the steps were meant to be clipped")
    check(per_first == per_second, "per_param() differs between two runs")
    check(all(map(same_bits, one, other)), "parameters differ between two runs")
    return f"{len(first)} steps, {len(first[0])} fields and {len(per_first)} parameters' statistics"


def norms(place: Place) -> str:
    """clip_grad_norm_ and grad_stats against float64."""
    shapes = [(50,), (7, 3), (1,)] if place.dry else [(1_000_003,), (4097,), (33,), (1,), (3001, 1003)]
    worst = 0.0
    for dtype, digits in ((F32, 1e-5), (BF16, 2.0**-7)):
        params = place.parameters(shapes, dtype)
        grads = [p.grad for p in params if p.grad is not None]
        grads[0][::3] = 0.0
        exact = torch.stack([g.double().norm() for g in grads])
        total = exact.norm()
        chosen = dispatch.choose(grads[0]).backend
        check(chosen == place.backend, f"the gradient utilities would use {chosen}, not {place.backend}")
        stats = mo_fused.grad_stats(params)
        close(stats.total_norm, total, 1e-6, f"grad_stats {dtype} total_norm")
        for i, g in enumerate(grads):
            close(stats.norms[i], exact[i], 1e-6, f"grad_stats {dtype} norm of tensor {i}")
            check(float(stats.amaxes[i]) == float(g.abs().max()), f"grad_stats {dtype}: amax of tensor {i}")
            check(int(stats.zero_counts[i]) == int((g == 0).sum()), f"grad_stats {dtype}: zeros of tensor {i}")
        worst = max(worst, abs(float(stats.total_norm / total) - 1.0))
        before = [g.double() for g in grads]
        close(mo_fused.clip_grad_norm_(params, 1.0), total, digits, f"clip_grad_norm_ {dtype}")
        coef = 1.0 / (float(total) + 1e-6)
        for i, (g, b) in enumerate(zip(grads, before)):
            torch.testing.assert_close(
                g.double(), b * coef, rtol=2 * digits, atol=1e-30, msg=lambda m, i=i: f"clipped {i}: {m}"
            )
        grads[1].view(-1)[-1] = float("inf")
        check(int(mo_fused.grad_stats(params).nonfinite) == 1, "grad_stats counts one non-finite element")
    huge = place.parameters(shapes[:2])
    for p in huge:
        assert p.grad is not None
        p.grad = p.grad.mul(1e25)
    wanted = torch.stack([p.grad.double().norm() for p in huge if p.grad is not None]).norm()
    close(mo_fused.grad_stats(huge).total_norm, wanted, 1e-6, "grad_stats of gradients of 1e25")
    opt = mo_fused.AdamW(huge, max_grad_norm=1.0, **place.options)
    opt.step()
    place.must_serve(opt)
    assert opt.last_step is not None and opt.last_step.grad_norm is not None
    close(opt.last_step.grad_norm, wanted, 1e-6, "grad_norm of a step with gradients of 1e25")
    return f"fp32 and bf16; total norm within {worst:.1e} of float64"


# -- GradScaler -------------------------------------------------------------------------------------------------------


def scalers(place: Place) -> str:
    """torch's GradScaler and ours: a step with an overflow changes nothing, the others are those without a scaler."""
    shapes = [(50,), (7, 3)] if place.dry else [(4097,), (300, 70), (1_000_003,)]
    steps, bad = (3, 1) if place.dry else (5, 2)
    counted = 0
    for scaler_kind in (torch.amp.GradScaler, mo_fused.GradScaler):
        for kind, arguments in (RULES["AdamW"], RULES["SGD momentum"]):
            scaled, plain = place.parameters(shapes), place.parameters(shapes)
            options = dict(arguments, max_grad_norm=1e6, **place.options)  # never clips, but measures
            a, b = kind(scaled, **options), kind(plain, **options)
            scaler = scaler_kind(place.device.type, init_scale=1024.0, growth_interval=1000)
            for t in range(steps):
                factor = scaler.scale(torch.ones((), device=place.device))
                for i, (p, q) in enumerate(zip(scaled, plain)):
                    q.grad = place.normal(p.shape, 50 * t + i)
                    p.grad = q.grad * factor
                    if t == bad and i == 1:
                        p.grad.view(-1)[-1] = float("inf")
                before = [p.detach().clone() for p in scaled]
                slots = [{k: v.clone() for k, v in a.state[p].items()} for p in scaled]
                scaler.step(a)
                scaler.update()
                if t == bad:
                    check(
                        all(map(same_bits, scaled, before)),
                        f"{scaler_kind.__module__}: a skipped step wrote a parameter",
                    )
                    for p, old in zip(scaled, slots):
                        wrong = [k for k, v in a.state[p].items() if not same_bits(v, old[k])]
                        check(not wrong, f"{scaler_kind.__module__}: a skipped step wrote {wrong}")
                    check(bool(a.last_step.skipped), "last_step.skipped after an overflow")
                else:
                    b.step()
            place.must_serve(a)
            check(scaler.get_scale() == 512.0, f"the scale after one overflow is {scaler.get_scale()}, expected 512")
            found = differences(a, scaled, b, plain)
            check(not found, f"{scaler_kind.__module__} {kind.__name__}: {'; '.join(found[:3])}")
            counted += 1
    return f"{counted} combinations, one of {steps} steps with an overflow, the others bit for bit as without a scaler"
