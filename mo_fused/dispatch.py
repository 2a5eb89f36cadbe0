"""Which backend serves which tensor, and why not the others. The only place that decides by device."""

from __future__ import annotations

import json
import os
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import errors

BACKENDS = ("cpu", "cuda", "triton", "eager")
"""Names that ``backend=`` and MO_FUSED_BACKEND take. What none of them serves goes to torch's single-tensor step."""

ON_DEVICE = ("cuda", "triton")
"""Backends whose rows are a DevicePart: their step does not wait for the device."""

FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""Element types that the kernels compute, with their codes in csrc/abi.h."""

# DLPack's device types, as csrc/scan.cpp reports them.
_DEVICE_CODES = {"cpu": 1, "cuda": 2}


@dataclass(frozen=True)
class Choice:
    """One decision: ``backend`` is "cpu", "cuda", "triton", "eager" or "torch" (torch's own single-tensor step)."""

    backend: str
    reason: str


@lru_cache(maxsize=1)
def _load_native() -> tuple[ModuleType | None, str]:
    if os.environ.get("MO_FUSED_NATIVE") == "0":
        return None, "MO_FUSED_NATIVE=0 is set"
    try:
        from . import _native
    except ImportError as error:
        return None, f"the native library did not load with torch {torch.__version__} ({error})"
    from .table import check_abi

    try:
        check_abi(_native.abi())
    except ImportError as error:
        return None, str(error)
    return _native, ""


def native() -> ModuleType | None:
    """The compiled extension, or None when it was not built or does not load here."""
    return _load_native()[0]


def native_problem() -> str:
    """Why :func:`native` is None; empty when it is there."""
    return _load_native()[1]


BUILD_CUDA = (
    "install the CUDA toolkit's nvcc, 12.4 or newer, and build again with `MO_FUSED_CUDA=1 pip install --no-binary "
    "mo_fused mo_fused` (or `pip install .` in a checkout)"
)


@lru_cache(maxsize=1)
def build_info() -> dict[str, Any]:
    """What setup.py wrote about the build; empty when the package was not built."""
    file = resources.files(__package__).joinpath("build_info.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


@lru_cache(maxsize=1)
def _cuda_state() -> tuple[str, str]:
    library = native()
    if library is None:
        return native_problem(), REMEDY
    if not hasattr(library, "cuda_versions"):
        reason, remedy = build_info().get("cuda_reason"), build_info().get("cuda_remedy")
        return (
            f"the native library was built without CUDA kernels{f' ({reason})' if reason else ''}",
            remedy or BUILD_CUDA,
        )
    runtime, driver, shim = library.cuda_versions()
    if shim:
        return "", ""
    if not is_nvidia():
        return "this build of torch does not drive NVIDIA's GPUs", "install a CUDA build of torch"
    if driver == 0:
        return "no CUDA driver was found", "install NVIDIA's driver"
    if driver < runtime:
        reason = f"the driver supports CUDA {_version(driver)}, and the kernels were built with {_version(runtime)}"
        return reason, f"update the driver, or build again with an nvcc of CUDA {_version(driver)} or older"
    return "", ""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def cuda_problem() -> str:
    """Why the CUDA backend cannot be used in this process; empty when it can."""
    return _cuda_state()[0]


def cuda_remedy() -> str:
    """What to do about :func:`cuda_problem`."""
    return _cuda_state()[1]


@lru_cache(maxsize=1)
def cuda_shim() -> bool:
    """The CUDA kernels were compiled for the CPU, as the tests do."""
    library = native()
    return library is not None and hasattr(library, "cuda_versions") and bool(library.cuda_versions()[2])


MIN_TRITON = (3, 6)
"""Older ones take square roots and quotients with denormal numbers flushed to zero (`sqrt.rn.ftz.f32`)."""
TRITON_REMEDY = 'install Triton 3.6 or newer with `pip install "mo_fused[triton]"` (Linux, NVIDIA or AMD GPU)'


@lru_cache(maxsize=1)
def triton_problem() -> str:
    """Why the Triton backend cannot be used in this process; empty when it can."""
    try:
        import triton
    except ImportError as error:
        return f"Triton does not import ({error})"
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if version < MIN_TRITON:
        return f"Triton {triton.__version__} is installed, which flushes denormal numbers to zero"
    return ""


def triton_interprets() -> bool:
    """TRITON_INTERPRET=1: kernels run in Python on the CPU's tensors, and cannot be compiled in this process."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def stream(device: torch.device) -> int:
    """The device's current stream, as a number; 0 for the CPU."""
    return 0 if device.type == "cpu" else int(torch.cuda.current_stream(device).cuda_stream)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which the device is the current one; nothing for the CPU."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def used_here(tensor: Tensor) -> None:
    """The current stream reads a tensor that another stream has made: its memory is not used anew before."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return device.type != "cpu" and torch.cuda.is_current_stream_capturing()


def is_capturing_anything() -> bool:
    """Whether a CUDA graph is being captured on the current device."""
    return has_gpu() and torch.cuda.is_current_stream_capturing()


def has_gpu() -> bool:
    """Whether torch drives a GPU here."""
    return torch.cuda.is_available()


def is_nvidia() -> bool:
    """Whether this build of torch drives NVIDIA's GPUs."""
    return torch.version.cuda is not None


@lru_cache(maxsize=1)
def warp_size() -> int:
    """Threads of a warp (NVIDIA) or wavefront (AMD) of the current device."""
    if torch.cuda.is_available():
        return int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "warp_size", 32))
    return 32


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU; 2 for the CPU, on which the interpreter runs."""
    if device.type == "cpu":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def device_code(device: torch.device) -> int:
    """The device as csrc/scan.cpp packs it: DLPack type << 16 | index."""
    return _DEVICE_CODES.get(device.type, 0) << 16 | (device.index or 0)


def is_cpu(tensor: Tensor) -> bool:
    """Whether the tensor is in the host's memory."""
    return is_host(tensor.device)


