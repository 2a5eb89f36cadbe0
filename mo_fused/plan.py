"""How much memory training takes: bytes of parameters, gradients, optimizer state and activations, and which GPUs fit.

All of it is arithmetic on shapes: nothing is allocated and no device is needed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mo_fused import quantised
from mo_fused.activations import SOURCE, activation_bytes
from mo_fused.planned_model import DTYPES, Weight, dimensions, load_model, option_of, parse_count, refuse, weight_of

# Bytes of an element of each moment; what they take in fewer than 16 bits is in quantised.py.
MOMENT_BYTES = {"fp32": 4, "bf16": 2}

# Bytes of an element on top of the parameter's own, and the parameters' dtypes that allow it.
MASTER_BYTES = {"none": 0, "fp32": 4, "split": 2, "split8": 1, "kahan": 2, "stochastic": 0}
_16_BITS = ("bf16", "fp16")
MASTER_DTYPES = {"fp32": _16_BITS, "split": ("bf16",), "split8": ("bf16",), "kahan": _16_BITS, "stochastic": _16_BITS}

STATE_DTYPES = ("none", *MOMENT_BYTES, *quantised.QUANTISED)
# What each optimizer keeps, by the name of the slot.
MOMENTS: dict[str, dict[str, str]] = {
    "adamw": {"exp_avg": "first moment", "exp_avg_sq": "second moment"},
    "adam": {"exp_avg": "first moment", "exp_avg_sq": "second moment"},
    "sgd": {"momentum_buffer": "momentum"},
    "sgd-no-momentum": {},
    "adafactor": {"variance": "factored second moment"},
}

GB = 10**9
# What can be had of each GPU's memory, as sold. Drivers show a little more of most; B200 is sold as 192 and 180 GB.
GPUS = {
    "RTX 3090 24 GB": 24 * GB,
    "RTX 4090 24 GB": 24 * GB,
    "L4 24 GB": 24 * GB,
    "RTX 5090 32 GB": 32 * GB,
    "A100 40 GB": 40 * GB,
    "L40S 48 GB": 48 * GB,
    "A100 80 GB": 80 * GB,
    "H100 80 GB": 80 * GB,
    "H200 141 GB": 141 * GB,
    "B200 192 GB (180 usable)": 180 * GB,
    "MI300X 192 GB": 192 * GB,
}
CONTEXT_BYTES = 1 * GB
FRAGMENTATION_PERCENT = 5

_LARGEST_SIZE = 2**30


@dataclass(frozen=True)
class PlanConfig:
    """What is to be trained, and how; each setting is the option of ``mo-fused plan`` with its name.

    Exactly one of ``params`` (a count such as "3e9", "3B" or "124M") and ``model`` ("module:factory") is given.
    ``dtype=None`` is bf16 for a count and the model's own dtypes for a model; ``grad_dtype=None`` and ``state_dtype``
    "none" are the parameter's dtype. ``batch`` counts sequences, ``length`` tokens in each, both of one forward pass;
    with both, activations are counted.

    Raises:
        InputError: a value is outside its range, or settings do not go together; the message names the option.
    """

    params: str | None = None
    model: str | None = None
    optimizer: str = "adamw"
    dtype: str | None = None
    grad_dtype: str | None = None
    state_dtype: str = "none"
    master_weights: str = "none"
    release: bool = False
    batch: int | None = None
    length: int | None = None
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    flash: bool = True
    recompute: bool = False

    def __post_init__(self) -> None:
        if (self.params is None) == (self.model is None):
            found = "neither" if self.params is None else "both"
            refuse("--params", "either --params or --model", found, "give --params 3B or --model module:factory")
        choices: dict[str, Sequence[str | None]] = {
            "optimizer": tuple(MOMENTS),
            "dtype": (None, *DTYPES),
            "grad_dtype": (None, *DTYPES),
            "state_dtype": STATE_DTYPES,
            "master_weights": tuple(MASTER_BYTES),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                refuse(option_of(name), f"one of {', '.join(c for c in known if c)}", repr(getattr(self, name)))
        sizes = {name: getattr(self, name) for name in ("batch", "length", "hidden", "layers", "heads")}
        for name, value in sizes.items():
            if value is not None and not 1 <= value <= _LARGEST_SIZE:
                refuse(option_of(name), f"a whole number from 1 to {_LARGEST_SIZE}", repr(value))
        about_activations = [option_of(name) for name, value in sizes.items() if value is not None]
        about_activations += ["--recompute"] * self.recompute + ["--no-flash"] * (not self.flash)
        if about_activations and (self.batch is None or self.length is None):
            remedy = "activations need both; without them leave it out"
            refuse(about_activations[0], "--batch and --length with it", " ".join(about_activations), remedy)


def collect(config: PlanConfig) -> dict[str, Any]:
    """Everything ``mo-fused plan`` prints, as one dictionary of plain values; memory in bytes.

    Raises:
        InputError: see :class:`PlanConfig`, :func:`~mo_fused.planned_model.parse_count` and
            :func:`~mo_fused.planned_model.load_model`; or master weights that the
            parameters' dtype does not allow; or sizes for activations that neither options nor model give.
    """
    model = None if config.model is None else load_model(config.model)
    notes: list[str] = []
    left_out: list[str] = []
    if model is None:
        dtype = config.dtype or "bf16"
        weights = [Weight(None, parse_count(config.params or ""), DTYPES[dtype].itemsize, dtype)]
    else:
        weights = [weight_of(p, config.dtype) for p in model.parameters()]  # a tied one comes once
    trained = [w for w in weights if w.trained]
    count = sum(w.count for w in weights)
    if len(trained) < len(weights):
        notes.append(f"{count - sum(w.count for w in trained):,} parameters are frozen: no gradients, no state")

    memory = {"parameters": sum(w.count * w.item for w in weights)}
    memory["gradients"] = _gradients(trained, config, notes, left_out)
    if config.master_weights != "none" and config.optimizer == "adafactor":
        refuse("--master-weights", "none with adafactor", config.master_weights, "leave it out, or plan for adamw")
    if config.master_weights != "none":
        memory[f"master weights ({config.master_weights})"] = _masters(trained, config.master_weights)
    memory |= _moments(trained, config, notes)
    per_parameter = sum(memory.values()) / count
    if model is not None and (buffers := [weight_of(b, config.dtype) for b in model.buffers()]):
        memory["buffers"] = sum(b.count * b.item for b in buffers)

    sizes: dict[str, int] = {}
    if config.batch is None:
        left_out.append("activations (give --batch, --length, --hidden and --layers)")
    else:
        sizes, memory["activations"] = _activations(config, model, trained, notes)
        left_out.append("embedding output, logits and loss (batch x length x vocabulary x 4 bytes and more)")
    left_out += [
        "temporary memory of a step, amsgrad's third moment, step counters",
        "workspaces of libraries, data, buffers for communication between GPUs",
    ]
    total = sum(memory.values())
    limits = {name: size * (100 - FRAGMENTATION_PERCENT) // 100 - CONTEXT_BYTES for name, size in GPUS.items()}
    return {
        "optimizer": config.optimizer,
        "parameters": count,
        "dtypes": sorted({w.dtype for w in weights}),
        "state_dtype": config.state_dtype,
        "bytes": memory,
        "total_bytes": total,
        "bytes_per_parameter": per_parameter,
        "activation_sizes": sizes,
        "gpus": [{"name": n, "usable_bytes": u, "fits": total <= u} for n, u in limits.items()],
        "notes": notes,
        "not_counted": left_out,
    }


def report(config: PlanConfig, as_json: bool = False) -> str:
    """The text of ``mo-fused plan``; with ``as_json`` the dictionary of :func:`collect` as JSON. Errors: as there."""
    found = collect(config)
    if as_json:
        return json.dumps(found, indent=2)
    unit, size = ("GB", GB) if found["total_bytes"] >= GB else ("MB", 10**6)
    rows = [*found["bytes"].items(), ("sum", found["total_bytes"])]
    width = max(len(name) for name, _ in rows)
    figures = [f"{value / size:,.2f}" for _, value in rows]
    apart = "" if config.batch else ", without activations"
    fits = [g["name"] for g in found["gpus"] if g["fits"]]
    too_small = [g["name"] for g in found["gpus"] if not g["fits"]]
    return "\n".join(
        [
            f"{found['parameters']:,} parameters in {', '.join(found['dtypes'])}; {_state(config)}",
            *(f"{row[0]:{width}}  {f:>{max(map(len, figures))}} {unit}" for row, f in zip(rows, figures)),
            f"{found['bytes_per_parameter']:.2f} bytes per parameter, not counting buffers and activations",
            f"fits{apart}: {', '.join(fits) or 'none of the GPUs listed'}",
            f"does not fit{apart}: {', '.join(too_small) or 'none of the GPUs listed'}",
            f"kept free: {CONTEXT_BYTES / GB:.0f} GB for the CUDA context and {FRAGMENTATION_PERCENT} % of the memory "
            "for fragmentation",
            *(f"note: {line}" for line in found["notes"]),
            *(f"not counted: {line}" for line in found["not_counted"]),
            "This is an estimate for one GPU that holds everything. 1 GB = 10^9 bytes.",
        ]
    )


def _state(config: PlanConfig) -> str:
    if config.optimizer == "adafactor" or not MOMENTS[config.optimizer]:
        return config.optimizer
    dtype = "the parameters' dtype" if config.state_dtype == "none" else config.state_dtype
    return f"{config.optimizer}, state in {dtype}"


def _gradients(trained: list[Weight], config: PlanConfig, notes: list[str], left_out: list[str]) -> int:
    items = DTYPES[config.grad_dtype].itemsize if config.grad_dtype else None
    sizes = [w.count * (items or w.item) for w in trained]
    if not config.release:
        return sum(sizes)
    if config.model is None:
        left_out.append("the gradient of the largest parameter, which a bare count does not tell (give --model)")
        return 0
    notes.append("--release: of the gradients the largest parameter's alone is there at a time")
    return max(sizes)


def _masters(trained: list[Weight], kind: str) -> int:
    """Bytes of master weights: of 16-bit parameters, which must all be of a dtype that allows them."""
    allowed = MASTER_DTYPES[kind]
    dtypes = {w.dtype for w in trained}
    if not dtypes & {*allowed} or dtypes & {*_16_BITS} - {*allowed}:
        found = f"{', '.join(sorted(dtypes))} with --master-weights {kind}"
        remedy = f"give --dtype {' or '.join(allowed)}, or leave --master-weights out"
        refuse("--master-weights", f"parameters in {' or '.join(allowed)}", found, remedy)
    return sum(w.count for w in trained if w.dtype in allowed) * MASTER_BYTES[kind]


def _moment_item(w: Weight, slot: str, kept: str) -> float:
    """Bytes of an element of a moment."""
    if kept == "none":
        return w.item
    if kept in MOMENT_BYTES:
        return MOMENT_BYTES[kept]
    block = quantised.LARGEST_BLOCK[kept] if w.shape is None else _block(w, kept)
    return quantised.code_of(slot, kept).bits / 8 + 4 / block if block else MOMENT_BYTES["fp32"]


def _block(w: Weight, kept: str) -> int:
    return quantised.block_for(w.shape or (), kept) if w.dtype in ("fp32", *_16_BITS) else 0


def _moments(trained: list[Weight], config: PlanConfig, notes: list[str]) -> dict[str, int]:
    if config.optimizer == "adafactor":
        return {MOMENTS["adafactor"]["variance"]: _factored(trained, config, notes)}
    kept = config.state_dtype
    sizes = {
        name: math.ceil(sum(w.count * _moment_item(w, slot, kept) for w in trained))
        for slot, name in MOMENTS[config.optimizer].items()
    }
    if kept in quantised.QUANTISED and sizes:
        full = sum(not _block(w, kept) for w in trained)
        notes.append(
            "a bare count: all parameters count as matrices; vectors and small tensors would keep fp32 state"
            if config.model is None
            else f"{full} of {len(trained)} tensors keep fp32 state: vectors, below {quantised.SMALLEST} elements, "
            f"without blocks of {quantised.SMALLEST_BLOCK}"
        )
    return sizes


def _factored(trained: list[Weight], config: PlanConfig, notes: list[str]) -> int:
    """Bytes of Adafactor's second moments: fp32 for each row and column of a matrix, each element of a vector."""
    if config.state_dtype != "none":
        notes.append("--state-dtype changes nothing: Adafactor's factors are fp32, and it has no first moment here")
    if config.model is None:
        notes.append("Adafactor's state is less than 0.3 % of the parameters for matrices of 1400 x 1400 and larger")
        return 0
    total = 0
    for w in trained:
        shape = w.shape or ()
        rows = shape[:-1], (*shape[:-2], *shape[-1:])  # of the last two dimensions, for each of the matrices before
        total += (sum(map(math.prod, rows)) if len(shape) > 1 else w.count) * max(4, w.item)
    return total


