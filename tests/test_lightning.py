"""Lightning's Trainer with our optimizers beside torch's: both kinds of optimization, precision, clipping, resuming."""

from __future__ import annotations

import gc
import importlib.util
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_cases import (
    ADAMW,
    BF16,
    FP16,
    FP32,
    LIMIT,
    PAIRS,
    Pair,
    assert_differ,
    assert_losses,
    falling,
    net,
    one_thread,  # noqa: F401  (an autouse fixture)
    rows,
)

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

import mo_fused
from mo_fused.optim.base import FusedOptimizer

pytestmark = [
    pytest.mark.cpu_only(reason="the subject is what Lightning does around the step, on the host"),
    pytest.mark.filterwarnings("ignore:.*num_workers.*", "ignore:.*ModelCheckpoint.*", "ignore:.*training batches.*"),
]
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def quiet_and_quick() -> Iterator[None]:
    """No notes about missing GPUs; and each fit collects garbage, which goes through all that was ever imported."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    gc.freeze()
    yield
    gc.unfreeze()


class Module(LightningModule):
    """Automatic optimization: Lightning makes the step."""

    def __init__(self, make: Callable[[Any], Any], overflow: tuple[int, ...] = (), dropout: float = 0.0) -> None:
        super().__init__()
        self.net = net(dropout)
        self.make, self.overflow = make, overflow
        self.losses: list[float] = []
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        self.made = self.make(self.net.parameters())
        return {"optimizer": self.made, "lr_scheduler": {"scheduler": falling(self.made), "interval": "step"}}

    def loss(self, batch: dict[str, Any]) -> Any:
        loss = self.net(**batch)["loss"]
        self.rates.append(self.made.param_groups[0]["lr"])
        self.losses.append(loss.item())
        return loss * float("inf") if len(self.losses) - 1 in self.overflow else loss

    def training_step(self, batch: dict[str, Any], index: int) -> Any:
        return self.loss(batch)


class Manual(Module):
    """Manual optimization: the module makes the step, and clips; it looks at what the optimizer says of it."""

    def __init__(self, make: Callable[[Any], Any], clip: float | None = None) -> None:
        super().__init__(make)
        self.automatic_optimization = False
        self.clip = clip
        self.norms: list[float] = []

    def training_step(self, batch: dict[str, Any], index: int) -> None:
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.clip is not None:
            self.clip_gradients(opt, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        opt.step()
        if isinstance(opt, FusedOptimizer):
            self.norms.append(float(opt.last_step.grad_norm))
        self.lr_schedulers().step()


def half(scale: float = 2.0**10, **options: Any) -> MixedPrecision:
    """16-mixed of the CPU. ``Trainer(precision="16-mixed")`` turns into bf16 there, but takes this plugin."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, **options))


def fit(module: Module, folder: Path, path: Path | None = None, epochs: int = 1, **options: Any) -> Trainer:
    options = {"enable_checkpointing": False, "limit_train_batches": STEPS, **options}
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder), **options,
    )  # fmt: skip
    loader = DataLoader(rows(4 * STEPS), batch_size=4)
    trainer.fit(module, loader, ckpt_path=None if path is None else str(path))
    return trainer


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_clipping_by_either_side(pair: Pair, tmp_path: Path) -> None:
    """Three losses of one: torch's optimizer clipped by Lightning, ours clipped by it, ours that clips by itself."""
    theirs, ours = Module(pair.torch), Module(pair.ours)
    inside = Module(lambda p: pair.ours(p, max_grad_norm=LIMIT))
    fit(theirs, tmp_path, gradient_clip_val=LIMIT)
    fit(ours, tmp_path, gradient_clip_val=LIMIT)
    fit(inside, tmp_path)
    for found in (ours, inside):
        assert_losses(found.losses, theirs.losses, **FP32)
        assert found.rates == theirs.rates
    assert float(inside.made.last_step.clip_coef) < 0.5
    if pair.kind == "SGD":
        free = Module(pair.torch)
        fit(free, tmp_path)
        assert_differ(ours.losses, free.losses, **FP32)


def test_accumulation(tmp_path: Path) -> None:
    theirs, ours = Module(ADAMW.torch), Module(ADAMW.ours)
    for module in (theirs, ours):
        fit(module, tmp_path, accumulate_grad_batches=2, epochs=2)
    assert_losses(ours.losses, theirs.losses, **FP32)
    assert float(ours.made.state[next(ours.net.parameters())]["step"]) == STEPS


