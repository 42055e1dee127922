"""DiLoCo's part of a Composer checkpoint, packed and unpacked.

Composer saves the model (with the global weights), the inner optimizer and the timestamp. DiLoCo's
part consists of

* ``progress``: outer step, position in the round, contribution counters, settings, outer
  hyperparameters and checksums of the saved model's tensors, as JSON;
* ``local``: the local parameters (and buffers, with ``sync_buffers``), by name, in their dtypes;
* ``momentum``: the outer momentum by name, fp32, if there is any;
* ``residual``: the residual of error feedback by name, fp32, if there is any;
* ``theta``: the global tensors by name, fp32 unless they are copied buffers: those that are not
  fp32 in the model, or all if the job has an EMA or SWA, because the saved model may then hold
  their weights;
* ``in_flight``: what a sync in flight had sent, if there is one; in a sharded checkpoint as text.

In a sharded checkpoint the keys depend only on the model and the settings. It is loaded into a
template with fixed keys, so optional keys would make the load fail (docs/adrs/ADR-013).
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_replication.diloco.copied_buffers import has_mean
from composer_replication.diloco.fragments import listed
from composer_replication.diloco.shards import local_tensor
from composer_replication.group.checksums import checksums, replaced
from composer_replication.group.global_weights import as_dtensor
from composer_replication.settings import FIXED, FIXED_WITH_BUFFERS, DiLoCoSettings, check_fixed

FORMAT = 3
_PLAIN = (
    "outer_step",
    "settings",
    "ledger",
    "inner_steps",
    "local_step",
    "since_sync",
    "reading",
    "replaces_global",
    "round_length",
)


class BadStateError(ValueError):
    """A checkpoint from which this group cannot continue."""


class CheckpointLayout:
    """How the tensors of a group's ranks are stored in its checkpoint.

    Args:
        fragments: The model's parameters and buffers in each fragment, by name.
        is_sharded: Whether each rank writes its shards (DCP), or rank 0 writes whole tensors.
        has_averages: Whether the saved model may hold other weights than the global ones.
    """

    def __init__(
        self,
        fragments: Sequence[Mapping[str, Tensor]],
        is_sharded: bool,
        has_averages: bool = False,
    ) -> None:
        self.fragments = [list(fragment) for fragment in fragments]
        self.live = {name: t for fragment in fragments for name, t in fragment.items()}
        self.is_sharded = is_sharded
        self.theta_beside = [
            name for name, t in self.live.items() if has_averages or t.dtype != torch.float32
        ]
        """The global parameters that are saved beside the model."""

    @property
    def first_names(self) -> list[str]:
        """The name of the first tensor in each fragment."""
        return [names[0] for names in self.fragments]

    def check_cut(self, saved: Sequence[str]) -> None:
        """Check that a checkpoint has the same parameters in each fragment.

        Args:
            saved: What ``first_names`` was.

        Raises:
            BadStateError: It was saved with another cut, which its counts per fragment are of.
        """
        pairs = zip(saved, self.first_names, strict=True)
        for index, (theirs, mine) in enumerate(pairs):
            if theirs != mine:
                raise BadStateError(
                    f"its fragment {index} begins with {theirs}, and with {mine} here: the model's "
                    "blocks have changed. Continue with the model's code, and the version of "
                    "composer-replication, that wrote it"
                )

    def save(self, name: str, shard: Tensor) -> Tensor:
        """Return what the checkpoint stores of a tensor. A collective if it has to be gathered."""
        like = self.live[name]
        if not isinstance(like, DTensor):
            return shard.detach()
        return as_dtensor(shard.detach(), like) if self.is_sharded else self.save_whole(name, shard)

    def load(self, name: str, saved: object) -> Tensor:
        """Return this rank's part of what ``save`` returned, on any number of ranks.

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
        mesh, placements = like.device_mesh, like.placements
        on_device = saved.to(mesh.device_type)
        return distribute_tensor(on_device, mesh, placements, src_data_rank=None).to_local()

    def save_whole(self, name: str, shard: Tensor) -> Tensor:
        """Return the whole tensor in rank 0's host memory, empty elsewhere. A collective."""
        like = self.live[name]
        if not isinstance(like, DTensor):
            return shard.detach()
        whole = as_dtensor(shard.detach(), like).full_tensor()
        return whole.cpu() if torch.distributed.get_rank() == 0 else whole.new_empty(0)


