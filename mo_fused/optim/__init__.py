"""Drop-in optimizers: torch.optim's classes on fused kernels."""

from .adafactor import Adafactor
from .adamw import Adam, AdamW
from .base import Explanation, FusedOptimizer
from .sgd import SGD

__all__ = ["SGD", "Adafactor", "Adam", "AdamW", "Explanation", "FusedOptimizer"]
