"""Builds the native part of mo_fused: writes a build.ninja and runs ninja. Everything else stands in pyproject.toml.

Environment variables:

- ``MO_FUSED_NATIVE``: ``auto`` (default) builds the native part when the machine can and falls back to a pure-Python
  package with a warning; ``1`` makes a missing native part an error; ``0`` leaves it out.
- ``MO_FUSED_CUDA``: the same for the CUDA kernels in the native part; where no nvcc is, ``auto`` leaves them out in
  silence. ``NVCC`` names the nvcc; else PATH, ``CUDA_HOME``, ``CUDA_PATH`` and /usr/local/cuda are searched.
- ``MO_FUSED_CUDA_ARCHS``: the GPUs to compile for, such as ``80;90`` (default: all of ``ARCHS`` that nvcc knows).
- ``CXX``, ``CPPFLAGS``, ``CXXFLAGS``, ``LDFLAGS``, ``NVCC_PREPEND_FLAGS``, ``NVCC_APPEND_FLAGS``: as everywhere; flags
  that change results are dropped with a warning.
- ``MAX_JOBS``: the number of compilers at a time (default: ninja's choice; of nvcc, one for every 2 GB of free memory).

What was built, or why nothing was, is written to ``mo_fused/build_info.json``, which ``mo-fused doctor`` reads.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
PACKAGE = "mo_fused"
EXTENSION = f"{PACKAGE}._native"
# The sources that know Python, and those that do not.
BORDER = sorted(CSRC.glob("*.cpp"))
KERNELS = sorted(CSRC.glob("cpu/*.cpp"))
CUDA_SOURCES = sorted(CSRC.glob("cuda/*.cu"))
OPTIMISE = ["-O3", "-g0", "-DNDEBUG"]
# These make bits depend on the compiler and the machine; at the link, -Ofast and -ffast-math also switch denormal
# numbers off for the whole process.
CHANGES_RESULTS = re.compile(
    r"-Ofast|-ffast-math|-funsafe-math-optimizations|-fassociative-math|-freciprocal-math|-ffinite-math-only"
    r"|-fno-signed-zeros|-ffp-contract=.*|-ffp-model=.*|-fopenmp.*|-mfma|-mdaz-ftz"
)
CHANGES_DEVICE_RESULTS = re.compile(r"(?<!\S)--?(?:use_fast_math|(?:fmad|ftz|prec-div|prec-sqrt)[=\s]\s*\S+)(?!\S)")
OLDEST_CUDA = (12, 4)
USUAL_NVCC = "/usr/local/cuda/bin/nvcc"
ARCHS = ("75", "80", "86", "89", "90", "100", "120")
CUDA_PROBE = """
__global__ void probe(float* a) { if constexpr (true) a[threadIdx.x] *= 2; }
int start(float* a) { probe<<<1, 32>>>(a); return int(cudaGetLastError()); }
"""
# macOS: a module to be loaded, whose names of Python are looked up in the process that loads it.
SHARED = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
# Programs that stand before a compiler and are none.
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")
GET_NVCC = (
    f"install NVIDIA's CUDA toolkit, {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]} or newer, "
    "or name the nvcc of an installed one with NVCC"
)
GET_COMPILER = (
    "install a C++17 compiler (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; "
    "conda: conda install cxx-compiler), or name one with CXX"
)


class Unavailable(Exception):
    """The native part cannot be built: what is missing, and what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


class NoCuda(Unavailable):
    """The native part can be built, but not its CUDA kernels."""


@dataclass
class Cuda:
    """An nvcc that compiles, for which GPUs, and the static runtime that goes with it."""

    nvcc: list[str]
    version: str
    archs: list[str]
    flags: list[str]
    host_flags: list[str]
    libs: list[str]


