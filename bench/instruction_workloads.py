"""What bench/instruction_guard.py counts: steps of fixed sizes, in one process under valgrind's callgrind.

    valgrind --tool=callgrind --instr-atstart=no --collect-atstart=no python bench/instruction_workloads.py REQUESTS.so

Of each workload some steps are made first, so that plans, states and Python's specialised bytecode are there; then
``STEPS`` are counted, one dump of callgrind for each workload. What prepares a step (gradients, learning rates) is not
counted. Prints what the counts depend on and what was counted, as JSON. Without an argument nothing is counted.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import platform
import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# The installed package: the path of a script begins with the script's folder, not with the checkout.
import mo_fused
from mo_fused import dispatch
from mo_fused.backends import cpu

WARM_UP = 20
"""Python specialises a function's bytecode after some calls, and a step calls some functions only once."""
STEPS = 4
ELEMENTS = 1 << 20
"""Of the native workloads: far more instructions than the Python code around one call."""
TENSORS, SMALL, GROUPS = 500, 64, 60


def nothing(step: int) -> None:
    """Nothing to prepare."""


@dataclass(frozen=True)
class Workload:
    step: Callable[[], Any]
    prepare: Callable[[int], None] = nothing
    """Called before each step with its number, not counted."""


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """With values and gradients that neither overflow nor vanish: sums that do are computed again."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).reshape(shape).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = p.detach() * 0.01
    return params


def native(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any) -> Workload:
    """One large tensor: the kernels."""
    return Workload(make(parameters([(1024, ELEMENTS // 1024)], dtype), lr=1e-3, **options).step)


def norm() -> Workload:
    """The pass that measures gradients."""
    grads = [p.grad for p in parameters([(ELEMENTS,)], torch.float32)]
    return Workload(lambda: mo_fused.get_total_norm([g for g in grads if g is not None]))


def host(groups: int = 1, elsewhere: bool = False, new_rate: bool = False, **options: Any) -> Workload:
    """Many small tensors: the Python code, and the native code for each tensor.

    ``elsewhere``: gradients lie where those of the step before did not, as after ``zero_grad()``. ``new_rate``: every
    group's learning rate is another, as with a scheduler.
    """
    params = parameters([(SMALL,)] * TENSORS, torch.float32)
    grads = [[p.grad.clone() for p in params if p.grad is not None] for _ in range(2)]
    settings = [{"params": params[g::groups], "weight_decay": 0.01 * g} for g in range(groups)]
    opt = mo_fused.AdamW(settings, lr=1e-3, **options)

    def prepare(step: int) -> None:
        if elsewhere:
            for p, grad in zip(params, grads[step % 2]):
                p.grad = grad
        if new_rate:
            for group in opt.param_groups:
                group["lr"] = 1e-3 / (1 + step)

    return Workload(opt.step, prepare)


CLIP: dict[str, Any] = {"max_grad_norm": 1.0, "skip_nonfinite": True}
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "native: AdamW fp32": lambda: native(mo_fused.AdamW),
    "native: AdamW bf16": lambda: native(mo_fused.AdamW, torch.bfloat16),
    "native: AdamW fp16": lambda: native(mo_fused.AdamW, torch.float16),
    "native: AdamW fp32, clip + skip": lambda: native(mo_fused.AdamW, **CLIP),
    "native: AdamW fp32, statistics": lambda: native(mo_fused.AdamW, stats=True),
    "native: AdamW fp32, int8 moments": lambda: native(mo_fused.AdamW, state_dtype="int8"),
    "native: AdamW bf16, split masters": lambda: native(mo_fused.AdamW, torch.bfloat16, master_weights="split"),
    "native: SGD fp32, momentum": lambda: native(mo_fused.SGD, momentum=0.9),
    "native: Adafactor fp32": lambda: native(mo_fused.Adafactor),
    "native: norm of fp32": norm,
    "host: step": host,
    "host: clip + skip, gradients elsewhere": lambda: host(elsewhere=True, **CLIP),
    "host: clip + skip, elsewhere, 60 groups": lambda: host(GROUPS, elsewhere=True, new_rate=True, **CLIP),
}


def count(name: str, workload: Workload, requests: ctypes.CDLL | None) -> None:
    for i in range(WARM_UP):
        workload.prepare(i)
        workload.step()
    gc.collect()
    if requests is not None:
        requests.start()
    for i in range(STEPS):
        workload.prepare(i)
        if requests is not None:
            requests.toggle()
        workload.step()
        if requests is not None:
            requests.toggle()
    if requests is not None:
        requests.dump(name.encode())
        requests.stop()


def fingerprint() -> dict[str, str]:
    """What decides how many instructions the same sources take."""
    shared = "shared library" if sysconfig.get_config_var("Py_ENABLE_SHARED") else "one program"
    tuned = "optimised" if "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "") else "plain"
    return {
        "machine": platform.machine(),
        "instruction set": cpu.instruction_set()[0],
        "libc": " ".join(platform.libc_ver()),
        "python": f"{platform.python_version()}, {platform.python_compiler()}, {tuned}, {shared}",
        "torch": torch.__version__.partition("+")[0],
        # GCC calls itself by the name of the program, c++ or g++.
        "compiler": re.sub(r"^\S*[cg]\+\+\S*", "GCC", str(dispatch.build_info().get("compiler"))),
    }


def main() -> None:
    requests = ctypes.CDLL(sys.argv[1]) if len(sys.argv) > 1 else None
    torch.set_num_threads(1)
    gc.disable()
    for name, make in WORKLOADS.items():
        count(name, make(), requests)
    print(json.dumps({"fingerprint": fingerprint(), "workloads": list(WORKLOADS), "steps": STEPS}))


if __name__ == "__main__":
    main()
