"""Session rules: tests run on an installed package with its native part, repeatably, and never skip in silence."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
SKIP_REASONS = Path(__file__).with_name("skip_reasons.txt")
# As in cases.py, which this file must not import: torch may be imported, Triton not before its interpreter is prepared.
BACKEND = os.environ.get("MO_FUSED_TEST_BACKEND", "cpu")
DEVICE = torch.device(os.environ.get("MO_FUSED_TEST_DEVICE", "cpu"))

# Tests that do not belong to every backend. A marked test is deselected, not skipped, where it does not belong; the
# reason stands at the mark.
MARKS = {
    "cpu_only(reason)": "the subject is the CPU's backends or what surrounds the step on the host alone",
    "device_only(reason)": "the subject is a backend of a device; runs where MO_FUSED_TEST_BACKEND=triton or cuda",
    "triton_only(reason)": "the subject is the Triton backend; runs where MO_FUSED_TEST_BACKEND=triton",
    "not_interpreted(reason)": "takes too long in Triton's interpreter; runs with the kernels compiled",
}

settings.register_profile("mo_fused", derandomize=True, deadline=None)
settings.load_profile("mo_fused")


def pytest_configure(config: pytest.Config) -> None:
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")
    torch.set_num_threads(2 if BACKEND == "cpu" else 1)  # the threads are the subject of tests of the CPU's kernels
    drop_checkout_from_path()
    if library := os.environ.get("MO_FUSED_TEST_NATIVE"):
        importlib.import_module("cuda_shim_library").use(library)
    try:
        importlib.import_module("mo_fused._native")
    except ImportError as error:
        spec = importlib.util.find_spec("mo_fused")
        found = f"found {spec.origin}, which has none ({error})" if spec else "found no mo_fused at all"
        raise pytest.UsageError(
            f"the tests need mo_fused with its native part: {found}. "
            f'Install it with MO_FUSED_NATIVE=1 pip install ".[test]" in {ROOT}, or with -e for development.'
        ) from error
    if BACKEND != "cpu":
        # What the user of an accelerator gets without asking, a test gets without asking too.
        os.environ["MO_FUSED_BACKEND"] = BACKEND
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("quick_interpreter").speed_up()
        # NumPy, which the interpreter computes with, warns where arithmetic of floats overflows as it should.
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what does not belong to the backend under test."""
    elsewhere = ["device_only"] if BACKEND == "cpu" else ["cpu_only"]
    if BACKEND != "triton":
        elsewhere.append("triton_only")
    if BACKEND == "triton" and DEVICE.type == "cpu":
        elsewhere.append("not_interpreted")
    out = [item for item in items if any(item.get_closest_marker(name) for name in elsewhere)]
    if BACKEND != "cpu":
        modules = {name for shard in importlib.import_module("shards").SHARDS for name in shard}
        out += [item for item in items if item.path.stem not in modules and item not in out]
    if out:
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """``torch.ones(3)`` in a test is on the device under test."""
    if DEVICE.type == "cpu":
        return (yield)
    with DEVICE:
        return (yield)


def drop_checkout_from_path() -> None:
    """``python -m pytest`` puts the checkout on sys.path, where its mo_fused/ would hide the installed one."""
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if Path(entry or ".").resolve() != ROOT]
    if "mo_fused" not in sys.modules and importlib.util.find_spec("mo_fused") is None:
        sys.path[:] = before  # nothing is installed: the checkout is what there is


@pytest.fixture
def teams_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have as many threads as torch is told, however few cores there are and however small the work."""
    team = importlib.import_module("mo_fused.team")
    monkeypatch.setattr(team, "allowed_cores", lambda: 64)
    monkeypatch.setattr(team, "ELEMENTS_PER_THREAD", 1 << 14)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python elsewhere (in the checkout ``-c`` and ``-m`` import its mo_fused/), with the mo_fused tested here."""
    spec = importlib.util.find_spec("mo_fused")
    places = list(spec.submodule_search_locations or []) if spec else []
    path = [str(Path(place).parent) for place in places] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    same = {"PYTHONPATH": os.pathsep.join(entry for entry in path if entry)}

    def run(*args: str, env: Mapping[str, str] | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *args],
            cwd=tmp_path,
            env={**os.environ, **same, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


def allowed_reasons(lines: Iterable[str]) -> list[str]:
    stripped = (line.strip() for line in lines)
    return [line for line in stripped if line and not line.startswith("#")]


def is_allowed(reason: str, allowed: Iterable[str]) -> bool:
    return any(reason.startswith(a[:-1]) if a.endswith("*") else reason == a for a in allowed)


def fail_unlisted_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip for a reason that is not listed, and every expected failure, into a failure."""
    wasxfail = getattr(report, "wasxfail", None)
    if wasxfail is not None:
        del report.wasxfail  # else the report still counts as an expected failure
        report.outcome = "failed"
        report.longrepr = f"expected failures are not allowed here: mend the code or the test ({wasxfail})"
    elif report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not is_allowed(reason, allowed_reasons(SKIP_REASONS.read_text(encoding="utf-8").splitlines())):
            report.outcome = "failed"
            report.longrepr = f"skipped for a reason that {SKIP_REASONS.name} does not list: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_unlisted_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_unlisted_skip(report)
    return report
