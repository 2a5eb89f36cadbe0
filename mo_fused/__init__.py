"""mo_fused: drop-in torch.optim classes whose whole step is one read of the gradients plus one update pass."""

from ._version import __version__
from .grad import clip_grad_norm_, clip_grads_with_norm_, get_total_norm, grad_stats
from .optim import SGD, Adafactor, Adam, AdamW
from .release import gradient_release
from .scaler import GradScaler
from .stats import GradStats, ParamStats, StepStats

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "GradScaler",
    "GradStats",
    "ParamStats",
    "StepStats",
    "__version__",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "grad_stats",
    "gradient_release",
]
