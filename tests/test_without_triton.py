"""Triton is optional: without it everything imports and works, and asking for it says what to install."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

# None in sys.modules is how an import fails without touching what is installed.
ABSENT = """
import sys
sys.modules["triton"] = None
import torch
from torch.nn import Parameter
import mo_fused
assert not [name for name in sys.modules if name.startswith("mo_fused.triton_kernels")]
"""


def test_asking_for_triton_names_the_remedy(run_python: Run) -> None:
    code = """
for ask in (dict(backend="triton"), {}):
    try:
        mo_fused.AdamW([Parameter(torch.ones(3))], **ask)
    except mo_fused.errors.MissingBackendError as error:
        print("refused:", error)
    else:
        print("accepted")
"""
    done = run_python("-c", ABSENT + code)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    assert first.startswith("refused: ") and "'triton'" in first
    assert 'pip install "mo_fused[triton]"' in first, "the message must say what to do"
    assert second == "accepted"
    # The same through the environment.
    done = run_python("-c", ABSENT + code, env={"MO_FUSED_BACKEND": "triton"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("refused: ") == 2, done.stdout


def test_a_step_needs_no_triton(run_python: Run) -> None:
    code = """
p = Parameter(torch.ones(3))
opt = mo_fused.AdamW([p], lr=0.125, weight_decay=0.0, max_grad_norm=1e9, stats=True)
p.grad = torch.ones(3)
opt.step()
print(opt.explain()[0].backend, bool((p < 0.9).all()), float(mo_fused.get_total_norm([p.grad])) > 1.7)
"""
    done = run_python("-c", ABSENT + code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["cpu", "True", "True"]


def test_kernels_are_imported_only_when_they_are_needed(run_python: Run) -> None:
    """A step on the CPU must not pay for them. (Triton itself is imported by torch, where it is installed.)"""
    code = """
import sys, torch, mo_fused
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
mo_fused.SGD([p], lr=0.1, max_grad_norm=1.0).step()
print([name for name in sys.modules if "triton_kernels" in name])
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[]"


def test_kernels_are_no_top_level_package(run_python: Run) -> None:
    """In a checkout the folder lies beside the package; imported from there its kernels would exist twice."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "triton_kernels").is_dir():
        pytest.fail("the folder of the kernels is not beside tests/: mend this test")
    done = run_python("-c", f"import sys; sys.path.insert(0, {str(root)!r}); import triton_kernels")
    assert done.returncode == 1
    assert "ImportError: expected these kernels to be imported as mo_fused.triton_kernels" in done.stderr
    assert "found 'triton_kernels'" in done.stderr
