"""A stream of clicks from a hidden model, so that the best possible result is known.

Every item belongs to a category and every category has a direction in a hidden space. A user is a mixture of a few
favourite categories, which shows in the items of the history and, partly, in what is put on show. The probability of a
click is the logistic function of

    BIAS + INTEREST * log(1 + number of items in the history whose direction is near that of the item on show,
                          each counted by its nearness) + quality of the category + quality of the item

where nearness is the square of the cosine where that is above 0. All of it can be read from what the model sees, so
the true probabilities' AUC is the limit that a model can come near.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

USERS, ITEMS, CATEGORIES = 40_000, 80_000, 64
LONGEST_HISTORY = 500  # of more, the validation examples alone would fill gigabytes while they are made
TRAIN, VALIDATION = 0, 1

_FAVOURITES = 3  # categories of a user
_LOYAL = 0.8  # share of the history that is from these
_AIMED = 0.4  # share of the items on show that are
_BIAS, _INTEREST = -2.6, 2.0
_CATEGORY_SPREAD, _ITEM_SPREAD = 0.7, 0.3  # deviations of the two qualities

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Examples:
    """``user``, ``item``, ``category``, ``length`` int64 (n,); ``history`` and ``history_category`` int64 (n, context),
    0 from ``length`` on; ``probability`` of a click float64 (n,); ``click`` bool (n,)."""

    user: Ints
    item: Ints
    category: Ints
    length: Ints
    history: Ints
    history_category: Ints
    probability: Floats
    click: NDArray[np.bool_]


class ClickStream:
    """Examples by number: example ``i`` of a stream is a function of the seed, the stream and ``i`` alone.

    Args:
        seed: decides the hidden model and every example.
        context: longest history.
    """

    def __init__(self, seed: int, context: int) -> None:
        self.seed, self.context = seed, context
        random = np.random.default_rng(seed)
        directions = random.standard_normal((CATEGORIES, 4))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        self.nearness = np.maximum(directions @ directions.T, 0.0) ** 2
        self.category_quality = random.normal(0.0, _CATEGORY_SPREAD, CATEGORIES)
        self.item_quality = random.normal(0.0, _ITEM_SPREAD, ITEMS)
        # A few items, users and categories make up most of the stream.
        self._item_share = _zipf(ITEMS // CATEGORIES, 1.0)
        self._user_share = _zipf(USERS, 0.6)
        self._category_share = _zipf(CATEGORIES, 0.5)
        self.favourites = np.searchsorted(self._category_share, random.random((USERS, _FAVOURITES)))

    def examples(self, stream: int, start: int, count: int) -> Examples:
        """Examples ``start`` to ``start + count - 1`` of ``stream`` (:data:`TRAIN` or :data:`VALIDATION`)."""
        context = self.context
        # What is drawn for one example: three numbers an item (is it a favourite, which category, which item of it).
        draws = uniforms(self.seed, stream, start, count, 3 * (context + 1) + 3)
        user = np.searchsorted(self._user_share, draws[:, 0])
        length = 1 + (draws[:, 1] * context).astype(np.int64)
        chance = draws[:, 2]
        which = draws[:, 3:].reshape(count, context + 1, 3)
        share = np.full(context + 1, _LOYAL)
        share[context] = _AIMED  # the last is the item on show
        own = np.take_along_axis(self.favourites[user], (which[:, :, 1] * _FAVOURITES).astype(np.int64), axis=1)
        any_category = np.searchsorted(self._category_share, which[:, :, 1])
        category = np.where(which[:, :, 0] < share, own, any_category)
        item = np.searchsorted(self._item_share, which[:, :, 2]) * CATEGORIES + category
        real = np.arange(context) < length[:, None]
        history, history_category = item[:, :context] * real, category[:, :context] * real
        shown, shown_category = item[:, context], category[:, context]
        near = (self.nearness[shown_category[:, None], history_category] * real).sum(axis=1)
        logit = _BIAS + _INTEREST * np.log1p(near) + self.category_quality[shown_category] + self.item_quality[shown]
        probability = 1.0 / (1.0 + np.exp(-logit))
        return Examples(
            user, shown, shown_category, length, history, history_category, probability, chance < probability
        )


def uniforms(seed: int, stream: int, start: int, count: int, width: int) -> Floats:
    """Numbers in [0, 1), shape (count, width), row ``i`` a function of (seed, stream, start + i).

    Made of counters by the mixing function of SplitMix64 (Steele et al. 2014, Fast Splittable Pseudorandom Number
    Generators).
    """
    key = _mix(_mix(np.array([seed], dtype=np.uint64)) + np.uint64(stream))
    rows = _mix(key + np.arange(start, start + count, dtype=np.uint64))
    bits = _mix(rows[:, None] + np.arange(width, dtype=np.uint64))
    draws: Floats = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws


def _mix(z: Any) -> Any:
    z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _zipf(count: int, exponent: float) -> Floats:
    """Cumulative shares of ``count`` things, the n-th proportional to n**-exponent; the last is 1."""
    shares = np.cumsum(np.arange(1.0, count + 1.0) ** -exponent)
    return np.asarray(shares / shares[-1])
