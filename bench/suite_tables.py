"""The README's tables of `mo-fused bench scaling` and `threads`, from recorded results."""

from __future__ import annotations

from figures import Figures, markdown, percent, short

from mo_fused.bench.scaling import UNITS
from mo_fused.bench.threads import verdict


def scaling_table(figures: Figures) -> str:
    """A row for each fitted line."""
    rows = []
    for case in figures.cases("scaling"):
        race = figures.race("scaling", case)
        for r in race:
            if r.get("slope_ms") is None:
                continue
            unit, factor = UNITS[case]
            points = [
                p["x"]
                for p in race
                if p.get("on_line") and (p["dtype"], p["contender"]) == (r["dtype"], r["contender"])
            ]
            off = "" if r["departure"] is None else percent(r["departure"])
            said = "straight" if r["straight"] else "noisy" if r["noisy_points"] else "not straight"
            slope, start = short(r["slope_ms"] * factor), short(r["intercept_ms"] * 1e3, 2)
            rows.append(
                (
                    case,
                    f"{min(points):,} to {max(points):,}",
                    r["dtype"],
                    r["contender"],
                    f"{slope} {unit}",
                    f"{start} us",
                    off,
                    said,
                )
            )
    head = ("Against", "From, to", "Dtype", "Contender", "Slope", "Intercept", "Largest departure", "Line")
    return markdown(head, rows)


def threads_table(figures: Figures) -> str:
    """A row for each workload: ms by the number of threads, and what is said of the one that a step chooses."""
    races = {case: figures.race("threads", case) for case in figures.cases("threads")}
    names = list(dict.fromkeys(r["contender"] for race in races.values() for r in race))
    rows = []
    for case, race in races.items():
        ms = {r["contender"]: short(r["median_ms"]) for r in race}
        rows.append((case, *(ms.get(name, "") for name in names), verdict(race)))
    return markdown(("Case", *(f"{name}, ms" for name in names), "Chosen"), rows)
