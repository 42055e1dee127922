"""Splitting a model into fragments: every trainable parameter in exactly one.

And the checks that the inner optimizer trains exactly what is synchronised.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from composer_replication.settings import DiLoCoSettings

ModelFragments = nn.Module | Sequence[nn.Module]
"""The model, or a sequence of modules with one per fragment."""

Parameters = dict[str, nn.Parameter]
"""A fragment: its trainable parameters by name, in the model's order."""

Fragments = Sequence[Mapping[str, Tensor]]
"""What is synchronised: each fragment's tensors by name."""


def split_model(
    model_fragments: ModelFragments,
    num_fragments: int = 1,
    fragment_patterns: Sequence[str | Sequence[str]] | None = None,
    also_synced: Collection[str] = (),
) -> list[Parameters]:
    """Split a model into fragments.

    Args:
        model_fragments: One module, which is cut here, or one module per fragment, as torchft takes
            them. Their parameters are then called ``<fragment>.<name>``.
        num_fragments: Number of fragments to cut a single module into, at block boundaries, see
            ``cut_at_blocks``.
        fragment_patterns: Instead of ``num_fragments``: the shell patterns over parameter names of
            each fragment.
        also_synced: Names of frozen parameters that are in a fragment nevertheless.

    Returns:
        The fragments in the order of their syncs. Frozen parameters are in no fragment, tied
        parameters are in one.

    Raises:
        ValueError: A parameter is in no fragment or in two, or a fragment is empty. The message
            names it.
    """
    model = whole_model(model_fragments)
    if not isinstance(model_fragments, nn.Module) and not model_fragments:
        raise ValueError("model_fragments=[]: pass the model, or one module per fragment")
    parameters = dict(_trainable(model, also_synced))
    if not parameters:
        raise ValueError(
            "the model has no trainable parameter: set requires_grad=True on those to train"
        )
    if isinstance(model_fragments, nn.Module):
        if fragment_patterns is not None:
            return _by_patterns(parameters, fragment_patterns)
        if num_fragments == 1:
            return [parameters]
        return cut_at_blocks(model, parameters, num_fragments)
    if fragment_patterns is not None or num_fragments not in (1, len(model_fragments)):
        raise ValueError(
            f"model_fragments has {len(model_fragments)} modules and is a split already: "
            "leave num_fragments and fragment_patterns out"
        )
    return _by_modules(parameters, model_fragments)


def whole_model(model_fragments: ModelFragments) -> nn.Module:
    """The model as one module, in which those of a sequence have their index as their name."""
    is_one = isinstance(model_fragments, nn.Module)
    return model_fragments if is_one else nn.ModuleList(model_fragments)


def synced_tensors(
    model: ModelFragments,
    settings: DiLoCoSettings,
    also_synced: Collection[str] = (),
) -> list[dict[str, Tensor]]:
    """Return the parameters of each fragment by name, and the buffers synchronised with them.

    All buffers of a single module are synchronised with the first fragment: they are small, and
    need not be synchronised together with their blocks.

    Raises:
        ValueError: See ``split_model``.
    """
    fragments = split_model(model, settings.num_fragments, settings.fragment_patterns, also_synced)
    synced: list[dict[str, Tensor]] = [{**parameters} for parameters in fragments]
    if settings.sync_buffers == "mean":
        for name, buffer in persistent_buffers(whole_model(model)).items():
            index = 0 if isinstance(model, nn.Module) else _index_in(name)
            synced[index][name] = buffer
    return synced


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of the model's state, by name: a tied one once."""
    others = set()
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            others.add(id(module._buffers.get(name)))
    named = model.named_buffers()
    return {plain_name(name): buffer for name, buffer in named if id(buffer) not in others}


def plain_name(name: str) -> str:
    """The name of a parameter or buffer in the model's ``state_dict``.

    That leaves out the wrapper of activation checkpointing, which one group or a resume may need
    and another not.
    """
    return name.replace("_checkpoint_wrapped_module.", "")


def model_fingerprint(fragments: Fragments) -> str:
    """Return the SHA-256 over the sorted names, shapes and dtypes of all synchronised tensors."""
    rows = sorted(f"{name} {text}" for name, text in described_tensors(fragments).items())
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    return f"{len(rows)} tensors, sha256 {digest}"


def described_tensors(fragments: Fragments) -> dict[str, str]:
    """Return the shape and the dtype of all synchronised tensors, by name."""
    named = by_name(fragments).items()
    return {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named}


