"""A small residual network for images of a few pixels."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F


def _norm(channels: int) -> nn.GroupNorm:
    # Not BatchNorm: a sample's result must not depend on the others of its batch. So accumulated small batches have the
    # gradient of one large one, recomputing a block changes nothing, and training and validation see the same network.
    return nn.GroupNorm(math.gcd(channels, 8), channels)


class ResidualBlock(nn.Module):
    """Pre-activation block (He et al. 2016, Identity Mappings in Deep Residual Networks), two 3x3 convolutions.

    (batch, channels_in, height, width) to (batch, channels_out, height / stride, width / stride).
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = _norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = _norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        same = channels_in == channels_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        out: Tensor = self.shortcut(x) + y
        return out


class SmallResNet(nn.Module):
    """Two stages of two residual blocks, ``width`` channels and then twice as many at half the resolution.

    Args:
        classes: number of classes.
        width: channels of the first stage.
    """

    def __init__(self, *, classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, 1),
            ResidualBlock(width, width, 1),
            ResidualBlock(width, 2 * width, 2),
            ResidualBlock(2 * width, 2 * width, 1),
        )
        self.norm = _norm(2 * width)
        self.head = nn.Linear(2 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, height, width) to logits (batch, classes)."""
        x = F.relu(self.norm(self.blocks(self.stem(images))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits
