"""DiLoCo's part of a Composer checkpoint, packed and unpacked.

Composer saves the model (with the global weights), the inner optimizer and the timestamp. DiLoCo's
part consists of

* ``progress``: outer step, position in the round, contribution counters, settings, outer
  hyperparameters and checksums of the saved model's tensors, as JSON;
* ``local``: the local parameters (and buffers, with ``sync_buffers``), by name, in their dtypes;
* ``momentum``: the outer momentum by name, fp32, if there is any;
* ``residual``: the residual of error feedback by name, fp32, if there is any;
* ``theta``: the global tensors by name, fp32 unless they are copied buffers: those that are not
  fp32 in the model, or all if the job has an EMA, because the saved model may then hold its
  weights;
* ``in_flight``: what a sync in flight had sent, if there is one; in a sharded checkpoint as text.

In a sharded checkpoint the keys depend only on the model and the settings. It is loaded into a
template with fixed keys, so optional keys would make the load fail (docs/adrs/ADR-013).
"""

from __future__ import annotations

import base64
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_replication.diloco.copied_buffers import has_mean
from composer_replication.diloco.division import held_tensor
from composer_replication.diloco.fragments import listed
from composer_replication.group.global_weights import as_dtensor
from composer_replication.settings import FIXED, FIXED_WITH_BUFFERS, DiLoCoSettings, check_fixed

FORMAT = 3
_WITH_TENSORS = ("fragments", "in_flight", "residual")
"""Keys of ``DiLoCo.state_dict()`` that are saved apart from ``progress``."""

_CHUNK = 1 << 17
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_SHIFT = (1 << 31) + 1
"""Added to every number, so that a number and its negative have different squares."""


class BadStateError(ValueError):
    """A checkpoint from which this group cannot continue."""


