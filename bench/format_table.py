"""The README's table of formats, from recorded results: bytes, quality and speed of every combination.

    python bench/train_formats.py --processes 2 --json RESULTS
    python bench/bench_formats.py --json RESULTS
    python bench/format_table.py RESULTS

Of each combination the newest line of the default rate and length counts. Speed is that of clip + step on GPT-2's 124 M
parameters in bf16, beside torch's clip + fused step of the same run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench_formats import name_of
from train_formats import LR, STEPS, case_of
from workloads import FUSED

Record = dict[str, Any]


def speeds(records: list[Record]) -> dict[str, float]:
    """Times torch's speed, by contender; torch's own line stands in the same case of the same run."""
    timed = [r for r in records if r["bench"] == "formats" and not r["quick"]]
    torch_ms = {(r["case"], r["time"]): r["median_ms"] for r in timed if r["contender"] == FUSED}
    return {
        r["contender"]: torch_ms[r["case"], r["time"]] / r["median_ms"]
        for r in timed
        if (r["case"], r["time"]) in torch_ms
    }


def table(records: list[Record]) -> str:
    """Markdown. Losses are differences to fp32 in percent, the mean over the seeds and in brackets each."""
    speed = speeds(records)
    those = [r for r in records if r["bench"] == "train_formats" and r["case"] == case_of(STEPS, LR) and not r["quick"]]
    trained = {r["contender"]: r for r in those}
    rows = ["| Parameters | Master weights | Moments | Bytes | Validation loss | Speed |", "|---|---|---|---|---|---|"]
    for name, found in trained.items():
        params, master, states = name.split("-")
        each = ", ".join(f"{d:+.2f}" for d in found["differences"])
        contender = name_of(states, None if master == "none" else master)
        fast = f"{speed[contender]:.2f}x" if params == "bf16" and contender in speed else ""
        loss = f"{found['difference']:+.2f} % ({each})"
        rows.append(f"| {params} | {master} | {states} | {found['bytes_of_matrices']:.2f} | {loss} | {fast} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]))
