"""The weights of a checkpoint as a safetensors file, without Composer or a trainer."""

from __future__ import annotations

import datetime
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.torch_version import TorchVersion

from composer_replication.callback.sharded_folder import read_entries, read_metadata
from composer_replication.diloco.fragments import as_peft_writes

CALLBACK = "DiLoCoCallback"
_MODEL = "state.model."
_OURS = f"state.callbacks.{CALLBACK}."

# Types that Composer itself saves beside tensors and plain containers. None of them runs code.
_COMPOSERS_OWN = [
    datetime.timedelta,
    TorchVersion,
    OrderedDict,
    np.dtype,
    np.ndarray,
    type(np.dtype(np.uint32)),
    np.zeros(0).__reduce__()[0],  # numpy's own function, under whatever name this numpy has it
]


@dataclass
class _Content:
    """The parts of a checkpoint that an export needs.

    Attributes:
        model: ``state/model``.
        progress: DiLoCo's ``progress``; empty if the checkpoint is not of a DiLoCo run.
        theta: DiLoCo's ``theta``.
        ema: The state of Composer's EMA; None if there is none, or the checkpoint is sharded.
    """

    model: dict[str, Tensor]
    progress: dict[str, Any] = field(default_factory=dict)
    theta: dict[str, Tensor] = field(default_factory=dict)
    ema: Mapping[str, Any] | None = None

    @property
    def whose(self) -> str:
        """Which weights the model has: ``global``, ``ema``, ``local`` or ``unknown``."""
        if not self.progress:
            is_ema = self.ema is not None and self.ema["ema_weights_active"]
            return "ema" if is_ema else "unknown"
        return self.progress.get("model", "global")


def export(checkpoint: str | Path, out: str | Path, weights: str | None = None) -> dict[str, Any]:
    """Write only the weights of a checkpoint. No code in the checkpoint is run.

    Args:
        checkpoint: A Composer checkpoint of a DiLoCo run: a file, or the folder of a sharded one.
        out: The safetensors file to write. Names and dtypes are the model's. It contains a tied
            weight under each of its names, so that ``load_state_dict`` accepts the file directly.
        weights: ``global``, or ``ema`` for the weights of Composer's EMA. None: the model of the
            checkpoint.

    Returns:
        ``num_tensors``, ``num_parameters``, ``outer_step`` and ``inner_steps`` (None if the
        checkpoint does not contain these two), and ``weights``: which weights these are,
        ``global``, ``ema``, ``local`` or ``unknown``.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: It cannot be read, or does not contain these weights.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    try:
        content = (_read_sharded if path.is_dir() else _read_file)(path)
    except Exception as error:  # torch raises many kinds, and few of them name the file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} cannot be read as a Composer checkpoint ({reason}): it may be cut off, or of "
            "another kind. Give another one"
        ) from error
    if not content.model:
        raise ValueError(f"{path} holds no model weights: give a checkpoint with a model in it")
    try:
        chosen = _chosen(content, weights)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    progress = content.progress
    notes = {"outer_step": str(progress["outer_step"])} if progress else {}
    whole = {name: tensor.contiguous().clone() for name, tensor in chosen.items()}
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Written elsewhere and moved, so that the file is never incomplete. The draft is in a new
    # folder, because a name beside ``out`` could be somebody's symbolic link to another file.
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        draft = Path(folder) / out.name
        save_file(whole, draft, metadata={"format": "pt", **notes})
        os.replace(draft, out)
    return {
        "num_tensors": len(whole),
        "num_parameters": sum(tensor.numel() for tensor in whole.values()),
        "outer_step": progress.get("outer_step"),
        "inner_steps": progress.get("inner_steps"),
        "weights": weights or content.whose,
    }


def in_words(exported: Mapping[str, Any], out: Path) -> list[str]:
    """What ``export`` returned, as lines for a person."""
    step, weights = exported["outer_step"], exported["weights"]
    name = {
        "global": "the global weights",
        "ema": "EMA's weights",
        "local": "this group's own weights",
        "unknown": "the weights",
    }[weights]
    when = f" after outer step {step}" if step is not None else ""
    note = {
        "local": "They are SWA's average, which becomes the global weights at the next sync.",
        "unknown": "The checkpoint has no DiLoCo state, so these may be local or global weights.",
    }
    found = f"{exported['num_tensors']} tensors, {exported['num_parameters']:,} parameters"
    return [f"{out}: {name}{when}, {found}", *(note[w] for w in [weights] if w in note)]


def _chosen(content: _Content, weights: str | None) -> dict[str, Tensor]:
    if weights is None or weights == content.whose:
        return content.model
    if weights not in ("global", "ema"):
        raise ValueError(f"cannot give weights={weights!r}: choose 'global' or 'ema'")
    return _global(content) if weights == "global" else _ema(content)


def _global(content: _Content) -> dict[str, Tensor]:
    if not content.progress:
        raise ValueError("has no DiLoCo state, so no global weights: leave weights='global' out")
    model = content.model
    if content.ema is not None and content.ema["ema_weights_active"]:
        model = _put(content.ema["ema_model"]["named_buffers_dict"], model, {})  # the trained ones
    return _put(content.theta, model, content.progress["tied"])


def _ema(content: _Content) -> dict[str, Tensor]:
    if content.ema is None:
        raise ValueError(
            "holds no weights of an EMA: the run had none, or the checkpoint is sharded and was "
            "saved while they were not in the model. Leave weights='ema' out"
        )
    if not content.ema["ema_started"]:
        raise ValueError("was saved before EMA started: use a later one")
    kept = content.ema["ema_model"]
    own = kept["named_parameters_dict"] | kept["named_buffers_dict"]
    return _put(own, content.model, content.progress.get("tied", {}))


def _put(
    values: Mapping[str, Tensor], model: dict[str, Tensor], tied: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the model with other values, under all of its names for them and in its dtypes.

    Buffers that the model does not save are only in ``values``, and are left out.
    """
    values = {name.removeprefix("module."): t for name, t in values.items()}  # as EMA's under DDP
    values |= {other: values[name] for other, name in tied.items() if name in values}
    values |= {as_peft_writes(name): tensor for name, tensor in values.items()}
    return {name: values[name].to(t.dtype) if name in values else t for name, t in model.items()}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a Composer checkpoint that is one file, without running code in it.

    Raises:
        Exception: Of many kinds: the file is no checkpoint, or is damaged.
    """
    with torch.serialization.safe_globals(_COMPOSERS_OWN):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _read_file(path: Path) -> _Content:
    state = read_checkpoint(path)["state"]
    ours = (state.get("callbacks") or {}).get(CALLBACK, {})
    return _Content(
        {name: t for name, t in state["model"].items() if isinstance(t, Tensor)},
        json.loads(ours.get("progress") or "{}"),
        ours.get("theta", {}),
        next((own for name, own in state.get("algorithms") or () if name == "EMA"), None),
    )


def _read_sharded(path: Path) -> _Content:
    stored = read_metadata(path).state_dict_metadata
    theta = f"{_OURS}theta."
    wanted: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith((_MODEL, theta)) and isinstance(entry, TensorStorageMetadata)
    }
    if f"{_OURS}progress" in stored:
        wanted[f"{_OURS}progress"] = ""
    read_entries(path, wanted)
    progress = json.loads(wanted.pop(f"{_OURS}progress", "") or "{}")
    parts = [
        {key.removeprefix(part): t for key, t in wanted.items() if key.startswith(part)}
        for part in (_MODEL, theta)
    ]
    return _Content(parts[0], progress, parts[1])