def pack(
    state: Mapping[str, Any],
    local: Mapping[str, Tensor],
    in_model: Callable[[str], Tensor],
    layout: CheckpointLayout,
) -> dict[str, Any]:
    """Turn ``DiLoCo.state_dict()`` into DiLoCo's part of a checkpoint.

    Args:
        state: What ``DiLoCo.state_dict()`` returned.
        local: The local parameters by name.
        in_model: Returns the tensor of a name in the checkpoint's model.
        layout: How tensors are stored.
    """
    fragments = state["fragments"]
    theta = {name: t for fragment in fragments for name, t in fragment["theta"].items()}
    momentum = momentum_of(fragments, always=bool(state["settings"].get("schedule")))
    progress = {key: state[key] for key in _PLAIN} | {
        "format": FORMAT,
        "outer_optimizers": [f["optimizer"]["param_groups"] for f in fragments],
        "has_momentum": [bool(f["optimizer"]["state"]) for f in fragments],
        "first_names": layout.first_names,
        "checksums": checksums(layout.live, in_model),
    }
    saved = {
        "progress": json.dumps(progress),
        "in_flight": _save_in_flight(state["in_flight"], layout),
        "local": {name: layout.save(name, tensor) for name, tensor in local.items()},
        "momentum": {name: layout.save(name, tensor) for name, tensor in momentum.items()},
        "residual": {name: layout.save(name, tensor) for name, tensor in state["residual"].items()},
        "theta": {name: layout.save(name, theta[name]) for name in layout.theta_beside},
    }
    return {key: value for key, value in saved.items() if value != {}}


def template(settings: DiLoCoSettings, layout: CheckpointLayout) -> dict[str, Any]:
    """Return empty tensors in the structure of ``pack``, to load a sharded checkpoint into."""

    def empty(name: str, dtype: torch.dtype) -> Tensor:
        shard = torch.empty_like(local_tensor(layout.live[name]), dtype=dtype)
        return layout.save(name, shard)

    trained = [name for name, t in layout.live.items() if t.requires_grad]
    has_momentum = settings.outer_momentum or settings.schedule
    with_momentum = trained if has_momentum else []
    dtypes = {n: torch.float32 if has_mean(t) else t.dtype for n, t in layout.live.items()}
    with_residual = [n for n, t in layout.live.items() if settings.keeps_residual and has_mean(t)]
    saved = {
        "progress": "",
        "in_flight": "",
        "local": {name: empty(name, tensor.dtype) for name, tensor in layout.live.items()},
        "momentum": {name: empty(name, torch.float32) for name in with_momentum},
        "residual": {name: empty(name, torch.float32) for name in with_residual},
        "theta": {name: empty(name, dtypes[name]) for name in layout.theta_beside},
    }
    return {key: value for key, value in saved.items() if value != {}}


