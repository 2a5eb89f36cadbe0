"""Packaging, seen from outside: the checkout becomes an sdist, the sdist a wheel, the wheel an installed package.

Builds run without isolation when the ``test`` extra's build requirements are there (they then need no network), else
isolated. The native part is compiled once, without its CUDA kernels (tests/test_cuda_build.py has those); every further
build reuses its objects or ends before the compiler.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email import message_from_string
from pathlib import Path

import pytest
from package_build import ROOT, copy_of_checkout, run

NO_ISOLATION = (
    all(importlib.util.find_spec(name) for name in ("pybind11", "ninja"))
    and int(importlib.metadata.version("setuptools").split(".")[0]) >= 77  # the first that reads our licence field
)
ISOLATION = ["--no-isolation"] if NO_ISOLATION else []
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

# An editable mo_fused serves, by its finder, also the modules that the one under test lacks.
NOT_EDITABLE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith("__editable__")]
"""

STEP = """
import json, sys, torch, mo_fused
p = torch.nn.Parameter(torch.ones(5))
opt = mo_fused.AdamW([p], lr=0.1, max_grad_norm=1.0)
p.grad = torch.full((5,), 2.0)
opt.step()
try:
    import mo_fused._native
    native = True
except ImportError:
    native = False
print(json.dumps({
    "file": mo_fused.__file__, "version": mo_fused.__version__, "native": native, "p": p.tolist(),
    "backends": [record.backend for record in opt.explain()],
}))
"""


