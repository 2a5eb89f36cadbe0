"""What a run, or two runs, say: who is faster, and where the machine was too noisy to tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mo_fused.bench.case import COPY, Outcome
from mo_fused.bench.peers import OURS
from mo_fused.bench.results import Record

Key = tuple[str, str, str]
MACHINE = ("processor", "cores", "threads", "gpu", "instruction_set")


def ratio_text(ratio: float) -> str:
    """``ratio``: a peer's time over ours."""
    return f"{ratio:.2f}x"


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line for each race of ours against others: our time, the fastest other one's, and who is faster than ours."""
    head = ("case", "mo_fused, ms", "fastest other", "its ms", "ratio", "faster than mo_fused")
    rows: list[tuple[str, ...]] = [head]
    for done in outcomes:
        names = [name for name in done.samples if name != COPY]
        first, others = names[0], [name for name in names if not name.startswith(OURS)]
        if not first.startswith(OURS) or not others:
            continue
        ms = {name: done.samples[name].median * 1e3 for name in names}
        best = min(others, key=ms.__getitem__)
        noisy = {first, best} & set(done.noisy)
        # Of tiny sizes and of noise nothing follows.
        ratio = "" if done.quick else "noisy" if noisy else ratio_text(ms[best] / ms[first])
        silent = done.quick or first in done.noisy
        faster = [] if silent else [n for n in others if ms[n] < ms[first] and n not in done.noisy]
        rows.append((done.case, f"{ms[first]:.3f}", best, f"{ms[best]:.3f}", ratio, ", ".join(faster)))
    return _aligned(rows) if len(rows) > 1 else ""


def pair(done: Outcome, a: str, b: str) -> str:
    """The verdict on two contenders of a race, given by names or parts of them; empty where one is not there."""
    names = [_match(word, [n for n in done.samples if n != COPY]) for word in (a, b)]
    if None in names:
        return ""
    one, other = (str(name) for name in names)
    if {one, other} & set(done.noisy):
        return f"{done.case}: too noisy to tell"
    if done.quick:
        return f"{done.case}: tiny sizes, which say nothing"
    s, t = done.samples[one], done.samples[other]
    return f"{done.case}: {_verdict(one, other, (s.low, s.median, s.high), (t.low, t.median, t.high))}"


def _match(word: str, names: Sequence[str]) -> str | None:
    exact = [n for n in names if n.lower() == word.lower()]
    # "fused" is torch's: ours has it in its name too, but is called by it in full.
    parts = sorted((n for n in names if word.lower() in n.lower()), key=lambda n: n.startswith(OURS))
    return next(iter(exact or parts), None)


def _verdict(a: str, b: str, one: tuple[float, float, float], other: tuple[float, float, float]) -> str:
    """(first quartile, median, third quartile) of each."""
    ratio = other[1] / one[1]
    if one[2] < other[0]:
        return f"{a} is {ratio_text(ratio)} as fast as {b}"
    if other[2] < one[0]:
        return f"{b} is {ratio_text(1 / ratio)} as fast as {a}"
    return f"no telling {a} from {b}: their quartiles overlap (medians {ratio_text(ratio)})"


@dataclass
class Comparison:
    """Two files of results.

    Attributes:
        noisy: cases in which a spread is above the threshold, with the contender.
        machines: what differs between the machines of the two.
    """

    rows: list[tuple[str, ...]] = field(default_factory=list)
    noisy: list[str] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)

    def text(self) -> str:
        head = ("case", "contender", "A ms", "B ms", "A / B", "B is")
        return _aligned([head, *self.rows])


def newest(records: Sequence[Record]) -> dict[Key, Record]:
    """By benchmark, case and contender the last one that was measured in full."""
    return {(r["bench"], r["case"], r["contender"]): r for r in records if r["median_ms"] and not r["quick"]}


def compare(a: Sequence[Record], b: Sequence[Record], max_spread: float) -> Comparison:
    """What both have: B beside A. Where quartiles overlap, or spread too far, nothing is concluded."""
    one, other = newest(a), newest(b)
    out = Comparison()
    for key in one:
        if key not in other:
            continue
        r, s = one[key], other[key]
        spreads = [(x["high_ms"] - x["low_ms"]) / x["median_ms"] for x in (r, s) if x["low_ms"] and x["high_ms"]]
        if any(r[fact] != s[fact] for fact in MACHINE):
            word = "not comparable: another machine"
        elif len(spreads) < 2:
            word = "not comparable: no quartiles"
        elif max(spreads) > max_spread:
            word = "too noisy to tell"
            out.noisy.append(f"{key[1]}, {key[2]} ({max(spreads):.0%})")
        elif s["high_ms"] < r["low_ms"]:
            word = "faster"
        elif r["high_ms"] < s["low_ms"]:
            word = "slower"
        else:
            word = "the same, as far as can be told"
        ms = (r["median_ms"], s["median_ms"])
        out.rows.append((key[1], key[2], f"{ms[0]:.3f}", f"{ms[1]:.3f}", ratio_text(ms[0] / ms[1]), word))
        for fact in (*MACHINE, "torch"):
            if r[fact] != s[fact]:
                note = f"{fact}: {r[fact]} in A, {s[fact]} in B"
                if note not in out.machines:
                    out.machines.append(note)
    return out


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = [all(_numeric(row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers, strict=True)).rstrip()
        for row in rows
    )


def _numeric(text: str) -> bool:
    return not text or text.rstrip("x").replace(".", "", 1).isdigit() or text == "noisy"