class CheckpointLayout:
    """How the tensors of a group's ranks are stored in its checkpoint.

    Args:
        fragments: The model's parameters and buffers in each fragment, by name.
        settings: The run's.
        is_sharded: Whether each rank writes its shards (DCP), or rank 0 writes whole tensors.
        has_averages: Whether the saved model may hold other weights than the global ones.

    Attributes:
        fragments: The same.
        live: The model's parameters and buffers, by name.
    """

    def __init__(
        self,
        fragments: Sequence[Mapping[str, Tensor]],
        settings: DiLoCoSettings,
        is_sharded: bool,
        has_averages: bool,
    ) -> None:
        self.fragments = fragments
        self._settings = settings
        self._is_sharded = is_sharded
        # Also while it is 0, as in a row of a schedule: keys may depend on the settings alone.
        self._has_momentum = settings.outer_momentum or settings.changes_outer_numbers
        self.live = {name: t for fragment in fragments for name, t in fragment.items()}
        # The global parameters that are saved beside the model.
        self._theta_beside = [
            name for name, t in self.live.items() if has_averages or t.dtype != torch.float32
        ]

    # ---- packed -----------------------------------------------------------------------------

    def pack(
        self,
        state: Mapping[str, Any],
        local: Mapping[str, Tensor],
        in_model: Callable[[str], Tensor],
    ) -> dict[str, Any]:
        """Turn ``DiLoCo.state_dict()`` into DiLoCo's part of a checkpoint.

        Args:
            state: What ``DiLoCo.state_dict()`` returned.
            local: The local parameters by name.
            in_model: Returns the tensor of a name in the checkpoint's model.
        """
        fragments = state["fragments"]
        theta = theta_of(fragments)
        optimizers = [fragment["optimizer"] for fragment in fragments]
        momentum = _momentum_of(fragments) if self._has_momentum else {}
        progress = {key: value for key, value in state.items() if key not in _WITH_TENSORS}
        progress |= {
            "format": FORMAT,
            "outer_optimizers": [each["param_groups"] for each in optimizers],
            "has_momentum": [bool(each["state"]) for each in optimizers],
            "first_names": [next(iter(fragment)) for fragment in self.fragments],
            "checksums": checksums(self.live, in_model),
        }
        return self._saved(
            json.dumps(progress),
            self._save_in_flight(state["in_flight"]),
            local=local,
            momentum=momentum,
            residual=state["residual"],
            theta={name: theta[name] for name in self._theta_beside},
        )

    def template(self) -> dict[str, Any]:
        """Return empty tensors in the structure of ``pack``, to load a sharded checkpoint into."""
        tensors = defaultdict[str, dict[str, Tensor]](dict)
        for name, live in self.live.items():
            local = torch.empty_like(held_tensor(live))
            tensors["local"][name] = local
            numbers = local.float() if has_mean(live) else local
            if name in self._theta_beside:
                tensors["theta"][name] = torch.empty_like(numbers)
            if self._has_momentum and live.requires_grad:
                tensors["momentum"][name] = torch.empty_like(numbers)
            if self._settings.keeps_residual and has_mean(live):
                tensors["residual"][name] = torch.empty_like(numbers)
        return self._saved("", "", **tensors)

    def _saved(
        self,
        progress: str,
        in_flight: dict[str, Any] | str,
        **tensors: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        saved: dict[str, Any] = {"progress": progress, "in_flight": in_flight}
        for kind, own in tensors.items():
            if own:
                saved[kind] = self._save_all(own, self._is_sharded)
        return saved

    def _save_all(self, shards: Mapping[str, Tensor], is_sharded: bool) -> dict[str, Tensor]:
        return {name: self._save(name, shard, is_sharded) for name, shard in shards.items()}

    def _save(self, name: str, shard: Tensor, is_sharded: bool) -> Tensor:
        """Return what the checkpoint stores of a tensor.

        With shards that is this rank's; else the whole tensor in rank 0's host memory, empty
        elsewhere, by a collective.
        """
        like = self.live[name]
        if not isinstance(like, DTensor):
            return shard.detach()
        part = as_dtensor(shard.detach(), like)
        if is_sharded:
            return part
        whole = part.full_tensor()
        if torch.distributed.get_rank() == 0:
            return whole.cpu()
        return whole.new_empty(0)

    def _save_in_flight(self, state: Mapping[str, Any] | None) -> dict[str, Any] | str:
        if state is None:
            return ""
        whole = {**state, "local": self._save_all(state["local"], False)}
        if not self._is_sharded:
            return whole
        buffer = io.BytesIO()
        torch.save(whole, buffer)
        return base64.b64encode(buffer.getvalue()).decode()  # weights_only has no bytes

    # ---- unpacked ---------------------------------------------------------------------------

    def unpack(self, saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Turn DiLoCo's part of a checkpoint back into the state of ``DiLoCo``.

        The model must hold the weights of the same checkpoint.

        Returns:
            The input of ``DiLoCo.load_state_dict``, and the local parameters by name.

        Raises:
            BadStateError: The checkpoint is one of another model, or damaged, or a tensor of the
                model was left out of the load (``load_ignore_keys``) or replaced since.
            SettingsMismatch: It was saved with other fragments.
        """
        progress = _read_progress(saved)
        self._check_model(saved["local"], progress)
        local = self._load_all(saved["local"])
        theta = self._load_all(saved.get("theta", {}))
        for name, live in self.live.items():
            if name not in theta:
                theta[name] = held_tensor(live).to(torch.float32, copy=True)
        momentum = self._load_all(saved.get("momentum", {}))
        fragments = []
        for index, names in enumerate(self.fragments):
            buffers = {
                position: {"momentum_buffer": momentum[name]}
                for position, name in enumerate(names)
                if progress["has_momentum"][index] and name in momentum
            }
            optimizer = {"state": buffers, "param_groups": progress["outer_optimizers"][index]}
            own = {name: theta[name] for name in names}
            fragments.append({"theta": own, "optimizer": optimizer})
        state = progress | {
            "in_flight": self._load_in_flight(saved["in_flight"]),
            "fragments": fragments,
            "residual": self._load_all(saved.get("residual", {})),
        }
        return state, local

    def _check_model(self, local: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        live = self.live
        odd = sorted(local.keys() ^ live.keys())
        fixed = FIXED_WITH_BUFFERS if odd else FIXED
        check_fixed(self._settings.fingerprint(), progress["settings"], fixed)
        if odd:
            where = "only in the model" if odd[0] in live else "not in the model"
            raise BadStateError(f"{odd[0]} is {where}: the checkpoint is one of another model")
        # If the model was cut elsewhere, the checkpoint's counts belong to other fragments.
        pairs = zip(progress["first_names"], self.fragments, strict=True)
        for index, (first, fragment) in enumerate(pairs):
            own = next(iter(fragment))
            if first != own:
                raise BadStateError(
                    f"its fragment {index} begins with {first}, and with {own} here: the "
                    "model's blocks have changed. Continue with the model's code, and the version "
                    "of composer-replication, that wrote it"
                )
        for name, tensor in local.items():
            if tensor.dtype != live[name].dtype:
                raise BadStateError(
                    f"{name} is {tensor.dtype} in it, and {live[name].dtype} in the model"
                )
        others = replaced(progress["checksums"], live)
        if others:
            raise BadStateError(
                f"{len(others)} of {len(live)} tensors of the model are not those of the file: "
                f"they were left out of the load (load_ignore_keys), or replaced since: "
                f"{listed(others)}"
            )

    def _load_all(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: self._load(name, tensor) for name, tensor in saved.items()}

    def _load(self, name: str, saved: object) -> Tensor:
        """Return this rank's part of what ``_save`` returned, on any number of ranks.

        Raises:
            BadStateError: It is missing, or has another shape than in the model.
        """
        like = self.live[name]
        if not isinstance(saved, Tensor) or saved.shape != like.shape:
            what = f"is {tuple(saved.shape)}" if isinstance(saved, Tensor) else "is missing"
            raise BadStateError(f"{name} {what} in it, and {tuple(like.shape)} in the model")
        if isinstance(saved, DTensor):
            return saved.to_local()
        if not isinstance(like, DTensor):
            return saved
        mesh = like.device_mesh
        on_device = saved.to(mesh.device_type)
        distributed = distribute_tensor(on_device, mesh, like.placements, src_data_rank=None)
        return distributed.to_local()

    def _load_in_flight(self, saved: Any) -> dict[str, Any] | None:
        """Return what ``_save_in_flight`` was given, with this rank's part of its tensors."""
        if not saved:
            return None
        if isinstance(saved, str):
            try:
                saved = torch.load(io.BytesIO(base64.b64decode(saved)), weights_only=True)
            except Exception as error:  # torch raises errors of many classes
                raise BadStateError(f"its sync in flight cannot be read ({error})") from error
        return {**saved, "local": self._load_all(saved["local"])}


def _read_progress(saved: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(saved.get("progress"), str) or "local" not in saved:
        raise BadStateError(
            f"it has {', '.join(sorted(saved)) or 'nothing'} where progress and "
            "local parameters should be"
        )
    progress = json.loads(saved["progress"])
    if progress.get("format") != FORMAT:
        raise BadStateError(
            f"its format is {progress.get('format')!r} and this version reads {FORMAT}: use the "
            "version of composer-replication that wrote it"
        )
    return progress


def _momentum_of(fragments: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the momentum of every trained parameter; zeros before the first outer step."""
    momentum = {}
    for fragment in fragments:
        theta = [*fragment["theta"].items()]
        (group,) = fragment["optimizer"]["param_groups"]  # of the outer SGD
        for index in group["params"]:
            name, like = theta[index]
            state = fragment["optimizer"]["state"].get(index)
            momentum[name] = state["momentum_buffer"] if state else torch.zeros_like(like)
    return momentum


def theta_of(fragments: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The global tensors by name of the fragments in ``DiLoCo.state_dict()``."""
    theta: dict[str, Tensor] = {}
    for fragment in fragments:
        theta |= fragment["theta"]
    return theta


# ---- which tensors have changed ----------------------------------------------------------------


def checksums(
    live: Mapping[str, Tensor],
    held: Callable[[str], Tensor] | None = None,
) -> dict[str, int]:
    """Return a checksum of each tensor, the same on all ranks and for any number of ranks.

    It is a sum over the numbers of a tensor, so the ranks can add the sums over their shards. The
    numbers are squared, since two sums of plain numbers may be equal by chance. The checksum tells
    different tensors apart, but does not resist somebody who constructs two with the same checksum.

    With sharded tensors it is a collective of all ranks.

    Args:
        live: The model's tensors by name. They define how each tensor is divided among the ranks.
        held: Returns this rank's shard of the tensor to sum, by name. None: sum the tensors of
            ``live`` themselves.
    """
    sharded = [tensor for tensor in live.values() if isinstance(tensor, DTensor)]
    sums = []
    for name, tensor in live.items():
        own = held_tensor(tensor) if held is None else held(name)
        adds = not sharded or _adds_its_part(tensor)
        sums.append(_checksum(own) if adds else 0)
    if sharded:
        device = sharded[0].device_mesh.device_type
        together = torch.tensor(sums, dtype=torch.int64, device=device)
        torch.distributed.all_reduce(together)
        sums = together.tolist()
    return dict(zip(live, sums, strict=True))


def replaced(sums: Mapping[str, int], live: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that have changed since ``checksums`` gave these sums.

    Those that had no sum are left out.
    """
    now = checksums(live)
    return [name for name, checksum in now.items() if sums.get(name, checksum) != checksum]


def _checksum(tensor: Tensor) -> int:
    word = _WORDS[tensor.element_size()]
    words = tensor.detach().reshape(-1).view(word)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):  # limits the memory of the copies
        shifted = chunk.to(torch.int64, copy=True).add_(_SHIFT)
        total += shifted.mul_(shifted).sum()  # modulo 2^64
    return int(total)


def _adds_its_part(tensor: Tensor) -> bool:
    """Whether this rank adds its shard. Of the ranks that hold the same shard only one does."""
    if not isinstance(tensor, DTensor):
        return torch.distributed.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank of the group is in the mesh of its model"
    pairs = zip(tensor.placements, coordinate, strict=True)
    return not any(placement.is_replicate() and rank for placement, rank in pairs)
