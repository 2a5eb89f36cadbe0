"""Task ``lm``: a byte-level GPT on text, measured by the mean cross-entropy per byte in nats."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mo_fused.training.config import TrainConfig
from mo_fused.training.model import BYTES, ByteGPT
from mo_fused.training.tasks import Task
from mo_fused.training.text import load_text

_VALIDATION_BATCH = 32


def build(config: TrainConfig, device: torch.device) -> Task:
    """Reads the text, then makes model and windows from ``config.seed`` alone (torch's global generator is reseeded).

    Raises:
        InputError: the text cannot be used.
    """
    text = load_text(config.text, config.context)
    torch.manual_seed(config.seed)
    model = ByteGPT(context=config.context, layers=config.layers, heads=config.heads, width=config.width).to(device)
    generator = torch.Generator().manual_seed(config.seed)
    kept = text.validation_windows(config.context)

    def cross_entropy(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(inputs.to(device, non_blocking=True))
        return F.cross_entropy(logits.view(-1, BYTES), targets.to(device, non_blocking=True).reshape(-1))

    def training_loss() -> Tensor:
        return cross_entropy(*text.draw(config.batch_size, config.context, generator))

    @torch.inference_mode()
    def validation_loss() -> float:
        batches = list(zip(*(torch.split(part, _VALIDATION_BATCH) for part in kept), strict=True))
        losses = torch.stack([cross_entropy(inputs, targets) for inputs, targets in batches])
        weights = torch.tensor([float(len(inputs)) for inputs, _ in batches], device=losses.device)
        return float((losses * weights).sum() / weights.sum())

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Task(
        model=model,
        training_loss=training_loss,
        validation_loss=validation_loss,
        tokens_per_step=config.batch_size * config.context,
        summary=f"byte-level GPT, {parameters:,} parameters; {text.source}, {text.size:,} bytes of text",
        data={
            "source": text.source,
            "sha256": text.sha256,
            "train_bytes": text.train.numel(),
            "validation_bytes": text.validation.numel(),
            "model_parameters": parameters,
        },
    )