def is_host(device: torch.device) -> bool:
    """Whether the device's memory is the host's."""
    return device.type == "cpu"


def is_cuda(device: torch.device) -> bool:
    """Whether ``torch.cuda`` speaks of this device (NVIDIA's and AMD's)."""
    return device.type == "cuda"


def is_meta(tensor: Tensor) -> bool:
    """Whether the tensor has no data."""
    return tensor.device.type == "meta"


REMEDY = (
    "install g++ and build again with `pip install --no-binary mo_fused mo_fused` (or `pip install .` in a checkout)"
)


def requested(backend: str | None) -> str | None:
    """The explicit choice: the argument, else MO_FUSED_BACKEND, else None. Raises when it cannot be honoured at all."""
    name = backend if backend is not None else (os.environ.get("MO_FUSED_BACKEND") or None)
    if name is None:
        return None
    if name not in BACKENDS:
        raise errors.unknown_backend(name, BACKENDS)
    if name == "cpu" and native() is None:
        raise errors.missing_backend("cpu", native_problem(), REMEDY)
    if name == "cuda" and cuda_problem():
        raise errors.missing_backend("cuda", cuda_problem(), cuda_remedy())
    if name == "triton" and triton_problem():
        raise errors.missing_backend("triton", triton_problem(), TRITON_REMEDY)
    return name


def choose(tensor: Tensor, backend: str | None = None) -> Choice:
    """The backend for a plain strided floating-point tensor on its device.

    ``backend`` is an explicit choice; it applies to the devices that it can serve.
    """
    wanted = requested(backend)
    if is_meta(tensor):
        return Choice("torch", "meta tensors have no data; torch's own step accepts them")
    if wanted == "eager":
        return Choice("eager", "asked for by backend= or MO_FUSED_BACKEND")
    if is_cpu(tensor):
        return _choose_cpu(wanted)
    return _choose_gpu(tensor, wanted)


def choose_host(backend: str | None = None) -> Choice:
    """The backend for what the host steps in the place of a device."""
    if requested(backend) == "eager":
        return Choice("eager", "asked for by backend= or MO_FUSED_BACKEND")
    return Choice("eager", native_problem()) if native() is None else Choice("cpu", "native kernels of the host")


def _choose_cpu(wanted: str | None) -> Choice:
    if wanted == "triton" and triton_interprets():
        return Choice("triton", "Triton's interpreter (TRITON_INTERPRET=1)")
    if wanted == "cuda" and cuda_shim():
        return Choice("cuda", "CUDA kernels compiled for the CPU")
    if native() is None:
        return Choice("eager", native_problem())
    return Choice("cpu", "native kernels")


def _choose_gpu(tensor: Tensor, wanted: str | None) -> Choice:
    kind = tensor.device.type
    if kind != "cuda":  # torch calls AMD's GPUs so too
        return Choice("torch", f"no kernel of mo_fused serves {kind} tensors")
    if wanted != "triton":
        problem = cuda_problem() or _cuda_device_problem(tensor)
        if not problem:
            return Choice("cuda", "CUDA kernels")
    else:
        problem = 'backend="triton" or MO_FUSED_BACKEND asks for it'
    if triton_problem():
        return Choice("torch", f"no CUDA kernels: {problem}; no Triton kernels: {triton_problem()}; {TRITON_REMEDY}")
    if triton_interprets():
        return Choice("torch", "TRITON_INTERPRET=1 is set: Triton's interpreter reads the CPU's memory only")
    if is_nvidia() and torch.cuda.get_device_capability(tensor.device) < (7, 0):
        return Choice("torch", "Triton compiles for compute capability 7.0 and newer")
    return Choice("triton", f"Triton kernels ({problem})")


def _cuda_device_problem(tensor: Tensor) -> str:
    if cuda_shim():
        return "the CUDA kernels were compiled for the CPU"
    major, minor = torch.cuda.get_device_capability(tensor.device)
    if (major, minor) < (7, 5):
        return f"the GPU has compute capability {major}.{minor}, 7.5 is needed"
    built = [divmod(int(arch), 10) for arch in build_info().get("cuda_archs", [])]
    # Machine code runs on the same major version from its minor version on, the newest one's PTX on everything newer.
    if not built or (major, minor) >= max(built) or any(a == major and b <= minor for a, b in built):
        return ""
    names = ", ".join(f"{a}.{b}" for a, b in built)
    return f"the CUDA kernels were built for compute capability {names}, and the GPU has {major}.{minor}"


def device_report() -> list[tuple[str, str, str]]:
    """For each kind of device: (device, backend it would get, why), for ``mo-fused doctor``."""
    rows = []
    kinds = [torch.device("cpu")]
    if torch.cuda.is_available():
        kinds += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in kinds:
        choice = choose(torch.empty(0, device=device))
        rows.append((str(device), choice.backend, choice.reason))
    return rows
