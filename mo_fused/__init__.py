"""mo_fused: drop-in torch.optim classes with the whole step fused: unscale, check, clip, update, statistics."""

from ._version import __version__
from .convert import from_state_dict, to_torch_state_dict
from .grad import clip_grad_norm_, clip_grads_with_norm_, get_total_norm, grad_stats
from .optim import SGD, Adafactor, Adam, AdamW
from .patching import patch, unpatch
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
    "from_state_dict",
    "get_total_norm",
    "grad_stats",
    "gradient_release",
    "patch",
    "to_torch_state_dict",
    "unpatch",
]
