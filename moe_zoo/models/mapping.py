"""The rules of a family applied: tensors by its names -> our parameters, and back."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from moe_zoo.models.families import Family, Rule
from moe_zoo.models.weight_files import WeightFiles
from moe_zoo.spec.architecture import Architecture
from moe_zoo.spec.errors import CheckpointError

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
        if ".experts." not in name:
            return cut(self._joined(rules, layer))
        numbers = experts if experts is not None else range(self.num_experts)
        first = cut(self._joined(rules, layer, numbers[0]))
        stack = first.new_empty(len(numbers), *first.shape)
        stack[0] = first
        for own, expert in zip(stack[1:], numbers[1:], strict=True):
            part = cut(self._joined(rules, layer, expert))
            if part.shape != own.shape:
                raise self._misfit(
                    rules, layer, expert, f"shape {tuple(part.shape)} where others have {tuple(own.shape)}"
                )
            own.copy_(part)
        return stack

    def where(self, name: str) -> str:
        """The file and the tensor of which a parameter is made, the first of several."""
        pattern, layer = pattern_of(name)
        return self.files.where(self.rules[pattern][0].theirs.format(layer=layer, expert=0))

    def _misfit(self, rules: list[Rule], layer: int | None, expert: int | None, what: str) -> CheckpointError:
        where = self.files.where(rules[0].theirs.format(layer=layer, expert=expert))
        return CheckpointError(f"{where}: {what}; it does not go with its like; fetch the file again")

    def _joined(self, rules: list[Rule], layer: int | None, expert: int | None = None) -> Tensor:
        blocks = [self._read(rule, layer, expert) for rule in rules]
        if len(blocks) == 1:
            return rules[0].as_ours(blocks[0])
        shapes = {tuple(block.shape) for block in blocks}
        if len(shapes) > 1:
            raise self._misfit(rules, layer, expert, f"shapes {sorted(shapes)} in what is one matrix here")
        if all(rule.is_only_transposed for rule in rules):
            return torch.cat(blocks, dim=-2).t()  # joined as they lie: one copy turns them, not two
        return torch.cat([rule.as_ours(block) for rule, block in zip(rules, blocks, strict=True)], dim=-1)

    def _read(self, rule: Rule, layer: int | None, expert: int | None) -> Tensor:
        name = rule.theirs.format(layer=layer, expert=expert)
        return (
            self.files.read(name, range(expert, expert + 1))[0] if rule.is_stacked else self.files.read(name, rule.rows)
        )


def upstream_tensors(
    family: Family, architecture: Architecture, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters and buffers -> tensors by the names of the family, in the order given.

    One that is made of several of ours comes with the last of them.
    """
    rules = rules_by_parameter(family, architecture)
    waiting: dict[str, list[tuple[int, Tensor]]] = {}
    sharers = Counter(rule.theirs for several in rules.values() for rule in several if rule.rows)
    for name, values in named:
        own, layer = rules_for(name, rules)
        for rule in own:
            block = values.chunk(rule.blocks, dim=-1)[rule.block] if rule.blocks > 1 else values
            for theirs, entry in _entries(rule, layer, block):
                if rule.rows is None:
                    yield theirs, entry.contiguous()
                    continue
                parts = waiting.setdefault(theirs, [])
                parts.append((rule.rows.start, entry))
                if len(parts) == sharers[rule.theirs]:
                    yield theirs, torch.cat([part for _, part in sorted(waiting.pop(theirs), key=lambda p: p[0])])


def _entries(rule: Rule, layer: int | None, block: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each file entry that a rule makes of a block of ours."""
    if "{expert}" not in rule.theirs:
        yield rule.theirs.format(layer=layer), rule.as_theirs(block)
        return
    for expert, entry in enumerate(block):
        yield rule.theirs.format(layer=layer, expert=expert), rule.as_theirs(entry)


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