@dataclass
class Toolchain:
    """What a native build needs, found and tried. ``cuda`` may be the reason why there is none."""

    cxx: list[str]
    compiler: str
    ninja: list[str]
    common: list[str]
    includes: list[str]
    isas: dict[str, list[str]] = field(default_factory=dict)
    isas_missing: dict[str, str] = field(default_factory=dict)
    cuda: Cuda | NoCuda = field(default_factory=lambda: NoCuda("it was not looked for", GET_NVCC))


def say(text: str) -> None:
    print(f"{PACKAGE}: {text}", file=sys.stderr, flush=True)


def choice(name: str, text: str) -> str:
    """The value of a variable that is 0, 1 or auto."""
    mode = text.strip().lower() or "auto"
    if mode not in ("auto", "0", "1"):
        raise CompileError(f"{name}={mode!r}: expected 0, 1 or auto; set one of these or unset it")
    return mode


def native_mode() -> str:
    return choice("MO_FUSED_NATIVE", os.environ.get("MO_FUSED_NATIVE", ""))


def cuda_mode() -> str:
    return choice("MO_FUSED_CUDA", os.environ.get("MO_FUSED_CUDA", ""))


def max_jobs() -> int | None:
    text = os.environ.get("MAX_JOBS", "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise CompileError(f"MAX_JOBS={text!r}: expected a whole number of at least 1; set one or unset it")
    return int(text)


def nvccs_at_a_time(meminfo: Path = Path("/proc/meminfo")) -> int:
    """One nvcc for every 2 GB of available memory, at least one, and no more than MAX_JOBS."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", meminfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    fitting = max(1, int(found[1]) * 1024 // 2_000_000_000) if found else 1
    return min(fitting, max_jobs() or fitting)


def env_flags(name: str) -> list[str]:
    flags = shlex.split(os.environ.get(name, ""))
    dropped = [f for f in flags if CHANGES_RESULTS.fullmatch(f)]
    if dropped:
        say(f"warning: {' '.join(dropped)} in {name} is left out, because it would change results")
    return [f for f in flags if f not in dropped]


def nvcc_environment(archs: int = 1) -> dict[str, str]:
    """The environment for nvcc: without flags that change results, and with leave to compile for several GPUs at once.

    Threads go this way and not into build.ninja, where another number would compile everything again.
    """
    env = dict(os.environ)
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        dropped = [found[0] for found in CHANGES_DEVICE_RESULTS.finditer(env.get(name, ""))]
        if dropped:
            say(f"warning: {' '.join(dropped)} in {name} is left out, because it would change results")
            env[name] = CHANGES_DEVICE_RESULTS.sub("", env[name])
    # One or two sources take most of the time, so few threads each keep many cores busy.
    threads = min((max_jobs() or os.cpu_count() or 1) // 4, archs)
    if threads > 1:
        env["NVCC_APPEND_FLAGS"] = f"{env.get('NVCC_APPEND_FLAGS', '')} --threads {threads}".strip()
    return env


def attempt(command: list[str], env: dict[str, str] | None = None) -> tuple[bool, str]:
    """Runs a command; (did it succeed, what it printed)."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return False, f"{command[0]}: {error.strerror}"
    return done.returncode == 0, (done.stdout + done.stderr).strip()


def first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it printed nothing")


def machine() -> str:
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def read_flags() -> tuple[list[str], dict[str, list[str]], list[str]]:
    """csrc/flags.txt for this machine: the flags of every C++ source, those of each instruction set, and nvcc's."""
    common: list[str] = []
    isas: dict[str, list[str]] = {"base": []}
    device: list[str] = []
    for line in (CSRC / "flags.txt").read_text(encoding="utf-8").splitlines():
        where, *rest = line.split() or ["#"]
        if where not in ("*", "nvcc", machine()):
            continue
        name, *flags = rest
        if where == "nvcc":
            device = flags
        elif name == "common":
            common = flags
        else:
            isas[name] = flags
    return common, isas, device


def find_compiler(common: list[str], folder: Path) -> tuple[list[str], str]:
    """A compiler that links a C++17 shared library: CXX when it is set, else the first that works."""
    source, out = folder / "probe.cpp", folder / "probe.so"
    source.write_text(
        "#include <thread>\n"
        "void probe(float* a, int n) { if constexpr (true) { for (int i = 0; i < n; ++i) a[i] *= 2; } }\n"
        "void start(float* a) { std::thread(probe, a, 64).join(); }\n"
    )
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [[c] for c in ("c++", "g++", "clang++") if shutil.which(c)]
    if not candidates:
        raise Unavailable("no C++ compiler was found (looked for c++, g++ and clang++)", GET_COMPILER)
    why = ""
    for cxx in candidates:
        out.unlink(missing_ok=True)
        ok, text = attempt([*cxx, *common, "-O3", *SHARED, "-pthread", str(source), "-o", str(out)])
        if ok and out.exists():
            return cxx, (attempt([*cxx, "--version"])[1].splitlines() or ["unknown"])[0]
        why = why or f"{shlex.join(cxx)} cannot build a C++17 shared library ({first_error(text)})"
    raise Unavailable(why, GET_COMPILER)


def find_ninja() -> list[str]:
    candidates = [["ninja"]] if shutil.which("ninja") else []
    if importlib.util.find_spec("ninja"):
        candidates.append([sys.executable, "-m", "ninja"])
    for ninja in candidates:
        if attempt([*ninja, "--version"])[0]:
            return ninja
    raise Unavailable("ninja was not found", "install it (pip install ninja)")


def find_includes() -> list[str]:
    """The include folders of the sources that know Python; as system headers, so that our warnings stay ours."""
    if not importlib.util.find_spec("pybind11"):
        raise Unavailable("pybind11 was not found", "install it (pip install pybind11)")
    import pybind11

    python = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    if not any(Path(folder, "Python.h").exists() for folder in python):
        raise Unavailable(
            f"Python.h was not found in {python[0]}",
            "install Python's headers (Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel)",
        )
    return [arg for folder in dict.fromkeys([pybind11.get_include(), *python]) for arg in ("-isystem", folder)]


def nvcc_candidates() -> list[list[str]]:
    """NVCC when it is set, else every nvcc in the usual places, best first."""
    chosen = shlex.split(os.environ.get("NVCC", ""))
    if chosen:
        return [chosen]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [shutil.which("nvcc"), *(os.path.join(home, "bin", "nvcc") for home in homes if home), USUAL_NVCC]
    return [[place] for place in dict.fromkeys(places) if place and shutil.which(place)]


def nvcc_release(text: str) -> tuple[str, tuple[int, int]] | None:
    """The line with the release in what ``nvcc --version`` printed, and the release as (major, minor)."""
    found = re.search(r"^.*\brelease (\d+)\.(\d+).*$", text, re.MULTILINE)
    return (found[0].strip(), (int(found[1]), int(found[2]))) if found else None


def known_archs(codes: str, archs: str) -> list[str]:
    """What both of nvcc's lists name, as "90", oldest first; without the variants (90a) that no other GPU runs."""
    real, virtual = (
        set(re.findall(rf"^{kind}_(\d+)$", text, re.M)) for kind, text in (("sm", codes), ("compute", archs))
    )
    return sorted(real & virtual, key=int)


def choose_archs(asked: str, known: list[str]) -> list[str]:
    """The GPUs to compile for, oldest first: those in MO_FUSED_CUDA_ARCHS (80, 8.0, sm_80), else those of ``ARCHS``."""
    if not asked.strip():
        return [arch for arch in ARCHS if arch in known]
    names = [name for name in re.split(r"[;,\s]+", asked) if name]
    archs = {re.sub(r"^(?:sm|compute)_|^(\d+)\.(?=\d$)", r"\1", name): name for name in names}
    unknown = [name for arch, name in archs.items() if arch not in known]
    if unknown or not archs:
        raise CompileError(
            f"MO_FUSED_CUDA_ARCHS={asked!r}: nvcc does not know {', '.join(unknown) or 'a GPU without name'}. "
            f"It knows {', '.join(known)}; name some of these, such as 80;90, or unset it. NVCC names another nvcc."
        )
    return sorted(archs, key=int)


def gencode(archs: list[str]) -> list[str]:
    """Machine code for every one of ``archs``, and for newer GPUs the newest one's PTX, which their driver compiles."""
    *older, newest = archs
    real = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in older]
    return [*real, f"-gencode=arch=compute_{newest},code=[sm_{newest},compute_{newest}]"]


