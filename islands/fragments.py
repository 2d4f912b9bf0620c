"""Which parameters are exchanged, and how they are cut into fragments: by name, so that no mesh or stage plays a part."""

import hashlib
import re
from dataclasses import dataclass
from typing import Literal, Sequence

import torch
from torch import nn

from islands.config_file import ConfigError
from islands.initialize import named_parameters

#: A parameter of a block: what comes before the block's number, and that number.
_IN_BLOCK = re.compile(r"(.*?\b)(\d+)\.")


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as a whole, whatever holds its shards."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Fragment:
    """Parameters that are exchanged together, one after another in a flat vector of ``numel`` elements."""

    name: str
    parameters: tuple[ParameterSpec, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)


Schema = tuple[ParameterSpec, ...]


def schema_of(model: nn.Module) -> Schema:
    """Every parameter that trains, in the model's order. A model on the meta device serves."""
    parameters = named_parameters([model]).items()
    return tuple(ParameterSpec(name, tuple(p.shape)) for name, p in parameters if p.requires_grad)


def schema_hash(schema: Schema) -> str:
    """SHA-256 (hex) of names and shapes in order: equal where states can be exchanged."""
    return hashlib.sha256(repr([(p.name, p.shape) for p in schema]).encode()).hexdigest()


def cut(
    schema: Schema, count: int, pattern: Literal["strided", "contiguous"] = "strided", separate_ends: bool = False
) -> list[Fragment]:
    """Cut a model into ``count`` fragments along its blocks.

    Args:
        pattern: every ``count``-th block to a fragment (Streaming DiLoCo, arXiv 2501.18512, found that better), or runs of them.
        separate_ends: what belongs to no block (embeddings, head, last norm) is a fragment of its own, the last; else each such
            parameter, largest first, goes to the smallest fragment.

    Raises:
        ConfigError: there are not as many blocks.
    """
    blocks = _blocks(schema)
    wanted = count - (separate_ends and count > 1)
    if wanted > max(1, len(blocks)):
        ends = " beside the one for embeddings and head" if separate_ends else ""
        raise ConfigError(
            f"outer.fragments={count} asks for {wanted} fragments of blocks{ends}, and the model has {len(blocks)} blocks that train; "
            f"give at most {len(blocks) + count - wanted}"
        )
    members = [_share(blocks, wanted, index, pattern) for index in range(wanted)]
    ends = [parameter for parameter in schema if not _IN_BLOCK.match(parameter.name)]
    if wanted < count:
        members.append(ends)
    else:
        for parameter in sorted(ends, key=lambda each: -each.numel):
            min(members, key=lambda each: sum(other.numel for other in each)).append(parameter)
    return [
        Fragment(str(index), tuple(parameter for parameter in schema if parameter in chosen))
        for index, chosen in enumerate(map(set, members))
    ]


def _blocks(schema: Schema) -> list[list[ParameterSpec]]:
    found: dict[tuple[str, int], list[ParameterSpec]] = {}
    for parameter in schema:
        if match := _IN_BLOCK.match(parameter.name):
            found.setdefault((match[1], int(match[2])), []).append(parameter)
    return list(found.values())


def _share(blocks: Sequence[list[ParameterSpec]], count: int, index: int, pattern: str) -> list[ParameterSpec]:
    chosen = blocks[index::count] if pattern == "strided" else blocks[len(blocks) * index // count : len(blocks) * (index + 1) // count]
    return [parameter for block in chosen for parameter in block]
