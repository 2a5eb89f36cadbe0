"""Rules for layer-wise learning-rate decay."""

from __future__ import annotations

import glob

from torch import nn

from mo_fused.errors import bad_option, message
from mo_fused.training.name_patterns import nearest
from mo_fused.training.rules import Rule, owners_of


def layer_decay(model: nn.Module, factor: float, blocks: str = "blocks") -> list[Rule]:
    """Layer-wise learning-rate decay: the deeper below the top, the lower the rate.

    Of L blocks, block i (from 0) gets ``factor**(L - i)``; what the model holds before its blocks, which are the
    embeddings, ``factor**(L + 1)``; what it holds after them, the last norm and the head, 1. Before and after mean the
    order of ``model.named_parameters()``; a head that shares the embedding's weight is an embedding. Clark et al. 2020,
    "ELECTRA"; Bao et al. 2021, "BEiT".

    Args:
        model: the module whose parameters are to be trained.
        factor: above 0, at most 1; 0.65 to 0.9 are usual for fine-tuning.
        blocks: name of the module that holds the blocks, lowest first. Blocks without parameters don't count.

    Raises:
        ValueError: ``factor`` outside its range, no such module, no blocks in it, blocks that share parameters.
    """
    if not 0.0 < factor <= 1.0:
        raise bad_option("factor", "above 0 and at most 1", factor, "give the ratio of one block's rate to the next's")
    modules = dict(model.named_modules(remove_duplicate=False))
    holder = modules.get(blocks) if blocks else None
    held: list[str] = []
    if holder is not None:
        inside = holder.named_modules(remove_duplicate=False)
        held = [n for n, m in inside if n and "." not in n and any(True for _ in m.parameters())]
    if not held:
        groups = [n for n, m in modules.items() if n and isinstance(m, (nn.ModuleList, nn.Sequential))]
        remedy = f"name the list of blocks; of lists and sequences {nearest(blocks, groups)}"
        raise bad_option("blocks", "a module that holds blocks with parameters", blocks, remedy)
    names = [name for name, _ in model.named_parameters()]
    first = next((i for i, name in enumerate(names) if name.startswith(f"{blocks}.")), len(names))
    lowest = factor ** (len(held) + 1)
    rules = [Rule(glob.escape(name), lr_factor=lowest) for name in names[:first]]
    rules += [
        Rule(f"{glob.escape(f'{blocks}.{name}')}.*", lr_factor=factor ** (len(held) - i)) for i, name in enumerate(held)
    ]
    for parameter, owners in owners_of(model):
        if sum(any(rule.matches(*owner, parameter) for owner in owners) for rule in rules) > 1:
            expected = "blocks and embeddings of their own parameters, each at its own depth"
            found = f"{' = '.join(name for name, _ in owners)}"
            raise ValueError(message(expected, found, "write rules with lr_factor for this model"))
    return rules