def by_name(fragments: Fragments) -> dict[str, Tensor]:
    """All synchronised tensors by name: no two fragments have the same."""
    return {name: tensor for fragment in fragments for name, tensor in fragment.items()}


def _trainable(
    module: nn.Module,
    also: Collection[str],
) -> Iterator[tuple[str, nn.Parameter]]:
    for own_name, parameter in module.named_parameters():  # tied parameters come once
        name = plain_name(own_name)
        if not parameter.requires_grad and name not in also:
            continue
        if not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name} has dtype {parameter.dtype}, which is not averaged over groups: "
                "freeze it (requires_grad=False)"
            )
        if parameter.dtype == torch.float64:
            raise ValueError(
                f"parameter {name} is float64, and groups average in float32: convert the model "
                "with model.float(), before its optimizer is built"
            )
        if is_lazy(parameter) or parameter.is_meta:
            raise ValueError(
                f"parameter {name} has no values yet (a lazy module, or the meta device): run a "
                "forward pass, or to_empty() and an initialisation, before DiLoCo is built"
            )
        yield name, parameter


def cut_at_blocks(
    model: nn.Module,
    parameters: Parameters,
    num_fragments: int,
) -> list[Parameters]:
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
    blocks: list[list[str]] = []
    for block in _each_block(model):
        own = [names.pop(id(p)) for p in block if id(p) in names]  # tied ones once
        if own:
            blocks.append(own)
    if len(blocks) < num_fragments:
        raise ValueError(
            f"num_fragments={num_fragments} but the model has {len(blocks)} blocks with trainable "
            f"parameters: use at most {len(blocks)}, or give fragment_patterns"
        )
    sizes = [sum(parameters[name].numel() for name in block) for block in blocks]
    bounds = [0, *balanced_cuts(sizes, num_fragments), len(blocks)]
    fragments = []
    for start, stop in itertools.pairwise(bounds):
        own = itertools.chain.from_iterable(blocks[start:stop])
        fragments.append({name: parameters[name] for name in own})
    return fragments


def _each_block(module: nn.Module) -> Iterator[Iterable[nn.Parameter]]:
    """Yield the parameters of each block, in the model's order."""
    yield module.parameters(recurse=False)
    for child in module.children():
        is_entry = _is_container(module) and not _is_container(child)
        if not is_entry and any(map(_is_container, child.modules())):
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
        """Cut the first ``stop`` sizes. Returns the largest of the runs, and the cuts."""
        if parts == 1:
            return ends[stop], []
        found = []
        for cut in range(parts - 1, stop):
            largest, cuts = best(cut, parts - 1)
            last = ends[stop] - ends[cut]
            found.append((max(largest, last), [*cuts, cut]))
        return min(found)

    _, cuts = best(len(sizes), parts)
    return cuts


def _index_in(name: str) -> int:
    """The index of the module that a tensor of a ``whole_model`` of several modules is in."""
    return int(name.partition(".")[0])


def _by_modules(parameters: Parameters, modules: Sequence[nn.Module]) -> list[Parameters]:
    # The same submodule twice is an overlap. A weight under two submodules is tied, and belongs to
    # the first fragment that contains it.
    homes: dict[nn.Module, int] = {}
    for index, module in enumerate(modules):
        for path, submodule in module.named_modules():
            direct = submodule.named_parameters(path, recurse=False)
            own = [name for name, parameter in direct if parameter.requires_grad]
            if own and homes.setdefault(submodule, index) != index:
                raise ValueError(
                    f"parameter {own[0]} is in model_fragments[{homes[submodule]}] and "
                    f"[{index}]: every parameter belongs to one fragment"
                )
    fragments: list[Parameters] = [{} for _ in modules]
    for name, parameter in parameters.items():
        fragments[_index_in(name)][name] = parameter
    for index, (fragment, module) in enumerate(zip(fragments, modules, strict=True)):
        if not fragment:
            raise ValueError(
                f"model_fragments[{index}] ({type(module).__name__}) has no trainable parameter "
                "of its own: leave it out"
            )
    return fragments


