"""Cutting a model into fragments of similar size, between its blocks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import nn


def cut_at_blocks(
    model: nn.Module, parameters: dict[str, nn.Parameter], num_fragments: int
) -> list[dict[str, nn.Parameter]]:
    """Cut a model into fragments between its blocks, so that the largest is as small as possible.

    A block is an entry of a ``ModuleList`` or ``Sequential``, or a module beside them, such as an
    embedding or a head. Blocks are never cut apart, and keep the order in which the model registers
    them. All parameters have equally many bytes in a message, so the number of elements decides.

    A checkpoint can be resumed only with the cut that it was saved with, so this rule, with how it
    decides between equally good cuts, cannot change.

    Args:
        model: The module to cut.
        parameters: Its parameters that are in a fragment, by name.
        num_fragments: Number of fragments.

    Returns:
        The parameters of each fragment by name, in the model's order. A tied parameter is in the
        fragment of its first block.

    Raises:
        ValueError: The model has fewer blocks with such parameters.
    """
    names = {id(p): name for name, p in parameters.items()}
    taken: set[int] = set()
    blocks: list[list[str]] = []
    for block in _each_block(model):
        own = [id(p) for p in block if id(p) in names and id(p) not in taken]
        taken.update(own)
        if own:
            blocks.append([names[identity] for identity in own])
    if len(blocks) < num_fragments:
        raise ValueError(
            f"num_fragments={num_fragments} but the model has {len(blocks)} blocks with trainable "
            f"parameters: use at most {len(blocks)}, or give fragment_patterns"
        )
    sizes = [sum(parameters[name].numel() for name in block) for block in blocks]
    bounds = [0, *balanced_cuts(sizes, num_fragments), len(blocks)]
    return [
        {name: parameters[name] for block in blocks[start:stop] for name in block}
        for start, stop in itertools.pairwise(bounds)
    ]


def _each_block(module: nn.Module) -> Iterator[Iterable[nn.Parameter]]:
    """Yield the parameters of each block, in the model's order."""
    direct = list(module.parameters(recurse=False))
    if direct:
        yield direct
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential) and not _is_container(child):
            yield child.parameters()
        elif any(_is_container(submodule) for submodule in child.modules()):
            yield from _each_block(child)
        else:
            yield child.parameters()


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def balanced_cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return where to cut ``sizes`` into ``parts`` runs so that the largest run is minimal.

    The runs before the last one are cut in the same way. Of several such cuts it is the first in
    the order of their positions.
    """
    ends = [*itertools.accumulate(sizes, initial=0)]

    @functools.cache
    def best(stop: int, parts: int) -> tuple[int, list[int]]:
        """The largest run, and the cuts, of the first ``stop`` sizes."""
        if parts == 1:
            return ends[stop], []
        return min(
            (max(best(cut, parts - 1)[0], ends[stop] - ends[cut]), [*best(cut, parts - 1)[1], cut])
            for cut in range(parts - 1, stop)
        )

    return best(len(sizes), parts)[1]
