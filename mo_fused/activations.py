"""What a transformer keeps of its forward pass for the backward pass: a published estimate, in bytes.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198,
equation 1 (a layer) and the two sections on recomputation. It counts a GPT layer: attention, an MLP of four times the
width with GELU, two layer norms, and dropout, whose masks take a byte an element.
"""

from __future__ import annotations

SOURCE = "Korthikanti et al. 2022, arXiv:2205.05198"


def activation_bytes(
    *,
    batch: int,
    length: int,
    hidden: int,
    layers: int,
    heads: int | None = None,
    item: int = 2,
    flash: bool = True,
    recompute: bool = False,
) -> int:
    """Bytes of all layers' activations on one device, by the estimate this file names; embedding and loss not counted.

    A layer keeps ``s*b*h*(34 + 5*a*s/h)`` bytes in 16 bits: 16 elements and two bytes of masks for each position and
    feature, two elements and one byte for each pair of positions and head.

    Args:
        batch, length: sequences (b) and tokens in each (s), of one forward pass.
        hidden, layers, heads: width (h), depth and attention heads (a) of the model.
        item: bytes of an element; 2 is what the source counts, others scale all but the masks.
        flash: attention is computed in tiles and keeps nothing for pairs of positions; ``heads`` is then not needed.
        recompute: each layer keeps its input alone, and one layer at a time has its full set.

    Raises:
        ValueError: ``heads`` is None without ``flash``.
    """
    tokens = batch * length
    layer = tokens * hidden * (16 * item + 2)
    if not flash:
        if heads is None:
            raise ValueError("expected heads without flash; found None; give the number of attention heads")
        layer += tokens * length * heads * (2 * item + 1)
    return layers * tokens * hidden * item + layer if recompute else layers * layer
