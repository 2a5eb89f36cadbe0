"""What nvcc makes of csrc/cuda: registers, spills, 128-bit accesses, and no fused multiply-add.

No GPU is needed. The PTX is what is searched for fma: machine code has it inside of IEEE division and square root, to
which they expand.
"""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from package_build import NO_NVCC, machine_nvcc

CSRC = Path(__file__).resolve().parent.parent / "csrc"
ARCHS = (80, 90)
KERNELS = sorted(p.stem for p in (CSRC / "cuda").glob("*_kernel.cu"))
# Instances of a kernel that has several: updates for each kind of statistics (Adafactor's has two), all of them for
# float64 parameters and for all others.
INSTANCES = {
    "adamw_kernel": 6,
    "sgd_kernel": 6,
    "adafactor_kernel": 4,
    "factor_sums_kernel": 2,
    "factored_rms_kernel": 2,
}
# Three blocks of 256 threads on a multiprocessor of 65536 registers. Kernels over float64 parameters, whose values take
# two registers each, have the limit of two blocks.
REGISTERS = 80
FLOAT64_REGISTERS = 128


NVCC = machine_nvcc()
if NVCC is None:
    pytest.skip(NO_NVCC, allow_module_level=True)


def flags() -> list[str]:
    lines = (CSRC / "flags.txt").read_text(encoding="utf-8").splitlines()
    return next(line.split()[2:] for line in lines if line.startswith("nvcc "))


def cuobjdump() -> str:
    """Triton brings one along."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


@dataclass
class Entry:
    """One kernel (one instance of a template) for one architecture."""

    name: str
    registers: int
    spilled: int
    stack: int


@dataclass
class Compiled:
    entries: list[Entry]
    sass: str
    ptx: str


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def compile_one(stem: str, arch: int, folder: Path) -> Compiled:
    source, out = CSRC / "cuda" / f"{stem}.cu", folder / f"{stem}.{arch}"
    common = [*flags(), "-O3", "-DMO_ISA=device", "-I", str(CSRC), str(source)]
    assert NVCC
    real = [f"-arch=compute_{arch}", f"-code=sm_{arch}"]
    report = run(*NVCC, "-cubin", *real, "-Xptxas", "-v", *common, "-o", f"{out}.cubin")
    run(*NVCC, "-ptx", f"-arch=compute_{arch}", *common, "-o", f"{out}.ptx")
    entries = []
    pattern = (
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) .*?Used (\d+) reg"
    )
    for name, stack, stores, loads, registers in re.findall(pattern, report, re.S):
        entries.append(Entry(name, int(registers), int(stores) + int(loads), int(stack)))
    return Compiled(entries, run(cuobjdump(), "-sass", f"{out}.cubin"), Path(f"{out}.ptx").read_text())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Compiled]:
    folder = tmp_path_factory.mktemp("cubins")
    keys = [(stem, arch) for stem in KERNELS for arch in ARCHS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(keys, pool.map(lambda key: compile_one(*key, folder), keys), strict=True))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", KERNELS)
def test_resources(stem: str, arch: int, compiled: dict[tuple[str, int], Compiled]) -> None:
    entries = compiled[stem, arch].entries
    assert len(entries) == INSTANCES.get(stem, 1), [e.name for e in entries]
    for entry in entries:
        assert entry.spilled == 0 and entry.stack == 0, entry
        wide = re.search(r"kernelI(?:Li\dE)?dE", entry.name)
        assert entry.registers <= (FLOAT64_REGISTERS if wide else REGISTERS), entry


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", KERNELS)
def test_nothing_is_fused_or_approximate(stem: str, arch: int, compiled: dict[tuple[str, int], Compiled]) -> None:
    ptx = compiled[stem, arch].ptx
    assert ".visible .entry" in ptx or ".entry" in ptx
    bad = re.findall(r"^\s*(?:@\S+\s+)?((?:fma|mad)\.\S*f(?:32|64)|\S+\.(?:approx|ftz|full)\S*)\s", ptx, re.M)
    assert not bad, sorted(set(bad))
    if stem == "adamw_kernel":
        assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx and "sqrt.rn.f64" in ptx


# Loads and stores of 16 bytes, in the instance of that name and in all that are not named. AdamW: four operands (five
# with AMSGrad), SGD: three, in at least two dtypes; float64 goes by 8 bytes when statistics are taken. Adafactor's
# update: parameter, gradient, roots, with and without a moment, of matrices and of vectors; without statistics 16-bit
# parameters too, whose roots are two. Its first pass: rows of 512 elements in each dtype, vectors, parameters; its
# second: gradient, roots, moments of vectors.
ACCESSES = {
    ("adamw_kernel", ""): (9, 7),
    ("adamw_kernel", "Li1Ed"): None,
    ("adamw_kernel", "Li2Ed"): None,
    ("sgd_kernel", ""): (5, 3),
    ("sgd_kernel", "Li1Ed"): None,
    ("sgd_kernel", "Li2Ed"): None,
    ("grad_stats_kernel", ""): (3, 0),
    ("scale_grad_kernel", ""): (3, 3),
    ("adafactor_kernel", ""): (14, 6),
    ("adafactor_kernel", "Li0Ef"): (30, 10),
    ("factor_sums_kernel", ""): (14, 0),
    ("factor_sums_kernel", "d"): (10, 0),
    ("factored_rms_kernel", ""): (13, 5),
    ("factored_rms_kernel", "d"): (3, 1),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", sorted({stem for stem, _ in ACCESSES}))
def test_accesses_of_128_bits(stem: str, arch: int, compiled: dict[tuple[str, int], Compiled]) -> None:
    """In every entry: the loads of fp32, bf16 and fp16 operands, and the stores of what it writes."""
    parts = re.split(r"Function : ", compiled[stem, arch].sass)[1:]
    assert len(parts) == len(compiled[stem, arch].entries)
    for part in parts:
        name = part.split("\n", 1)[0]
        kind = re.search(r"kernelI?((?:Li\d)?E?[df]?)E", name)
        wanted = ACCESSES.get((stem, kind[1] if kind else ""), ACCESSES[stem, ""])
        if wanted is None:
            continue
        loads, stores = wanted
        assert len(re.findall(r"LDG\.E(?:\.\w+)*\.128", part)) >= loads, name
        assert len(re.findall(r"STG\.E(?:\.\w+)*\.128", part)) >= stores, name


def test_a_fused_build_is_noticed(tmp_path: Path) -> None:
    """The search for fma finds it when fusion is on."""
    assert NVCC
    on = [f.replace("-fmad=false", "-fmad=true") for f in flags()]
    (tmp_path / "fused.cu").write_text("__global__ void k(float* x) { x[0] = x[1] * x[2] + x[3]; }\n")
    for extra, expected in ((on, True), (flags(), False)):
        out = tmp_path / "k.ptx"
        run(*NVCC, "-ptx", "-arch=compute_80", *extra, str(tmp_path / "fused.cu"), "-o", str(out))
        assert ("fma.rn.f32" in out.read_text()) is expected
