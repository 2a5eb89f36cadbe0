"""Task ``ctr``: a Deep Interest Network on a made stream of clicks, measured by AUC, whose best value is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mo_fused.training.clicks import CATEGORIES, ITEMS, LONGEST_HISTORY, TRAIN, USERS, VALIDATION, ClickStream, Examples
from mo_fused.training.din import DIN
from mo_fused.training.errors import bad_input
from mo_fused.training.tasks import Task, checked_position, sklearn_module

_VALIDATION_EXAMPLES = 20_000
_VALIDATION_BATCH = 2_000


class ClickLoader:
    """The stream's training examples in order, without end and none twice, in dicts as :class:`DIN` takes them.

    "labels", float32 (batch_size,), is 1 for a click. The position is the next example's number.
    """

    def __init__(self, stream: ClickStream, batch_size: int) -> None:
        self.stream, self.batch_size = stream, batch_size
        self.next = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            start = self.next
            self.next += self.batch_size
            yield as_batch(self.stream.examples(TRAIN, start, self.batch_size))

    def state_dict(self) -> dict[str, Any]:
        return {"example": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checked_position(state, "example")
        self.next = int(state["example"])


def as_batch(examples: Examples) -> dict[str, Tensor]:
    """The tensors that the model sees, and the labels."""
    names = ("user", "item", "category", "history", "history_category")
    batch = {name: torch.from_numpy(getattr(examples, name)) for name in names}
    places = torch.arange(examples.history.shape[1])
    batch["mask"] = places < torch.from_numpy(examples.length)[:, None]
    batch["labels"] = torch.from_numpy(examples.click).float()
    return batch


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Mean binary cross-entropy in nats."""
    return F.binary_cross_entropy_with_logits(model(batch).float(), batch["labels"])


def build(*, device: torch.device, seed: int, batch_size: int, context: int, width: int) -> Task:
    """Hidden model, examples and weights come from ``seed`` alone (torch's global generator is reseeded).

    Raises:
        InputError: scikit-learn is missing, or ``context`` is more than a history of the stream is made for.
    """
    if context > LONGEST_HISTORY:
        raise bad_input(
            "--context",
            expected=f"a history of at most {LONGEST_HISTORY} items",
            found=str(context),
            remedy="give a smaller --context",
        )
    roc_auc_score = sklearn_module("metrics", "ctr").roc_auc_score
    stream = ClickStream(seed, context)
    held = stream.examples(VALIDATION, 0, _VALIDATION_EXAMPLES)
    best = float(roc_auc_score(held.click, held.probability))
    parts = {name: torch.split(part, _VALIDATION_BATCH) for name, part in as_batch(held).items()}
    batches = [dict(zip(parts, batch, strict=True)) for batch in zip(*parts.values(), strict=True)]
    torch.manual_seed(seed)
    model = DIN(users=USERS, items=ITEMS, categories=CATEGORIES, width=width).to(device)

    @torch.no_grad()
    def validate() -> dict[str, float]:
        model.eval()
        logits = [model({name: part.to(device) for name, part in batch.items()}).float() for batch in batches]
        model.train()
        scores = torch.cat(logits).cpu().double()
        loss = F.binary_cross_entropy_with_logits(scores, torch.from_numpy(held.click).double())
        # A score that is not a number has no rank: 0.5 is what knowing nothing gives.
        auc = roc_auc_score(held.click, scores.numpy()) if bool(scores.isfinite().all()) else 0.5
        return {"val_loss": float(loss), "val_metric": float(auc)}

    p = held.probability
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Task(
        model=model,
        loader=ClickLoader(stream, batch_size),
        loss_fn=loss_fn,
        validate=validate,
        metric="AUC",
        higher_is_better=True,
        samples_per_batch=batch_size,
        tokens_per_batch=None,
        summary=f"Deep Interest Network, {parameters:,} parameters; made clicks, best possible AUC {best:.4f}",
        data={
            "source": "clicks made from the seed",
            "users": USERS,
            "items": ITEMS,
            "categories": CATEGORIES,
            "validation_examples": _VALIDATION_EXAMPLES,
            "click_rate": float(held.click.mean()),
            "best_auc": best,
            "best_loss": float(-np.where(held.click, np.log(p), np.log1p(-p)).mean()),
            "model_parameters": parameters,
        },
    )