def build(kind: str, folder: Path, out: Path, **env: str) -> Path:
    done = run([sys.executable, "-m", "build", *ISOLATION, f"--{kind}", "-o", str(out), "."], folder, **env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (made,) = out.iterdir()
    return made


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and newer
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    (tree,) = folder.iterdir()
    return tree


def install(wheel: Path, target: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    done = run([*pip, str(wheel)], target.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def files_under(*tops: str, suffixes: tuple[str, ...]) -> set[str]:
    found = (path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in suffixes)
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of the checkout, so that nothing is written into the checkout."""
    return build("sdist", copy_of_checkout(tmp_path_factory.mktemp("checkout")), tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def tree(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist in which the native part is built."""
    return unpack(sdist, tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with native part, built where importing torch is an error."""
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "torch.py").write_text("raise ImportError('a build must not need torch')\n")
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"), MO_FUSED_NATIVE="1", PYTHONPATH=str(blocked))


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native part, taken out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        return Path(archive.extract(name, tmp_path_factory.mktemp("library")))


def test_sdist_holds_sources_and_tests_and_nothing_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    suffixes = (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".txt", ".sh", ".typed")
    wanted = files_under("csrc", "tests", "mo_fused", "triton_kernels", suffixes=suffixes)
    assert "csrc/cuda/step.cu" in wanted
    assert wanted - names == set()
    assert {name for name in names if name.endswith((".so", ".o", ".pyc", "build_info.json"))} == set()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "setup.py", "pyproject.toml"} <= names


def test_wheel_holds_exactly_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [n for n in names if n.endswith(".dist-info/METADATA")]
        info = metadata.partition("/")[0]
        fields = message_from_string(archive.read(metadata).decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        built = json.loads(archive.read("mo_fused/build_info.json"))
    assert {name.partition("/")[0] for name in names} == {"mo_fused", info}
    modules = {name for name in names if name.endswith((".py", ".pyi", ".typed"))}
    kernels = {f"mo_fused/{name}" for name in files_under("triton_kernels", suffixes=(".py",))}
    assert modules == files_under("mo_fused", suffixes=(".py", ".pyi", ".typed")) | kernels
    assert "mo-fused = mo_fused.cli:main" in entry_points
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.10"
    required = [text for text in fields.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert required == ["torch>=2.6", "numpy"]
    extras = {"triton", "train", "report", "test", "bench", "plot", "tensorboard", "all"}
    assert extras <= set(fields.get_all("Provides-Extra", []))
    assert built["native"] is True
    assert built["version"] == fields["Version"]
    assert "base" in built["isas"]
    assert built["cuda"] is False
    assert built["cuda_reason"].startswith("MO_FUSED_CUDA=0 was set")


def test_native_part_links_neither_torch_nor_openmp(library: Path) -> None:
    done = run(["readelf", "--dynamic", "--wide", str(library)], library.parent)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout))
    system = re.compile(r"lib(stdc\+\+|gcc_s|c|m|pthread|dl|rt)\.so\.\d+|ld-linux.*\.so\.\d+")
    assert needed, done.stdout + done.stderr
    assert {name for name in needed if not system.fullmatch(name)} == set()


def test_native_part_has_no_fused_multiply_add_and_no_fast_math(library: Path) -> None:
    """Contraction changes bits between instruction sets; fast-math at the link sets flush-to-zero at start-up."""
    done = run(["objdump", "--disassemble", "--no-show-raw-insn", str(library)], library.parent)
    instructions = set(re.findall(r"^\s*[0-9a-f]+:\s+([a-z]\w*)", done.stdout, re.MULTILINE))
    assert len(instructions) > 20, done.stderr
    fused = r"v?fn?m(add|sub|la|ls|addsub|subadd)\w*"
    assert {name for name in instructions if re.fullmatch(fused + r"|v?ldmxcsr|fpcr", name)} == set()


def test_wider_kernels_share_no_code_with_the_rest(wheel: Path, tree: Path) -> None:
    """A weak symbol of an AVX object may be what the linker keeps for all: older CPUs would then run AVX code."""
    objects = [path for path in tree.glob("build/native-*/obj/cpu/*_kernel.*.o") if not path.name.endswith(".base.o")]
    assert len(objects) > 0 or platform.machine() not in ("x86_64", "AMD64")
    shared = {}
    for path in objects:
        done = run(["nm", "--defined-only", "--demangle", str(path)], path.parent)
        assert done.returncode == 0, done.stderr
        shared[path.name] = re.findall(r"^[0-9a-f]+ [WVu] (.+)$", done.stdout, re.MULTILINE)
    assert {name: symbols for name, symbols in shared.items() if symbols} == {}


def test_wheel_installs_and_runs_natively(wheel: Path, tmp_path: Path, run_python: RunPython) -> None:
    target = install(wheel, tmp_path / "target")
    done = run_python("-c", NOT_EDITABLE + STEP, env={"PYTHONPATH": str(target), "MO_FUSED_BACKEND": ""})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["file"] == str(target / "mo_fused" / "__init__.py")
    assert said["native"] is True
    assert said["backends"] == ["cpu"]
    assert said["version"] in wheel.name
    assert all(value < 1 for value in said["p"])
    doctor = run([str(target / "bin" / "mo-fused"), "doctor"], tmp_path, PYTHONPATH=str(target))
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert said["version"] in doctor.stdout


def test_editable_install_builds_in_place(wheel: Path, tree: Path, tmp_path: Path, run_python: RunPython) -> None:
    """Runs after the wheel's build in the same tree: its objects are reused, so nothing is compiled again."""
    code = "import setuptools.build_meta as b; b.build_editable('editable')"
    done = run([sys.executable, "-c", code], tree, MO_FUSED_NATIVE="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    if NO_ISOLATION:
        assert "ninja: no work to do" in done.stdout
    (made,) = (tree / "editable").glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tmp_path / "site")
    # -I: no PYTHONPATH and no current folder. An installed mo_fused would win: the finder is put first. That of an
    # editable one has the same name as this one's: it is forgotten and this one's folder searched first.
    start = (
        f"import site, sys; folder = {str(tmp_path / 'site')!r}\n"
        "for name in [name for name in sys.modules if name.startswith('__editable__')]: del sys.modules[name]\n"
        "sys.path.insert(0, folder); site.addsitedir(folder); sys.meta_path.insert(0, sys.meta_path.pop())\n"
    )
    ran = run_python("-I", "-c", start + STEP, env={"MO_FUSED_BACKEND": ""})
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["file"] == str(tree / "mo_fused" / "__init__.py")
    assert said["backends"] == ["cpu"]


def test_without_compiler_the_package_is_pure_python_and_works(
    sdist: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, run_python: RunPython
) -> None:
    tree = unpack(sdist, tmp_path_factory.mktemp("pure"))
    wheel = build("wheel", tree, tmp_path / "wheel", CXX="/bin/false")
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == []
        built = json.loads(archive.read("mo_fused/build_info.json"))
    assert built["native"] is False
    assert "/bin/false" in built["reason"]
    assert "install a C++17 compiler" in built["remedy"]
    target = install(wheel, tmp_path / "target")
    done = run_python("-c", NOT_EDITABLE + STEP, env={"PYTHONPATH": str(target), "MO_FUSED_BACKEND": ""})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["file"] == str(target / "mo_fused" / "__init__.py")
    assert said["native"] is False
    assert said["backends"] == ["eager"]
    assert all(value < 1 for value in said["p"])
    doctor = run([str(target / "bin" / "mo-fused"), "doctor"], tmp_path, PYTHONPATH=str(target))
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "/bin/false" in doctor.stdout, "doctor says why there is no native part"


@pytest.mark.parametrize(
    ("env", "status", "texts"),
    [
        ({"CXX": "/bin/false"}, 0, ["WARNING: built without the native part", "apt-get install g++"]),
        ({"CXX": "/bin/false", "MO_FUSED_NATIVE": "1"}, 1, ["MO_FUSED_NATIVE=1 asks", "apt-get install g++"]),
        ({"CXX": "no-such-c++", "MO_FUSED_NATIVE": "1"}, 1, ["no-such-c++: No such file", "install a C++17 compiler"]),
        ({"CXX": "/bin/true", "MO_FUSED_NATIVE": "1"}, 1, ["/bin/true cannot build", "install a C++17 compiler"]),
        ({"MO_FUSED_NATIVE": "0"}, 0, ["WARNING: built without", "MO_FUSED_NATIVE=0 was set"]),
        ({"MO_FUSED_NATIVE": "yes"}, 1, ["MO_FUSED_NATIVE='yes': expected 0, 1 or auto"]),
        ({"MO_FUSED_CUDA": "on"}, 1, ["MO_FUSED_CUDA='on': expected 0, 1 or auto"]),
        ({"MO_FUSED_CUDA": "1", "MO_FUSED_NATIVE": "0"}, 1, ["MO_FUSED_CUDA=1 asks", "MO_FUSED_NATIVE=0 was set"]),
        ({"MO_FUSED_CUDA": "1", "CXX": "/bin/false"}, 1, ["MO_FUSED_CUDA=1 asks", "apt-get install g++"]),
        ({"MAX_JOBS": "0"}, 1, ["MAX_JOBS='0': expected a whole number"]),
        ({"CXX": "/bin/false", "CXXFLAGS": "-O2 -ffast-math"}, 0, ["-ffast-math in CXXFLAGS is left out"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_a_build_says(tree: Path, tmp_path: Path, env: dict[str, str], status: int, texts: list[str]) -> None:
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    done = run([sys.executable, "setup.py", "build_ext", *folders], tree, **env)
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert [text for text in texts if text not in said] == [], said
    assert list(tmp_path.rglob("*.so")) == []
