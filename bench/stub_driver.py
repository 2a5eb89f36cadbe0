"""A GPU driver for Triton that launches nothing: everything up to the launch is real, on a machine without a GPU."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

launched: list[str] = []
"""Names of the kernels that would have been launched, in order."""


class _Utils:
    """What Triton asks of a device: generous limits, and a binary that is loaded by doing nothing."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, name, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass


class _Launcher:
    """Stands where the compiled launcher would, and takes the same arguments."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._name = metadata.name

    def __call__(self, *args: Any) -> None:
        launched.append(self._name)


class StubDriver:
    """An sm_90 GPU in name."""

    utils = _Utils()
    launcher_cls = _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def install() -> None:
    """Makes it the driver of this process."""
    driver.set_active(StubDriver())
