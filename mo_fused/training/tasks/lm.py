"""Task ``lm``: a byte-level GPT on text, measured by the mean cross-entropy per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mo_fused.training.model import ByteGPT
from mo_fused.training.padding import cross_entropy
from mo_fused.training.tasks import Task, checked_position
from mo_fused.training.text import TextData, load_text

_VALIDATION_BATCH = 32


class WindowLoader:
    """Random windows of a text without end: pairs (inputs, targets), each int64 of shape (batch_size, context).

    The position is the state of the generator, which lives on the CPU: a seed means the same windows on every device.
    """

    def __init__(self, text: TextData, batch_size: int, context: int, seed: int) -> None:
        self.text, self.batch_size, self.context = text, batch_size, context
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.text.draw(self.batch_size, self.context, self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checked_position(state, "generator")
        self.generator.set_state(state["generator"].cpu())


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross-entropy in nats of (inputs, targets, ...); targets of -100 don't count, so batches may be padded."""
    return cross_entropy(model(batch[0]), batch[1])


def build(
    *,
    device: torch.device,
    seed: int,
    batch_size: int,
    text: str | None,
    context: int,
    layers: int,
    heads: int,
    width: int,
) -> Task:
    """Reads the text, then makes model and windows from ``seed`` alone (torch's global generator is reseeded).

    Raises:
        InputError: the text cannot be used.
    """
    data = load_text(text, context)
    torch.manual_seed(seed)
    model = ByteGPT(context=context, layers=layers, heads=heads, width=width).to(device)
    inputs, targets = (torch.split(part, _VALIDATION_BATCH) for part in data.validation_windows(context))
    batches = list(zip(inputs, targets, strict=True))

    @torch.no_grad()
    def validate() -> dict[str, float]:
        model.eval()
        losses = torch.stack([loss_fn(model, [part.to(device) for part in batch]) for batch in batches])
        model.train()
        weights = torch.tensor([float(len(inputs)) for inputs, _ in batches], device=device)
        loss = float((losses * weights).sum() / weights.sum())
        return {"val_loss": loss, "val_metric": loss / math.log(2)}

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Task(
        model=model,
        loader=WindowLoader(data, batch_size, context, seed),
        loss_fn=loss_fn,
        validate=validate,
        metric="bits per byte",
        higher_is_better=False,
        samples_per_batch=batch_size,
        tokens_per_batch=batch_size * context,
        summary=f"byte-level GPT, {parameters:,} parameters; {data.source}, {data.size:,} bytes of text",
        data={
            "source": data.source,
            "sha256": data.sha256,
            "train_bytes": data.train.numel(),
            "validation_bytes": data.validation.numel(),
            "model_parameters": parameters,
        },
    )
