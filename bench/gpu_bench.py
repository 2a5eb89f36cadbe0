"""Races on a GPU: both backends of mo_fused and torch's fused optimizers, taking turns in one run.

    python bench/gpu_check.py bench [--dry-run] [--seconds N] [--json FILE]

Three times are taken of a step, by medians: one after the other on an idle device (what a loop that does nothing else
sees), with the host ahead of the device (what the device alone needs), and until the call returns (the host). All
contenders step the same parameters with the same gradients and the same state tensors.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_figures
import gpu_offload
import torch
from gpu_backends import under_test, why_not
from gpu_place import on_backend
from torch import Tensor

import mo_fused
from mo_fused.bench import facts as machine
from mo_fused.bench.case import Goal
from mo_fused.bench.peers import FUSED, OURS, share_state
from mo_fused.bench.race import Contender, DeviceClock, DeviceRace, HostClock, Sample
from mo_fused.bench.steps import after_clipping, clip_, under_scaler
from mo_fused.bench.workloads import DECAY, LR, MAX_NORM, gpt2_shapes, in_groups

GROUPS = 465
"""Of a model for which torch's fused step was reported to take 58.8 ms of host time."""
OWN_SCALER, TORCH_SCALER = "its scaler", "torch's scaler"
THEIRS = {"step": FUSED, "clip": f"{FUSED}, clipping", "scaler": f"{FUSED}, scaler, clipping"}
MAX_ROUNDS = 30
OFFLOAD_SECONDS, OFFLOAD_BATCH = 35.0, 32
"""For the training step with states on the host, which is the last race, and its sequences."""


def ours(backend: str, scaler: str = "") -> str:
    """The name of a contender of ours."""
    return f"{OURS} {backend}, {scaler}" if scaler else f"{OURS} {backend}"


# -- contenders -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Where the races are held."""

    device: torch.device
    dry: bool
    backends: Sequence[str]
    """Those of ours that take part."""

    def parameters(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """Parameters with random values and gradients, made where they are needed: two billion take long elsewhere."""
        generator = torch.Generator(self.device).manual_seed(0)
        params: list[Tensor] = []
        for shape in shapes:
            p = torch.nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device=self.device))
            p.data.normal_(0.0, 0.02, generator=generator)
            p.grad = torch.empty_like(p).normal_(0.0, 1e-3, generator=generator)
            params.append(p)
        return params


Make = Callable[..., torch.optim.Optimizer]

MAKERS: dict[str, tuple[Make, Make]] = {
    "AdamW": (
        partial(mo_fused.AdamW, lr=LR, weight_decay=DECAY),
        partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY, fused=True),
    ),
    "SGD": (partial(mo_fused.SGD, lr=LR, momentum=0.9), partial(torch.optim.SGD, lr=LR, momentum=0.9, fused=True)),
}
"""(ours, torch's) by rule."""


def our_options(backend: str, how: str) -> dict[str, Any]:
    """Arguments of our optimizer, which clips by itself."""
    return {"backend": backend, "max_grad_norm": None if how == "step" else MAX_NORM}


def race(stage: Stage, rule: str, how: str, params: list[Tensor], groups: Any) -> list[Contender]:
    """Contenders of a race: ours with each backend, torch's last.

    Args:
        stage: where, and with which backends.
        rule: "AdamW" or "SGD".
        how: "step", "clip" or "scaler" (with clipping).
        params: all parameters.
        groups: the same as an optimizer takes them.
    """
    our, their = MAKERS[rule]
    numel, size = sum(p.numel() for p in params), params[0].element_size()

    def contender(name: str, call: Callable[[], Any], extra: str) -> Contender:
        return Contender(name, call, float(numel * gpu_figures.bytes_a_parameter(rule, extra, size)))

    under = partial(under_scaler, device=stage.device)
    out: list[Contender] = []
    steppers: list[torch.optim.Optimizer] = []
    for backend in stage.backends:
        own = our(groups(), **our_options(backend, how))
        steppers.append(own)
        if how == "scaler":
            second = our(groups(), **our_options(backend, how))
            steppers.append(second)
            by_own = under(mo_fused.GradScaler, optimizer=own, clipped=[])
            by_torchs = under(torch.amp.GradScaler, optimizer=second, clipped=[])
            out += [
                contender(ours(backend, OWN_SCALER), by_own, "own scaler, clip inside"),
                contender(ours(backend, TORCH_SCALER), by_torchs, "torch's scaler, clip inside"),
            ]
        else:
            out.append(contender(ours(backend), own.step, "clip inside" if how == "clip" else "step"))
    other = their(groups())
    share_state([*steppers, other])
    if how == "scaler":
        call, extra = under(torch.amp.GradScaler, optimizer=other, clipped=params), "torch's scaler, clip before"
    elif how == "clip":
        call, extra = after_clipping(other.step, params), "clip before"
    else:
        call, extra = other.step, "step"
    return [*out, contender(THEIRS[how], call, extra)]


def agree(stage: Stage, backend: str, rule: str, how: str, dtype: torch.dtype) -> None:
    """Refuses to time what does not do the same as torch's: some steps on small tensors, compared."""
    our, their = MAKERS[rule]
    first, second = (stage.parameters([(33, 7), (129,), (1,)], dtype) for _ in range(2))
    one, other = our(first, **our_options(backend, how)), their(second)
    for step in range(2 if stage.dry else 3):
        for p, q in zip(first, second, strict=True):
            p.grad = torch.full_like(p, 0.1 * (step + 1))
            q.grad = p.grad.clone()
        if how != "step":
            clip_(second)
        one.step()
        other.step()
    on_backend(one, backend)
    digits = {torch.bfloat16: 2.0**-7}.get(dtype, 1e-5)
    for p, q in zip(first, second, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=digits, atol=3 * LR * digits)


# -- the cases --------------------------------------------------------------------------------------------------------

Shapes = Sequence[Sequence[int]]

MODELS: dict[str, Shapes] = {
    "GPT-2 0.1 B": gpt2_shapes(),
    "GPT-2 0.5 B": gpt2_shapes(layers=24, width=1280),
    "GPT-2 1.9 B": gpt2_shapes(layers=36, width=2048),
}
MANY: dict[str, Shapes] = {"1000 x 64": [(64,)] * 1000, "500 x 64x64": [(64, 64)] * 500}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HOST_MS = 1.0
"""A step of many small tensors or groups keeps the host for less than this."""


@dataclass(frozen=True)
class Case:
    """One race."""

    workload: str
    shapes: Shapes
    dtype: str
    how: str
    rule: str = "AdamW"
    groups: int = 1
    in_memory: bool = True
    """Far larger than the caches, so that bytes per second mean something."""

    @property
    def title(self) -> str:
        words = {"step": "step", "clip": "clip + step", "scaler": "scaler + clip + step"}[self.how]
        return f"{self.workload}, {words}"

    def goals(self, backends: Sequence[str]) -> list[Goal]:
        """The same for every backend."""
        if not self.in_memory:
            return []  # the goal is the host's time
        wanted = {
            "step": {"": 1.0},
            "clip": {"": 1.25},
            "scaler": {OWN_SCALER: 1.4, TORCH_SCALER: 1.15},
        }[self.how]
        return [Goal(ours(b, scaler), THEIRS[self.how], least) for b in backends for scaler, least in wanted.items()]


def cases() -> list[Case]:
    """What matters most comes first: the clock may cut the list short."""
    order = ("GPT-2 0.5 B", "GPT-2 1.9 B", "GPT-2 0.1 B")
    both = ("step", "clip")
    hows = dict.fromkeys(order[:2], (*both, "scaler")) | {order[2]: both}
    out = [Case(name, MODELS[name], dtype, how) for name in order for dtype in DTYPES for how in hows[name]]
    for name, shapes in MANY.items():
        out += [Case(name, shapes, dtype, how, in_memory=False) for dtype in DTYPES for how in both]
    name, shapes = next(iter(MANY.items()))
    grouped = f"{name}, {GROUPS} groups"
    out += [Case(grouped, shapes, dtype, how, groups=GROUPS, in_memory=False) for dtype in DTYPES for how in both]
    sgd = f"{order[0]}, SGD momentum"
    return out + [Case(sgd, MODELS[order[0]], dtype, how, rule="SGD") for dtype in DTYPES for how in both]


def dry_cases() -> list[Case]:
    """One of each kind, tiny. SGD in fp32 alone: torch's fused SGD on the CPU loses a part of a bf16 buffer."""
    model, many = gpt2_shapes(1, 4, 30, 8)[1:3], [(64,)] * 2
    return [
        Case("GPT-2 tiny", model, "fp32", "step"),
        Case("GPT-2 tiny", model, "bf16", "clip"),
        Case("GPT-2 tiny", model, "fp32", "scaler"),
        Case("2 x 64, 2 groups", many, "fp32", "clip", groups=2, in_memory=False),
        Case("GPT-2 tiny, SGD momentum", model, "fp32", "clip", rule="SGD"),
    ]


def records(case: Case, held: DeviceRace, copy: float, stage: Stage) -> list[dict[str, Any]]:
    """One record a contender, with the names of bench/results and what only a device has."""
    backend_of = {ours(b, scaler): b for b in stage.backends for scaler in ("", OWN_SCALER, TORCH_SCALER)}
    contenders = {c.name: c for c in held.contenders}
    samples: dict[str, Sample] = held.samples()
    of_device = {name: gpu_figures.quartiles(times)[1] for name, times in held.device_times.items()}
    of_host = {name: gpu_figures.quartiles(times)[1] for name, times in held.host_times.items()}
    reference = THEIRS[case.how]
    out = []
    for name, sample in samples.items():
        moved = contenders[name].bytes if case.in_memory else 0.0
        rate = gpu_figures.gb_per_s(moved, of_device[name])
        goals = [
            {
                "label": "ratio",
                "limit": g.ratio,
                "at_most": g.at_most,
                "measured": g.measured(samples),
                "reached": g.reached(samples),
            }
            for g in case.goals(stage.backends)
            if g.subject == name
        ]
        if not case.in_memory and name != reference:
            host = of_host[name] * 1e3
            goals.append(
                {"label": "host ms", "limit": HOST_MS, "at_most": True, "measured": host, "reached": host <= HOST_MS}
            )
        copied = gpu_figures.share(rate, copy)
        if case.in_memory and case.how == "step" and name != reference and copied:
            goals.append(
                {"label": "copy", "limit": 0.9, "at_most": False, "measured": copied, "reached": copied >= 0.9}
            )
        out.append(
            {
                "bench": "gpu",
                "case": case.title,
                "dtype": case.dtype,
                "contender": name,
                "backend": backend_of.get(name),
                "quick": stage.dry,
                "median_ms": sample.median * 1e3,
                "low_ms": sample.low * 1e3,
                "high_ms": sample.high * 1e3,
                "device_ms": of_device[name] * 1e3,
                "host_ms": of_host[name] * 1e3,
                "rounds": sample.rounds,
                "calls_a_round": sample.calls,
                "elements": sum(p_numel(shape) for shape in case.shapes),
                "bytes": moved or None,
                "gb_per_s": rate,
                "share_of_copy": copied,
                "ratio_to_torch": None if name == reference else samples[reference].median / sample.median,
                "device_ratio_to_torch": None if name == reference else of_device[reference] / of_device[name],
                "goals": goals,
            }
        )
    return out


