"""A whole training step of a transformer with states on the host, beside the same one without offload, and its bits.

    python bench/bench_offload.py --only gpu [--batch N] [--model NAME]
    python bench/gpu_check.py bench, and verify --only offload

Every contender trains a model of its own, all on one device. Peak memory is what the device holds of a contender at the
most during its step: its weights, its gradients and activations, and its states where they are there.
"""

from __future__ import annotations

import gc
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from gpu_numbers import RULES
from gpu_place import Place, check, differences
from torch import Tensor, nn
from torch.nn import functional as F

import mo_fused
from mo_fused.bench import peers
from mo_fused.bench.case import Goal, Outcome
from mo_fused.bench.peers import DEEPSPEED, OURS
from mo_fused.bench.race import Contender, Race
from mo_fused.bench.workloads import DECAY, LR, MAX_NORM
from mo_fused.offload import ring

PLAIN, CLIPPED = f"{OURS}, no offload", f"{OURS}, no offload, clipping"
CPU, CPU_CLIPPED = f'{OURS} "cpu"', f'{OURS} "cpu", clipping'
TAKEN, RELEASED = f'{OURS} "cpu", gradients', f'{OURS} "cpu", release'
TORCHAO = "torchao CPUOffloadOptimizer"
MOST = 1.2
"""A training step with offload takes at most this many times as long as one without."""
OOM = torch.cuda.OutOfMemoryError

# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Of a GPT-2."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024


SIZES = {"0.1 B": Size(12, 768, 12), "0.5 B": Size(24, 1280, 20), "1.9 B": Size(36, 2048, 16)}
TINY = Size(1, 16, 2, 50, 8)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        w = size.width
        self.heads = size.heads
        self.first, self.second = nn.LayerNorm(w), nn.LayerNorm(w)
        self.qkv, self.out = nn.Linear(w, 3 * w), nn.Linear(w, w)
        self.up, self.down = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
        out: Tensor = x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))
        return out