def unpack(
    saved: Mapping[str, Any], settings: DiLoCoSettings, layout: CheckpointLayout
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Turn DiLoCo's part of a checkpoint back into the state of ``DiLoCo``.

    The model has to hold the weights of the same checkpoint.

    Returns:
        The input of ``DiLoCo.load_state_dict``, and the local parameters by name.

    Raises:
        BadStateError: The checkpoint is one of another model, or damaged, or a tensor of the model
            was left out of the load (``load_ignore_keys``) or replaced since.
        SettingsMismatch: It was saved with other fragments.
    """
    progress = _read_progress(saved)
    names = saved["local"].keys()
    fixed = FIXED if names == layout.live.keys() else FIXED_WITH_BUFFERS
    check_fixed(settings.fingerprint(), progress["settings"], fixed)
    if names != layout.live.keys():
        odd = sorted(names ^ layout.live.keys())[0]
        where = "only in the model" if odd in layout.live else "not in the model"
        raise BadStateError(f"{odd} is {where}: the checkpoint is one of another model")
    layout.check_cut(progress["first_names"])
    for name, tensor in saved["local"].items():
        if tensor.dtype != layout.live[name].dtype:
            raise BadStateError(
                f"{name} is {tensor.dtype} in it, and {layout.live[name].dtype} in the model"
            )
    if others := replaced(progress["checksums"], layout.live):
        raise BadStateError(
            f"{len(others)} of {len(layout.live)} tensors of the model are not those of the file: "
            f"they were left out of the load (load_ignore_keys), or replaced since: "
            f"{listed(others)}"
        )
    state = {key: progress[key] for key in _PLAIN} | {
        "in_flight": _load_in_flight(saved["in_flight"], layout),
        "fragments": _fragments(saved, progress, layout),
        "residual": {name: layout.load(name, t) for name, t in saved.get("residual", {}).items()},
    }
    return state, {name: layout.load(name, tensor) for name, tensor in saved["local"].items()}


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


def momentum_of(fragments: list[dict[str, Any]], *, always: bool = False) -> dict[str, Tensor]:
    """Return the momentum of every trained parameter; zeros before the first outer step.

    Args:
        fragments: Their outer states.
        always: Whether also where the momentum is 0 at the moment, as in a row of a schedule.
    """
    momentum = {}
    for fragment in fragments:
        names, optimizer = list(fragment["theta"]), fragment["optimizer"]
        for group in optimizer["param_groups"]:
            for index in group["params"] if always or group["momentum"] else ():
                name = names[index]
                buffer = optimizer["state"].get(index, {}).get("momentum_buffer")
                momentum[name] = (
                    torch.zeros_like(fragment["theta"][name]) if buffer is None else buffer
                )
    return momentum


def _fragments(
    saved: Mapping[str, Any], progress: Mapping[str, Any], layout: CheckpointLayout
) -> list[dict[str, Any]]:
    """Return the fragments' states, as ``load_outer_state`` takes them."""
    momentum = {name: layout.load(name, t) for name, t in saved.get("momentum", {}).items()}
    saved_theta = saved.get("theta", {})
    fragments = []
    for index, names in enumerate(layout.fragments):
        theta = {
            name: layout.load(name, saved_theta[name])
            if name in saved_theta
            else local_tensor(layout.live[name]).to(torch.float32, copy=True)
            for name in names
        }
        state = {
            position: {"momentum_buffer": momentum[name]}
            for position, name in enumerate(names)
            if name in momentum and progress["has_momentum"][index]
        }
        groups = progress["outer_optimizers"][index]
        optimizer = {"state": state, "param_groups": groups}
        fragments.append({"theta": theta, "optimizer": optimizer})
    return fragments


def _save_in_flight(
    state: Mapping[str, Any] | None, layout: CheckpointLayout
) -> dict[str, Any] | str:
    if state is None:
        return ""
    local = {name: layout.save_whole(name, tensor) for name, tensor in state["local"].items()}
    whole = {**state, "local": local}
    if not layout.is_sharded:
        return whole
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    return base64.b64encode(buffer.getvalue()).decode()  # weights_only has no bytes


def _load_in_flight(
    saved: Mapping[str, Any] | str, layout: CheckpointLayout
) -> dict[str, Any] | None:
    if not saved:
        return None
    if isinstance(saved, str):
        try:
            saved = torch.load(io.BytesIO(base64.b64decode(saved)), weights_only=True)
        except Exception as error:  # torch's are of many kinds
            raise BadStateError(f"its sync in flight cannot be read ({error})") from error
    assert not isinstance(saved, str)
    local = {name: layout.load(name, tensor) for name, tensor in saved["local"].items()}
    return {**saved, "local": local}
