"""Reading a sharded checkpoint's folder without running anything that is in it.

Torch unpickles ``.metadata`` and every entry that is no tensor, and a pickle may call anything.
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

# By exact name: a module's other names lead to os, and a dotted name to any method.
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
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
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
        except pickle.UnpicklingError as error:  # whose text says how to run the code after all
            name = read_item.dest_index.fqn
            raise ValueError(f"its entry {name} holds more than plain data") from error
        # Torch's own unpickles all of it, so it gets what we have read and written again.
        plain = io.BytesIO()
        torch.save(entry, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read_metadata(folder: Path) -> Metadata:
    """What a sharded checkpoint says of its entries and files.

    Raises:
        UnpicklingError: It asks for a function or class that no checkpoint needs.
        Exception: Of many kinds: it is missing, damaged or none.
    """
    with (folder / ".metadata").open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}, no Metadata")
    return metadata


def read_entries(folder: Path, wanted: dict[str, Any]) -> None:
    """Read entries of a sharded checkpoint.

    Args:
        folder: The checkpoint.
        wanted: What to read, by name: an empty tensor that is filled, or anything else that is
            replaced.

    Raises:
        Exception: Of many kinds: the checkpoint is damaged, or an entry is neither a tensor nor
            plain data.
    """
    try:
        load(wanted, storage_reader=_Reader(folder), planner=_Planner(), no_dist=True)
    except CheckpointException as error:  # no Exception, and it quotes every frame
        [(cause, _)] = error.failures.values()
        raise cause from None