def host_flags(cxx: list[str], common: list[str]) -> list[str]:
    """nvcc's flags for the compiler of the host code."""
    host = cxx[1:] if len(cxx) > 1 and Path(cxx[0]).name in LAUNCHERS else cxx
    passed = [*host[1:], *(flag for flag in common if not flag.startswith("-std="))]
    # nvcc splits at commas.
    return [f"-ccbin={host[0]}", *("-Xcompiler=" + flag.replace(",", r"\,") for flag in passed)]


def runtime_places(dry_run: str) -> list[str]:
    """The folders that may hold the static runtime, from what ``nvcc --dryrun`` printed and from the environment."""
    variables = dict(re.findall(r"^#\$ (TOP|LIBRARIES)=(.*)$", dry_run, re.MULTILINE))
    linked = [arg[2:] for arg in shlex.split(variables.get("LIBRARIES", "")) if arg.startswith("-L")]
    roots = [variables.get("TOP", "").strip(), os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    target = {"aarch64": "sbsa"}.get(machine(), machine())
    subfolders = ("lib64", f"targets/{target}-linux/lib", "lib")
    return [*linked, *(os.path.join(root, sub) for root in roots if root for sub in subfolders)]


def try_nvcc(nvcc: list[str], chain: Toolchain, device: list[str], folder: Path) -> Cuda:
    """Compiles and links a kernel. Raises ``NoCuda``."""
    name = shlex.join(nvcc)
    env = nvcc_environment()
    ok, text = attempt([*nvcc, "--version"])
    release = nvcc_release(text)
    if not ok or not release:
        raise NoCuda(f"{name} does not run ({first_error(text)})", GET_NVCC)
    version, numbers = release
    if numbers < OLDEST_CUDA:
        raise NoCuda(f"{name} is too old (CUDA {numbers[0]}.{numbers[1]})", GET_NVCC)
    known = known_archs(*(attempt([*nvcc, option], env)[1] for option in ("--list-gpu-code", "--list-gpu-arch")))
    archs = choose_archs(os.environ.get("MO_FUSED_CUDA_ARCHS", ""), known)
    if not archs:
        raise NoCuda(f"{name} knows none of the GPUs {', '.join(ARCHS)}", GET_NVCC)
    source, obj, out = folder / "kernel.cu", folder / "kernel.o", folder / "kernel.so"
    source.write_text(CUDA_PROBE)
    flags = [*device, "-O3", "-DNDEBUG"]
    host = host_flags(chain.cxx, chain.common)
    ok, text = attempt([*nvcc, *flags, *gencode(archs[-1:]), *host, "-c", str(source), "-o", str(obj)], env)
    if not ok or not obj.exists():
        raise NoCuda(
            f"{name} cannot compile a kernel ({first_error(text)})",
            "name a compiler that this nvcc takes with CXX, or another nvcc with NVCC",
        )
    places = runtime_places(attempt([*nvcc, "--dryrun", str(source)], env)[1])
    runtime = next((place for place in places if Path(place, "libcudart_static.a").exists()), None)
    get_runtime = (
        "install the whole CUDA toolkit (conda: conda install cuda-cudart-static), or name another nvcc with NVCC"
    )
    if runtime is None:
        raise NoCuda(f"the static runtime of {name}, libcudart_static.a, was not found", get_runtime)
    # Hidden, so that it is never mixed with the CUDA runtime that torch has loaded.
    hidden = "-Wl,--exclude-libs,libcudart_static.a"
    libs = [f"-L{os.path.realpath(runtime)}", "-lcudart_static", "-ldl", "-lrt", "-lpthread", hidden]
    ok, text = attempt([*chain.cxx, *chain.common, "-shared", "-pthread", str(obj), *libs, "-o", str(out)])
    if not ok or not out.exists():
        raise NoCuda(f"a kernel cannot be linked with the static runtime of {name} ({first_error(text)})", get_runtime)
    return Cuda(nvcc, version, archs, flags, host, libs)


def find_cuda(chain: Toolchain, device: list[str], folder: Path) -> Cuda | NoCuda:
    """The first nvcc that works, or why there is none. Raises ``NoCuda`` where MO_FUSED_CUDA=1 asks for one."""
    mode = cuda_mode()
    if mode == "0":
        return NoCuda("MO_FUSED_CUDA=0 was set when the package was built", "unset it and install again")
    candidates = nvcc_candidates()
    why = NoCuda("nvcc was not found (looked at NVCC, PATH, CUDA_HOME, CUDA_PATH and /usr/local/cuda)", GET_NVCC)
    for i, nvcc in enumerate(candidates):
        try:
            return try_nvcc(nvcc, chain, device, folder)
        except NoCuda as error:
            why = error if i == 0 else why
    if mode == "1":
        raise why
    if candidates:
        warn_without_cuda(why)
    return why


def warn_without_cuda(why: Unavailable) -> None:
    say(
        f"WARNING: built without the CUDA kernels: {why.reason}.\n"
        f"  What to do: {why.remedy}. MO_FUSED_CUDA=1 turns this warning into an error, MO_FUSED_CUDA=0 silences it."
    )


def find_toolchain() -> Toolchain:
    """Finds and tries everything that a native build needs. Raises ``Unavailable``."""
    if sys.platform not in ("linux", "darwin"):
        why = f"the native part is built on Linux and macOS only, this is {sys.platform}"
        raise Unavailable(why, "use the eager backend")
    common, isas, device = read_flags()
    common = [*env_flags("CPPFLAGS"), *env_flags("CXXFLAGS"), *common]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cxx, compiler = find_compiler(common, folder)
        chain = Toolchain(cxx, compiler, find_ninja(), common, find_includes())
        for isa, flags in isas.items():
            probe = [*cxx, *common, *flags, "-O3", "-c", str(folder / "probe.cpp"), "-o", str(folder / "probe.o")]
            ok, text = attempt(probe)
            if ok:
                chain.isas[isa] = flags
            else:
                chain.isas_missing[isa] = f"the compiler does not take its flags ({first_error(text)})"
                say(f"warning: no {isa} kernels: {chain.isas_missing[isa]}")
        chain.cuda = find_cuda(chain, device, folder)
    return chain


def write_ninja(chain: Toolchain, folder: Path, target: Path) -> None:
    """Writes build.ninja into ``folder``: CPU kernels once per instruction set, every other source once."""

    def path(p: Path) -> str:
        return re.sub(r"([$ :])", r"$\1", os.path.relpath(p, folder))

    def words(args: list[str]) -> str:
        return shlex.join(args).replace("$", "$$")

    cuda = chain.cuda if isinstance(chain.cuda, Cuda) else None
    defines = [f"-DMO_HAVE_{isa.upper()}=1" for isa in chain.isas if isa != "base"]
    if cuda:
        defines.append("-DMO_HAVE_CUDA=1")
    lines = [
        "ninja_required_version = 1.5",
        f"cxx = {words(chain.cxx)}",
        f"flags = {words([*chain.common, *OPTIMISE, *defines])} -I {path(CSRC)}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags $extra -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        "rule link",
        f"  command = $cxx {words(SHARED)} -pthread {words(env_flags('LDFLAGS'))} $in $libs -o $out",
        "  description = link $out",
    ]
    if cuda:
        device = [*cuda.flags, "-DMO_ISA=device", "-DMO_HAVE_CUDA=1", *gencode(cuda.archs), *cuda.host_flags]
        lines += [
            f"libs = {words(cuda.libs)}",
            f"nvcc = {words(cuda.nvcc)}",
            "pool nvcc",
            f"  depth = {nvccs_at_a_time()}",
            "rule nvcc",
            f"  command = $nvcc -MD -MF $out.d {words(device)} -I {path(CSRC)} -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  pool = nvcc",
            "  description = compile $out",
        ]
    objects: list[str] = []

    def compile_one(source: Path, suffix: str, extra: list[str], rule: str = "compile") -> None:
        objects.append(f"obj/{source.relative_to(CSRC).with_suffix('')}{suffix}.o")
        lines.extend([f"build {objects[-1]}: {rule} {path(source)}", f"  extra = {words(extra)}"])

    for source in CUDA_SOURCES if cuda else []:  # first, because they take longest
        compile_one(source, "", [], "nvcc")
    for source in BORDER:
        compile_one(source, "", chain.includes)
    for source in KERNELS:
        if source.stem.endswith("_kernel"):
            for isa, flags in chain.isas.items():
                compile_one(source, f".{isa}", [f"-DMO_ISA={isa}", *flags])
        else:
            compile_one(source, "", [])
    lines += [f"build {target.name}: link {' '.join(objects)}", f"default {target.name}", ""]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text("\n".join(lines), encoding="utf-8")


def try_import(library: Path) -> None:
    """Loads the library in a process of its own: a shared library links even when a symbol is missing."""
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location(*sys.argv[1:]); m = u.module_from_spec(s); "
        "s.loader.exec_module(m)"
    )
    ok, text = attempt([sys.executable, "-c", code, EXTENSION, str(library)])
    if not ok:
        raise Unavailable(
            f"the native part was built but does not load ({text.splitlines()[-1]})",
            "report this message; MO_FUSED_NATIVE=0 installs without it",
        )


