"""The native CPU backend: hands the table to the compiled library."""

from __future__ import annotations

from .. import dispatch, team
from ..table import Table


def run(table: Table) -> None:
    """Runs the phases that ``table.control`` asks for, on as many threads as the work is worth."""
    native = dispatch.native()
    assert native is not None  # dispatch chose this backend
    table.control["threads"] = team.team_size(table.useful_threads, len(table.batches) - 1)
    native.cpu_step(table.address)


def instruction_set() -> tuple[str, str | None]:
    """(name in use, what is wrong with MO_FUSED_ISA or None)."""
    native = dispatch.native()
    assert native is not None
    name, error = native.cpu_isa()
    return str(name), error
