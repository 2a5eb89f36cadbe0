"""Building the CUDA kernels: what setup.py chooses and says, with an nvcc of our own making, and the real one's result.

The stand-ins are programs that setup.py runs like the real ones: an nvcc that answers as told, and a ninja that copies
the installed native part instead of compiling it again. What a compiler makes of the CPU sources is in
tests/test_packaging.py.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from package_build import BUILD_VARIABLES, NO_NVCC, ROOT, copy_of_checkout, machine_nvcc, run, setup_functions

import mo_fused._native

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
KNOWN = ["75", "80", "86", "87", "90", "100"]

NVCC = """#!{python}
import subprocess, sys
args = sys.argv[1:]
if {broken!r}:
    sys.exit({broken!r})
if "--version" in args:
    print("nvcc: NVIDIA (R) Cuda compiler driver\\nCuda compilation tools, release {release}, V{release}.88")
elif "--list-gpu-code" in args:
    print("sm_75\\nsm_80\\nsm_86\\nsm_87\\nsm_90\\nsm_90a\\nsm_100")
elif "--list-gpu-arch" in args:
    print("compute_75\\ncompute_80\\ncompute_86\\ncompute_87\\ncompute_90\\ncompute_90a\\ncompute_100\\ncompute_101")
elif "--dryrun" in args:
    print("#$ TOP={top}\\n#$ LIBRARIES=  \\"-L{top}/nowhere\\"", file=sys.stderr)
elif {refuses!r}:
    sys.exit("host_config.h:1:2: error: " + {refuses!r})
else:
    out = args[args.index("-o") + 1]
    compile = [*{cxx!r}, "-x", "c++", "-fPIC", "-c", "-", "-o", out]
    sys.exit(subprocess.run(compile, input=b"int f() {{ return 1; }}").returncode)
"""

NINJA = """#!{python}
import pathlib, re, shutil, sys
if "--version" in sys.argv:
    sys.exit(print("1.11"))
folder = pathlib.Path(sys.argv[sys.argv.index("-C") + 1])
text = (folder / "build.ninja").read_text()
if {fails!r} and "rule nvcc" in text:
    print({fails!r})
    sys.exit(1)
