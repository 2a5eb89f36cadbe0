"""The table of formats: bytes, quality and speed of every combination of parameters, master weights and moments."""

from __future__ import annotations

from typing import Any

from figures import Figures, markdown, times

TIMED = "*, clip + step, * moments"


def speeds(found: Figures) -> dict[str, float]:
    """Times torch's speed by contender; torch's own time is that of the same race."""
    out = {}
    for case in found.cases("formats", TIMED):
        torch_ms = found.ms("formats", case, "torch fused")
        for r in found.race("formats", case):
            out[r["contender"]] = torch_ms / r["median_ms"]
    return out


def _rows(found: Figures, trained: str) -> list[tuple[tuple[str, str, str], dict[str, Any], float | None]]:
    """(parameters, master weights, moments), the record of the training, and the speed where it was timed."""
    fast = speeds(found)
    out = []
    for r in found.race("train_formats", trained):
        params, master, states = r["contender"].split("-")
        out.append(((params, master, states), r, fast.get(f"mo_fused {states} {master}") if params == "bf16" else None))
    return out


def formats_table(found: Figures, trained: str) -> str:
    """Losses are differences to fp32 in percent, the mean over the seeds and in brackets each."""
    rows = []
    for combination, r, speed in _rows(found, trained):
        each = ", ".join(f"{d:+.2f}" for d in r["differences"])
        loss = f"{r['difference']:+.2f} % ({each})"
        rows.append([*combination, f"{r['bytes_of_matrices']:.2f}", loss, times(speed) if speed else ""])
    return markdown(["Parameters", "Master weights", "Moments", "Bytes", "Validation loss", "Speed"], rows)


def below_torch(found: Figures, trained: str) -> str:
    """The combinations that are slower than torch's step."""
    slow = [
        f"`{master}` with {states} moments"
        for (_, master, states), _, speed in _rows(found, trained)
        if speed and speed < 1
    ]
    return ", ".join(slow) or "none"
