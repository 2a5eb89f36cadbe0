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
UPDATES = ("adamw_kernel", "sgd_kernel")
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
    # Updates: three kinds of statistics, for float64 parameters and for all others.
    assert len(entries) == (6 if stem in UPDATES else 1), [e.name for e in entries]
    for entry in entries:
        assert entry.spilled == 0 and entry.stack == 0, entry
        wide = stem in UPDATES and re.search(r"kernelILi\dEd", entry.name)
        assert entry.registers <= (FLOAT64_REGISTERS if wide else REGISTERS), entry


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", KERNELS)
def test_nothing_is_fused_or_approximate(stem: str, arch: int, compiled: dict[tuple[str, int], Compiled]) -> None:
    ptx = compiled[stem, arch].ptx
    assert ".visible .entry" in ptx or ".entry" in ptx
    bad = re.findall(r"^\s*(?:@\S+\s+)?((?:fma|mad)\.\S*f(?:32|64)|\S+\.(?:approx|ftz|full)\S*)\s", ptx, re.M)
    assert not bad, sorted(set(bad))
    if stem in UPDATES and stem.startswith("adamw"):
        assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx and "sqrt.rn.f64" in ptx


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", ["adamw_kernel", "sgd_kernel", "grad_stats_kernel", "scale_grad_kernel"])
def test_accesses_of_128_bits(stem: str, arch: int, compiled: dict[tuple[str, int], Compiled]) -> None:
    """In every entry: the loads of fp32, bf16 and fp16 operands, and the stores of what it writes."""
    parts = re.split(r"Function : ", compiled[stem, arch].sass)[1:]
    assert len(parts) == len(compiled[stem, arch].entries)
    # Loads: AdamW four operands (five with AMSGrad), SGD three; in at least two dtypes of 16 bytes at a time.
    loads = {"adamw_kernel": 9, "sgd_kernel": 5, "grad_stats_kernel": 3, "scale_grad_kernel": 3}[stem]
    stores = {"adamw_kernel": 7, "sgd_kernel": 3, "grad_stats_kernel": 0, "scale_grad_kernel": 3}[stem]
    for part in parts:
        sums_of_wide = re.search(r"kernelILi[12]Ed", part.split("\n", 1)[0])
        if sums_of_wide:  # float64 goes by 8 bytes when statistics are taken
            continue
        assert len(re.findall(r"LDG\.E(?:\.\w+)*\.128", part)) >= loads, part.split("\n", 1)[0]
        assert len(re.findall(r"STG\.E(?:\.\w+)*\.128", part)) >= stores, part.split("\n", 1)[0]


def test_a_fused_build_is_noticed(tmp_path: Path) -> None:
    """The search for fma finds it when fusion is on."""
    assert NVCC
    on = [f.replace("-fmad=false", "-fmad=true") for f in flags()]
    (tmp_path / "fused.cu").write_text("__global__ void k(float* x) { x[0] = x[1] * x[2] + x[3]; }\n")
    for extra, expected in ((on, True), (flags(), False)):
        out = tmp_path / "k.ptx"
        run(*NVCC, "-ptx", "-arch=compute_80", *extra, str(tmp_path / "fused.cu"), "-o", str(out))
        assert ("fma.rn.f32" in out.read_text()) is expected