@pytest.mark.parametrize("clip", [None, LIMIT])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_manual_optimization(pair: Pair, clip: float | None, tmp_path: Path) -> None:
    """What ``self.optimizers()`` returns is Lightning's wrapper: it says what the step measured, too."""
    theirs, ours = Manual(pair.torch, clip), Manual(lambda p: pair.ours(p, stats=True), clip)
    for module in (theirs, ours):
        fit(module, tmp_path)
    assert_losses(ours.losses, theirs.losses, **FP32)
    assert ours.rates == theirs.rates and len(ours.norms) == STEPS
    if clip is not None:
        assert ours.norms == pytest.approx([clip] * STEPS, rel=1e-4)
    else:
        assert min(ours.norms) > LIMIT


class Released(Module):
    def on_train_start(self) -> None:
        self.handle = mo_fused.gradient_release(self.net, self.optimizers())


class ReleasedByHand(Manual):
    on_train_start = Released.on_train_start


@pytest.mark.parametrize("kinds", [(Module, Released), (Manual, ReleasedByHand)], ids=["automatic", "manual"])
def test_gradient_release_through_the_wrapper(kinds: tuple[type[Module], type[Module]], tmp_path: Path) -> None:
    """The bits of the ordinary step, and no gradient is left after the backward."""
    plain, released = (kind(lambda p: ADAMW.ours(p, stats=True)) for kind in kinds)
    left: list[int] = []
    released.on_after_backward = lambda: left.append(sum(p.grad is not None for p in released.net.parameters()))
    for module in (plain, released):
        fit(module, tmp_path)
    assert released.losses == plain.losses
    assert left == [0] * STEPS