class Gpt(nn.Module):
    """GPT-2's parameters and arithmetic, the output layer tied to the embedding, without dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.last = nn.LayerNorm(size.width)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.dim() > 1 else None

    def forward(self, words: Tensor) -> Tensor:
        """The loss of predicting each next word."""
        x = self.tokens(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.last(x)[:, :-1] @ self.tokens.weight.T
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        return loss


# -- contenders -------------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """A model and what steps it."""

    model: Gpt
    step: Callable[[], Any]
    zero_grad: Callable[[], Any]
    resident: int = 0
    """Bytes on the device between two steps."""
    peak: int = 0

    def train(self, words: Tensor) -> None:
        """Forward, backward, step; until the device has done it."""
        self.model(words).backward()
        self.step()
        self.zero_grad()
        if words.is_cuda:
            torch.cuda.synchronize()


def _ours(model: Gpt, release: bool = False, **options: Any) -> Trained:
    optimizer = mo_fused.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, **options)
    if release:
        handle = mo_fused.gradient_release(model, optimizer)
        return Trained(model, lambda h=handle: optimizer.step(), optimizer.zero_grad)  # type: ignore[misc]
    return Trained(model, optimizer.step, optimizer.zero_grad)


def _torchao(model: Gpt) -> Trained:
    offload = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    optimizer = offload(model.parameters(), torch.optim.AdamW, lr=LR, weight_decay=DECAY, fused=True)
    return Trained(model, optimizer.step, optimizer.zero_grad)


def _deepspeed(model: Gpt) -> Trained:
    """Weights in fp32 and states on the host, gradients copied there and weights back, all after the backward."""
    peer = next(p for p in peers.ADAMW if p.name == DEEPSPEED)
    notes: list[str] = []
    if not peers.available([peer], torch.device("cpu"), None, notes.append):
        raise ImportError(notes[0])
    params = list(model.parameters())
    pinned = params[0].is_cuda
    there = [nn.Parameter(p.detach().float().cpu()) for p in params]
    buffers = [torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for p in params]
    for t in there:
        t.grad = torch.zeros_like(t)
    optimizer = peer.make(there)

    def step() -> None:
        with torch.no_grad():
            for p, b in zip(params, buffers, strict=True):
                assert p.grad is not None
                b.copy_(p.grad, non_blocking=True)
            if pinned:
                torch.cuda.synchronize()
            for t, b in zip(there, buffers, strict=True):
                assert t.grad is not None
                t.grad.copy_(b)
            optimizer.step()
            for p, t, b in zip(params, there, buffers, strict=True):
                b.copy_(t)
                p.copy_(b, non_blocking=True)

    def zero_grad() -> None:
        for p in params:
            p.grad = None

    return Trained(model, step, zero_grad)


def makers() -> dict[str, Callable[[Gpt], Trained]]:
    return {
        PLAIN: _ours,
        CPU: lambda model: _ours(model, offload="cpu"),
        TAKEN: lambda model: _ours(model, offload="cpu", offload_gradients=True),
        RELEASED: lambda model: _ours(model, release=True, offload="cpu"),
        CLIPPED: lambda model: _ours(model, max_grad_norm=MAX_NORM),
        CPU_CLIPPED: lambda model: _ours(model, max_grad_norm=MAX_NORM, offload="cpu"),
        TORCHAO: _torchao,
        DEEPSPEED: _deepspeed,
    }


OF_CLIPPED = {CPU_CLIPPED: CLIPPED}
"""Contenders that are compared with another one than ``PLAIN``."""


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(device)


def contenders(device: torch.device, size: Size, dtype: torch.dtype) -> tuple[dict[str, Trained], list[str]]:
    """Those that are installed here and train; what there is to say about the others."""
    found: dict[str, Trained] = {}
    notes = []
    words = batch_of(device, size, 1)
    for name, make in makers().items():
        gc.collect()
        before = _allocated(device)
        torch.manual_seed(0)
        try:
            trained = make(Gpt(size).to(device=device, dtype=dtype))
            for _ in range(2):
                trained.train(words)
        except ImportError as error:
            notes.append(f"{name}: not installed ({str(error)[:100]})")
            continue
        except Exception as error:
            if name not in (TORCHAO, DEEPSPEED):
                raise
            notes.append(f"{name} does not train here: {type(error).__name__}: {str(error)[:200]}")
            continue
        trained.resident = _allocated(device) - before
        found[name] = trained
    return found, notes


def batch_of(device: torch.device, size: Size, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(size.vocabulary, (batch, size.context), generator=generator).to(device)


def largest_batch(trained: Trained, device: torch.device, size: Size) -> int:
    """The largest power of two that fits, beside all that the device holds already."""
    batch = 1
    while batch < 4096:
        try:
            trained.train(batch_of(device, size, 2 * batch))
        except OOM:
            break
        batch *= 2
    trained.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    return batch


def race(
    device: torch.device, size: Size, batch: int | None, seconds: float, rounds: int, quick: bool = False
) -> Outcome:
    """All contenders in turn, within about ``seconds``. ``batch`` None: the largest power of two that fits."""
    start = time.perf_counter()
    dtype = torch.bfloat16
    found, notes = contenders(device, size, dtype)
    if batch is None:
        batch = largest_batch(found[PLAIN], device, size) if device.type == "cuda" else 2
    words = batch_of(device, size, batch)
    for name in list(found):
        try:
            _measure_peak(found[name], device, words)
        except OOM:
            notes.append(f"{name}: out of memory at this batch")
            del found[name]
            gc.collect()
    held = Race([Contender(n, lambda t=t: t.train(words)) for n, t in found.items()], 0.0, pause_s=0.0)  # type: ignore[misc]
    held.warm_up()
    done = 0
    while done < rounds and (done < 2 or time.perf_counter() - start < seconds):
        held.round()
        done += 1
    samples = held.samples()
    for name in [n for n in found if n not in (PLAIN, CLIPPED)]:
        base = OF_CLIPPED.get(name, PLAIN)
        notes.append(f"{name}: {samples[name].median / samples[base].median:.3f}x {base}; target at most {MOST:g}x")
    for name, trained in found.items():
        notes.append(f"{name}: peak {trained.peak / 2**30:.2f} GiB on the device")
    numel = sum(p.numel() for p in found[PLAIN].model.parameters())
    title = f"GPT-2 {numel / 1e6:.0f} M bf16, training step, {batch} x {size.context}"
    goals = [Goal(n, OF_CLIPPED.get(n, PLAIN), MOST, at_most=True) for n in found if n in (CPU, CPU_CLIPPED)]
    return Outcome("offload", title, samples, {}, goals, quick, notes)


def _measure_peak(trained: Trained, device: torch.device, words: Tensor) -> None:
    if device.type != "cuda":
        trained.train(words)
        return
    others = _allocated(device) - trained.resident
    torch.cuda.reset_peak_memory_stats(device)
    trained.train(words)
    trained.peak = torch.cuda.max_memory_allocated(device) - others


def gpu_records(done: Outcome) -> list[dict[str, Any]]:
    """As gpu_bench's: what its table asks for."""
    out = []
    for record in done.records():
        name = record["contender"]
        base = OF_CLIPPED.get(name, PLAIN)
        ratio = done.samples[name].median / done.samples[base].median
        goal = {"label": "of no offload", "limit": MOST, "at_most": True, "measured": ratio, "reached": ratio <= MOST}
        out.append({**record, "dtype": "bf16", "goals": [] if name in (PLAIN, CLIPPED) else [goal]})
    return out


