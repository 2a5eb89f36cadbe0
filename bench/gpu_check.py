"""The steps of bench/gpu_check.sh, one a command.

    python bench/gpu_check.py prepare | environment | build | installed | verify | bench | tests | report

`prepare` is for a machine with a network; all others need none. `report` and the dry runs of `environment` and `tests`
do without torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import gpu_backends
import gpu_figures

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
WHEELS = ROOT / "build" / "gpu_wheels"
WORK = ROOT / "build" / "gpu_check"
VENV = WORK / "venv"

TARGET_PYTHON = "3.12"
# pip takes a tag as it is: manylinux2014 does not stand for the older and newer ones that wheels are named by.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
NOT_INSTALLED = "not installed"
PARALLEL_TESTS = "pytest-xdist"
DRY_TESTS = ("test_step_protocol.py", "-k", "no_gradient or hooks")
"""The few tests of the dry run."""
NOT_RUN = 77
"""Exit status of a step that has nothing to run here."""


def say(text: str) -> None:
    print(text, flush=True)


def run(*words: str | Path, env: Mapping[str, str] | None = None) -> int:
    """Runs a command in the checkout, with its output in the log; its exit status."""
    command = [str(w) for w in words]
    say(f"$ {shlex.join(command)}")
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **(env or {})}, check=False).returncode


def first_lines(*words: str, count: int = 3) -> str:
    """What a program prints first, or why it prints nothing."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{words[0]}: {error}"
    return "\n".join((done.stdout or done.stderr).strip().splitlines()[:count])


# -- requirements -----------------------------------------------------------------------------------------------------


def requirements() -> list[str]:
    """What the build and the tests need beside torch, as pyproject.toml says it."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *extras["test"], *extras["train"], PARALLEL_TESTS]
    return list(dict.fromkeys(w for w in wanted if not w.startswith("mo-fused")))


def version(name: str) -> str:
    """Of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def is_met(requirement: str) -> bool:
    """Whether this interpreter has it, new enough; only ``name`` and ``name>=version`` are understood."""
    name, _, least = requirement.partition(">=")
    found = version(name)
    return found != NOT_INSTALLED and _release(found) >= _release(least)


