"""Reading the folder of a sharded checkpoint without running code in it.

Torch unpickles ``.metadata`` and every entry that is not a tensor, and a pickle may call any
function.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

# By exact names, since other names of these modules lead to os, and dotted names to any method.
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    ("pathlib._local", "PosixPath"),  # as Python 3.13 names it
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it needs {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            entry = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:  # its text explains how to run the code
            name = read_item.dest_index.fqn
            raise ValueError(f"its entry {name} holds more than plain data") from error
        # Torch's own load_bytes unpickles anything, so it gets only what was read safely above.
        plain = io.BytesIO()
        torch.save(entry, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a sharded checkpoint: its entries and files.

    Raises:
        UnpicklingError: It needs a function or class that no checkpoint needs.
        Exception: Of many kinds: it is missing or damaged, or it is no checkpoint.
    """
    with (folder / ".metadata").open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it contains a {type(metadata).__name__}, not Metadata")
    return metadata


def read_entries(folder: Path, wanted: dict[str, Any]) -> None:
    """Read entries of a sharded checkpoint.

    Args:
        folder: The checkpoint's folder.
        wanted: The entries to read, by name. An empty tensor is filled, any other value is
            replaced.

    Raises:
        Exception: Of many kinds: the checkpoint is damaged, or an entry is neither a tensor nor
            plain data.
    """
    try:
        load(wanted, storage_reader=_Reader(folder), planner=_Planner(), no_dist=True)
    except CheckpointException as error:  # it is not an Exception, and quotes every frame
        [(cause, _)] = error.failures.values()
        raise cause from None
