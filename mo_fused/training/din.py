"""Click prediction from a user's history: a Deep Interest Network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class DIN(nn.Module):
    """Deep Interest Network (Zhou et al. 2018): attention of the item on show over the items of the history.

    Each item is the embedding of itself beside that of its category. A small network weighs every item of the history
    against the one on show; the interest is the weighted sum. The weights aren't normalised, so that many like items
    mean a stronger interest than one (section 4.3 of the paper).

    Args:
        users, items, categories: rows of the embedding tables.
        width: size of an embedding.
    """

    def __init__(self, *, users: int, items: int, categories: int, width: int) -> None:
        super().__init__()
        self.user_embedding = nn.Embedding(users, width)
        self.item_embedding = nn.Embedding(items, width)
        self.category_embedding = nn.Embedding(categories, width)
        pair = 2 * width
        self.attention = nn.Sequential(nn.Linear(4 * pair, 36), nn.PReLU(), nn.Linear(36, 1))
        self.mlp = nn.Sequential(
            nn.Linear(width + 3 * pair, 80), nn.PReLU(), nn.Linear(80, 40), nn.PReLU(), nn.Linear(40, 1)
        )
        for table in (self.user_embedding, self.item_embedding, self.category_embedding):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits of a click, (batch,).

        Args:
            batch: "user", "item" and "category" int64 (batch,); "history" and "history_category" int64 (batch, length);
                "mask" bool (batch, length), true where the history has an item.
        """
        shown = self._pair(batch["item"], batch["category"])
        history = self._pair(batch["history"], batch["history_category"])
        each = shown.unsqueeze(1).expand_as(history)
        weights = self.attention(torch.cat([history, each, history - each, history * each], dim=-1))
        interest = (weights * batch["mask"].unsqueeze(-1) * history).sum(dim=1)
        features = [self.user_embedding(batch["user"]), shown, interest, interest * shown]
        logits: Tensor = self.mlp(torch.cat(features, dim=-1)).squeeze(-1)
        return logits

    def _pair(self, items: Tensor, categories: Tensor) -> Tensor:
        return torch.cat([self.item_embedding(items), self.category_embedding(categories)], dim=-1)
