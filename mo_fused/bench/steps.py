"""The suites step, clip, amp and adafactor: one optimizer step, bare, with clipping, and under a GradScaler.

Bytes counted, in elements read or written: AdamW moves 7 (parameter, gradient and two moments are read, all but the
gradient written). With clipping ours reads the gradient once more for the norm: 8; the others read it for the norm, and
read and write it to scale it: 10. Under torch's scaler, which reads and writes it before that, they move 12, ours 10;
ours under our scaler 8. Adafactor moves 5 (the gradient is read three times), with clipping ours too, the others 8.

torch scales the shared gradients in place, so that from the second round on they have the norm that is asked for; that
changes what is multiplied, not what is read and written. For the same reason the scaler's scale is 1: a larger one
would divide the gradients again in every round, down to denormal numbers, which are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mo_fused
from mo_fused.bench import accuracy, peers
from mo_fused.bench.case import Case, Settings, copy_contender
from mo_fused.bench.peers import OURS, OURS_LIKE, Peer
from mo_fused.bench.race import Contender
from mo_fused.bench.results import Record
from mo_fused.bench.room import too_large
from mo_fused.bench.workloads import MAX_NORM, WORKLOADS, Workload

OUR_SCALER, TORCH_SCALER = "mo_fused, mo_fused.GradScaler", "mo_fused, torch's GradScaler"
MOVED = {"step": (7, 7), "clip": (8, 10), "amp": (8, 12)}
"""Elements by (ours, the others)."""
ADAFACTOR_MOVED = 5
WORDS = {"step": "step", "clip": "clip + step", "amp": "scaler + clip + step"}


def clip_(params: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, MAX_NORM)


def after_clipping(step: Callable[[], Any], params: Sequence[Tensor]) -> Callable[[], None]:
    def call() -> None:
        clip_(params)
        step()

    return call


def under_scaler(
    kind: type[torch.amp.GradScaler], optimizer: torch.optim.Optimizer, clipped: Sequence[Tensor], device: torch.device
) -> Callable[[], None]:
    """A step as PyTorch's guide writes it; ``clipped``: what is unscaled and clipped by hand before it."""
    scaler = kind(device.type, init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(
        torch.zeros((), device=device)
    )  # makes the scale tensor, as a training loop does before its first step

    def call() -> None:
        if clipped:
            scaler.unscale_(optimizer)
            clip_(clipped)
        scaler.step(optimizer)
        scaler.update()

    return call


@dataclass(frozen=True)
class Suite:
    """A kind of step over workloads, by all who can do it."""

    how: str
    """"step", "clip" or "amp"."""
    of: Sequence[Peer]
    bench: str
    rule: str = ""

    def case(self, name: str) -> Case:
        workload = WORKLOADS[name]
        words = f"{self.rule}, {WORDS[self.how]}" if self.rule else WORDS[self.how]
        rounds = 9 if workload.in_memory else 25
        extra = partial(self.extra, workload)
        return Case(
            self.bench, f"{workload.name}, {words}", partial(self.contenders, workload), (), rounds, extra=extra
        )

    def contenders(self, workload: Workload, settings: Settings) -> list[Contender]:
        """None where the workload is not for this device, or is too large for its memory."""
        reason = too_large(workload, settings)
        if reason:
            settings.says(f"{workload.name} is left out: {reason}")
            return []
        there = peers.available(self.of, settings.device, settings.peers, settings.says)
        params = workload.parameters(settings.quick, settings.device)
        there = [peer for peer in there if not self._left_out(peer, params, workload, settings)]
        there = [peer for peer in there if self._agrees(peer, workload, settings)]
        made = {peer.name: self._make(peer, params) for peer in there}
        twins = [made[peer.name] for peer in there if not peer.own_state and not self.rule]
        second = self._make(there[0], params) if self.how == "amp" else None
        if twins:
            peers.share_state([*twins, *([second] if second else [])])
        counted = workload.counted_bytes(params)
        racing = [self._contender(peer, made[peer.name], params, counted, settings) for peer in there]
        if second is not None:
            call = under_scaler(torch.amp.GradScaler, second, (), settings.device)
            racing.insert(1, Contender(TORCH_SCALER, call, 10 * counted))
        return [*racing, copy_contender(settings.quick, settings.device)] if workload.in_memory else racing

    def _left_out(self, peer: Peer, params: Sequence[Tensor], workload: Workload, settings: Settings) -> bool:
        reason = peer.why_not(params) if not settings.quick else ""
        if self.how == "amp" and not peer.scaled:
            reason = "does not step under a GradScaler"
        if reason:
            settings.says(f"{peer.name} is left out of {workload.name}: {reason}")
        return bool(reason)

    def _error(self, peer: Peer, dtype: torch.dtype, device: torch.device) -> float | None:
        """Against float64; None for those that follow another rule, or would have to be compiled for it."""
        if peer.wrap is not None or peer.name in (OURS_LIKE, peers.TRANSFORMERS):
            return None
        oracle = next(p for p in (peers.ADAFACTOR if self.rule else peers.ADAMW) if p.name == peers.FOR_LOOP)
        return accuracy.error(peer, oracle, dtype, device)

    def _agrees(self, peer: Peer, workload: Workload, settings: Settings) -> bool:
        """Whether a peer that should do the same arithmetic does; of another one's time nothing follows."""
        error = self._error(peer, workload.dtype, settings.device)
        # bf16 rounds away more than a wrong rule might.
        if error is None or not peer.exact or workload.dtype != torch.float32 or error <= accuracy.DISAGREES:
            return True
        settings.says(
            f"{peer.name} is left out: it ends {error:.1%} away from float64, expected less than "
            f"{accuracy.DISAGREES:.0%}, so it does something else"
        )
        return False

    def _ours(self, peer: Peer) -> bool:
        return peer.name in (OURS, OURS_LIKE)

    def _make(self, peer: Peer, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        options = {"max_grad_norm": MAX_NORM} if self._ours(peer) and self.how != "step" else {}
        return peer.make(params, **options)

    def _contender(
        self, peer: Peer, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], counted: float, settings: Settings
    ) -> Contender:
        own = self._ours(peer)
        moved = MOVED[self.how][0 if own else 1]
        if self.rule:
            moved = ADAFACTOR_MOVED + (0 if own or self.how == "step" else 3)
        # What a peer keeps of 16-bit parameters, or in few bits, is its own affair, and so are the bytes it moves.
        known = peer.exact and (not peer.own_state or params[0].dtype == torch.float32)
        step: Callable[[], Any] = peer.wrap(optimizer.step) if peer.wrap else optimizer.step
        if self.how == "amp":
            kind = mo_fused.GradScaler if own else torch.amp.GradScaler
            step = under_scaler(kind, optimizer, () if own else params, settings.device)
        elif self.how == "clip" and not own:
            step = after_clipping(step, params)
        return Contender(
            OUR_SCALER if own and self.how == "amp" else peer.name, step, moved * counted if known else 0.0
        )

    def extra(self, workload: Workload, settings: Settings, names: Sequence[str]) -> Mapping[str, Record]:
        """Versions, and the accuracy against float64."""
        out: dict[str, Record] = {}
        for peer in self.of:
            name = OUR_SCALER if self.how == "amp" and peer.name == OURS else peer.name
            if name in names:
                error = self._error(peer, workload.dtype, settings.device)
                out[name] = {"version": peer.version, "error": error}
        if TORCH_SCALER in names:
            out[TORCH_SCALER] = {"version": mo_fused.__version__}
        return out


STEP = Suite("step", peers.ADAMW, "step")
CLIP = Suite("clip", peers.ADAMW, "clip")
AMP = Suite("amp", peers.ADAMW, "amp")
ADAFACTOR_STEP = Suite("step", peers.ADAFACTOR, "adafactor", "Adafactor")
ADAFACTOR_CLIP = Suite("clip", peers.ADAFACTOR, "adafactor", "Adafactor")

_BOTH, _ONE = ("fp32", "bf16"), ("fp32",)
_DTYPES = {"gpt2": _BOTH, "llama": ("bf16",), "vit": _ONE, "resnet": _ONE, "lora": _BOTH, "small": _BOTH, "tiny": _ONE}
_NAMES = [f"{model}-{word}" for model, words in _DTYPES.items() for word in words] + ["huge-bf16"]
_SCALED = ("gpt2-fp32", "resnet-fp32", "lora-fp32", "small-fp32", "tiny-fp32")

STEPS = {f"step-{name}": STEP.case(name) for name in _NAMES}
CLIPS = {f"clip-{name}": CLIP.case(name) for name in _NAMES}
AMPS = {f"amp-{name}": AMP.case(name) for name in _SCALED}
ADAFACTORS = {
    f"adafactor-{suite.how}-{name}": suite.case(name)
    for suite in (ADAFACTOR_STEP, ADAFACTOR_CLIP)
    for name in ("gpt2-fp32", "gpt2-bf16", "matrices-fp32", "matrices-bf16")
}