def compile_native(chain: Toolchain, folder: Path, target: Path) -> None:
    """Compiles the extension in ``folder``, loads it, and copies it to ``target``. Raises ``Unavailable``."""
    write_ninja(chain, folder, target)
    limit = max_jobs()
    env = nvcc_environment(len(chain.cuda.archs)) if isinstance(chain.cuda, Cuda) else None
    ok, text = attempt([*chain.ninja, "-C", str(folder), *(["-j", str(limit)] if limit else [])], env)
    print(text, flush=True)
    if not ok:
        raise Unavailable(
            f"compiling the native part failed ({first_error(text)})",
            f"the compiler is {chain.compiler}; try another with CXX, or report the output above; "
            "MO_FUSED_NATIVE=0 installs without it",
        )
    if "_PYTHON_HOST_PLATFORM" not in os.environ:
        try_import(folder / target.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / target.name, target)


def build_native(target: Path) -> dict[str, object]:
    """Builds the extension and copies it to ``target``; returns what belongs in build_info.json about it."""
    import fcntl  # not on every system, unlike this file

    max_jobs()  # a bad value is an error before anything else happens
    chain = find_toolchain()
    # Not setuptools' build_temp: that is a new folder for every editable install, and ninja would start from nothing.
    folder = ROOT / "build" / f"native-{sysconfig.get_config_var('SOABI')}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            compile_native(chain, folder, target)
        except Unavailable as error:
            if isinstance(chain.cuda, NoCuda) or cuda_mode() == "1":
                raise
            chain.cuda = NoCuda(f"with them, {error.reason}", f"report the output above ({chain.cuda.version})")
            warn_without_cuda(chain.cuda)
            compile_native(chain, folder, target)
    return {
        "compiler": chain.compiler,
        "flags": [*chain.common, *OPTIMISE],
        "isas": chain.isas,
        "isas_missing": chain.isas_missing,
        "platform": sysconfig.get_platform(),
        "python": sysconfig.get_config_var("SOABI"),
        **cuda_info(chain.cuda),
    }


