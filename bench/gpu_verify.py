"""Checks of the GPU backend that the test-suite cannot make without a GPU, or only on small tensors.

    python bench/gpu_check.py verify [--dry-run] [--only NAME]

A check returns a line that says what it saw, or raises. With ``--dry-run`` those that make sense there run in Triton's
interpreter on tiny tensors of the CPU.
"""

from __future__ import annotations

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
from gpu_behaviour import beyond_32_bits, graphs, memory, no_sync, streams
from gpu_numbers import RULES, bits, norms, repeatable, scalers
from gpu_place import Place


@dataclass(frozen=True)
class Check:
    run: Callable[[Place], str]
    dry: bool = False
    """Makes sense on the CPU, in Triton's interpreter."""


CHECKS = {f"bits {rule}": Check(partial(bits, rule=rule), dry=True) for rule in RULES} | {
    "graphs": Check(graphs),
    "no sync": Check(no_sync),
    "streams": Check(streams),
    "repeatable": Check(repeatable, dry=True),
    "norms": Check(norms, dry=True),
    "scalers": Check(scalers, dry=True),
    "memory": Check(memory),
    "beyond 32 bits": Check(beyond_32_bits),
}
AT_A_TIME = 5
CHECK_SECONDS = 90


def run_here(place: Place, name: str) -> bool:
    """Runs one check and says how it went."""
    start = time.perf_counter()
    try:
        said = CHECKS[name].run(place)
        if not place.dry:
            torch.cuda.synchronize()
    except Exception as error:  # whatever it is, the other checks have something to say as well
        traceback.print_exc(file=sys.stdout)
        print(f"FAILED  {name}: {str(error)[:1200]}", flush=True)
        return False
    print(f"ok  {name} ({time.perf_counter() - start:.1f} s): {said}", flush=True)
    return True


def _in_a_process(name: str) -> bool:
    """A process for each check: an illegal access makes every later CUDA call of its process fail."""
    words = [sys.executable, sys.argv[0], "verify", "--only", name]
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"FAILED  {name}: not done after {CHECK_SECONDS} s", flush=True)
        return False
    text = done.stdout
    if not re.search(rf"^(ok|FAILED)  {re.escape(name)}\b", text, re.MULTILINE):
        text += f"FAILED  {name}: its process ended with status {done.returncode}\n"
    print(text, end="", flush=True)
    return done.returncode == 0


def run(dry: bool, only: str = "") -> int:
    """Runs the checks, on a GPU some of them at a time; a line each; 1 when one failed. ``only``: this check alone."""
    if only and only not in CHECKS:
        print(f"--only: expected one of {', '.join(CHECKS)}, found {only!r}", flush=True)
        return 2
    if not dry and not torch.cuda.is_available():
        print("FAILED  all checks: no GPU that torch can use; --dry-run runs on the CPU", flush=True)
        return 1
    names = [only] if only else list(CHECKS)
    if not dry and not only:
        # Most of the time goes into compiling kernels, on one core each.
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            return 0 if all(list(pool.map(_in_a_process, names))) else 1
    place = Place(torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device()), dry)
    passed = True
    for name in names:
        if dry and not CHECKS[name].dry:
            print(f"needs a GPU  {name}", flush=True)
        else:
            passed &= run_here(place, name)
    return 0 if passed else 1
