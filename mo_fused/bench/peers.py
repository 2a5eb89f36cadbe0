"""By whom the workloads are stepped: ours, torch's own and what is installed of other projects.

A peer is a :class:`Peer`; :func:`available` says which of them can be used and why the others cannot. Nothing but the
standard peers is imported before it is asked for, as some compile themselves then.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import mo_fused
from mo_fused.bench.workloads import DECAY, LR
from mo_fused.optim import FusedOptimizer
from mo_fused.training.errors import bad_input

Make = Callable[..., torch.optim.Optimizer]

OURS, FUSED, FOREACH, FOR_LOOP, COMPILED = (
    "mo_fused",
    "torch fused",
    "torch foreach",
    "torch for-loop",
    "torch compiled",
)
DEEPSPEED, TRANSFORMERS = "DeepSpeedCPUAdam", "transformers"
OURS_LIKE = "mo_fused, transformers' form"
ADAFACTOR_LR = 1e-2
COMPILED_TENSORS = 400
"""At most; beyond that Inductor takes many minutes for a step."""
SLOW_ELEMENTS = 40_000_000
"""At most, for peers whose step of more would take seconds."""


@dataclass(frozen=True)
class Peer:
    """One optimizer of somebody.

    Attributes:
        make: (parameters, **options) to the optimizer; options are those of the constructor.
        package: the distribution whose version is recorded.
        devices: types of device on which it runs.
        tensors: it is left out where there are more of them.
        elements: likewise, of all tensors.
        shapes: likewise, of different ones: it compiles a step for each, and up to a number only.
        own_state: it keeps something else than two moments of the parameter's dtype, so it shares no state.
        exact: does the same arithmetic as the others; not so where states are quantised.
        scaled: it steps under a GradScaler.
        wrap: what makes a step a faster one, such as ``torch.compile``.
    """

    name: str
    make: Make
    package: str = "torch"
    devices: Sequence[str] = ("cpu", "cuda")
    tensors: float = math.inf
    elements: float = math.inf
    shapes: float = math.inf
    own_state: bool = False
    exact: bool = True
    scaled: bool = True
    wrap: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None

    @property
    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def why_not(self, params: Sequence[Tensor]) -> str:
        """Why these tensors are not stepped; empty where they are."""
        device = params[0].device.type
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if len(params) > self.tensors:
            return f"takes too long with {len(params)} tensors"
        if sum(p.numel() for p in params) > self.elements:
            return "takes seconds a step at this size"
        if len({p.shape for p in params}) > self.shapes:
            return "compiles for each shape, and there are too many"
        return ""


def _module(name: str) -> Any:
    """What the module is about is its optimizer, so what it prints and warns of when it is loaded is not shown."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _of(module: str, kind: str, **fixed: Any) -> Make:
    """The class ``kind`` of ``module``, looked up when it is used."""
    return partial(_made, module, kind, fixed)


