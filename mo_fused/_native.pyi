"""The compiled library (csrc/bindings.cpp). Addresses are of the records in mo_fused/table.py."""

from typing import Any

def abi() -> dict[str, int]: ...
def cpu_isa() -> tuple[str, str | None]: ...
def cpu_step(table: int) -> None: ...
def scan(api: tuple[object, type, type], items: list[Any], out: int) -> int: ...
def refresh_rows(
    api: tuple[object, type, type],
    params: list[Any],
    states: list[dict[str, Any]],
    keys: tuple[str, ...],
    has_step: bool,
    grads: list[Any],
    seen: int,
    flags: int,
    rows: int,
) -> int: ...
def same_items(a: list[Any], b: list[Any]) -> bool: ...
