"""Task ``vision``: a small residual network on scikit-learn's handwritten digits, measured by its accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mo_fused.training.errors import bad_input
from mo_fused.training.padding import cross_entropy
from mo_fused.training.resnet import SmallResNet
from mo_fused.training.tasks import Task, checked_position, sklearn_module

_SIDE, _CLASSES = 8, 10
_VALIDATION = 360  # of 1797 images


class ImageLoader:
    """Epochs of shuffled batches: images float32 (batch_size, 1, 8, 8), shifted by up to a pixel, and labels int64.

    What an epoch draws depends on the seed and the epoch's number alone, so the position is two numbers. An epoch's
    last images that fill no batch are left out.

    Args:
        images: float32 (images, 10, 10), a pixel of background around each.
        labels: int64 (images,).
    """

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int, seed: int) -> None:
        self.images, self.labels, self.batch_size, self.seed = images, labels, batch_size, seed
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = self.epoch
        random = np.random.default_rng((self.seed, epoch))
        order = torch.from_numpy(random.permutation(len(self.images)))
        shifts = torch.from_numpy(random.integers(0, 3, (2, len(self.images))))
        while self.epoch == epoch:
            here = slice(self.batch * self.batch_size, (self.batch + 1) * self.batch_size)
            # The position is the next batch's before this one is handed out: an epoch's end is the next one's start.
            self.batch += 1
            if self.batch == len(self):
                self.epoch, self.batch = epoch + 1, 0
            chosen = order[here]
            yield shifted(self.images[chosen], *shifts[:, here]), self.labels[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checked_position(state, "epoch", "batch")
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])


def shifted(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """The window of 8x8 pixels that starts ``down`` and ``right`` (0 to 2, a value each image) in images of 10x10.

    Returns (images, 1, 8, 8); 1 and 1 are the image as it was.
    """
    pixels = torch.arange(_SIDE)
    image = torch.arange(len(images))[:, None, None]
    return images[image, (down[:, None] + pixels)[:, :, None], (right[:, None] + pixels)[:, None, :]].unsqueeze(1)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross-entropy in nats of (images, labels)."""
    return cross_entropy(model(batch[0]), batch[1])


def build(*, device: torch.device, seed: int, batch_size: int, width: int) -> Task:
    """The digits, split the same way for every seed; weights, order and shifts come from ``seed`` alone.

    Raises:
        InputError: scikit-learn is missing, or a batch is larger than the training set.
    """
    images, labels = _digits()
    train, kept = slice(_VALIDATION, None), slice(0, _VALIDATION)
    if batch_size > len(images[train]):
        raise bad_input(
            "--batch-size",
            expected=f"at most the {len(images[train])} images that are trained on",
            found=str(batch_size),
            remedy="give a smaller --batch-size",
        )
    torch.manual_seed(seed)
    model = SmallResNet(classes=_CLASSES, width=width).to(device)
    centre = torch.ones(_VALIDATION, dtype=torch.int64)
    held = shifted(images[kept], centre, centre).to(device), labels[kept].to(device)

    @torch.no_grad()
    def validate() -> dict[str, float]:
        model.eval()
        logits = model(held[0])
        model.train()
        accuracy = (logits.argmax(dim=1) == held[1]).float().mean()
        return {"val_loss": float(cross_entropy(logits, held[1])), "val_metric": float(accuracy)}

    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = len(images[train])
    return Task(
        model=model,
        loader=ImageLoader(images[train], labels[train], batch_size, seed),
        loss_fn=loss_fn,
        validate=validate,
        metric="accuracy",
        higher_is_better=True,
        samples_per_batch=batch_size,
        tokens_per_batch=None,
        summary=f"residual network, {parameters:,} parameters; handwritten digits, {trained:,} images of 8x8 pixels",
        data={
            "source": "sklearn.datasets.load_digits",
            "train_images": trained,
            "validation_images": _VALIDATION,
            "model_parameters": parameters,
        },
    )


def _digits() -> tuple[Tensor, Tensor]:
    """All images, float32 (1797, 10, 10) with a pixel of background around each and values near unit size, and labels.

    In a fixed random order: the file is sorted by who wrote the digits.
    """
    raw, labels = sklearn_module("datasets", "vision").load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = torch.from_numpy(raw[order].reshape(-1, _SIDE, _SIDE)).float()
    # Pixels go from 0 to 16; their mean is near 5 and their deviation near 6.
    images = (nn.functional.pad(images, (1, 1, 1, 1)) - 5.0) / 6.0
    return images, torch.from_numpy(labels[order]).long()
