"""Checks of what only a GPU has: a choice of backends, CUDA graphs, waiting, streams, memory, long indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gpu_backends import by_environment
from gpu_numbers import RULES
from gpu_place import Place, check, close, differences, fields, on_backend, same_bits
from torch import Tensor
from torch.nn import Parameter

import mo_fused
from mo_fused import dispatch

F32, BF16 = torch.float32, torch.bfloat16
MIB = 1 << 20


def choice(place: Place) -> str:
    """Unasked, a GPU gets the CUDA kernels where there are any; MO_FUSED_BACKEND overrides that, ``backend=`` both."""
    built = not dispatch.cuda_problem()
    usual = "cuda" if built else "triton"
    # (MO_FUSED_BACKEND, backend=, what has to serve)
    asked = [(None, None, usual), (None, "triton", "triton"), ("triton", None, "triton")]
    if built:
        asked += [("cuda", None, "cuda"), ("triton", "cuda", "cuda"), ("cuda", "triton", "triton")]
    for variable, argument, expected in asked:
        with by_environment(variable):
            params = place.parameters([(33, 7), (129,)])
            opt = mo_fused.AdamW(params, **({} if argument is None else {"backend": argument}))
            try:
                on_backend(opt, expected)
                opt.step()
                on_backend(opt, expected)
                utilities = dispatch.choose(params[0]).backend
                check(argument or utilities == expected, f"the gradient utilities would use {utilities}")
            except AssertionError as error:
                raise AssertionError(f"MO_FUSED_BACKEND={variable}, backend={argument}: {error}") from error
    if not built:
        try:
            mo_fused.AdamW(place.parameters([(3,)]), backend="cuda").step()
        except RuntimeError as error:
            check(dispatch.cuda_problem() in str(error), f'backend="cuda" gives no reason: {error}')
        else:
            raise AssertionError('backend="cuda" was accepted without CUDA kernels')
    return f"{usual} where nothing is asked; {len(asked)} ways to ask"


def _mixed(place: Place) -> list[Tensor]:
    return [
        *place.parameters([(4097,), (300, 70), (1,), (1_000_003,), *[(64,)] * 50]),
        *place.parameters([(257, 33), (70_001,)], BF16),
    ]


CAPTURED: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "AdamW, every option": (
        mo_fused.AdamW,
        dict(weight_decay=0.1, max_grad_norm=1.0, skip_nonfinite=True, stats=True, clip_in_place=True),
    ),
    "AdamW, clipping": (mo_fused.AdamW, dict(amsgrad=True, max_grad_norm=1.0)),
    "AdamW, statistics alone": (mo_fused.AdamW, dict(stats=True)),
    "AdamW, bare": (mo_fused.AdamW, {}),
    "SGD, every option": (
        mo_fused.SGD,
        dict(momentum=0.9, weight_decay=0.1, max_grad_norm=1.0, skip_nonfinite=True, stats=True),
    ),
    "SGD, bare": (mo_fused.SGD, dict(momentum=0.9, nesterov=True)),
}


def _set_grads(params: Sequence[Tensor], bases: Sequence[Tensor], t: int, bad: bool) -> None:
    """New gradients in the same memory: a captured step reads where it was captured."""
    for p, base in zip(params, bases):
        assert p.grad is not None
        p.grad.copy_(base.view(-1).roll(3 * t).view(base.shape) * (1.0 + 0.3 * t))
    if bad:
        assert params[0].grad is not None
        params[0].grad.view(-1)[5] = float("nan")


# After a capture: replays, a step outside of the graph, steps whose gradients lie elsewhere, and replays between them.
SEQUENCE = (
    "replay",
    "replay",
    "replay, NaN",
    "replay",
    "replay",
    "step",
    "step, moved",
    "replay",
    "step, moved",
    "replay",
)


def _graph_of(place: Place, name: str) -> list[str]:
    kind, arguments = CAPTURED[name]
    sides = []
    for _ in range(2):
        params = _mixed(place)
        lr = torch.tensor(1e-2, device=place.device)
        sides.append((kind(params, lr=lr, **arguments, **place.options), params, lr))
    (ours, captured, our_lr), (plain, stepped, plain_lr) = sides
    bases = [p.grad.clone() for p in captured if p.grad is not None]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for t in range(3):
            _set_grads(captured, bases, t, False)
            ours.step()
    torch.cuda.current_stream().wait_stream(stream)
    for t in range(3):
        _set_grads(stepped, bases, t, False)
        plain.step()
    place.must_serve(ours)
    for p in captured:  # a captured backward pass has its gradients in the graph's own memory
        assert p.grad is not None
        p.grad = p.grad.clone()
    of_graph = [p.grad for p in captured]
    elsewhere = [g.clone() for g in of_graph if g is not None]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    wrong = [f"after the capture: {text}" for text in differences(ours, captured, plain, stepped)]
    for i, act in enumerate(SEQUENCE):
        bad = act.endswith("NaN") and "every option" in name
        for p, g in zip(captured, elsewhere if act.endswith("moved") else of_graph):
            p.grad = g
        for params, lr in ((captured, our_lr), (stepped, plain_lr)):
            _set_grads(params, bases, 3 + i, bad)
            lr.fill_(1e-2 / (3 + i))
        if act.startswith("replay"):
            graph.replay()
        else:
            ours.step()
        plain.step()
        what = f"{i} ({act})"
        wrong += [f"{what}: {text}" for text in differences(ours, captured, plain, stepped)]
        # Between replays last_step is that of the captured step; other steps take buffers of their own.
        if act.startswith("step") or "step" not in SEQUENCE[:i]:
            measured, expected = fields(ours), fields(plain)
            wrong += [
                f"{what}: last_step.{field} is {float(measured[field])!r}, without a graph {float(expected[field])!r}"
                for field in expected
                if not same_bits(measured[field], expected[field])
            ]
            if bad:
                check(bool(expected["skipped"]), "the step with a NaN was meant to be skipped")
    return [f"{name}: {text}" for text in wrong]


def graphs(place: Place) -> str:
    """A captured step, replayed with other gradients and rates, does what a step of its own does, bit for bit."""
    wrong = []
    for name in CAPTURED:
        wrong += _graph_of(place, name)
    check(not wrong, f"{len(wrong)} differences: " + "; ".join(wrong[:6]))
    return f"{len(CAPTURED)} captured steps; {len(SEQUENCE)} replays and other steps after each"


def graph_with_clip(place: Place) -> str:
    """``mo_fused.clip_grad_norm_`` and a step in one graph, as code captures them that clips by hand.

    Replays with other gradients and rates have the bits of torch's clip and a step outside of a graph: while a graph is
    captured ours leaves the work to torch's.
    """
    wrong, norms = [], []
    for name in ("AdamW, bare", "SGD, bare"):
        kind, arguments = CAPTURED[name]
        sides = []
        for _ in range(2):
            params = _mixed(place)
            lr = torch.tensor(1e-2, device=place.device)
            sides.append((kind(params, lr=lr, **arguments, **place.options), params, lr))
        (ours, captured, our_lr), (plain, stepped, plain_lr) = sides
        bases = [p.grad.clone() for p in captured if p.grad is not None]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _set_grads(captured, bases, 0, False)
            torch.nn.utils.clip_grad_norm_(captured, 1.0)
            ours.step()
        torch.cuda.current_stream().wait_stream(stream)
        _set_grads(stepped, bases, 0, False)
        torch.nn.utils.clip_grad_norm_(stepped, 1.0)
        plain.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            norm = mo_fused.clip_grad_norm_(captured, 1.0)
            ours.step()
        place.must_serve(ours)
        for t in range(1, 5):
            for params, lr in ((captured, our_lr), (stepped, plain_lr)):
                _set_grads(params, bases, t, False)
                lr.fill_(1e-2 / t)
            graph.replay()
            expected = torch.nn.utils.clip_grad_norm_(stepped, 1.0)
            plain.step()
            if not same_bits(norm, expected):
                wrong.append(f"{name}, replay {t}: norm {float(norm)!r}, without a graph {float(expected)!r}")
            wrong += [f"{name}, replay {t}: {text}" for text in differences(ours, captured, plain, stepped)]
            norms.append(float(expected))
    check(min(norms) > 1.0, f"nothing was clipped: norms from {min(norms)}")
    check(not wrong, f"{len(wrong)} differences: " + "; ".join(wrong[:6]))
    return "AdamW and SGD, 4 replays each"


@contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def no_sync(place: Place) -> str:
    """A step, its scaler and the utilities that promise it never make the host wait."""
    value = torch.ones((), device=place.device)
    try:
        with _no_waiting():
            value.item()
    except RuntimeError:
        pass
    else:
        raise AssertionError("set_sync_debug_mode('error') does not see .item(): this check proves nothing here")
    for name, (kind, arguments) in CAPTURED.items():
        for scaler in (None, torch.amp.GradScaler("cuda"), mo_fused.GradScaler("cuda")):
            params = _mixed(place)
            opt = kind(params, lr=1e-3, **arguments, **place.options)
            if scaler is not None:
                scaler.scale(value)

            def step(opt: Any = opt, scaler: Any = scaler) -> None:
                if scaler is None:
                    opt.step()
                else:
                    scaler.step(opt)
                    scaler.update()

            for _ in range(3):
                step()
            fresh = [torch.randn_like(p) for p in params]
            torch.cuda.synchronize()
            try:
                with _no_waiting():
                    step()
                    for group in opt.param_groups:
                        group["lr"] *= 0.5
                    step()
                    for p, g in zip(params, fresh):  # gradients at other addresses
                        p.grad = g
                    step()
                    seen = opt.last_step.grad_norm, opt.last_step.clip_coef, opt.last_step.skipped
            except RuntimeError as error:
                raise AssertionError(f"{name}, {type(scaler).__module__}: the host waited: {error}") from error
            place.must_serve(opt)
            check(all(v is None or v.is_cuda for v in seen), f"{name}: statistics are on another device")
    return f"{len(CAPTURED)} optimizers without and with both scalers: same step, another rate, gradients elsewhere"


def streams(place: Place) -> str:
    """A step on a stream of its own follows what that stream does before it, and nothing else."""
    shapes = [(4097,), (1_000_003,)]
    for kind, arguments in (RULES["AdamW"], RULES["SGD momentum"]):
        sides = []
        for on_stream in (True, False):
            params = place.parameters(shapes)
            opt = kind(params, max_grad_norm=1.0, stats=True, **arguments, **place.options)
            for _ in range(3):  # compiles
                opt.step()
            new = [place.normal(p.shape, 70 + i) for i, p in enumerate(params)]
            for p in params:
                p.grad = torch.full_like(p, 1e3)  # what a step reads that does not wait
            torch.cuda.synchronize()
            stream = torch.cuda.Stream() if on_stream else torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                for t in range(3):
                    if on_stream:
                        torch.cuda._sleep(int(1e8))  # about 50 ms
                    for p, g in zip(params, new):
                        assert p.grad is not None
                        p.grad.copy_(g * (t + 1))
                    opt.step()
                copies = [p.detach().clone() for p in params]
                norm = opt.last_step.grad_norm.clone()
            check(not on_stream or not stream.query(), "the host was meant to be ahead of the stream")
            stream.synchronize()
            place.must_serve(opt)
            sides.append([*copies, norm])
        check(all(map(same_bits, *sides)), f"{kind.__name__}: a step on another stream gave another result")
    return "AdamW and SGD, 3 steps each behind 50 ms of other work"


def _requested(which: str) -> int:
    """Bytes as they were asked for: the allocator rounds a large block up by as much as a megabyte."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def memory(place: Place) -> str:
    """A step makes no temporary of a parameter's size."""
    worst_first = worst_later = 0
    shapes = [(25_000_000,)] * 3 + [(64,)] * 500
    for kind, arguments in (CAPTURED["AdamW, every option"], CAPTURED["AdamW, bare"], CAPTURED["SGD, every option"]):
        for dtype in (F32, BF16):
            params = place.parameters(shapes, dtype)
            opt = kind(params, lr=1e-3, **arguments, **place.options)
            grown = []
            for _ in range(4):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = _requested("current")
                opt.step()
                torch.cuda.synchronize()
                grown.append(_requested("peak") - before)
            state = sum(v.numel() * v.element_size() for s in opt.state.values() for v in s.values())
            place.must_serve(opt)
            worst_first = max(worst_first, grown[0] - state)
            worst_later = max(worst_later, *grown[1:])
            del params, opt
    check(
        worst_first < 4 * MIB, f"the first step took {worst_first / MIB:.2f} MiB beyond its state, of at least 143 MiB"
    )
    check(worst_later < MIB, f"a later step took {worst_later / MIB:.2f} MiB, of at least 143 MiB of parameters")
    return f"first step {worst_first / MIB:.2f} MiB beyond its state, later ones {worst_later / MIB:.3f} MiB"


def beyond_32_bits(place: Place) -> str:
    """A tensor of more than 2^31 elements: both ends, and the border, are stepped and measured."""
    n, border = (1 << 31) + 11, 1 << 31
    p = Parameter(torch.ones(n, dtype=BF16, device=place.device))
    p.grad = torch.zeros(n, dtype=BF16, device=place.device)
    places = [*range(8), *range(border - 8, n)]
    at = torch.tensor(places, device=place.device)
    p.grad[at] = 2.0
    opt = mo_fused.SGD([p], lr=0.25, max_grad_norm=1e6, **place.options)
    opt.step()
    place.must_serve(opt)
    check(bool((p.detach()[at] == 0.5).all()), f"elements at the ends are {p.detach()[at].tolist()}, expected 0.5")
    others = p.detach()[8 : border - 8]
    check(all(bool((part == 1.0).all()) for part in others.split(1 << 28)), "an element without a gradient was changed")
    assert opt.last_step is not None and opt.last_step.grad_norm is not None
    close(opt.last_step.grad_norm, (4.0 * len(places)) ** 0.5, 1e-6, "grad_norm")
    return f"SGD, bf16, {n:,} elements"
