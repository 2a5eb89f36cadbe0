"""Watchers: each looks for one fault in a run, works alone, and says what it found with numbers."""

from mo_fused.training.watchers.base import Watcher as Watcher
from mo_fused.training.watchers.dead_gradient import DeadGradient as DeadGradient
from mo_fused.training.watchers.loss_spike import LossSpike as LossSpike
from mo_fused.training.watchers.nonfinite import NonFinite as NonFinite
from mo_fused.training.watchers.norm_outlier import NormOutlier as NormOutlier
from mo_fused.training.watchers.plateau import Plateau as Plateau
from mo_fused.training.watchers.scale_collapse import ScaleCollapse as ScaleCollapse

__all__ = ["DeadGradient", "LossSpike", "NonFinite", "NormOutlier", "Plateau", "ScaleCollapse", "Watcher"]
