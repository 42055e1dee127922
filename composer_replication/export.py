"""The global weights of a checkpoint as a safetensors file, without Composer or a trainer."""

from __future__ import annotations

import datetime
import json
import os
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.torch_version import TorchVersion

from composer_replication.sharded_folder import read_entries, read_metadata

CALLBACK = "DiLoCoCallback"
_MODEL = "state.model."
_PROGRESS = f"state.callbacks.{CALLBACK}.progress"

# What Composer itself puts beside tensors and plain containers; nothing here runs code.
_COMPOSERS_OWN = [
    datetime.timedelta,
    TorchVersion,
    OrderedDict,
    np.dtype,
    np.ndarray,
    type(np.dtype(np.uint32)),
    np.zeros(0).__reduce__()[0],  # numpy's own function, under whatever name this numpy has it
]


def export(checkpoint: str | Path, out: str | Path) -> dict[str, Any]:
    """Write the global weights of a checkpoint alone. Nothing that is in it is run.

    Args:
        checkpoint: A Composer checkpoint of a DiLoCo run: a file, or a sharded one's folder.
        out: The safetensors file. Names and dtypes are the model's. A tied weight is there under
            each of its names, so that ``load_state_dict`` takes it as it is.

    Returns:
        ``num_tensors``, ``num_parameters``, ``outer_step`` and ``batch``, the last two as far as
        the checkpoint tells them.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: It cannot be read, or holds no model.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    try:
        weights, progress = (_read_sharded if path.is_dir() else _read_file)(path)
    except Exception as error:  # torch's own are of many kinds, and say little of the file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} cannot be read as a Composer checkpoint ({reason}): it may be cut off, or of "
            "another kind. Give another one"
        ) from error
    if not weights:
        raise ValueError(f"{path} holds no model weights: give a checkpoint with a model in it")
    told = json.loads(progress) if progress else {}
    notes = {"outer_step": str(told["outer_step"])} if told else {}
    whole = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Never half a file under the name that was asked for; and in a new folder, since a name beside
    # it could be somebody's symbolic link to another file.
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        draft = Path(folder) / out.name
        save_file(whole, draft, metadata={"format": "pt", **notes})
        os.replace(draft, out)
    return {
        "num_tensors": len(whole),
        "num_parameters": sum(tensor.numel() for tensor in whole.values()),
        "outer_step": told.get("outer_step"),
        "inner_steps": told.get("inner_steps"),
    }


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A monolithic Composer checkpoint, without running anything that is in it.

    Raises:
        Exception: Of many kinds: it is none, or is damaged.
    """
    with torch.serialization.safe_globals(_COMPOSERS_OWN):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _read_file(path: Path) -> tuple[dict[str, Tensor], str]:
    state = read_checkpoint(path)["state"]
    weights = {name: t for name, t in state["model"].items() if isinstance(t, Tensor)}
    progress = (state.get("callbacks") or {}).get(CALLBACK, {}).get("progress", "")
    return weights, progress


def _read_sharded(path: Path) -> tuple[dict[str, Tensor], str]:
    stored = read_metadata(path).state_dict_metadata
    wanted: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    if _PROGRESS in stored:
        wanted[_PROGRESS] = ""
    read_entries(path, wanted)
    progress = wanted.pop(_PROGRESS, "")
    return {key.removeprefix(_MODEL): tensor for key, tensor in wanted.items()}, progress