shutil.copyfile({library!r}, folder / re.search("^default (.+)$", text, re.M)[1])
"""


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    return setup_functions()


@pytest.fixture(autouse=True)
def no_build_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*BUILD_VARIABLES, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def cxx(setup_py: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found: list[str] = setup_py.find_compiler(["-fPIC"], tmp_path_factory.mktemp("compiler"))[0]
    return found


@pytest.fixture
def fake_nvcc(tmp_path: Path, cxx: list[str]) -> Callable[..., str]:
    """Makes an nvcc: of a release, broken (what it then says), refusing to compile, with or without static runtime."""

    def make(release: str = "13.0", broken: str = "", refuses: str = "", runtime: bool = True) -> str:
        top = tmp_path / "toolkit"
        (top / "lib").mkdir(parents=True, exist_ok=True)
        if runtime:
            (top / "lib" / "libcudart_static.a").write_bytes(b"!<arch>\n")  # an archive without members
        values = dict(python=sys.executable, release=release, broken=broken, refuses=refuses, top=top, cxx=cxx)
        return program(top / "bin" / "nvcc", NVCC.format(**values))

    return make


@pytest.fixture
def fake_ninja(tmp_path: Path) -> Callable[..., str]:
    """Makes a ninja and returns the PATH that has it first; told to fail, it prints that at CUDA kernels."""

    def make(fails: str = "") -> str:
        library = mo_fused._native.__file__
        ninja = program(tmp_path / "path" / "ninja", NINJA.format(python=sys.executable, fails=fails, library=library))
        return f"{Path(ninja).parent}{os.pathsep}{os.environ['PATH']}"

    return make


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_checkout(tmp_path_factory.mktemp("cuda"))


@dataclass(frozen=True)
class Built:
    status: int
    said: str
    info: dict[str, Any]
    library: bool
    ninja: str


def build(tree: Path, out: Path, **env: str) -> Built:
    """What ``setup.py build_ext`` leaves behind."""
    folders = ["--build-lib", str(out / "lib"), "--build-temp", str(out / "temp")]
    done = run([sys.executable, "setup.py", "build_ext", *folders], tree, **env)
    info = out / "lib" / "mo_fused" / "build_info.json"
    return Built(
        done.returncode,
        done.stdout + done.stderr,
        json.loads(info.read_text()) if info.exists() else {},
        any((out / "lib").rglob("_native*.so")),
        "".join(file.read_text() for file in tree.glob("build/native-*/build.ninja")),
    )


# ---- what a build says and does, from outside


@pytest.mark.parametrize(
    ("how", "reason", "remedy"),
    [
        (dict(release="11.8"), "is too old (CUDA 11.8)", "install NVIDIA's CUDA toolkit, 12.4 or newer"),
        (dict(broken="fake nvcc: no such driver"), "does not run (fake nvcc: no such driver)", "with NVCC"),
    ],
    ids=["too_old", "does_not_run"],
)
def test_unusable_nvcc_gives_a_warning_and_a_cpu_build(
    tree: Path, tmp_path: Path, fake_nvcc: Callable[..., str], fake_ninja: Callable[..., str],
    how: dict[str, str], reason: str, remedy: str,
) -> None:  # fmt: skip
    nvcc = fake_nvcc(**how)
    auto = build(tree, tmp_path / "auto", NVCC=nvcc, PATH=fake_ninja(), MO_FUSED_CUDA="auto")
    assert auto.status == 0, auto.said
    assert "WARNING: built without the CUDA kernels" in auto.said
    assert reason in auto.said and remedy in auto.said
    assert "without the native part" not in auto.said
    assert auto.library
    assert auto.info["native"] is True and auto.info["cuda"] is False
    assert reason in auto.info["cuda_reason"] and remedy in auto.info["cuda_remedy"]
    assert "MO_HAVE_CUDA" not in auto.ninja and ".cu" not in auto.ninja

    wanted = build(tree, tmp_path / "wanted", NVCC=nvcc, PATH=fake_ninja(), MO_FUSED_CUDA="1")
    assert wanted.status == 1, wanted.said
    assert "MO_FUSED_CUDA=1 asks for the CUDA kernels" in wanted.said
    assert reason in wanted.said and remedy in wanted.said
    assert not wanted.library


def test_kernels_that_do_not_compile_leave_the_cpu_part(
    tree: Path, tmp_path: Path, fake_nvcc: Callable[..., str], fake_ninja: Callable[..., str]
) -> None:
    failing = fake_ninja(fails="adamw_kernel.cu: error: out of memory")
    auto = build(tree, tmp_path / "auto", NVCC=fake_nvcc(), PATH=failing, MO_FUSED_CUDA="auto")
    assert auto.status == 0, auto.said
    assert "WARNING: built without the CUDA kernels" in auto.said
    assert auto.library
    assert auto.info["native"] is True and auto.info["cuda"] is False
    assert "adamw_kernel.cu: error: out of memory" in auto.info["cuda_reason"]

    wanted = build(tree, tmp_path / "wanted", NVCC=fake_nvcc(), PATH=failing, MO_FUSED_CUDA="1")
    assert wanted.status == 1, wanted.said
    assert "MO_FUSED_CUDA=1 asks" in wanted.said and "adamw_kernel.cu: error: out of memory" in wanted.said


def test_usable_nvcc_is_used(
    tree: Path, tmp_path: Path, fake_nvcc: Callable[..., str], fake_ninja: Callable[..., str]
) -> None:
    env = dict(NVCC=fake_nvcc(), PATH=fake_ninja(), MO_FUSED_CUDA="auto", MO_FUSED_CUDA_ARCHS="9.0, 80", MAX_JOBS="1")
    done = build(tree, tmp_path, **env)
    assert done.status == 0, done.said
    assert "WARNING" not in done.said
    assert done.info["cuda"] is True
    assert done.info["cuda_archs"] == ["80", "90"]
    assert done.info["nvcc"] == "Cuda compilation tools, release 13.0, V13.0.88"
    sources = {path.name for path in (ROOT / "csrc" / "cuda").glob("*.cu")}
    assert "step.cu" in sources
    assert set(re.findall(r"^build obj/cuda/\w+\.o: nvcc .*/csrc/cuda/(\w+\.cu)$", done.ninja, re.M)) == sources
    (nvcc,) = re.findall(r"^  command = \$nvcc (.*)$", done.ninja, re.M)
    for flag in ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false", "-O3", "-DMO_ISA=device"):
        assert f" {flag} " in nvcc
    (flags,) = re.findall(r"^flags = (.*)$", done.ninja, re.M)
    assert "-DMO_HAVE_CUDA=1" in flags
    assert re.search(r"^pool nvcc\n  depth = 1$", done.ninja, re.M), "MAX_JOBS"


def test_unknown_architecture_is_an_error_that_lists_the_known(
    tree: Path, tmp_path: Path, fake_nvcc: Callable[..., str], fake_ninja: Callable[..., str]
) -> None:
    """Whatever MO_FUSED_CUDA says: a typing error must not become a build without kernels."""
    done = build(tree, tmp_path, NVCC=fake_nvcc(), PATH=fake_ninja(), MO_FUSED_CUDA="auto", MO_FUSED_CUDA_ARCHS="80;95")
    assert done.status == 1, done.said
    assert f"MO_FUSED_CUDA_ARCHS='80;95': nvcc does not know 95. It knows {', '.join(KNOWN)}" in done.said
    assert not done.library


# ---- the choices one by one


def toolchain(setup_py: ModuleType, cxx: list[str]) -> Any:
    return setup_py.Toolchain(cxx, "a compiler", ["ninja"], ["-fPIC"], [])


@pytest.mark.parametrize(
    ("how", "reason", "remedy"),
    [
        (dict(release="12.3"), "is too old (CUDA 12.3)", "12.4 or newer"),
        (dict(refuses="unsupported GNU version"), "cannot compile a kernel (host_config.h:1:2: error: uns", "CXX"),
        (dict(runtime=False), "libcudart_static.a, was not found", "install the whole CUDA toolkit"),
    ],
    ids=["too_old", "refuses_the_compiler", "no_static_runtime"],
)
def test_why_an_nvcc_is_unusable(
    setup_py: ModuleType, cxx: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], fake_nvcc: Callable[..., str], how: dict[str, Any], reason: str, remedy: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("NVCC", fake_nvcc(**how))
    found = setup_py.find_cuda(toolchain(setup_py, cxx), [], tmp_path)
    assert isinstance(found, setup_py.NoCuda)
    assert reason in found.reason and remedy in found.remedy
    assert f"WARNING: built without the CUDA kernels: {found.reason}" in capsys.readouterr().err
    monkeypatch.setenv("MO_FUSED_CUDA", "1")
    with pytest.raises(setup_py.NoCuda) as raised:
        setup_py.find_cuda(toolchain(setup_py, cxx), [], tmp_path)
    assert raised.value.reason == found.reason


def test_oldest_usable_nvcc(
    setup_py: ModuleType, cxx: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_nvcc: Callable[..., str]
) -> None:
    monkeypatch.setenv("NVCC", fake_nvcc(release="12.4"))
    found = setup_py.find_cuda(toolchain(setup_py, cxx), ["-ftz=false"], tmp_path)
    assert found.archs == ["75", "80", "86", "90", "100"]
    assert "-ftz=false" in found.flags
    assert found.libs[0] == f"-L{tmp_path / 'toolkit' / 'lib'}"
    assert "-lcudart_static" in found.libs


def test_without_any_nvcc_nothing_is_said(
    setup_py: ModuleType, cxx: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup_py, "USUAL_NVCC", str(tmp_path / "none"))
    found = setup_py.find_cuda(toolchain(setup_py, cxx), [], tmp_path)
    assert capsys.readouterr() == ("", "")
    info = setup_py.cuda_info(found)
    assert info["cuda"] is False
    assert str(info["cuda_reason"]).startswith("nvcc was not found (looked at NVCC, PATH")
    assert "install NVIDIA's CUDA toolkit" in str(info["cuda_remedy"])
    monkeypatch.setenv("MO_FUSED_CUDA", "1")
    with pytest.raises(setup_py.NoCuda, match="nvcc was not found"):
        setup_py.find_cuda(toolchain(setup_py, cxx), [], tmp_path)


def test_where_nvcc_is_looked_for(setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: tmp_path / name / "bin" / "nvcc" for name in ("path", "home", "cuda_path", "usual")}
    for place in places.values():
        program(place, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(places["path"].parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda_path"))
    monkeypatch.setattr(setup_py, "USUAL_NVCC", str(places["usual"]))
    assert setup_py.nvcc_candidates() == [[str(place)] for place in places.values()]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "absent"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "usual"))
    assert setup_py.nvcc_candidates() == [[str(places["path"])], [str(places["usual"])]]
    monkeypatch.setenv("NVCC", "my-nvcc --with flags")
    assert setup_py.nvcc_candidates() == [["my-nvcc", "--with", "flags"]], "it alone, there or not"


def test_the_first_nvcc_that_works_is_taken(
    setup_py: ModuleType, cxx: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], fake_nvcc: Callable[..., str],
) -> None:  # fmt: skip
    old = program(tmp_path / "old" / "nvcc", "#!/bin/sh\necho Cuda compilation tools, release 11.8, V11.8.89\n")
    good = fake_nvcc()
    monkeypatch.setattr(setup_py, "nvcc_candidates", lambda: [[old], [good]])
    assert setup_py.find_cuda(toolchain(setup_py, cxx), [], tmp_path).nvcc == [good]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("asked", "archs"),
    [
        ("", ["75", "80", "86", "90", "100"]),
        (" ", ["75", "80", "86", "90", "100"]),
        ("80;90", ["80", "90"]),
        ("80,90 100", ["80", "90", "100"]),
        ("100;90;80;90", ["80", "90", "100"]),
        ("sm_80;compute_90", ["80", "90"]),
        ("8.0 10.0", ["80", "100"]),
        ("87", ["87"]),
    ],
)
def test_architectures_are_read(setup_py: ModuleType, asked: str, archs: list[str]) -> None:
    assert setup_py.choose_archs(asked, KNOWN) == archs


@pytest.mark.parametrize(
    ("asked", "unknown"),
    [
        ("80;95", "95"),
        ("hopper", "hopper"),
        ("sm_99 9.5", "sm_99, 9.5"),
        ("9", "9"),
        ("90a", "90a"),
        ("0.80", "0.80"),
        (";", "a GPU without name"),
    ],
)
def test_unknown_architectures_are_named(setup_py: ModuleType, asked: str, unknown: str) -> None:
    with pytest.raises(setup_py.CompileError) as raised:
        setup_py.choose_archs(asked, KNOWN)
    assert f"nvcc does not know {unknown}. It knows 75, 80, 86, 87, 90, 100;" in str(raised.value)


def test_known_architectures_can_be_compiled_and_assembled(setup_py: ModuleType) -> None:
    codes, archs = (
        "sm_50\nsm_90\nsm_90a\nsm_100\nsm_80\n",
        "compute_100\ncompute_80\ncompute_90\ncompute_90a\ncompute_120\n",
    )
    assert setup_py.known_archs(codes, archs) == ["80", "90", "100"]
    assert setup_py.known_archs("", archs) == []


def test_every_gpu_gets_machine_code_and_the_newest_ptx(setup_py: ModuleType) -> None:
    assert setup_py.gencode(["80", "90"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    ]
    assert setup_py.gencode(["75"]) == ["-gencode=arch=compute_75,code=[sm_75,compute_75]"]


def test_release_is_read(setup_py: ModuleType) -> None:
    text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.4, V12.4.131\nBuild x\n"
    assert setup_py.nvcc_release(text) == ("Cuda compilation tools, release 12.4, V12.4.131", (12, 4))
    assert setup_py.nvcc_release("a release of something") is None


def test_host_flags(setup_py: ModuleType) -> None:
    """The compiler alone after -ccbin; the language standard is nvcc's own; commas are not separators."""
    assert setup_py.host_flags(["ccache", "g++", "-m64"], ["-std=c++17", "-fPIC", "-Wl,-z"]) == [
        "-ccbin=g++",
        "-Xcompiler=-m64",
        "-Xcompiler=-fPIC",
        r"-Xcompiler=-Wl\,-z",
    ]
    assert setup_py.host_flags(["ccache"], []) == ["-ccbin=ccache"], "a link named so is a compiler"