# -- bits -------------------------------------------------------------------------------------------------------------


@contextmanager
def tiny_slots(size: int) -> Iterator[None]:
    """Many pieces a step, so that slots of the ring are used again and again."""
    before, ring.SLOT_BYTES = ring.SLOT_BYTES, size
    try:
        yield
    finally:
        ring.SLOT_BYTES = before


def _side(place: Place, kind: Any, arguments: dict[str, Any], shapes: Sequence[Any], how: str, steps: int) -> Any:
    """Steps whose gradients depend on the parameters, so that a copy that comes too late is seen in the results."""
    released = how == "release"
    with tempfile.TemporaryDirectory() as folder:
        all_options: dict[str, dict[str, Any]] = {
            "none": {},
            "cpu": dict(offload="cpu"),
            "part": dict(offload="cpu", offload_fraction=0.5),
            "gradients": dict(offload="cpu", offload_gradients=True),
            "release": dict(offload="cpu"),
            "disk": dict(offload=f"disk:{folder}"),
        }
        options = all_options[how]
        model = nn.ParameterList(place.parameters(shapes))
        opt = kind(list(model), **arguments, **place.options, **options)
        handle = mo_fused.gradient_release(model, opt) if released else None
        for t in range(steps):
            opt.zero_grad(set_to_none=how != "cpu" or t % 2 == 0)  # otherwise written in place, right after the step
            factors = [place.normal(p.shape, 1000 * t + i) for i, p in enumerate(model)]
            if not place.dry and t % 3 == 1:
                torch.cuda._sleep(int(2e7))  # about 10 ms: the host is ahead of the device
            loss = sum((p * p * f).sum() for p, f in zip(model, factors, strict=True))
            loss.backward()
            del loss, factors
            if not place.dry and t % 3 == 2:
                # Memory that the copies have read, if it was freed too early, is written again.
                junk = [torch.full_like(p, float("nan")) for p in model]
                del junk
            opt.step()
        if not place.dry:
            torch.cuda.synchronize()
        state = {p: {k: v.detach().clone() for k, v in opt.state[p].items()} for p in model}
        served = {e.backend for e in opt.explain()}
        if handle is not None:
            handle.remove()
        return list(model), state, served


class _States:
    """What gpu_place.differences asks of an optimizer."""

    def __init__(self, state: Any) -> None:
        self.state = state


def offload(place: Place) -> str:
    """Results have the bits of the backend's steps without offload; copies are late, slots few and used again."""
    shapes = [(40, 3), (33,), (1,)] if place.dry else [(1003, 517), (64,), (257, 129), *[(4097,)] * 5, (1,)]
    steps = 2 if place.dry else 24
    hows = ("cpu", "part", "gradients", "release", "disk")
    wrong = []
    with tiny_slots(4096 if place.dry else 400_000):
        for rule in ("AdamW",) if place.dry else ("AdamW", "SGD momentum"):
            kind, arguments = RULES[rule]
            arguments = {**arguments, "lr": 1e-3}
            plain, state, served = _side(place, kind, arguments, shapes, "none", steps)
            check(served == {place.backend}, f"expected {place.backend} without offload, found {served}")
            for how in hows:
                params, found, served = _side(place, kind, arguments, shapes, how, steps)
                check("cpu" in served, f"{how}: the host was meant to step, not {served}")
                check(how == "part" or len(served) == 1, f"{how}: the host was meant to step everything: {served}")
                texts = differences(_States(found), params, _States(state), plain)
                wrong += [f"{rule}, {how}: {text}" for text in texts]
    check(not wrong, f"{len(wrong)} tensors differ from those without offload: " + "; ".join(wrong[:6]))
    return f"{', '.join(hows)}: {steps} steps with the bits of no offload"
