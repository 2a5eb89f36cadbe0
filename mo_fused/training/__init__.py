"""The training layer: trainer, schedules, parameter rules, presets, checkpoints, and the tasks of ``mo-fused train``.

Pure Python over the public API; every part works alone. Names are loaded on first use, so that ``mo-fused --help`` and
``mo-fused doctor`` need neither the models nor the packages of the ``train`` extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mo_fused.training.changes import record_changes as record_changes
    from mo_fused.training.checkpoints import Checkpoints as Checkpoints
    from mo_fused.training.checkpoints import load_checkpoint as load_checkpoint
    from mo_fused.training.config import TrainConfig as TrainConfig
    from mo_fused.training.config_file import load_config as load_config
    from mo_fused.training.errors import InputError as InputError
    from mo_fused.training.feed import Feed as Feed
    from mo_fused.training.findings import Finding as Finding
    from mo_fused.training.groups import decay_groups as decay_groups
    from mo_fused.training.islands import fp32_island as fp32_island
    from mo_fused.training.islands import remove_fp32_islands as remove_fp32_islands
    from mo_fused.training.layers_watch import LayerNorms as LayerNorms
    from mo_fused.training.layers_watch import layer_norms as layer_norms
    from mo_fused.training.layerwise import layer_decay as layer_decay
    from mo_fused.training.monitor import Monitor as Monitor
    from mo_fused.training.overfit import OverfitCheck as OverfitCheck
    from mo_fused.training.padding import PaddedBatch as PaddedBatch
    from mo_fused.training.padding import count_targets as count_targets
    from mo_fused.training.padding import cross_entropy as cross_entropy
    from mo_fused.training.padding import pad_batch as pad_batch
    from mo_fused.training.param_table import ParamGroups as ParamGroups
    from mo_fused.training.preflight import Preflight as Preflight
    from mo_fused.training.presets import PRESETS as PRESETS
    from mo_fused.training.presets import RECOMMENDATION as RECOMMENDATION
    from mo_fused.training.presets import TEXT as TEXT
    from mo_fused.training.presets import VISION as VISION
    from mo_fused.training.presets import Preset as Preset
    from mo_fused.training.profiling import StepProfiler as StepProfiler
    from mo_fused.training.profiling import profile_steps as profile_steps
    from mo_fused.training.recompute import checkpoint_activations as checkpoint_activations
    from mo_fused.training.recompute import keep_activations as keep_activations
    from mo_fused.training.rng import rng_state as rng_state
    from mo_fused.training.rng import set_rng_state as set_rng_state
    from mo_fused.training.rules import NO_DECAY as NO_DECAY
    from mo_fused.training.rules import Rule as Rule
    from mo_fused.training.rules import embedding_rule as embedding_rule
    from mo_fused.training.rules import param_groups as param_groups
    from mo_fused.training.run_folder import RunFolder as RunFolder
    from mo_fused.training.schedules import inverse_sqrt as inverse_sqrt
    from mo_fused.training.schedules import warmup_constant as warmup_constant
    from mo_fused.training.schedules import warmup_cosine as warmup_cosine
    from mo_fused.training.schedules import warmup_linear as warmup_linear
    from mo_fused.training.schedules import warmup_stable_decay as warmup_stable_decay
    from mo_fused.training.seeding import LoaderSeeds as LoaderSeeds
    from mo_fused.training.seeding import seed_everything as seed_everything
    from mo_fused.training.sinks import Console as Console
    from mo_fused.training.sinks import JsonLines as JsonLines
    from mo_fused.training.sinks import MLflow as MLflow
    from mo_fused.training.sinks import Sink as Sink
    from mo_fused.training.sinks import TensorBoard as TensorBoard
    from mo_fused.training.sinks import WandB as WandB
    from mo_fused.training.snapshot import kept_state as kept_state
    from mo_fused.training.sweep import Sweep as Sweep
    from mo_fused.training.tasks import Task as Task
    from mo_fused.training.tasks import build_task as build_task
    from mo_fused.training.train import RunResult as RunResult
    from mo_fused.training.train import run as run
    from mo_fused.training.trainer import Trainer as Trainer
    from mo_fused.training.trainer_step import LossFn as LossFn
    from mo_fused.training.trainer_step import StepMonitor as StepMonitor
    from mo_fused.training.watchers import DeadGradient as DeadGradient
    from mo_fused.training.watchers import LossSpike as LossSpike
    from mo_fused.training.watchers import NonFinite as NonFinite
    from mo_fused.training.watchers import NormOutlier as NormOutlier
    from mo_fused.training.watchers import Plateau as Plateau
    from mo_fused.training.watchers import ScaleCollapse as ScaleCollapse
    from mo_fused.training.watchers import Watcher as Watcher

_HOMES = {
    "Checkpoints": "checkpoints",
    "Console": "sinks",
    "DeadGradient": "watchers",
    "Feed": "feed",
    "Finding": "findings",
    "InputError": "errors",
    "JsonLines": "sinks",
    "LayerNorms": "layers_watch",
    "LoaderSeeds": "seeding",
    "LossFn": "trainer_step",
    "LossSpike": "watchers",
    "MLflow": "sinks",
    "Monitor": "monitor",
    "NO_DECAY": "rules",
    "NonFinite": "watchers",
    "NormOutlier": "watchers",
    "OverfitCheck": "overfit",
    "PRESETS": "presets",
    "PaddedBatch": "padding",
    "ParamGroups": "param_table",
    "Plateau": "watchers",
    "Preflight": "preflight",
    "Preset": "presets",
    "RECOMMENDATION": "presets",
    "Rule": "rules",
    "RunFolder": "run_folder",
    "RunResult": "train",
    "ScaleCollapse": "watchers",
    "Sink": "sinks",
    "StepMonitor": "trainer_step",
    "StepProfiler": "profiling",
    "Sweep": "sweep",
    "TEXT": "presets",
    "Task": "tasks",
    "TensorBoard": "sinks",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "VISION": "presets",
    "WandB": "sinks",
    "Watcher": "watchers",
    "build_task": "tasks",
    "checkpoint_activations": "recompute",
    "count_targets": "padding",
    "cross_entropy": "padding",
    "decay_groups": "groups",
    "embedding_rule": "rules",
    "fp32_island": "islands",
    "inverse_sqrt": "schedules",
    "keep_activations": "recompute",
    "kept_state": "snapshot",
    "layer_decay": "layerwise",
    "layer_norms": "layers_watch",
    "load_checkpoint": "checkpoints",
    "load_config": "config_file",
    "pad_batch": "padding",
    "param_groups": "rules",
    "profile_steps": "profiling",
    "record_changes": "changes",
    "remove_fp32_islands": "islands",
    "rng_state": "rng",
    "run": "train",
    "seed_everything": "seeding",
    "set_rng_state": "rng",
    "warmup_constant": "schedules",
    "warmup_cosine": "schedules",
    "warmup_linear": "schedules",
    "warmup_stable_decay": "schedules",
}

__all__ = [
    "Checkpoints",
    "Console",
    "DeadGradient",
    "Feed",
    "Finding",
    "InputError",
    "JsonLines",
    "LayerNorms",
    "LoaderSeeds",
    "LossFn",
    "LossSpike",
    "MLflow",
    "Monitor",
    "NO_DECAY",
    "NonFinite",
    "NormOutlier",
    "OverfitCheck",
    "PRESETS",
    "PaddedBatch",
    "ParamGroups",
    "Plateau",
    "Preflight",
    "Preset",
    "RECOMMENDATION",
    "Rule",
    "RunFolder",
    "RunResult",
    "ScaleCollapse",
    "Sink",
    "StepMonitor",
    "StepProfiler",
    "Sweep",
    "TEXT",
    "Task",
    "TensorBoard",
    "TrainConfig",
    "Trainer",
    "VISION",
    "WandB",
    "Watcher",
    "build_task",
    "checkpoint_activations",
    "count_targets",
    "cross_entropy",
    "decay_groups",
    "embedding_rule",
    "fp32_island",
    "inverse_sqrt",
    "keep_activations",
    "kept_state",
    "layer_decay",
    "layer_norms",
    "load_checkpoint",
    "load_config",
    "pad_batch",
    "param_groups",
    "profile_steps",
    "record_changes",
    "remove_fp32_islands",
    "rng_state",
    "run",
    "seed_everything",
    "set_rng_state",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
