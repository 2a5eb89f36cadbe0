"""What formats cost in quality: the text model of `mo-fused train`, trained with each, over the same seeds.

    python bench/train_formats.py [--processes 2] [--steps N] [--lr LR] [--seeds 0,1,2] [--only TEXT,..] [--output FILE]

A seed means the same first weights and the same batches for every combination, so that differences are taken seed by
seed. bf16 is `model.to(torch.bfloat16)`: parameters, gradients and the whole forward pass. The validation loss is that
of the parameters, computed in fp32 whatever was trained in: in bf16 a loss of 2.3 is rounded by up to 0.3 %.

At the default rate bf16 without master weights loses several times what the seeds differ by: many of its updates are
less than half a spacing. At larger rates that fades (0.3 % at 1e-3), and at the 3e-3 of `mo-fused train` runs of equal
quality end some percent apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import mo_fused
from mo_fused.bench import facts, results
from mo_fused.training import TrainConfig, decay_groups, warmup_cosine
from mo_fused.training.tasks import build_task

LR, STEPS, SEEDS = 3e-4, 400, (0, 1, 2)
TINY = {"context": 16, "layers": 1, "heads": 2, "width": 64, "batch_size": 2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BOUND, BOUND_INT4 = 0.5, 1.5
"""How far from fp32 a format may end, in percent."""


@dataclass(frozen=True)
class Combination:
    """What parameters, the rest of the weights and moments are kept in."""

    params: str
    master: str | None
    states: str | None
    """``state_dtype``; None is the parameters' own."""

    @property
    def name(self) -> str:
        return f"{self.params}-{self.master or 'none'}-{self.states or self.params}"

    @property
    def bound(self) -> float | None:
        """In percent; None where nothing is promised."""
        if self.params == "bf16" and self.master is None:
            return None
        return BOUND_INT4 if self.states == "int4" else BOUND


BASELINE = Combination("fp32", None, None)
PURE = Combination("bf16", None, None)
COMBINATIONS = (
    BASELINE,
    Combination("fp32", None, "int8"),
    Combination("fp32", None, "int4"),
    PURE,
    Combination("bf16", None, "fp32"),
    *(Combination("bf16", "fp32", states) for states in ("fp32", "bf16", "int8", "int4")),
    *(Combination("bf16", "split", states) for states in ("fp32", "bf16", "int8", "int4")),
    *(Combination("bf16", m, states) for m in ("split8", "kahan", "stochastic") for states in ("bf16", "int8", "int4")),
)


@dataclass(frozen=True)
class Settings:
    """The command line."""

    combinations: tuple[Combination, ...]
    seeds: tuple[int, ...]
    steps: int
    lr: float
    threads: int
    processes: int
    quick: bool
    output: str | None


@dataclass(frozen=True)
class Job:
    """One training run; plain values, to be sent to another process."""

    combination: Combination
    seed: int
    settings: Settings


@dataclass(frozen=True)
class Run:
    """What came of a job. Bytes are those of parameter, gradient, master weights and moments."""

    val_loss: float
    bytes: float
    bytes_of_matrices: float
    backends: tuple[str, ...]


