"""Host time of a step on a GPU: Python, the address scan and the preparation of launches, without any launch.

    python -m bench.bench_host                 # a CPU is enough; 500 tensors in 20 groups
    python -m bench.bench_host --backend cuda

Everything is real but the device: the tensors lie in the CPU's memory, so the kernels, which never run, get addresses
that a GPU could not read. Triton's driver is the stub of bench/stub_driver.py; of the CUDA backend the native call is
left out. Not counted: the driver's own launch call, about 3 us each. torch's fused AdamW is not shown beside it: its
host time cannot be taken apart from its CPU kernels; bench/gpu_check.sh measures both on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The installed mo_fused goes before the checkout's folder of that name, which has no kernels.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT] + [str(ROOT)]

import torch  # noqa: E402 (needs the path above)

import mo_fused  # noqa: E402
from bench import stub_driver  # noqa: E402
from mo_fused import dispatch  # noqa: E402
from mo_fused.backends import cuda  # noqa: E402


def median_ms(prepare: Callable[[int], None], step: Callable[[], None], repetitions: int) -> float:
    """Median of the step's time in milliseconds; ``prepare`` is called before each with its number, untimed."""
    times = []
    for i in range(repetitions):
        prepare(i)
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def cases(tensors: int, groups: int, repetitions: int, backend: str) -> dict[str, tuple[float, int]]:
    """(milliseconds, launches) by case."""
    params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(tensors)]
    grads = [[torch.ones(64) for _ in params] for _ in range(2)]
    settings = [{"params": params[g::groups], "weight_decay": 0.01 * g} for g in range(groups)]

    def give(which: int) -> None:
        for p, g in zip(params, grads[which], strict=True):
            p.grad = g

    give(0)
    out = {}
    options = {"bare step": {}, "clip + skip": {"max_grad_norm": 1.0, "skip_nonfinite": True}}
    options["clip + skip + stats"] = {**options["clip + skip"], "stats": True}
    for name, chosen in options.items():
        opt = mo_fused.AdamW(settings, lr=1e-3, backend=backend, **chosen)

        def new_rate(i: int, opt: torch.optim.Optimizer = opt) -> None:
            for group in opt.param_groups:
                group["lr"] = 1e-3 / (1 + i)

        for what, prepare in {
            "": lambda i: None,
            ", new learning rate": new_rate,
            ", every gradient elsewhere": lambda i: give(i % 2),
        }.items():
            for i in range(3):
                prepare(i)
                opt.step()
            stub_driver.launched.clear()
            prepare(3)
            opt.step()
            launches = len(stub_driver.launched)
            out[name + what] = (median_ms(prepare, opt.step, repetitions), launches)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton")
    parser.add_argument("--repetitions", type=int, default=200)
    args = parser.parse_args()
    if dispatch.native() is None:
        raise SystemExit(f"the address scan would run in Python: {dispatch.native_problem()}")
    # The kernels are offered the CPU's tensors, as in the tests.
    if args.backend == "triton":
        stub_driver.install()
        dispatch.triton_interprets = lambda: True
    else:
        dispatch.cuda_problem = lambda: ""
        dispatch.cuda_shim = lambda: True
        cuda.launch = lambda step: stub_driver.launched.append("cuda")
    print(f"{args.backend}: {args.tensors} tensors in {args.groups} groups, median of {args.repetitions}")
    for name, (ms, launches) in cases(args.tensors, args.groups, args.repetitions, args.backend).items():
        print(f"{name:<46} {ms:7.3f} ms  {launches} launches")


if __name__ == "__main__":
    main()