def _activations(
    config: PlanConfig, model: nn.Module | None, trained: list[Weight], notes: list[str]
) -> tuple[dict[str, int], int]:
    """The sizes that were used, and bytes."""
    told = {} if model is None else dimensions(model)
    given = {n: v for n in ("hidden", "layers", "heads") if (v := getattr(config, n)) is not None}
    sizes = told | given
    needed = ["hidden", "layers"] if config.flash else ["hidden", "layers", "heads"]
    if missing := [option_of(name) for name in needed if name not in sizes]:
        found = "none in the options" if model is None else "none in the options or in the model"
        refuse(missing[0], f"{' and '.join(missing)} for activations", found, "give them, or leave --batch out")
    elements: Counter[tuple[str, int]] = Counter()
    for w in trained:
        elements[w.dtype, w.item] += w.count
    (dtype, item), _ = elements.most_common(1)[0]
    used = {"batch": config.batch or 0, "length": config.length or 0} | {n: sizes[n] for n in needed}
    rule = f"2 bytes of masks and 16 elements in {dtype} for each token, layer and unit of width"
    if not config.flash:
        rule += ", a byte and 2 elements for each pair of tokens, layer and head"
    if config.recompute:
        rule += ", but of all layers except one the input alone (full recomputation)"
    notes.append(f"activations, estimated after {SOURCE}: {rule}")
    from_model = ", ".join(n for n in needed if n in told and n not in given)
    where = f" ({from_model} from the model)" if from_model else ""
    notes.append("activations are of " + ", ".join(f"{n} {v}" for n, v in used.items()) + where)
    return used, activation_bytes(**used, item=item, flash=config.flash, recompute=config.recompute)
