"""Text as samples of bytes, and a loader over them."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from composer_replication.diloco.arguments import takes
from composer_replication.training.loader_arguments import TextArguments
from composer_replication.training.loaders import shard
from composer_replication.training.text_files import Split, check_text_folder


class TextBytes(Dataset[dict[str, torch.Tensor]]):
    """The bytes of a folder's text files, cut into windows that do not overlap.

    A sample is ``{"input_ids", "labels"}``, both int64 of shape (max_seq_len,). A label is the byte
    that follows its input, so it is already shifted. Neighbouring windows therefore share one byte:
    the last label of the first is the first input of the second. Bytes after the last full window
    are unused.

    Args:
        path: The folder. None: the running Python's standard library.
            :func:`~composer_replication.training.text_files.check_text_folder` says which files
            count as text.
        max_seq_len: Bytes in one sample.
        split: "train", or "eval" for the held-out files.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The folder holds no text, too little, or too much.
    """

    def __init__(
        self, path: str | Path | None = None, *, max_seq_len: int, split: Split = "train"
    ) -> None:
        folder = check_text_folder(path, max_seq_len=max_seq_len)
        # bytearray: torch warns about a read-only buffer.
        self._bytes = torch.frombuffer(bytearray(folder.read_bytes(split)), dtype=torch.uint8)
        self.max_seq_len = max_seq_len

    @property
    def name(self) -> str:
        """A name that is equal wherever the samples are equal, on any machine and in any folder."""
        digest = hashlib.sha256(self._bytes.numpy().data).hexdigest()[:16]
        return f"text {digest} by {self.max_seq_len}"

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.max_seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.max_seq_len
        window = self._bytes[start : start + self.max_seq_len + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


@takes(TextArguments)
def build_text_loader(**arguments: Any) -> DataLoader:
    """Build a loader over :class:`TextBytes` for this rank of this replica group.

    :func:`~composer_replication.training.loaders.shard` says how groups share the windows.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: An argument is impossible, or the text does not fill one batch.
    """
    options = TextArguments(**arguments)
    text = TextBytes(options.path, max_seq_len=options.max_seq_len, split=options.split)
    return shard(text, options, dataset_id=text.name if options.is_leased else "")
