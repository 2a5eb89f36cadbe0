"""What the compiler makes of the Triton kernels, without a GPU: one line a kernel and target.

    python -m bench.triton_report [--target NAME] [--only TEXT] [--processes N]

Registers and bytes of spills are of a thread, shared memory is of a block; load and store: the widest access to global
memory, in bits; fma: multiply-adds that the compiler fused. Where a figure is not as promised (tests/triton_variants.py
says what is), the reason follows under its line and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The installed mo_fused goes before the checkout's folder of that name, which has no kernels.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT] + [str(ROOT / "tests"), str(ROOT)]

from triton_compile import compile_variant, compiling, problems  # noqa: E402 (needs the path above)
from triton_variants import TARGETS, variants  # noqa: E402

LINE = "{:<8}{:<38}{:>10}{:>8}{:>8}{:>7}{:>7}{:>6}"


def report(targets: list[str], only: str, processes: int) -> int:
    """Prints the table; returns how many compilations are not as promised."""
    print(f"Triton {version('triton')}")
    print(LINE.format("target", "kernel", "registers", "spills", "shared", "load", "store", "fma"))
    bad = 0
    with tempfile.TemporaryDirectory() as folder, compiling(Path(folder), processes) as pool:
        begun = [
            (target, variant, pool.submit(compile_variant, target, variant))
            for target in (TARGETS[name] for name in targets)
            for variant in variants(target).values()
            if only in variant.name
        ]
        for target, variant, future in begun:
            try:
                figures = future.result()
            except Exception as error:  # a compiler may raise anything; the table goes on
                found = [f"does not compile: {type(error).__name__}: {error}"]
                print(LINE.format(target.name, variant.name, *"------"))
            else:
                found = problems(target, variant, figures)
                widest = (max(figures.loads), max(figures.stores))
                row = (figures.registers, figures.spills, figures.shared, *widest, figures.fused)
                print(LINE.format(target.name, variant.name, *row))
            for one in found:
                print(f"{'':<8}! {one}")
            sys.stdout.flush()
            bad += bool(found)
    print(f"{len(begun)} compiled, {bad} not as promised")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="one GPU; may be repeated (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels with this text in their line")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="compilers at a time (default: 2)")
    args = parser.parse_args()
    sys.exit(1 if report(args.target or list(TARGETS), args.only, args.processes) else 0)