def cuda_info(cuda: Cuda | NoCuda) -> dict[str, object]:
    if isinstance(cuda, NoCuda):
        return {"cuda": False, "cuda_reason": cuda.reason, "cuda_remedy": cuda.remedy}
    return {"cuda": True, "cuda_archs": cuda.archs, "cuda_flags": cuda.flags, "nvcc": cuda.version}


class Build(build):
    """A build that starts from an empty package: what was deleted from the source must not survive in the wheel."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib, PACKAGE), ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """setuptools' build_ext with ninja in place of its compiler, and with a package without native part as fallback."""

    def build_extensions(self) -> None:
        native, cuda = native_mode(), cuda_mode()
        target = Path(self.get_ext_fullpath(EXTENSION))
        info: dict[str, object] = {"version": self.distribution.get_version(), "native": True}
        try:
            if native == "0":
                raise Unavailable("MO_FUSED_NATIVE=0 was set when the package was built", "unset it and install again")
            info.update(build_native(target))
        except Unavailable as error:
            if native == "1" and not isinstance(error, NoCuda):
                raise CompileError(
                    f"MO_FUSED_NATIVE=1 asks for the native part, but {error.reason}.\n"
                    f"What to do: {error.remedy}; or set MO_FUSED_NATIVE=auto for a package without it."
                ) from error
            if cuda == "1":
                raise CompileError(
                    f"MO_FUSED_CUDA=1 asks for the CUDA kernels, but {error.reason}.\n"
                    f"What to do: {error.remedy}; or set MO_FUSED_CUDA=auto for a package without them."
                ) from error
            info.update(native=False, reason=error.reason, remedy=error.remedy)
            info.update(cuda_info(NoCuda("there is no native part", error.remedy)))
            say(
                f"WARNING: built without the native part: {error.reason}.\n"
                f"  The package works, but its optimizers run on the slower eager backend.\n"
                f"  What to do: {error.remedy}. MO_FUSED_NATIVE=1 turns this warning into an error."
            )
            self.extensions = []
        built, _ = self.info_files()
        built.parent.mkdir(parents=True, exist_ok=True)
        built.write_text(json.dumps(info, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def info_files(self) -> tuple[Path, Path]:
        """build_info.json in the build folder and beside the sources."""
        package = Path(self.get_finalized_command("build_py").get_package_dir(PACKAGE))
        return Path(self.build_lib, PACKAGE, "build_info.json"), package / "build_info.json"

    def copy_extensions_to_source(self) -> None:
        built, beside_source = self.info_files()
        if not self.extensions:  # an older build would go on being imported
            (beside_source.parent / Path(self.get_ext_filename(EXTENSION)).name).unlink(missing_ok=True)
        super().copy_extensions_to_source()
        self.copy_file(str(built), str(beside_source))

    def get_outputs(self) -> list[str]:
        outputs = super().get_outputs()
        return outputs if self.inplace else [*outputs, str(self.info_files()[0])]

    def get_output_mapping(self) -> dict[str, str]:
        mapping = super().get_output_mapping()
        if self.inplace:
            built, beside_source = self.info_files()
            mapping[str(built)] = str(beside_source)
        return mapping


if __name__ == "__main__":  # so that tests can import the functions above
    sources = [str(s.relative_to(ROOT)) for s in (*BORDER, *KERNELS)]
    setup(ext_modules=[Extension(EXTENSION, sources=sources)], cmdclass={"build": Build, "build_ext": BuildNative})