def prepare() -> int:
    """Downloads wheels for the machine without a network into build/gpu_wheels."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    platforms = [word for tag in PLATFORMS for word in ("--platform", tag)]
    options = [
        "--quiet",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        TARGET_PYTHON,
        *platforms,
    ]
    status = run(sys.executable, "-m", "pip", "download", *options, "--dest", WHEELS, *requirements())
    found = sorted(WHEELS.glob("*.whl"))
    say(f"{len(found)} wheels, {sum(w.stat().st_size for w in found) / 2**20:.1f} MiB, in {WHEELS.relative_to(ROOT)}")
    return status


# -- steps ------------------------------------------------------------------------------------------------------------


def environment(dry: bool) -> int:
    """What the figures mean nothing without. The dry run saves the time that importing torch takes."""
    query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem"
    say(f"nvidia-smi: {first_lines('nvidia-smi', query, '--format=csv,noheader')}")
    say(f"nvcc: {first_lines('nvcc', '--version', count=9).rpartition(chr(10))[2]}")
    say(f"c++: {first_lines('c++', '--version', count=1)}")
    say(f"python: {sys.version.split()[0]} ({sys.executable})")
    commit = first_lines("git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty", count=1)
    say(f"commit: {os.environ.get('MO_FUSED_COMMIT') or commit}")
    missing = [r for r in requirements() if not is_met(r)]
    say(f"missing here: {', '.join(missing) or 'nothing'}; wheels: {len(list(WHEELS.glob('*.whl')))}")
    for name in ("torch", "triton"):
        say(f"{name}: {version(name)}")
    if dry:
        return 0
    try:
        import torch
    except ImportError as error:
        say(f"FAILED: torch does not import ({error}); PYTHON names the interpreter that has it")
        return 1
    say(f"CUDA of torch: {torch.version.cuda}")
    if not torch.cuda.is_available():
        say("FAILED: no GPU that torch can use")
        return 1
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        size, processors = facts.total_memory / 2**30, facts.multi_processor_count
        say(f"GPU {i}: {facts.name}, sm_{facts.major}{facts.minor}, {processors} multiprocessors, {size:.0f} GiB")
    return 0


def make_venv() -> Path:
    """A virtual environment that sees everything this interpreter sees; its interpreter.

    ``--system-site-packages`` shows the packages of the base installation alone, which torch is not among when this
    interpreter is a virtual environment's itself. So its folders are named in a .pth file.
    """
    shutil.rmtree(VENV, ignore_errors=True)
    venv.EnvBuilder(system_site_packages=True, symlinks=True, with_pip=False).create(VENV)
    python = VENV / "bin" / "python"
    place = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    paths = sysconfig.get_paths()
    seen = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()]
    outer = dict.fromkeys([paths["purelib"], paths["platlib"], *seen])
    Path(place, "outer.pth").write_text("\n".join(outer) + "\n", encoding="utf-8")
    return python


def build_settings(dry: bool) -> dict[str, str]:
    """Environment of the build, where the caller's says nothing: CUDA kernels for the GPU that is here, and no others.

    The dry run leaves them out: compiling them takes minutes, and it runs none.
    """
    found = first_lines("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", count=1)
    wanted = (
        {"MO_FUSED_CUDA": "0"} if dry else {"MO_FUSED_CUDA_ARCHS": found} if re.fullmatch(r"\d+\.\d", found) else {}
    )
    return {name: value for name, value in wanted.items() if name not in os.environ}


def build(dry: bool) -> int:
    """Installs the checkout into a virtual environment of its own, without the network."""
    missing = [r for r in requirements() if not is_met(r)]
    python = make_venv()
    pip: list[str | Path] = [python, "-m", "pip", "install", "--no-index"]
    if run(python, "-m", "pip", "--version") and run(python, "-m", "ensurepip"):
        say("FAILED: there is no pip for the virtual environment")
        return 1
    lacking = []
    for requirement in missing:  # one by one: a wheel that is not there must not keep the others out
        if run(*pip, "--quiet", "--find-links", WHEELS, requirement):
            lacking.append(requirement)
    if lacking:
        say(f"STILL MISSING: {', '.join(lacking)}; run bench/gpu_check.sh --prepare where there is a network")
    # Nothing of the build goes into the checkout itself.
    config = WORK / "build.cfg"
    config.write_text(f"[build]\nbuild_base = {WORK / 'build'}\n[egg_info]\negg_base = {WORK}\n", encoding="utf-8")
    env = {**build_settings(dry), "DIST_EXTRA_CONFIG": str(config)}
    install = [*pip, "--no-build-isolation", "--no-deps", "."]
    if not run(*install, env={**env, "MO_FUSED_NATIVE": "1"}):
        return run(python, Path(__file__), "installed")
    say(
        "FAILED: the native part was not built. Installing without it: the CPU's bits then come from the eager backend,"
    )
    say("and the test-suite will refuse to start.")
    if run(*install, env={**env, "MO_FUSED_NATIVE": "auto"}) == 0:
        run(python, Path(__file__), "installed")
    return 1


def installed() -> int:
    """Says which mo_fused this interpreter imports and what it has for a GPU; fails when it has no native part."""
    from mo_fused import cli, dispatch

    cli.main(["doctor"])
    say(f"CUDA kernels: {dispatch.cuda_problem() or 'usable'}")
    say(f"mo_fused: {importlib.metadata.version('mo-fused')} from {Path(dispatch.__file__).parent}")
    if dispatch.native() is None:
        say(f"FAILED: no native part: {dispatch.native_problem()}")
        return 1
    return 0


def suite() -> list[Path]:
    """The modules that run against a GPU's backends, as tests/shards.py lists them."""
    sys.path.append(str(TESTS))
    from shards import SHARDS

    return [TESTS / f"{name}.py" for shard in SHARDS for name in shard]


def tests(dry: bool, backend: str, junit: Path | None) -> int:
    """The test-suite on one backend; replaces this process, so that a signal reaches pytest."""
    reason = gpu_backends.why_not(backend, dry)
    if reason:
        say(f"not run: {reason}")
        return NOT_RUN
    env = {**os.environ, "MO_FUSED_TEST_BACKEND": backend, "MO_FUSED_TEST_DEVICE": "cpu" if dry else "cuda"}
    words = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    if junit is not None:
        words.append(f"--junitxml={junit}")
    if dry:
        env |= {"TRITON_INTERPRET": "1"} if backend == "triton" else {}
        words += [str(TESTS / DRY_TESTS[0]), *DRY_TESTS[1:]]
    else:
        # Compiling hundreds of kernels is most of the time with Triton, and every process does its own.
        if is_met(PARALLEL_TESTS):
            words += ["-n", str(max(1, min(12, (os.cpu_count() or 1) - 2)))]
        words += map(str, suite())
    say(f"$ {shlex.join(words)}")
    os.chdir(ROOT)
    os.execve(sys.executable, words, env)


