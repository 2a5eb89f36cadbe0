"""Builds the native part of mo_fused: writes a build.ninja and runs ninja. Everything else stands in pyproject.toml.

Environment variables:

- ``MO_FUSED_NATIVE``: ``auto`` (default) builds the native part when the machine can and falls back to a pure-Python
  package with a warning; ``1`` makes a missing native part an error; ``0`` leaves it out.
- ``CXX``, ``CPPFLAGS``, ``CXXFLAGS``, ``LDFLAGS``: as everywhere; flags that change results are dropped with a warning.
- ``MAX_JOBS``: the number of compilers at a time (default: ninja's choice).

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
OPTIMISE = ["-O3", "-g0", "-DNDEBUG"]
# These make bits depend on the compiler and the machine; at the link, -Ofast and -ffast-math also switch denormal
# numbers off for the whole process.
CHANGES_RESULTS = re.compile(
    r"-Ofast|-ffast-math|-funsafe-math-optimizations|-fassociative-math|-freciprocal-math|-ffinite-math-only"
    r"|-fno-signed-zeros|-ffp-contract=.*|-ffp-model=.*|-fopenmp.*|-mfma|-mdaz-ftz"
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


@dataclass
class Toolchain:
    """What a native build needs, found and tried."""

    cxx: list[str]
    compiler: str
    ninja: list[str]
    common: list[str]
    includes: list[str]
    isas: dict[str, list[str]] = field(default_factory=dict)
    isas_missing: dict[str, str] = field(default_factory=dict)


def say(text: str) -> None:
    print(f"{PACKAGE}: {text}", file=sys.stderr, flush=True)


def native_mode() -> str:
    mode = os.environ.get("MO_FUSED_NATIVE", "").strip().lower() or "auto"
    if mode not in ("auto", "0", "1"):
        raise CompileError(f"MO_FUSED_NATIVE={mode!r}: expected 0, 1 or auto; set one of these or unset it")
    return mode


def jobs() -> list[str]:
    text = os.environ.get("MAX_JOBS", "").strip()
    if not text:
        return []
    if not text.isdecimal() or int(text) < 1:
        raise CompileError(f"MAX_JOBS={text!r}: expected a whole number of at least 1; set one or unset it")
    return ["-j", text]


def env_flags(name: str) -> list[str]:
    flags = shlex.split(os.environ.get(name, ""))
    dropped = [f for f in flags if CHANGES_RESULTS.fullmatch(f)]
    if dropped:
        say(f"warning: {' '.join(dropped)} in {name} is left out, because it would change results")
    return [f for f in flags if f not in dropped]


def attempt(command: list[str]) -> tuple[bool, str]:
    """Runs a command; (did it succeed, what it printed)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return False, f"{command[0]}: {error.strerror}"
    return done.returncode == 0, (done.stdout + done.stderr).strip()


def first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it printed nothing")


def read_flags() -> tuple[list[str], dict[str, list[str]]]:
    """csrc/flags.txt for this machine: the flags of every source, and those of each further instruction set."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    common: list[str] = []
    isas: dict[str, list[str]] = {"base": []}
    for line in (CSRC / "flags.txt").read_text(encoding="utf-8").splitlines():
        where, *rest = line.split() or ["#"]
        if where not in ("*", machine):
            continue
        name, *flags = rest
        if name == "common":
            common = flags
        else:
            isas[name] = flags
    return common, isas


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
        ok, text = attempt([*cxx, *common, "-O3", "-shared", "-pthread", str(source), "-o", str(out)])
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


def find_toolchain() -> Toolchain:
    """Finds and tries everything that a native build needs. Raises ``Unavailable``."""
    if sys.platform != "linux":
        raise Unavailable(f"the native part is built on Linux only, this is {sys.platform}", "use the eager backend")
    common, isas = read_flags()
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
    return chain


def write_ninja(chain: Toolchain, folder: Path, target: Path) -> None:
    """Writes build.ninja into ``folder``: kernels once per instruction set, every other source once."""

    def path(p: Path) -> str:
        return re.sub(r"([$ :])", r"$\1", os.path.relpath(p, folder))

    def words(args: list[str]) -> str:
        return shlex.join(args).replace("$", "$$")

    defines = [f"-DMO_HAVE_{isa.upper()}=1" for isa in chain.isas if isa != "base"]
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
        f"  command = $cxx -shared -pthread {words(env_flags('LDFLAGS'))} $in -o $out",
        "  description = link $out",
    ]
    objects: list[str] = []

    def compile_one(source: Path, suffix: str, extra: list[str]) -> None:
        objects.append(f"obj/{source.relative_to(CSRC).with_suffix('')}{suffix}.o")
        lines.extend([f"build {objects[-1]}: compile {path(source)}", f"  extra = {words(extra)}"])

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


def build_native(target: Path) -> dict[str, object]:
    """Builds the extension and copies it to ``target``; returns what belongs in build_info.json about it."""
    import fcntl  # not on every system, unlike this file

    at_a_time = jobs()
    chain = find_toolchain()
    # Not setuptools' build_temp: that is a new folder for every editable install, and ninja would start from nothing.
    folder = ROOT / "build" / f"native-{sysconfig.get_config_var('SOABI')}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_ninja(chain, folder, target)
        ok, text = attempt([*chain.ninja, "-C", str(folder), *at_a_time])
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
    return {
        "compiler": chain.compiler,
        "flags": [*chain.common, *OPTIMISE],
        "isas": chain.isas,
        "isas_missing": chain.isas_missing,
        "platform": sysconfig.get_platform(),
        "python": sysconfig.get_config_var("SOABI"),
    }


class Build(build):
    """A build that starts from an empty package: what was deleted from the source must not survive in the wheel."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib, PACKAGE), ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """setuptools' build_ext with ninja in place of its compiler, and with a package without native part as fallback."""

    def build_extensions(self) -> None:
        mode = native_mode()
        target = Path(self.get_ext_fullpath(EXTENSION))
        info: dict[str, object] = {"version": self.distribution.get_version(), "native": True}
        try:
            if mode == "0":
                raise Unavailable("MO_FUSED_NATIVE=0 was set when the package was built", "unset it and install again")
            info.update(build_native(target))
        except Unavailable as error:
            if mode == "1":
                raise CompileError(
                    f"MO_FUSED_NATIVE=1 asks for the native part, but {error.reason}.\n"
                    f"What to do: {error.remedy}; or set MO_FUSED_NATIVE=auto for a package without it."
                ) from error
            info.update(native=False, reason=error.reason, remedy=error.remedy)
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


setup(
    ext_modules=[Extension(EXTENSION, sources=[str(s.relative_to(ROOT)) for s in (*BORDER, *KERNELS)])],
    cmdclass={"build": Build, "build_ext": BuildNative},
)
