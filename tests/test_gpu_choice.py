"""Which backend a GPU's tensor gets, and why not the others: on a machine without a GPU, from what the parts report."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mo_fused
from mo_fused import dispatch, errors

pytestmark = pytest.mark.cpu_only(reason="stands in for GPUs and drivers that are not there")

GPU: Any = SimpleNamespace(device=torch.device("cuda", 0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what this machine has: CUDA (runtime of the build, driver) or None, GPU maker and capability, Triton."""

    def make(
        cuda: tuple[int, int] | None, nvidia: bool = True, capability: tuple[int, int] = (9, 0), triton: str = ""
    ) -> None:
        library = SimpleNamespace() if cuda is None else SimpleNamespace(cuda_versions=lambda: (*cuda, False))
        monkeypatch.setattr(dispatch, "native", lambda: library)
        monkeypatch.setattr(dispatch, "is_nvidia", lambda: nvidia)
        monkeypatch.setattr(dispatch, "triton_problem", lambda: triton)
        monkeypatch.setattr(dispatch, "triton_interprets", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.delenv("MO_FUSED_BACKEND", raising=False)
        for cached in (dispatch.cuda_problem, dispatch.cuda_shim):
            cached.cache_clear()

    yield make  # type: ignore[misc]
    for cached in (dispatch.cuda_problem, dispatch.cuda_shim):
        cached.cache_clear()


def test_cuda_comes_first(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((13000, 13000))
    assert dispatch.choose(GPU).backend == "cuda"
    assert dispatch.choose(GPU, "triton").backend == "triton"
    monkeypatch.setenv("MO_FUSED_BACKEND", "triton")
    assert dispatch.choose(GPU).backend == "triton"
    assert dispatch.choose(GPU, "cuda").backend == "cuda", "the argument counts more than the environment"


@pytest.mark.parametrize(
    "has,reason",
    [
        (dict(cuda=None), "built without CUDA kernels"),
        (dict(cuda=(13000, 0)), "no CUDA driver"),
        (dict(cuda=(13000, 12040)), "the driver supports CUDA 12.4, and the kernels were built with 13.0"),
        (dict(cuda=(13000, 13000), nvidia=False), "does not drive NVIDIA's GPUs"),
    ],
    ids=["not_built", "no_driver", "old_driver", "amd"],
)
def test_without_cuda_triton_serves(has: dict[str, Any], reason: str, machine: Any) -> None:
    machine(**has)
    choice = dispatch.choose(GPU)
    assert choice.backend == "triton" and reason in choice.reason
    with pytest.raises(errors.MissingBackendError, match="expected the backend 'cuda' to be usable") as caught:
        mo_fused.AdamW([torch.nn.Parameter(torch.ones(2))], backend="cuda")
    assert reason in str(caught.value) and "nvcc" in str(caught.value)


def test_a_newer_driver_is_fine(machine: Any) -> None:
    machine((12040, 13000))
    assert dispatch.choose(GPU).backend == "cuda"


def test_an_old_gpu(machine: Any) -> None:
    machine((13000, 13000), capability=(7, 0))
    choice = dispatch.choose(GPU)
    assert choice.backend == "triton" and "compute capability 7.0" in choice.reason
    machine((13000, 13000), capability=(6, 1))
    choice = dispatch.choose(GPU)
    assert choice.backend == "torch" and "7.0 and newer" in choice.reason


def test_neither(machine: Any) -> None:
    machine(None, triton="Triton 3.5.1 is installed")
    choice = dispatch.choose(GPU)
    assert choice.backend == "torch"
    assert "built without CUDA kernels" in choice.reason and "Triton 3.5.1" in choice.reason
    assert "pip install" in choice.reason


def test_another_accelerator(machine: Any) -> None:
    machine((13000, 13000))
    choice = dispatch.choose(SimpleNamespace(device=torch.device("xpu", 0)))  # type: ignore[arg-type]
    assert choice.backend == "torch" and "xpu" in choice.reason