def _by_patterns(
    parameters: Parameters,
    patterns: Sequence[str | Sequence[str]],
) -> list[Parameters]:
    entries = [[entry] if isinstance(entry, str) else list(entry) for entry in patterns]
    fragments: list[Parameters] = [{} for _ in entries]
    missing = []
    for name, parameter in parameters.items():
        index = _first_match((name, _ADAPTER.sub(r".\1", name)), entries)
        if index is None:
            missing.append(name)
        else:
            fragments[index][name] = parameter
    if missing:
        raise ValueError(
            f"fragment_patterns leave out {listed(missing)}: add a pattern, or '*' to the last"
        )
    for entry, fragment in zip(entries, fragments, strict=True):
        if not fragment:
            raise ValueError(
                f"fragment_patterns entry {entry} matches no parameter that an earlier entry left. "
                f"The model has {listed(list(parameters))}"
            )
    return fragments


def _first_match(names: Sequence[str], entries: Sequence[Sequence[str]]) -> int | None:
    """Return the first entry that matches a name; the first names come first."""
    for name in names:
        for index, entry in enumerate(entries):
            if any(fnmatchcase(name, pattern) for pattern in entry):
                return index
    return None


_ADAPTER = re.compile(r"\.(lora_\w+)\.[^.]+")
"""What PEFT leaves out of a LoRA parameter's name when it saves it: the name of the adapter."""


LISTED = 6
"""How many names a message has at most."""


def listed(names: Sequence[str]) -> str:
    """Return the first names for a message, and how many more there are."""
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def check_trained_by(
    fragments: Fragments,
    *optimizers: torch.optim.Optimizer,
) -> None:
    """Check that the inner optimizers train exactly what the fragments synchronise.

    A parameter outside all fragments would never be synchronised, and a fragment over copies of the
    parameters would synchronise tensors that no optimizer trains. torchft accepts both.

    Raises:
        ValueError: The parameters differ. The message names them.
    """
    trained = _trained_by(optimizers)
    named = by_name(fragments).items()
    synced = {id(tensor): name for name, tensor in named if tensor.requires_grad}
    foreign = [name for identity, name in synced.items() if identity not in trained]
    if foreign:
        raise ValueError(
            f"in a fragment but not in the inner optimizer: {listed(foreign)}. Build the "
            "optimizer over the same model, or freeze these (requires_grad=False)"
        )
    uncovered = [where for identity, where in trained.items() if identity not in synced]
    if uncovered:
        raise ValueError(
            f"in the inner optimizer but in no fragment: {listed(uncovered)}. Add the module that "
            "holds them to model_fragments, or pass the whole model"
        )


def _trained_by(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, str]:
    """Where optimizers have the parameters that they train, by the parameter's id."""
    trained: dict[int, str] = {}
    for number, optimizer in enumerate(optimizers):
        which = f"[{number}]." if len(optimizers) > 1 else ""
        for group, contents in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(contents["params"]):
                if parameter.requires_grad:
                    place = f"{which}param_groups[{group}]['params'][{index}]"
                    trained[id(parameter)] = f"{place}, shape {tuple(parameter.shape)}"
    return trained


class WatchedModel:
    """Watches a model for changes that no sync would reach.

    Args:
        model_fragments: The model.
        fragments: What is synchronised.
    """

    def __init__(
        self,
        model_fragments: ModelFragments,
        fragments: Fragments,
    ) -> None:
        whole = whole_model(model_fragments)
        synced = {*map(id, by_name(fragments).values())}
        every = whole.named_parameters()
        self._left_out = [(name, p) for name, p in every if id(p) not in synced]
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        for module in whole.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in synced:
                    self._buffers.append((module, key, buffer))

    @torch.no_grad()
    def put_buffers_back(self) -> None:
        """Give modules the synchronised buffers back that they have replaced by new ones.

        Most write into a buffer. Some assign a new tensor, as in ``self.count = self.count + 1``,
        and no sync would reach it.
        """
        for module, key, buffer in self._buffers:
            other = module._buffers[key]
            if other is not None and other is not buffer:
                module._buffers[key] = buffer.copy_(other)

    def check_none_thawed(self, *optimizers: torch.optim.Optimizer) -> None:
        """Check that the inner optimizers still train no parameter outside the fragments.

        Raises:
            ValueError: A parameter was frozen when the fragments were made, and is trained now: it
                would never be synchronised.
        """
        thawed = [(name, p) for name, p in self._left_out if p.requires_grad]
        trained = _trained_by(optimizers) if thawed else {}
        names = [name for name, p in thawed if id(p) in trained]
        if names:
            raise ValueError(
                f"frozen when training began, and trained now: {listed(names)}. No sync has them. "
                "Let them be trainable from the beginning, in all replica groups (their learning "
                "rate may be 0 at first), or freeze them again"
            )
