"""The rules of a family applied: tensors by its names -> our parameters, and back."""

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from moe_zoo.models.families import Family, Rule
from moe_zoo.models.weight_files import WeightFiles
from moe_zoo.spec.architecture import Architecture

Cut = Callable[[Tensor], Tensor]


class UpstreamWeights:
    """Our parameters, made of the tensors of a folder."""

    def __init__(self, family: Family, architecture: Architecture, files: WeightFiles):
        self.files, self.num_experts = files, architecture.num_experts
        self.rules = rules_by_parameter(family, architecture)

    def values(self, name: str, experts: range | None = None, cut: Cut = lambda whole: whole) -> Tensor:
        """Parameter or buffer ``name``, of some ``experts`` alone where it is a stack.

        ``cut`` takes this rank's slice of each tensor, of each expert's where it is a stack: what is held at once is
        one tensor of a file and the slice.
        """
        rules, layer = rules_for(name, self.rules)
        if "{expert}" not in rules[0].theirs:
            return cut(self._joined(rules, layer=layer))
        numbers = experts if experts is not None else range(self.num_experts)
        return torch.stack([cut(self._joined(rules, layer=layer, expert=expert)) for expert in numbers])

    def _joined(self, rules: list[Rule], **numbers: int | None) -> Tensor:
        blocks = [self.files.read(rule.theirs.format(**numbers)) for rule in rules]
        blocks = [block.t() if rule.is_transposed else block for rule, block in zip(rules, blocks, strict=True)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


def upstream_tensors(
    family: Family, architecture: Architecture, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters and buffers -> tensors by the names of the family, in the order given."""
    rules = rules_by_parameter(family, architecture)
    for name, values in named:
        own, layer = rules_for(name, rules)
        for rule in own:
            block = values.chunk(rule.blocks, dim=-1)[rule.block] if rule.blocks > 1 else values
            entries = enumerate(block) if "{expert}" in rule.theirs else [(None, block)]
            for expert, entry in entries:
                entry = entry.t() if rule.is_transposed else entry
                yield rule.theirs.format(layer=layer, expert=expert), entry.contiguous()


def rules_by_parameter(family: Family, architecture: Architecture) -> dict[str, list[Rule]]:
    """The rules of each of our parameters, blocks in order."""
    found: dict[str, list[Rule]] = {}
    for rule in family.rules_of(architecture):
        found.setdefault(rule.ours, []).append(rule)
    return {ours: sorted(rules, key=lambda rule: rule.block) for ours, rules in found.items()}


def rules_for(name: str, rules: dict[str, list[Rule]]) -> tuple[list[Rule], int | None]:
    """The rules of one parameter, and the number of its layer where they hold for any."""
    if name in rules:
        return rules[name], None
    pattern, layer = pattern_of(name)
    return rules[pattern], layer


def pattern_of(name: str) -> tuple[str, int | None]:
    """``layers.3.norm`` -> (``layers.{layer}.norm``, 3)."""
    match = re.match(r"layers\.(\d+)\.", name)
    return (re.sub(r"^layers\.\d+\.", "layers.{layer}.", name), int(match[1])) if match else (name, None)