def bytes_a_parameter(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> float:
    """Measured over the tensors that are there after a step, before gradients are dropped; the step's number is not
    counted."""
    tensors = [
        t for p in params for t in (p, p.grad, *optimizer.state[p].values()) if isinstance(t, Tensor) and t.dim()
    ]
    return sum(t.numel() * t.element_size() for t in tensors) / sum(p.numel() for p in params)


def train(job: Job) -> Run:
    settings = job.settings
    torch.set_num_threads(settings.threads)
    sizes_of_model: dict[str, Any] = TINY if settings.quick else {}
    config = TrainConfig(steps=settings.steps, seed=job.seed, lr=settings.lr, **sizes_of_model)
    task = build_task(config, torch.device("cpu"))
    batches = iter(task.loader)
    combination, model = job.combination, task.model.to(DTYPES[job.combination.params])
    optimizer = mo_fused.AdamW(
        decay_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        max_grad_norm=config.max_grad_norm,
        state_dtype=combination.states,
        master_weights=combination.master,
        seed=config.seed,
    )
    schedule = warmup_cosine(optimizer, config.schedule_steps, config.warmup_steps, config.min_lr_ratio)
    for _ in range(config.steps):
        optimizer.zero_grad()
        task.loss_fn(task.model, next(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    params = list(model.parameters())
    sizes = [bytes_a_parameter(optimizer, some) for some in (params, [p for p in params if p.dim() > 1])]
    backends = tuple(sorted({row.backend for row in optimizer.explain()}))
    optimizer.zero_grad()
    model.float()
    return Run(task.validate()["val_loss"], *sizes, backends)


def case_of(steps: int, lr: float) -> str:
    return f"text model, {steps} steps, lr {lr:g}"


def record(
    combination: Combination, runs: Sequence[Run], baseline: Sequence[Run], settings: Settings
) -> dict[str, Any]:
    """A combination's line of the table; ``runs`` and ``baseline`` are of the same seeds."""
    losses = [run.val_loss for run in runs]
    differences = [100.0 * (run.val_loss / other.val_loss - 1.0) for run, other in zip(runs, baseline, strict=True)]
    mean, bound = statistics.fmean(differences), combination.bound
    return {
        "bench": "train_formats",
        "case": case_of(settings.steps, settings.lr),
        "contender": combination.name,
        "quick": settings.quick,
        "seeds": list(settings.seeds),
        "bytes": runs[0].bytes,
        "bytes_of_matrices": runs[0].bytes_of_matrices,
        "val_loss": statistics.fmean(losses),
        "val_loss_sd": deviation(losses),
        "val_losses": losses,
        "difference": mean,
        "difference_sd": deviation(differences),
        "differences": differences,
        "bound": bound,
        "reached": None if bound is None else abs(mean) <= bound,
        "backends": list(runs[0].backends),
    }


def deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def head(seeds: Sequence[int]) -> str:
    columns = "".join(f"{f'seed {seed}':>9}" for seed in seeds)
    return (
        f"{'parameters-master-states':<25} {'bytes':>6} {'matrices':>8} {'val loss':>8}{columns} {'mean':>8} {'sd':>7}"
    )


def line(found: dict[str, Any]) -> str:
    """Differences are in percent of the loss in fp32."""
    columns = "".join(f"{value:>+8.2f}%" for value in found["differences"])
    sd = "" if found["difference_sd"] is None else f"{found['difference_sd']:.2f}%"
    verdict = "" if found["bound"] is None or found["reached"] else f"  beyond {found['bound']:g}%"
    return (
        f"{found['contender']:<25} {found['bytes']:>6.2f} {found['bytes_of_matrices']:>8.3f} {found['val_loss']:>8.4f}"
        f"{columns} {found['difference']:>+7.2f}% {sd:>7}{verdict}"
    )


def sensitivity(records: Sequence[dict[str, Any]]) -> str:
    """Whether the rate is one at which bf16 alone shows, or empty where it was not trained."""
    of = {found["contender"]: found for found in records}
    if PURE.name not in of or of[BASELINE.name]["val_loss_sd"] is None:
        return ""
    loses = of[PURE.name]["difference"]
    spread = 100.0 * of[BASELINE.name]["val_loss_sd"] / of[BASELINE.name]["val_loss"]
    verdict = "more than" if loses > spread else "NOT more than"
    return (
        f"{PURE.name} loses {loses:.2f}%, {verdict} the seeds' own spread of {spread:.2f}% (standard deviation, fp32)"
    )


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """The lines of the table, each as soon as its runs are done; the baseline comes first."""
    jobs = [Job(c, seed, settings) for c in settings.combinations for seed in settings.seeds]
    with ExitStack() as stack:
        runs: Iterator[Run] = map(train, jobs)
        if settings.processes > 1:
            # Not forked: threads that torch has started would not be there.
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(settings.processes))
            runs = pool.imap(train, jobs)
        baseline: list[Run] = []
        for combination in settings.combinations:
            those = list(islice(runs, len(settings.seeds)))
            baseline = baseline or those
            yield record(combination, those, baseline, settings)


def arguments(words: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and few steps: does it run, not how good is it"
    )
    parser.add_argument("--output", metavar="FILE", help="append the results to FILE, a CSV file")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float, default=LR, help="the schedule's highest rate (default: %(default)g)")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="default: %(default)s")
    parser.add_argument(
        "--only", default="", metavar="TEXT[,TEXT]", help="only combinations whose name contains a TEXT"
    )
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    given = parser.parse_args(words)
    chosen = [c for c in COMBINATIONS if any(text in c.name for text in given.only.split(","))]
    if not chosen:
        parser.error(f"--only {given.only}: there are {', '.join(c.name for c in COMBINATIONS)}")
    return Settings(
        combinations=(BASELINE, *(c for c in chosen if c != BASELINE)),
        seeds=tuple(int(seed) for seed in given.seeds.split(",")),
        steps=given.steps or (5 if given.quick else STEPS),
        lr=given.lr,
        threads=given.threads,
        processes=given.processes,
        quick=given.quick,
        output=given.output,
    )


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    settings = arguments(words)
    torch.set_num_threads(settings.threads)
    here = facts.circumstances()
    print(f"{facts.heading(here)}\n\n{settings.steps} steps, lr {settings.lr:g}\n{head(settings.seeds)}", flush=True)
    records = []
    for found in measure(settings):
        print(line(found), flush=True)
        results.append(settings.output, [found], here)
        records.append(found)
    print(sensitivity(records))
    return records


if __name__ == "__main__":
    main()
