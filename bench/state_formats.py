"""How far quantised moments are from those in fp32: the text model of `mo-fused train`, its own moments and gradients.

    python bench/state_formats.py [--steps 100,300] [--beta2 0.999] [--only TEXT,TEXT] [--output FILE]

The model is trained in fp32. Beside the moments of some matrices every format keeps its own, made of the same clipped
gradients: decoded, updated and stored again in every step, as an optimizer does. Two errors are shown, one of storing
the present moments once, one of having lived in the format since the first step:

    m, v, update    root of the mean square of the error, over that of the value; the update is
                    m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    root            root of the mean square of each element's relative error of sqrt(v)

Beside ours stand the formats of bitsandbytes and torchao, rounded to nearest: 8 bits with a dynamic code book (Dettmers
2016, arXiv:1511.04561; Dettmers et al. 2022, arXiv:2110.02861) and 256 elements a scale, and torchao's 4 bits, a
smaller book of the same kind for m and sixteen equal steps without zero for v, 128 elements a scale.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from train_formats import TINY

import mo_fused
from mo_fused import masters, quantised
from mo_fused.bench import facts, results
from mo_fused.training import TrainConfig, decay_groups, warmup_cosine
from mo_fused.training.tasks import build_task

WIDE = {"width": 256, "heads": 4}
"""So that rows have blocks of the largest sizes, and ours take as many bytes as the others."""

Moments = tuple[Tensor, Tensor]
Store = Callable[[Moments, int], Moments]
"""Moments, and the key of this step's random numbers, to what is read back."""


@dataclass(frozen=True)
class Format:
    name: str
    bits: int
    block_of: Callable[[Tensor], int]
    """Elements of a matrix that share a scale."""
    store: Store

    def bytes(self, params: Sequence[Tensor]) -> float:
        """Codes and scales of both moments, a parameter."""
        size = sum(p.numel() * 2 * (self.bits / 8 + 4 / self.block_of(p)) for p in params)
        return size / sum(p.numel() for p in params)


def ours(state_dtype: str, nearest: bool = False) -> Format:
    """As the optimizer keeps them: codes and scales, random bits for each element unless ``nearest``."""

    def store(moments: Moments, key: int) -> Moments:
        drawn = None if nearest else masters.draw(moments[0].shape, key, moments[0].device)
        bits = (None, None) if drawn is None else (drawn >> 16, drawn & 0xFFFF)
        block = quantised.block_of(moments[0], state_dtype)
        kept = []
        for slot, value, random in zip(("exp_avg", "exp_avg_sq"), moments, bits, strict=True):
            code = quantised.code_of(slot, state_dtype)
            entry = quantised.make(slot, code, value, block)
            quantised.store(entry, slot, code, value, random)
            kept.append(quantised.load(entry, slot, code, value.shape))
        return kept[0], kept[1]

    name = f"{state_dtype}, nearest" if nearest else state_dtype
    bits = quantised.code_of("exp_avg", state_dtype).bits
    return Format(name, bits, lambda p: quantised.block_of(p, state_dtype), store)


def dynamic_book(signed: bool, bits: int, exponents: int) -> Tensor:
    """Dettmers' dynamic numbers, sorted: one decade for each exponent, up to 1, each divided twice as finely as the
    one below."""
    points = [0.0, 1.0]
    for decade in range(exponents):
        parts = 2 ** (decade + bits - 1 - exponents + (not signed))
        borders = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64)
        inside = (10.0 ** (decade - exponents + 1) * (borders[:-1] + borders[1:]) / 2).tolist()
        points += inside + ([-x for x in inside] if signed else [])
    return torch.tensor(sorted(points), dtype=torch.float32)


def through_book(x: Tensor, book: Tensor, block: int) -> Tensor:
    """The nearest point of the book, in blocks scaled by their largest magnitude."""
    blocks = x.reshape(-1, block)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    halfway = (book[1:] + book[:-1]) / 2
    return (book[torch.bucketize(blocks / scale.clamp_min(1e-38), halfway)] * scale).reshape(x.shape)


def of_books(name: str, first: Tensor, second: Tensor, bits: int, block: int) -> Format:
    def store(moments: Moments, _: int) -> Moments:
        m, v = moments
        return through_book(m, first, block), through_book(v, second, block)

    return Format(name, bits, lambda _: block, store)


def formats() -> list[Format]:
    small = torch.linspace(0.0, 1.0, 17)[1:]
    return [
        *(ours(state_dtype, nearest) for state_dtype in quantised.QUANTISED for nearest in (False, True)),
        of_books("bitsandbytes, torchao 8 bits", dynamic_book(True, 8, 7), dynamic_book(False, 8, 7), 8, 256),
        of_books("torchao 4 bits", dynamic_book(True, 4, 3), small, 4, 128),
    ]


@dataclass(frozen=True)
class Errors:
    m: float
    v: float
    root: float
    update: float


