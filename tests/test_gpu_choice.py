"""Which backend a GPU's tensor gets, and why not the others: on a machine without a GPU, from what the parts report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        cuda: tuple[int, int] | None,
        nvidia: bool = True,
        capability: tuple[int, int] = (9, 0),
        triton: str = "",
        archs: Sequence[str] = ("75", "80", "90"),
    ) -> None:
        library = SimpleNamespace() if cuda is None else SimpleNamespace(cuda_versions=lambda: (*cuda, False))
        monkeypatch.setattr(dispatch, "native", lambda: library)
        monkeypatch.setattr(dispatch, "build_info", lambda: {"cuda_archs": archs})
        monkeypatch.setattr(dispatch, "is_nvidia", lambda: nvidia)
        monkeypatch.setattr(dispatch, "triton_problem", lambda: triton)
        monkeypatch.setattr(dispatch, "triton_interprets", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.delenv("MO_FUSED_BACKEND", raising=False)
        for cached in (dispatch._cuda_state, dispatch.cuda_shim):
            cached.cache_clear()

    yield make  # type: ignore[misc]
    for cached in (dispatch._cuda_state, dispatch.cuda_shim):
        cached.cache_clear()


def test_cuda_comes_first(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((13000, 13000))
    assert dispatch.choose(GPU).backend == "cuda"
    assert dispatch.choose(GPU, "triton").backend == "triton"
    monkeypatch.setenv("MO_FUSED_BACKEND", "triton")
    assert dispatch.choose(GPU).backend == "triton"
    assert dispatch.choose(GPU, "cuda").backend == "cuda", "the argument counts more than the environment"


@pytest.mark.parametrize(
    "has,reason,remedy",
    [
        (dict(cuda=None), "built without CUDA kernels", "nvcc"),
        (dict(cuda=(13000, 0)), "no CUDA driver", "install NVIDIA's driver"),
        (
            dict(cuda=(13000, 12040)),
            "the driver supports CUDA 12.4, and the kernels were built with 13.0",
            "update the driver, or build again with an nvcc of CUDA 12.4 or older",
        ),
        (dict(cuda=(13000, 13000), nvidia=False), "does not drive NVIDIA's GPUs", "a CUDA build of torch"),
    ],
    ids=["not_built", "no_driver", "old_driver", "amd"],
)
def test_without_cuda_triton_serves(has: dict[str, Any], reason: str, remedy: str, machine: Any) -> None:
    machine(**has)
    choice = dispatch.choose(GPU)
    assert choice.backend == "triton" and reason in choice.reason
    with pytest.raises(errors.MissingBackendError, match="expected the backend 'cuda' to be usable") as caught:
        mo_fused.AdamW([torch.nn.Parameter(torch.ones(2))], backend="cuda")
    assert reason in str(caught.value) and remedy in str(caught.value)


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


@pytest.mark.parametrize(
    "capability,archs,served",
    [
        ((8, 0), ["90"], False),  # nothing older than what was listed
        ((9, 0), ["90"], True),
        ((10, 0), ["90"], True),  # by the PTX of the newest
        ((8, 9), ["80"], True),  # newer, same major version
        ((8, 0), ["86", "120"], False),
        ((10, 0), ["80", "120"], False),  # between two
        ((12, 1), ["80", "120"], True),
    ],
)
def test_a_gpu_that_the_kernels_were_not_built_for(
    capability: tuple[int, int], archs: list[str], served: bool, machine: Any
) -> None:
    machine((13000, 13000), capability=capability, archs=archs)
    choice = dispatch.choose(GPU)
    assert choice.backend == ("cuda" if served else "triton")
    if not served:
        assert f"the GPU has {capability[0]}.{capability[1]}" in choice.reason


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
