"""The suite offload: steps with the states on the host and in a file, beside those without and those of peers.

Bytes counted, an element of fp32: a step moves 28, 4 more for the norm of clipping. Through the ring of
``offload="cpu"`` parameter and gradient are copied in and the parameter out (3 x 8); to and from a file both moments
are copied twice (4 x 8). On the CPU its own memory plays the GPU's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from mo_fused import dispatch
from mo_fused.bench import peers
from mo_fused.bench.case import Case, Settings, copy_contender
from mo_fused.bench.peers import DEEPSPEED, OURS, ours
from mo_fused.bench.race import Contender
from mo_fused.bench.room import too_large
from mo_fused.bench.steps import after_clipping
from mo_fused.bench.workloads import MAX_NORM, WORKLOADS

MODEL = WORKLOADS["gpt2-fp32"]
PLAIN, CPU, TAKEN, DISK = OURS, f'{OURS} "cpu"', f'{OURS} "cpu", gradients', f'{OURS} "disk:"'
MOVED = {PLAIN: 28, CPU: 28 + 24, TAKEN: 28 + 24, DISK: 28 + 32}


def with_gradients(step: Callable[[], Any], params: Sequence[Tensor]) -> Callable[[], None]:
    """``offload_gradients`` takes them away: they are there again before the step, as a backward would leave them."""
    grads = [p.grad for p in params]

    def call() -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        step()

    return call


def contenders(max_norm: float | None, folder: str | None, settings: Settings) -> list[Contender]:
    """``folder``: where the file is; a temporary one that goes with the last contender where it is None."""
    reason = too_large(MODEL, settings)
    if reason:
        settings.says(f"{MODEL.name} is left out: {reason}")
        return []
    params = MODEL.parameters(settings.quick, settings.device)
    elements = sum(p.numel() for p in params)
    kept = tempfile.TemporaryDirectory(prefix="mo-fused-bench-") if folder is None else None
    options: dict[str, dict[str, Any]] = {
        PLAIN: {},
        CPU: dict(offload="cpu"),
        TAKEN: dict(offload="cpu", offload_gradients=True),
        DISK: dict(offload=f"disk:{folder if kept is None else kept.name}"),
    }
    out = []
    for name, how in options.items():
        step = with_gradients(ours(params, max_grad_norm=max_norm, **how).step, params)
        out.append(
            Contender(name, _keeping(step, kept), float((MOVED[name] + (0 if max_norm is None else 4)) * elements))
        )
    # The peer whose states are in the host's memory; its gradients are there already.
    if dispatch.is_host(settings.device):
        for peer in peers.available(peers.ADAMW, settings.device, settings.peers, settings.says):
            if peer.name == DEEPSPEED:
                step = peer.make(params).step
                moved = (28 if max_norm is None else 40) * elements
                out.append(
                    Contender(peer.name, step if max_norm is None else after_clipping(step, params), float(moved))
                )
    return [*out, copy_contender(settings.quick, settings.device)]


def _keeping(call: Callable[[], Any], folder: Any) -> Callable[[], Any]:
    """The call, which keeps the folder of its file for as long as it is there itself."""

    def kept(_folder: Any = folder) -> Any:
        return call()

    return kept


def cases(folder: str | None = None) -> dict[str, Case]:
    return {
        f"offload-{name}": Case(
            "offload", f"{MODEL.name}, states on the host, {words}", partial(contenders, norm, folder), rounds=9
        )
        for name, words, norm in (("step", "step", None), ("clip", "clip + step", MAX_NORM))
    }


OFFLOAD = cases()
