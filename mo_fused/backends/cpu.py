"""The native CPU backend: hands the table to the compiled library."""

from __future__ import annotations

import torch

from .. import dispatch
from ..table import Table


def run(table: Table) -> None:
    """Runs the phases that ``table.control`` asks for, on at most torch's number of threads."""
    native = dispatch.native()
    assert native is not None  # dispatch chose this backend
    table.control["threads"] = min(torch.get_num_threads(), table.useful_threads)
    native.cpu_step(table.address)


def instruction_set() -> tuple[str, str | None]:
    """(name in use, what is wrong with MO_FUSED_ISA or None)."""
    native = dispatch.native()
    assert native is not None
    name, error = native.cpu_isa()
    return str(name), error