def _made(module: str, kind: str, fixed: dict[str, Any], params: Any, **options: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(_module(module), kind)(params, **{**fixed, **options})
    return made


def _torch_adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": LR, "weight_decay": DECAY, **options})


def _compiled(step: Callable[[], Any]) -> Callable[[], Any]:
    # All steps are one function to Dynamo, which from the ninth on would not compile it any more.
    torch._dynamo.reset()
    return torch.compile(step, fullgraph=False)


def ours(params: Any, **options: Any) -> torch.optim.Optimizer:
    return mo_fused.AdamW(params, **{"lr": LR, "weight_decay": DECAY, **options})


def ours_adafactor(params: Any, **options: Any) -> torch.optim.Optimizer:
    return mo_fused.Adafactor(params, **{"lr": ADAFACTOR_LR, "weight_decay": DECAY, **options})


def _ours_like_transformers(params: Any, **options: Any) -> torch.optim.Optimizer:
    return mo_fused.Adafactor.like_transformers(params, weight_decay=DECAY, **options)


def _torch_adafactor(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, **{"lr": ADAFACTOR_LR, "weight_decay": DECAY, **options})


torch_fused = partial(_torch_adamw, fused=True)
torch_foreach = partial(_torch_adamw, foreach=True)
_ADAMW = {"lr": LR, "weight_decay": DECAY}
_slow = partial(Peer, elements=SLOW_ELEMENTS, own_state=True, scaled=False)

ADAMW = (
    Peer(OURS, ours, "mo-fused"),
    Peer(FUSED, torch_fused),
    Peer(FOREACH, torch_foreach),
    Peer(FOR_LOOP, partial(_torch_adamw, foreach=False, fused=False), tensors=3000),
    Peer(
        COMPILED,
        partial(_torch_adamw, foreach=True, capturable=False),
        tensors=COMPILED_TENSORS,
        own_state=True,
        scaled=False,
        wrap=_compiled,
    ),
    Peer(
        DEEPSPEED,
        _of("deepspeed.ops.adam", "DeepSpeedCPUAdam", adamw_mode=True, **_ADAMW),
        "deepspeed",
        ("cpu",),
        own_state=True,
        scaled=False,
    ),
    Peer(
        "DeepSpeed FusedAdam",
        _of("deepspeed.ops.adam", "FusedAdam", adam_w_mode=True, **_ADAMW),
        "deepspeed",
        ("cuda",),
        own_state=True,
        scaled=False,
    ),
    Peer(
        "apex FusedAdam",
        _of("apex.optimizers", "FusedAdam", adam_w_mode=True, **_ADAMW),
        "apex",
        ("cuda",),
        own_state=True,
    ),
    Peer("optimi", _of("optimi", "AdamW", **_ADAMW), "torch-optimi", own_state=True, scaled=False),
    _slow("bitsandbytes AdamW", _of("bitsandbytes.optim", "AdamW32bit", **_ADAMW), "bitsandbytes"),
    _slow("bitsandbytes AdamW8bit", _of("bitsandbytes.optim", "AdamW8bit", **_ADAMW), "bitsandbytes", exact=False),
    _slow(
        "torchao AdamW8bit",
        _of("torchao.optim", "AdamW8bit", **_ADAMW),
        "torchao",
        exact=False,
        tensors=3000,
        shapes=8,
    ),
    _slow(
        "torchao AdamW4bit",
        _of("torchao.optim", "AdamW4bit", **_ADAMW),
        "torchao",
        exact=False,
        tensors=3000,
        shapes=8,
    ),
    Peer(
        "flashoptim",
        _of("flashoptim", "FlashAdamW", **_ADAMW),
        "flashoptim",
        ("cuda",),
        own_state=True,
        exact=False,
        scaled=False,
    ),
    _slow("turboadam", _of("turboadam", "TurboAdam", **_ADAMW), "turboadam", exact=False),
)
ADAFACTOR = (
    Peer(OURS, ours_adafactor, "mo-fused"),
    Peer(FOR_LOOP, partial(_torch_adafactor, foreach=False)),
    Peer(FOREACH, partial(_torch_adafactor, foreach=True)),
    Peer(OURS_LIKE, _ours_like_transformers, "mo-fused"),
    Peer(TRANSFORMERS, _of("transformers.optimization", "Adafactor", weight_decay=DECAY), "transformers"),
    Peer("adafactor8bit", _of("adafactor8bit", "Adafactor8Bit", lr=ADAFACTOR_LR), "adafactor8bit", exact=False),
)


@cache
def _problem(peer: Peer, device: str) -> str:
    """Why a peer cannot be used on this machine; empty where it can. Steps a small tensor to find out."""
    if device not in peer.devices:
        return f"runs on {' and '.join(peer.devices)} only"
    try:
        p = torch.nn.Parameter(torch.zeros(8, 8, device=device))
        p.grad = torch.ones_like(p)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(io.StringIO()):
                peer.make([p]).step()
    except ImportError as error:
        return f"is not installed ({error})" if peer.version is None else f"does not load ({_line(error)})"
    except Exception as error:  # whatever its compiler, its loader or its version check raises
        return f"does not run here ({_line(error)})"
    return ""


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def wanted_peers(option: str, names: Iterable[str]) -> list[str]:
    """The names without what is empty.

    Raises:
        InputError: one of them is part of no peer's name.
    """
    words = [name.strip() for name in names if name.strip()]
    known = list(dict.fromkeys(peer.name for peer in (*ADAMW, *ADAFACTOR)))
    for word in words:
        if not any(word.lower() in name.lower() for name in known):
            raise bad_input(
                option,
                expected=f"parts of the names {', '.join(known)}",
                found=repr(word),
                remedy="leave it out, or correct it",
            )
    return words


def available(
    of: Sequence[Peer], device: torch.device, wanted: Iterable[str] | None, says: Callable[[str], Any]
) -> list[Peer]:
    """The peers that run on this machine, ours first; why another is left out goes to ``says``.

    Args:
        of: ADAMW or ADAFACTOR.
        device: where they shall run.
        wanted: parts of names; None is all, and what is none of them is never loaded. Ours take part in any case.
    """
    chosen = list(of)
    if wanted is not None:
        words = [word.lower() for word in wanted]
        chosen = [p for p in of if p.name.startswith(OURS) or any(word in p.name.lower() for word in words)]
    there = []
    for peer in chosen:
        problem = _problem(peer, device.type)
        if problem:
            says(f"{peer.name} is left out: {problem}")
        else:
            there.append(peer)
    return there


def share_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Gives all of them the state tensors of the first, so that they race over the same memory.

    Where pages lie decides by up to a quarter: two runs of one and the same optimizer over states of their own differ.
    The count of steps is where each one keeps it: on a GPU only the fused ones have it there, and torch's others would
    wait for the device at every tensor.
    """
    first = optimizers[0]
    first.step()
    for other in optimizers[1:]:
        for p, state in first.state.items():
            on_device = isinstance(other, FusedOptimizer) or other.defaults.get("fused")
            other.state[p] = state if on_device else {**state, "step": state["step"].cpu()}
