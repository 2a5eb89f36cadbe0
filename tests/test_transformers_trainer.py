"""The transformers library's Trainer with our optimizers beside torch's: clipping, precision, resuming."""

from __future__ import annotations

import gc
import importlib.util
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

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
if importlib.util.find_spec("accelerate") is None:
    pytest.skip("accelerate is not installed", allow_module_level=True)
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import Trainer, TrainingArguments

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="the subject is what Trainer does around the step, on the host")
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Each train() collects garbage, which goes through all that was ever imported: most of the time of these tests."""
    gc.freeze()
    yield
    gc.unfreeze()


class WithScaler(Trainer):
    """Trainer with the loss scaler that it has on a GPU.

    On the CPU ``TrainingArguments(fp16=True)`` is taken, but Accelerate then switches neither autocast nor a scaler on.
    These are its own two lines for a GPU, with a scaler of the CPU; all that follows is the library's.
    """

    scaler: torch.amp.GradScaler

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        assert self.accelerator.scaler is None, "Accelerate does it by itself now"
        self.accelerator.native_amp, self.accelerator.scaler = True, self.scaler


class Run:
    """A Trainer with the optimizer and the schedule that are given to it, and what it trained."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[Any], Any],
        overflow: tuple[int, ...] = (),
        dropout: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        **arguments: Any,
    ) -> None:
        for kept in (AcceleratorState, GradientState, PartialState):
            kept._reset_state()
        self.losses: list[float] = []
        self.overflow = overflow
        self.model = net(dropout)
        self.model.register_forward_hook(self._note)
        self.optimizer = make(self.model.parameters())
        arguments = {
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "save_strategy": "no",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            **arguments,
        }
        kind = Trainer if scaler is None else type("Scaled", (WithScaler,), {"scaler": scaler})
        settings = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, seed=3, **arguments)
        schedule = falling(self.optimizer)
        self.trainer = kind(self.model, settings, train_dataset=rows(32), optimizers=(self.optimizer, schedule))
        self.trainer.callback_handler.pop_callback("PrinterCallback")

    def _note(self, module: Any, inputs: Any, output: dict[str, Any]) -> Any:
        self.losses.append(output["loss"].item())
        return {"loss": output["loss"] * float("inf")} if len(self.losses) - 1 in self.overflow else None

    def train(self, resume: Path | None = None) -> Run:
        self.trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return self

    def logged(self, key: str) -> list[float]:
        return [entry[key] for entry in self.trainer.state.log_history if key in entry]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_clipping_by_either_side(pair: Pair, tmp_path: Path) -> None:
    """Three losses of one: torch's optimizer clipped by Trainer, ours clipped by Trainer, ours that clips by itself."""
    theirs = Run(tmp_path, pair.torch, max_grad_norm=LIMIT).train()
    ours = Run(tmp_path, pair.ours, max_grad_norm=LIMIT).train()
    inside = Run(tmp_path, lambda p: pair.ours(p, max_grad_norm=LIMIT)).train()
    for found in (ours, inside):
        assert_losses(found.losses, theirs.losses, **FP32)
        assert found.logged("learning_rate") == theirs.logged("learning_rate")
    assert float(inside.optimizer.last_step.clip_coef) < 0.5
    assert float(inside.optimizer.last_step.grad_norm) == pytest.approx(theirs.logged("grad_norm")[-1], rel=1e-4)
    if pair.kind == "SGD":
        assert_differ(ours.losses, Run(tmp_path, pair.torch).train().losses, **FP32)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_accumulation_without_clipping(pair: Pair, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(gradient_accumulation_steps=2, max_steps=4)
    theirs = Run(tmp_path, pair.torch, **options).train()
    ours = Run(tmp_path, pair.ours, **options).train()
    assert len(ours.losses) == 8
    assert_losses(ours.losses, theirs.losses, **FP32)


@pytest.mark.parametrize("clip", ["trainer", "step"])
def test_bf16(clip: str, tmp_path: Path) -> None:
    theirs = Run(tmp_path, ADAMW.torch, bf16=True, max_grad_norm=LIMIT).train()
    inside = LIMIT if clip == "step" else None
    outside = 0.0 if inside else LIMIT
    ours = Run(tmp_path, lambda p: ADAMW.ours(p, max_grad_norm=inside), bf16=True, max_grad_norm=outside).train()
    assert_losses(ours.losses, theirs.losses, **BF16)
    plain = Run(tmp_path, ADAMW.torch, max_grad_norm=LIMIT).train()
    assert_differ(theirs.losses, plain.losses, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("clip", ["trainer", "step"])
@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
def test_fp16_skips_step_and_schedule_together(pair: Pair, clip: str, tmp_path: Path) -> None:
    """Two of six batches overflow."""
    overflow = (1, 3)

    def run(make: Callable[[Any], Any], outside: float) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        return Run(tmp_path, make, overflow, scaler=scaler, fp16=True, max_grad_norm=outside).train()

    theirs = run(pair.torch, LIMIT)
    inside = LIMIT if clip == "step" else None
    ours = run(lambda p: pair.ours(p, max_grad_norm=inside), 0.0 if inside else LIMIT)
    assert_losses(ours.losses, theirs.losses, **FP16)
    last = pair.options["lr"] * 0.9 ** (STEPS - 2)
    assert ours.trainer.lr_scheduler.get_last_lr() == theirs.trainer.lr_scheduler.get_last_lr() == [last]
    assert ours.trainer.accelerator.scaler.get_scale() == 2.0**8


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_resumed_run_has_the_bits_of_one_that_never_stopped(pair: Pair, precision: str, tmp_path: Path) -> None:
    """Dropout, the order of the data, the schedule and the scale included."""

    def run(**more: Any) -> Run:
        if precision == "fp16":
            more["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        if precision != "fp32":
            more[precision] = True
        return Run(tmp_path, lambda p: pair.ours(p, max_grad_norm=LIMIT), dropout=0.3, **more)

    straight = run(save_strategy="steps", save_steps=3).train()
    resumed = run().train(resume=tmp_path / "checkpoint-3")
    assert resumed.losses == straight.losses[3:]
    assert resumed.logged("learning_rate") == straight.logged("learning_rate")
    assert len(set(straight.losses)) == STEPS
    for name, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_made_by_trainer_itself(tmp_path: Path) -> None:
    """``optimizer_cls_and_kwargs``: Trainer makes the groups (no decay of biases and norms) and its own schedule."""
    losses = []
    for kind, options in ((torch.optim.AdamW, {}), (mo_fused.AdamW, dict(max_grad_norm=LIMIT))):
        run = Run(tmp_path, ADAMW.torch)
        settings = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=STEPS,
            per_device_train_batch_size=4, seed=3, max_grad_norm=0.0 if options else LIMIT, weight_decay=0.1,
            lr_scheduler_type="cosine", warmup_steps=2,
        )  # fmt: skip
        made = (kind, dict(lr=0.02, **options))
        trainer = Trainer(run.model, settings, train_dataset=rows(32), optimizer_cls_and_kwargs=made)
        trainer.callback_handler.pop_callback("PrinterCallback")
        trainer.train()
        assert [g["weight_decay"] for g in trainer.optimizer.param_groups] == [0.1, 0.0]
        losses.append(run.losses)
    assert_losses(losses[1], losses[0], **FP32)