def errors(true: Sequence[Moments], kept: Sequence[Moments], config: TrainConfig, step: int) -> Errors:
    def over(values: Callable[[Moments], Tensor]) -> float:
        pairs = [(values(a).double(), values(b).double()) for a, b in zip(true, kept, strict=True)]
        return (
            sum(float((b - a).square().sum()) for a, b in pairs) / sum(float(a.square().sum()) for a, _ in pairs)
        ) ** 0.5

    def update(moments: Moments) -> Tensor:
        m, v = moments
        return m / (1.0 - config.beta1**step) / ((v / (1.0 - config.beta2**step)).sqrt() + config.eps)

    ratios = [(b[1].double() / a[1].double())[a[1] > 0].sqrt() for a, b in zip(true, kept, strict=True)]
    root = float((torch.cat(ratios) - 1.0).square().mean().sqrt())
    return Errors(over(lambda x: x[0]), over(lambda x: x[1]), root, over(update))


@dataclass(frozen=True)
class Settings:
    """The command line."""

    config: TrainConfig
    steps: tuple[int, ...]
    only: tuple[str, ...]
    quick: bool
    output: str | None


def measure(settings: Settings) -> list[dict[str, Any]]:
    """One record for each format and each of the steps asked for; printed as they come."""
    config = settings.config
    task = build_task(config, torch.device("cpu"))
    batches = iter(task.loader)
    named = [(n, p) for n, p in task.model.named_parameters() if quantised.block_of(p, "int8")]
    params = [p for n, p in named if any(text in n for text in settings.only)]
    if not params:
        raise SystemExit(f"no matrix has that in its name; there are {', '.join(n for n, _ in named)}")
    # What is clipped is written back: the formats' own moments are made of it.
    optimizer = mo_fused.AdamW(
        decay_groups(task.model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        max_grad_norm=config.max_grad_norm,
        clip_in_place=True,
    )
    schedule = warmup_cosine(optimizer, config.schedule_steps, config.warmup_steps, config.min_lr_ratio)
    racing, records = formats(), []
    lived = {f.name: [(torch.zeros_like(p), torch.zeros_like(p)) for p in params] for f in racing}
    streams = [masters.stream(config.seed, position) for position in range(len(params))]
    for step in range(1, max(settings.steps) + 1):
        optimizer.zero_grad()
        task.loss_fn(task.model, next(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        keys = [masters.step_key(stream, step, quantised.STATE_SLOT) for stream in streams]
        for f in racing:
            for i, p in enumerate(params):
                lived[f.name][i] = f.store(updated(lived[f.name][i], p.grad, config), keys[i])
        if step in settings.steps:
            true = [(optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]) for p in params]
            found = []
            for f in racing:
                once = [f.store(moments, key) for moments, key in zip(true, keys, strict=True)]
                both = (errors(true, kept, config, step) for kept in (once, lived[f.name]))
                found.append(record(f.name, f.bytes(params), *both, step, settings))
            print(table(found, step), flush=True)
            records += found
    return records


def updated(moments: Moments, grad: Tensor | None, config: TrainConfig) -> Moments:
    assert grad is not None
    m, v = moments
    return m + (grad - m) * (1.0 - config.beta1), v + (grad * grad - v) * (1.0 - config.beta2)


def record(name: str, size: float, once: Errors, lived: Errors, step: int, settings: Settings) -> dict[str, Any]:
    config = settings.config
    return {
        "bench": "state_formats",
        "case": f"text model, lr {config.lr:g}, betas {config.beta1:g} and {config.beta2:g}, step {step}",
        "contender": name,
        "quick": settings.quick,
        "bytes": size,
        "stored_once": asdict(once),
        "lived": asdict(lived),
    }


def table(records: Sequence[dict[str, Any]], step: int) -> str:
    names = ("m", "v", "root", "update")
    columns = "".join(f"{name:>9}" for name in names)
    lines = [
        f"\n{'':<37}{'present moments, stored once':^36}{f'after {step} steps in the format':^36}",
        f"{'':<30}{'bytes':>7}{columns}{columns}",
    ]
    for found in records:
        values = [found[when][name] for when in ("stored_once", "lived") for name in names]
        lines.append(f"{found['contender']:<30}{found['bytes']:>7.3f}" + "".join(f"{value:>9.2%}" for value in values))
    return "\n".join(lines)


def arguments(words: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: does it run, not how far off")
    parser.add_argument("--output", metavar="FILE", help="append the results to FILE, a CSV file")
    parser.add_argument("--steps", metavar="N,N", help="after which steps to measure (default: 100,300)")
    parser.add_argument("--lr", type=float, default=TrainConfig().lr)
    parser.add_argument("--beta2", type=float, default=TrainConfig().beta2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="TEXT,TEXT", help="matrices whose name contains one (embedding,blocks.1)")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads")
    given = parser.parse_args(words)
    if given.threads:
        torch.set_num_threads(given.threads)
    steps = tuple(int(n) for n in (given.steps or ("2,4" if given.quick else "100,300")).split(","))
    only = given.only or ("" if given.quick else "embedding,blocks.1")
    sizes: dict[str, Any] = TINY if given.quick else WIDE
    config = TrainConfig(steps=max(steps), seed=given.seed, lr=given.lr, beta2=given.beta2, **sizes)
    return Settings(config, steps, tuple(only.split(",")), given.quick, given.output)


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    settings = arguments(words)
    here = facts.circumstances()
    print(facts.heading(here), flush=True)
    records = measure(settings)
    results.append(settings.output, records, here)
    return records


if __name__ == "__main__":
    main()