def p_numel(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape."""
    numel = 1
    for n in shape:
        numel *= n
    return numel


def hold(case: Case, stage: Stage, clock: HostClock | DeviceClock, budget_s: float) -> DeviceRace:
    """Set-up, warm-up and the rounds of one case."""
    params = stage.parameters(case.shapes, DTYPES[case.dtype])
    contenders = race(
        stage, case.rule, case.how, params, lambda: in_groups(params, case.groups) if case.groups > 1 else params
    )
    held = DeviceRace(contenders, 1e-4 if stage.dry else 0.01, clock)
    held.warm_up()
    held.run(budget_s, 1 if stage.dry else MAX_ROUNDS)
    return held


def able(case: Case, stage: Stage) -> list[str]:
    """The backends that do in this case what torch's optimizer does; says so about the others."""
    found = []
    for backend in stage.backends:
        try:
            agree(stage, backend, case.rule, case.how, DTYPES[case.dtype])
            found.append(backend)
        except Exception as error:  # the other backends race all the same
            traceback.print_exc()
            print(f"FAILED  {case.title} {case.dtype}, {ours(backend)}: {str(error)[:500]}", flush=True)
    if not found:
        raise RuntimeError("no backend does what torch's optimizer does")
    return found


def circumstances(device: torch.device, copy: float, dry: bool) -> dict[str, Any]:
    """Machine and versions, as in bench/results, with the GPU."""
    facts = machine.circumstances(device)
    facts["commit"] = facts["commit"] or os.environ.get("MO_FUSED_COMMIT")
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    facts["cuda_kernels"] = why_not("cuda", dry) or "raced"
    return {**facts, "cuda": torch.version.cuda, "copy_gb_per_s": copy}


def with_offload(device: torch.device, dry: bool, seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """A training step with states on the host; its records, and whether it failed."""
    if not dry and seconds < 15.0:
        print("note: no time was left for the training step with offload", flush=True)
        return [], False
    size = gpu_offload.TINY if dry else gpu_offload.SIZES["0.1 B"]
    try:
        done = gpu_offload.race(device, size, 1 if dry else OFFLOAD_BATCH, seconds - 5.0, 2 if dry else 12, dry)
    except Exception as error:  # the races have something to say as well
        traceback.print_exc()
        print(f"FAILED  training step with offload: {str(error)[:500]}", flush=True)
        return [], True
    for note in done.notes:
        print(f"note: {note}", flush=True)
    return gpu_offload.gpu_records(done), False


def append(path: Path | None, records: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    """One JSON object a line: what is read afterwards needs nothing but the standard library."""
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({**record, **facts}) + "\n" for record in records)


def copy_rate(device: torch.device, clock: HostClock | DeviceClock, dry: bool) -> float:
    """GB/s of a large copy on the device, bytes read and written both counted."""
    numel = (1 << 12) if dry else (1 << 29)  # 2 GiB: far larger than the caches
    source, target = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    times = [clock.slot(lambda: target.copy_(source), 2, 1e-4).ahead for _ in range(3 if dry else 12)]
    rate = gpu_figures.gb_per_s(8.0 * numel, gpu_figures.quartiles(times[2:])[1])
    assert rate is not None
    return rate


def run(dry: bool, seconds: float, output: Path | None) -> int:
    """All cases within ``seconds``; 1 when one failed. A case that there was no time for is named, and no failure."""
    start = time.perf_counter()
    end = start + seconds
    seconds -= min(OFFLOAD_SECONDS, seconds / 4)
    if not dry and not torch.cuda.is_available():
        print("FAILED  all cases: no GPU that torch can use; --dry-run runs on the CPU", flush=True)
        return 1
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    backends, clock = under_test(dry), HostClock() if dry else DeviceClock()
    if not backends:
        print("FAILED  all cases: no backend is left to race", flush=True)
        return 1
    copy = copy_rate(device, clock, dry)
    facts = circumstances(device, copy, dry)
    print(machine.heading(facts), flush=True)
    print(f"note: {facts['gpu'] or 'CPU'}, a plain copy moves {copy:.0f} GB/s (read and written)", flush=True)
    # Optimizers import it when they are made first. What is there now would take a fifth of a second of every round's
    # garbage collection.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
    todo, all_records, failed, late = dry_cases() if dry else cases(), [], 0, []
    for i, case in enumerate(todo):
        left = seconds - (time.perf_counter() - start)
        if left < 2.0:
            late.append(f"{case.title} {case.dtype}")
            continue
        began = time.perf_counter()
        try:
            stage = Stage(device, dry, able(case, Stage(device, dry, backends)))
            failed += len(stage.backends) < len(backends)
            # What is left is dealt out to what is left; setting up takes some of it.
            found = records(case, hold(case, stage, clock, 0.5 * left / (len(todo) - i)), copy, stage)
            append(output, found, facts)
            all_records += found
            print(f"{case.title} {case.dtype}: {time.perf_counter() - began:.1f} s", flush=True)
        except Exception as error:  # the other cases have something to say as well
            failed += 1
            traceback.print_exc()
            print(f"FAILED  {case.title} {case.dtype}: {str(error)[:500]}", flush=True)
        gc.collect()
        if not dry:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # an illegal access: nothing more can be had from this process
                print(f"FAILED  all later cases: {error}", flush=True)
                break
            torch.cuda.empty_cache()
    else:  # unless the device is lost
        found, lost = with_offload(device, dry, end - time.perf_counter())
        append(output, found, facts)
        all_records += found
        failed += lost
    if late:
        print(f"note: no time was left for {len(late)} cases: {'; '.join(late)}", flush=True)
    if not dry:
        print(f"note: at the end a copy moves {copy_rate(device, clock, dry):.0f} GB/s", flush=True)
    print(gpu_figures.table(all_records), flush=True)
    gc.unfreeze()
    return 1 if failed or not all_records else 0