def test_places_of_the_static_runtime(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/home/cuda")
    monkeypatch.setattr(setup_py, "machine", lambda: "x86_64")
    text = '#$ TOP=/opt/a b\n#$ INCLUDES="-I/x"  \n#$ LIBRARIES=  "-L/opt/a b/stubs" "-L/opt/l"\n#$ gcc -L/other\n'
    assert setup_py.runtime_places(text) == [
        "/opt/a b/stubs", "/opt/l",
        "/opt/a b/lib64", "/opt/a b/targets/x86_64-linux/lib", "/opt/a b/lib",
        "/home/cuda/lib64", "/home/cuda/targets/x86_64-linux/lib", "/home/cuda/lib",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kib", "max_jobs", "depth"),
    [(16_000_000, "", 8), (16_000_000, "3", 3), (16_000_000, "99", 8), (1_000_000, "4", 1), (None, "4", 1)],
)
def test_memory_limits_the_number_of_nvccs(
    setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kib: int | None, max_jobs: str, depth: int
) -> None:
    meminfo = tmp_path / "meminfo"
    if kib is not None:
        meminfo.write_text(f"MemTotal:       99999999 kB\nMemFree:  1 kB\nMemAvailable:   {kib} kB\n")
    monkeypatch.setenv("MAX_JOBS", max_jobs)
    assert setup_py.nvccs_at_a_time(meminfo) == depth


def test_flags_that_change_results_do_not_reach_nvcc(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-lineinfo --use_fast_math -fmad true -Xptxas=-v")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-ftz=true -prec-div=false --ftzx")
    monkeypatch.setenv("MAX_JOBS", "1")
    env = setup_py.nvcc_environment(7)
    assert env["NVCC_PREPEND_FLAGS"].split() == ["-lineinfo", "-Xptxas=-v"]
    assert env["NVCC_APPEND_FLAGS"].split() == ["--ftzx"]
    said = capsys.readouterr().err
    assert "--use_fast_math -fmad true in NVCC_PREPEND_FLAGS is left out" in said
    assert "-ftz=true -prec-div=false in NVCC_APPEND_FLAGS is left out" in said


@pytest.mark.parametrize(("max_jobs", "archs", "threads"), [(3, 7, 0), (8, 7, 2), (64, 7, 7), (64, 1, 0)])
def test_threads_of_nvcc(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, max_jobs: int, archs: int, threads: int
) -> None:
    monkeypatch.setenv("MAX_JOBS", str(max_jobs))
    said = setup_py.nvcc_environment(archs).get("NVCC_APPEND_FLAGS", "")
    assert said == (f"--threads {threads}" if threads else "")


def test_flags_of_nvcc_keep_ieee_arithmetic(setup_py: ModuleType) -> None:
    common, isas, device = setup_py.read_flags()
    assert {"-std=c++17", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"} == set(device)
    assert "-ffp-contract=off" in common
    assert "device" not in isas


# ---- the real nvcc


@dataclass(frozen=True)
class Library:
    path: Path
    info: dict[str, Any]


def installed_info() -> dict[str, Any]:
    file = importlib.resources.files("mo_fused").joinpath("build_info.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def nvcc(setup_py: ModuleType) -> list[str]:
    """The machine's own; one that is new enough but does not work makes the tests fail."""
    found = machine_nvcc()
    if found is not None:
        return found
    pytest.skip(NO_NVCC)


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A native part with CUDA kernels: the installed one when it has them, else one that is built for this."""
    info = installed_info()
    if info.get("cuda"):
        return Library(Path(mo_fused._native.__file__), info)
    nvcc = shlex.join(request.getfixturevalue("nvcc"))
    tree, out = copy_of_checkout(tmp_path_factory.mktemp("real")), tmp_path_factory.mktemp("out")
    done = build(tree, out, NVCC=nvcc, MO_FUSED_CUDA="1", MO_FUSED_CUDA_ARCHS="80;90")
    assert done.status == 0, done.said
    (path,) = (out / "lib").rglob("_native*.so")
    return Library(path, done.info)


def test_it_imports_without_driver_and_says_what_it_is(library: Library, run_python: RunPython) -> None:
    code = (
        "import importlib.util as u, json, sys; s = u.spec_from_file_location('_native', sys.argv[1]); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(json.dumps(m.cuda_versions()))"
    )
    done = run_python("-c", code, str(library.path))
    assert done.returncode == 0, done.stderr
    runtime, driver, shim = json.loads(done.stdout)
    release = re.search(r"release (\d+)\.(\d+)", library.info["nvcc"])
    assert release is not None
    assert runtime == 1000 * int(release[1]) + 10 * int(release[2])
    assert driver >= 0
    assert shim is False


def test_it_links_no_cuda_library_and_exports_none_of_its_symbols(library: Library) -> None:
    dynamic = run(["readelf", "--dynamic", "--wide", str(library.path)], library.path.parent)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic.stdout)
    assert needed, dynamic.stderr
    assert [name for name in needed if re.search("cuda|cudart|nv|torch", name)] == []
    loaded = run(["ldd", str(library.path)], library.path.parent)
    assert "libc.so" in loaded.stdout, loaded.stderr
    assert re.search(r"libcuda|libcudart|not found", loaded.stdout) is None
    symbols = run(["nm", "--dynamic", "--defined-only", str(library.path)], library.path.parent).stdout.split("\n")
    names = [line.split()[-1] for line in symbols if line]
    assert "PyInit__native" in names
    assert [name for name in names if re.match(r"_*(cu|nv|fatbin)", name)] == [], (
        "torch's runtime would be mixed with ours"
    )
    sections = run(["readelf", "--section-headers", "--wide", str(library.path)], library.path.parent).stdout
    assert ".nv_fatbin" in sections


def test_doctor_tells_what_was_built(run_python: RunPython) -> None:
    done = run_python("-m", "mo_fused.cli", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["build"]
    assert said == installed_info()
    assert {"nvcc", "cuda_archs"} <= set(said) if said["cuda"] else {"cuda_reason", "cuda_remedy"} <= set(said)


def test_what_nvcc_makes_of_our_flags(nvcc: list[str], setup_py: ModuleType, tmp_path: Path) -> None:
    """Machine code for both GPUs and PTX for the newer, and IEEE arithmetic, as its own dry run says."""
    device = setup_py.read_flags()[2]
    source = tmp_path / "kernel.cu"
    source.write_text(setup_py.CUDA_PROBE)
    command = [*nvcc, *device, *setup_py.gencode(["80", "90"]), "--dryrun", "-c", str(source)]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"--image3=kind=(\w+),sm=(\d+)", done.stderr)) == {
        ("elf", "80"),
        ("elf", "90"),
        ("ptx", "90"),
    }
    arithmetic = set(re.findall(r"-(?:ftz|prec_div|prec_sqrt|fmad)=\d", done.stderr))
    assert arithmetic == {"-ftz=0", "-prec_div=1", "-prec_sqrt=1", "-fmad=0"}