@pytest.mark.parametrize("clip", ["lightning", "step"])
def test_bf16(clip: str, tmp_path: Path) -> None:
    """Lightning asks who unscales here too, where nothing is scaled."""
    options: dict[str, Any] = dict(max_grad_norm=LIMIT) if clip == "step" else dict(amp="torch")
    theirs, ours = Module(ADAMW.torch), Module(lambda p: ADAMW.ours(p, **options))
    fit(theirs, tmp_path, precision="bf16-mixed", gradient_clip_val=LIMIT)
    fit(ours, tmp_path, precision="bf16-mixed", gradient_clip_val=None if clip == "step" else LIMIT)
    assert_losses(ours.losses, theirs.losses, **BF16)
    plain = Module(ADAMW.torch)
    fit(plain, tmp_path, gradient_clip_val=LIMIT)
    assert_differ(theirs.losses, plain.losses, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("amp,clip", [("fused", "none"), ("fused", "step"), ("torch", "step"), ("torch", "lightning")])
@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
def test_fp16(pair: Pair, amp: str, clip: str, tmp_path: Path) -> None:
    """Two of six batches overflow: nothing moves but the schedule, which Lightning steps all the same."""
    overflow = (1, 3)
    outside = None if clip == "none" else LIMIT
    inside = LIMIT if clip == "step" else None
    theirs = Module(pair.torch, overflow)
    fit(theirs, tmp_path, gradient_clip_val=outside, plugins=[half()])
    ours, plugin = Module(lambda p: pair.ours(p, max_grad_norm=inside, amp=amp), overflow), half()
    fit(ours, tmp_path, gradient_clip_val=None if inside else outside, plugins=[plugin])
    assert_losses(ours.losses, theirs.losses, **FP16)
    assert ours.rates == theirs.rates == [pair.options["lr"] * 0.9**t for t in range(STEPS)]
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 2.0**8
    if amp == "fused":
        assert not bool(ours.made.last_step.skipped)
    if pair is ADAMW:
        assert float(ours.made.state[next(ours.net.parameters())]["step"]) == STEPS - 2


def test_fp16_by_hand_is_clipped_in_the_step(tmp_path: Path) -> None:
    """Before a manual step gradients are scaled, whoever clips then: only the step, or the scaler, knows the scale."""
    theirs = Module(ADAMW.torch)
    fit(theirs, tmp_path, gradient_clip_val=LIMIT, plugins=[half()])
    ours = Manual(lambda p: ADAMW.ours(p, max_grad_norm=LIMIT))
    fit(ours, tmp_path, plugins=[half()])
    assert_losses(ours.losses, theirs.losses, **FP16)
    assert max(ours.norms) < 2.0**5, "norms are of unscaled gradients"


@pytest.mark.parametrize("precision", ["bf16", "16"])
def test_lightning_clips_in_mixed_precision_only_what_does_not_unscale(precision: str, tmp_path: Path) -> None:
    """It refuses optimizers that unscale in the step, torch's fused ones too; with ``amp="torch"`` see above."""
    for make in (lambda p: torch.optim.AdamW(p, fused=True), mo_fused.AdamW):
        plugin = half() if precision == "16" else MixedPrecision("bf16-mixed", "cpu")
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(Module(make), tmp_path, gradient_clip_val=LIMIT, plugins=[plugin])


@pytest.mark.parametrize("precision", ["32", "bf16", "16"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_resumed_fit_has_the_bits_of_one_that_never_stopped(pair: Pair, precision: str, tmp_path: Path) -> None:
    """Schedule and scale included. Lightning saves no random numbers, so there is no dropout here."""

    def run(path: Path | None = None, **more: Any) -> Module:
        module = Module(lambda p: pair.ours(p, max_grad_norm=LIMIT))
        if precision == "16":
            more["plugins"] = [half(growth_interval=2)]
        if precision == "bf16":
            more["precision"] = "bf16-mixed"
        fit(module, tmp_path, path, epochs=2, **more)
        return module

    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    straight = run(enable_checkpointing=True, callbacks=[saver])
    resumed = run(tmp_path / "epoch=0.ckpt")
    assert resumed.losses == straight.losses[STEPS:] and resumed.rates == straight.rates[STEPS:]
    assert len(set(straight.losses)) == 2 * STEPS
    for name, value in straight.net.state_dict().items():
        assert torch.equal(resumed.net.state_dict()[name], value), name


class Told(Module):
    """A schedule that Lightning steps with a measure."""

    def configure_optimizers(self) -> Any:
        self.made = self.make(self.net.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.made, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": self.made, "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "loss"}}

    def training_step(self, batch: dict[str, Any], index: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


def test_plateau(tmp_path: Path) -> None:
    theirs, ours = Told(ADAMW.torch), Told(ADAMW.ours)
    for module in (theirs, ours):
        fit(module, tmp_path)
    assert_losses(ours.losses, theirs.losses, **FP32)
    assert ours.rates == theirs.rates and ours.rates[-1] < ours.rates[0]


# With the second, the wrapper of old would have an engine of its own that takes the gradients too.
OFFLOADED: dict[str, Any] = dict(offload="cpu", offload_gradients=True)


@pytest.mark.parametrize("options", [{}, OFFLOADED], ids=["plain", "offloaded"])
def test_fabric(options: dict[str, Any]) -> None:
    """Clipped by either side; the wrapper says what the step measured."""
    losses = []
    for make in (ADAMW.torch, lambda p: ADAMW.ours(p, max_grad_norm=LIMIT, **options)):
        fabric = Fabric(accelerator="cpu", devices=1)
        module = net()
        bare = make(module.parameters())
        model, opt = fabric.setup(module, bare)
        losses.append([])
        for row in rows(STEPS):
            loss = model(**row)["loss"]
            fabric.backward(loss)
            if not isinstance(bare, FusedOptimizer):
                fabric.clip_gradients(model, opt, max_norm=LIMIT)
            opt.step()
            opt.zero_grad()
            losses[-1].append(loss.item())
    assert_losses(losses[1], losses[0], **FP32)
    assert opt.last_step is bare.last_step and float(opt.last_step.clip_coef) < 1


@pytest.mark.parametrize("options", [{}, OFFLOADED], ids=["plain", "offloaded"])
def test_wrapper_stands_for_the_optimizer(options: dict[str, Any]) -> None:
    """LightningOptimizer takes on our class: methods that run on it have to find what the optimizer itself keeps."""
    model = net()
    params = list(model.parameters())
    bare = ADAMW.ours(params[:-1], **options)
    wrapper: Any = LightningOptimizer(bare)
    assert [str(r) for r in wrapper.explain()] == [str(r) for r in bare.explain()], "before the first step"
    wrapper.add_param_group({"params": params[-1:]})
    model(**rows(1)[0])["loss"].backward()
    wrapper.zero_grad()
    bare.step()
    assert not bare.state, "zero_grad has to forget gradients that are elsewhere too"
    for row in rows(2):
        model(**row)["loss"].backward()
        bare.step()
        bare.zero_grad()
    assert wrapper.last_step is bare.last_step
    assert [str(r) for r in wrapper.explain()] == [str(r) for r in bare.explain()]
    saved = wrapper.state_dict()
    assert len(saved["state"]) == len(params) and all(float(s["step"]) == 2 for s in saved["state"].values())
    fresh = ADAMW.ours(params[:-1], **options)
    fresh.add_param_group({"params": params[-1:]})
    loader: Any = LightningOptimizer(fresh)
    loader.load_state_dict(saved)
    for p in params:
        assert torch.equal(fresh.state[p]["exp_avg"], bare.state[p]["exp_avg"])