def result_of_tests(lines: Sequence[str]) -> str:
    """The last line of pytest's that counts, or why there is none."""
    wanted = re.compile(r"\d+ (passed|failed|error)|^not run: ")
    return next((line for line in reversed(lines) if wanted.search(line)), "no result")


def report(out: Path, steps: Sequence[str]) -> int:
    """Prints and writes report.txt: environment, checks, table, steps; before and after them what is not covered."""

    def log(name: str) -> list[str]:
        path = out / name
        return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []

    records = [json.loads(line) for line in log("bench.jsonl")]
    parts = ["\n".join(log("environment.log"))]
    checks = [line for line in log("verify.log") if re.match(r"(ok|FAILED|needs a GPU)\b", line)]
    parts.append("\n".join(checks) or "no check has left a result")
    notes = [line for line in log("bench.log") if line.startswith(("note:", "FAILED"))]
    parts.append("\n".join([gpu_figures.table(records), *notes, gpu_figures.LEGEND]))
    rows = [step.split("|") for step in steps]
    ends = [f"tests with {b}: {result_of_tests(log(f'tests-{b}.log'))}" for b in gpu_backends.BACKENDS]
    parts.append("\n".join([*(f"{name:<12} {took:>4} s  {verdict}" for name, took, verdict in rows), *ends]))
    said = [*log("verify.log"), *log("bench.log"), *(line.removeprefix("not run: ") for line in log("tests-cuda.log"))]
    lacking = [line for line in said if line.startswith(gpu_backends.NO_CUDA)]
    if lacking:
        rule = "!" * 100
        loud = f"{rule}\n{lacking[0]}\n{rule}"
        parts = [loud, *parts, loud]
    (out / "environment.log").unlink(missing_ok=True)
    text = "\n\n".join(parts) + "\n"
    (out / "report.txt").write_text(text, encoding="utf-8")
    say(f"\n{text}")
    return 0 if records and checks else 1


def use_the_interpreter() -> None:
    """Triton's, for a dry run."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from quick_interpreter import speed_up

    speed_up()


def use_the_shim() -> None:
    """The CUDA kernels compiled for the CPU, for a dry run where there is such a library."""
    if gpu_backends.SHIM in os.environ:
        import cuda_shim_library

        cuda_shim_library.use(os.environ[gpu_backends.SHIM])


def main(words: Sequence[str] | None = None) -> int:
    # A shell that runs this in the background has interrupts ignored, and they are what a time limit sends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "installed"):
        commands.add_parser(name)
    for name in ("environment", "build", "verify", "bench", "tests"):
        commands.add_parser(name).add_argument("--dry-run", action="store_true")
    commands.choices["verify"].add_argument("--only", default="", metavar="NAME", help="this check alone")
    commands.choices["verify"].add_argument("--backend", default="", metavar="NAME", help="this backend alone")
    commands.choices["bench"].add_argument("--seconds", type=float, default=185.0, help="for all cases together")
    commands.choices["bench"].add_argument("--json", type=Path, metavar="FILE", help="append the results to FILE")
    commands.choices["tests"].add_argument("--backend", choices=gpu_backends.BACKENDS, required=True)
    commands.choices["tests"].add_argument("--junit", type=Path, metavar="FILE")
    of_report = commands.add_parser("report")
    of_report.add_argument("--out", type=Path, required=True)
    of_report.add_argument("steps", nargs="*", metavar="NAME|SECONDS|VERDICT")
    given = parser.parse_args(words)
    if given.command in ("verify", "bench", "tests") and given.dry_run:
        sys.path.append(str(TESTS))
        if given.command != "tests":  # those run in a process of their own
            use_the_interpreter()
        use_the_shim()
    if given.command == "verify":
        import gpu_verify

        return gpu_verify.run(given.dry_run, given.only, given.backend)
    if given.command == "bench":
        import gpu_bench

        return gpu_bench.run(given.dry_run, given.seconds, given.json)
    if given.command == "environment":
        return environment(given.dry_run)
    if given.command == "build":
        return build(given.dry_run)
    if given.command == "tests":
        return tests(given.dry_run, given.backend, given.junit)
    if given.command == "report":
        return report(given.out, given.steps)
    return {"prepare": prepare, "installed": installed}[given.command]()


if __name__ == "__main__":
    sys.exit(main())
