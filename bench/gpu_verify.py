"""Checks of the GPU backends that the test-suite cannot make without a GPU, or only on small tensors.

    python bench/gpu_check.py verify [--dry-run] [--only NAME] [--backend NAME]

A check returns a line that says what it saw, or raises. With ``--dry-run`` those that make sense there run in Triton's
interpreter on tiny tensors of the CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from gpu_backends import BACKENDS, NEEDS_A_GPU, by_environment, under_test
from gpu_behaviour import beyond_32_bits, choice, graph_with_clip, graphs, memory, no_sync, streams
from gpu_numbers import RULES, bits, norms, repeatable, scalers
from gpu_offload import offload
from gpu_place import Place


@dataclass(frozen=True)
class Check:
    run: Callable[[Place], str]
    dry: bool = False
    """Makes sense on the CPU, in Triton's interpreter."""
    once: bool = False
    """Asks for its backends itself."""


CHECKS = {f"bits {rule}": Check(partial(bits, rule=rule), dry=True) for rule in RULES} | {
    "choice": Check(choice, once=True),
    "graphs": Check(graphs),
    "graph with clip": Check(graph_with_clip),
    "no sync": Check(no_sync),
    "streams": Check(streams),
    "repeatable": Check(repeatable, dry=True),
    "norms": Check(norms, dry=True),
    "scalers": Check(scalers, dry=True),
    "offload": Check(offload, dry=True),
    "memory": Check(memory),
    "beyond 32 bits": Check(beyond_32_bits),
}
AT_A_TIME = max(2, min(8, (os.cpu_count() or 1) // 2))
CHECK_SECONDS = 75


def title(name: str, backend: str) -> str:
    """How a check is called in the report."""
    return name if CHECKS[name].once else f"{backend}: {name}"


def run_here(place: Place, name: str) -> bool:
    """Runs one check and says how it went."""
    start = time.perf_counter()
    called = title(name, place.backend)
    try:
        with by_environment(place.backend):
            said = CHECKS[name].run(place)
        if not place.dry:
            torch.cuda.synchronize()
    except Exception as error:  # whatever it is, the other checks have something to say as well
        traceback.print_exc(file=sys.stdout)
        print(f"FAILED  {called}: {str(error)[:1200]}", flush=True)
        return False
    print(f"ok  {called} ({time.perf_counter() - start:.1f} s): {said}", flush=True)
    return True


def _in_a_process(backend: str, name: str) -> bool:
    """A process for each check and backend: an illegal access makes every later CUDA call of its process fail."""
    words = [sys.executable, sys.argv[0], "verify", "--only", name, "--backend", backend]
    called = title(name, backend)
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"FAILED  {called}: not done after {CHECK_SECONDS} s", flush=True)
        return False
    text = done.stdout
    if not re.search(rf"^(ok|FAILED)  {re.escape(called)}\b", text, re.MULTILINE):
        text += f"FAILED  {called}: its process ended with status {done.returncode}\n"
    print(text, end="", flush=True)
    return done.returncode == 0


def run(dry: bool, only: str = "", backend: str = "") -> int:
    """Runs the checks, on a GPU some of them at a time; a line each; 1 when one failed.

    Args:
        dry: on the CPU.
        only: this check alone.
        backend: this backend alone, whether or not it is thought to work here.
    """
    for word, known, value in (("--only", list(CHECKS), only), ("--backend", BACKENDS, backend)):
        if value and value not in known:
            print(f"{word}: expected one of {', '.join(known)}, found {value!r}", flush=True)
            return 2
    if not dry and not torch.cuda.is_available():
        print("FAILED  all checks: no GPU that torch can use; --dry-run runs on the CPU", flush=True)
        return 1
    backends = [backend] if backend else under_test(dry)
    if not backends:
        print("FAILED  all checks: no backend is left to check", flush=True)
        return 1
    todo = [(b, n) for b in backends for n in CHECKS if only in ("", n) and (b == backends[0] or not CHECKS[n].once)]
    if not dry and len(todo) > 1:
        # Most of the time goes into importing torch and compiling kernels, on one core each.
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            return 0 if all(list(pool.map(_in_a_process, *zip(*todo)))) else 1
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    passed = True
    for b, name in todo:
        if dry and not CHECKS[name].dry:
            print(f"{NEEDS_A_GPU}  {title(name, b)}", flush=True)
        else:
            passed &= run_here(Place(device, dry, b), name)
    return 0 if passed else 1
