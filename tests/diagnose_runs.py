"""Small trainings for ``mo-fused diagnose``: a healthy one, and the same with one fault planted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mo_fused
from mo_fused.training import (
    DeadGradient,
    JsonLines,
    LossSpike,
    Monitor,
    NonFinite,
    NormOutlier,
    ScaleCollapse,
    Trainer,
)
from mo_fused.training.schedules import warmup_cosine

CLASSES, FEATURES, BATCH = 10, 16, 32
BAD = (300, 700, 1100, 1500)


class WithSamples:
    """A trainer's monitor that is told the samples of each batch too; the loss sets ``samples``: ids and losses."""

    def __init__(self, folder: Path, optimizer: mo_fused.AdamW, scaler: Any) -> None:
        watchers = [kind(action="log") for kind in (LossSpike, DeadGradient, NonFinite, NormOutlier, ScaleCollapse)]
        self.monitor = Monitor(optimizer, [JsonLines(folder)], watchers, detail_every=50, scaler=scaler)
        self.monitor.request_detail()  # of the first step
        self.samples: tuple[Tensor, Tensor] | None = None

    def step(self, loss: Tensor, info: Mapping[str, Any]) -> None:
        assert self.samples is not None
        self.monitor.step(loss, {**info, "sample_ids": self.samples[0], "sample_losses": self.samples[1]})


@dataclass
class Data:
    """Clusters, one a class: inputs ``(n, 16)`` and labels ``(n,)``."""

    inputs: Tensor
    labels: Tensor
    held_inputs: Tensor
    held_labels: Tensor

    def loader(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            for ids in torch.randperm(len(self.inputs), generator=generator).split(BATCH):
                if len(ids) == BATCH:
                    yield self.inputs[ids], self.labels[ids], ids


def clusters(generator: torch.Generator, count: int = 2000, noise: float = 1.0) -> Data:
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (count + 500,), generator=generator)
    inputs = centres[labels] + noise * torch.randn(count + 500, FEATURES, generator=generator)
    return Data(inputs[:count], labels[:count], inputs[count:], labels[count:])


def mlp(width: int = 32, depth: int = 2, unit: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(FEATURES, width), unit()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), unit()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def make_run(fault: str, folder: Path, seed: int = 0, steps: int = 400) -> Path:
    """Trains with the fault planted; "healthy" and "healthy fp16" have none.

    On one thread: tensors are tiny here, and further threads would only wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _made(fault, folder, seed, steps)
    finally:
        torch.set_num_threads(before)


def _made(fault: str, folder: Path, seed: int, steps: int) -> Path:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    data, model = clusters(generator), mlp()
    lr, warmup, precision, scaler = 3e-3, 40, "fp32", None
    if fault == "wrong labels":
        data.labels = data.labels[torch.randperm(len(data.labels), generator=generator)]
    elif fault == "wrong labels learned by heart":
        data = clusters(generator, 128)
        data.labels = data.labels[torch.randperm(len(data.labels), generator=generator)]
        model = mlp(128)
    elif fault == "vanishing gradient":
        model = mlp(depth=12, unit=nn.Sigmoid)
    elif fault in ("no warm-up", "the same with a warm-up"):
        data, model = clusters(generator, 8000, noise=2.0), mlp(512)
        lr, warmup = 0.02, 1 if fault == "no warm-up" else 100
    elif fault == "bad samples":
        data = clusters(generator, noise=0.4)
        data.labels[torch.tensor(BAD)] = (data.labels[torch.tensor(BAD)] + 1) % CLASSES
    elif fault == "rate too low":
        lr = 1e-8
    elif fault == "over-fitting":
        data, model = clusters(generator, 128, noise=2.0), mlp(128)
    elif fault in ("fp16 underflow", "loss scale too low", "healthy fp16"):
        precision = "fp16"
        scaler = mo_fused.GradScaler("cpu", init_scale=2.0**-24 if fault == "loss scale too low" else 2.0**12)
        if fault == "fp16 underflow":
            data.inputs[::100] *= 1e5  # beyond what fp16 holds
    optimizer = mo_fused.AdamW(model.named_parameters(), lr=lr, stats=True, skip_nonfinite=True)
    folder.mkdir(parents=True)
    recorder = WithSamples(folder, optimizer, scaler)

    def loss_fn(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
        recorder.samples = batch[2], losses.detach()
        return losses.mean()

    def validate() -> dict[str, float]:
        with torch.no_grad():
            return {"val_loss": float(cross_entropy(model(data.held_inputs), data.held_labels))}

    trainer = Trainer(
        model,
        optimizer,
        loss_fn,
        schedule=warmup_cosine(optimizer, warmup_steps=warmup, total_steps=steps),
        precision=precision,
        scaler=scaler,
        monitor=recorder,
        validate=validate,
        validate_every=steps // 20,
    )
    trainer.fit(data.loader(generator), steps)
    recorder.monitor.close()
    # JSON is YAML.
    config = {"batch_size": BATCH, "precision": precision, "data": {"classes": CLASSES}}
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder
