"""Text of a folder as samples of bytes, and a loader that gives each replica group its share.

Whole files are held out for the evaluation. Composer's own sampler gives every replica group the
same samples, since each group is a job of its own; this one knows the group and the rank in it.
"""

import codecs
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset, Subset
from torchft.data import DistributedSampler

Split = Literal["train", "eval"]

# Not source of the library itself, or not written by hand: `encodings` is tables, `pydoc_data` is
# one file of help text. Together they would be a fifth of the bytes, and say little about code.
_STDLIB_SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data")
)
_HELD_OUT_FRACTION = 0.05
_SNIFFED_BYTES = 64 * 1024
_MAX_FOLDER_BYTES = 1 << 30


@dataclass(frozen=True)
class TextFolder:
    """A checked folder: its text files, split into those to train on and those held out.

    Attributes:
        root: The folder.
        train: Paths relative to ``root``, with forward slashes, sorted.
        eval: The same for the held-out files. No file is in both.
    """

    root: Path
    train: tuple[str, ...]
    eval: tuple[str, ...]

    def files(self, split: Split) -> tuple[str, ...]:
        """The relative paths of one split, in the order in which they are read.

        Raises:
            ValueError: ``split`` is neither "train" nor "eval".
        """
        if split not in get_args(Split):
            raise ValueError(f"split={split!r} is unknown. Use 'train' or 'eval'.")
        return self.train if split == "train" else self.eval

    def num_bytes(self, split: Split) -> int:
        """The size of one split in bytes, from the sizes of its files."""
        return sum((self.root / name).stat().st_size for name in self.files(split))

    def read_bytes(self, split: Split) -> bytes:
        """The contents of one split's files, one after the other."""
        return b"".join((self.root / name).read_bytes() for name in self.files(split))


def check_text_folder(path: str | Path | None = None, *, max_seq_len: int = 1) -> TextFolder:
    """List and split the text files of a folder, or reject the folder.

    A hash of each file's relative path decides whether it is held out (about one in twenty), so
    that every replica group holds out the same files on any machine. A folder so small that no file
    is selected holds out the one whose path has the lowest hash.

    Args:
        path: A folder, which is searched with its subfolders. Every file counts, whatever its
            suffix, if its first 64 KiB are UTF-8 without a NUL byte. Hidden files and folders
            (``.git``) and empty files do not count, and links to folders are not followed. All text
            together may have 1 GiB, since every process holds it in memory. None: the ``*.py``
            files of the running Python's standard library.
        max_seq_len: Bytes in one sample. Each split must hold at least one sample.

    Returns:
        The folder and its split.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The folder holds no text, too little, or too much.
    """
    if max_seq_len < 1:
        raise ValueError(f"max_seq_len={max_seq_len} must be at least 1 byte.")
    root = Path(sysconfig.get_path("stdlib") if path is None else path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"path={str(root)!r} does not exist. Pass a folder of text files.")
    if not root.is_dir():
        raise ValueError(f"path={str(root)!r} is not a folder. Pass the folder the file is in.")
    names = _standard_library_files(root) if path is None else _text_files(root)
    if len(names) < 2:
        raise ValueError(
            f"path={str(root)!r} holds {len(names)} text files. At least 2 are needed, since whole "
            "files are held out: put more text files there, or cut the one into parts."
        )
    held_out = _held_out(names)
    folder = TextFolder(
        root=root,
        train=tuple(name for name in names if name not in held_out),
        eval=tuple(name for name in names if name in held_out),
    )
    _check_sizes(folder, max_seq_len)
    return folder


def _check_sizes(folder: TextFolder, max_seq_len: int) -> None:
    sizes: dict[Split, int] = {"train": folder.num_bytes("train"), "eval": folder.num_bytes("eval")}
    if sum(sizes.values()) > _MAX_FOLDER_BYTES:
        raise ValueError(
            f"path={str(folder.root)!r} holds {sum(sizes.values())} bytes of text. Every process "
            f"holds them in memory, so the limit is {_MAX_FOLDER_BYTES}. Use a part of it, or a "
            "StreamingDataset."
        )
    for split, size in sizes.items():
        if size < max_seq_len + 1:  # the last byte of a window is a target only
            raise ValueError(
                f"path={str(folder.root)!r} leaves {size} bytes for split={split!r}; one sample "
                f"needs max_seq_len + 1 = {max_seq_len + 1}. Add text, or shorten max_seq_len."
            )


def _held_out(names: list[str]) -> frozenset[str]:
    """Select about one path in twenty; at least one and never all."""

    def rank(name: str) -> int:
        return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big")

    by_rank = sorted(names, key=rank)
    num_low = sum(rank(name) < _HELD_OUT_FRACTION * 2**64 for name in names)
    return frozenset(by_rank[: min(max(num_low, 1), len(names) - 1)])


def _standard_library_files(root: Path) -> list[str]:
    return [name for name in _walk(root, _STDLIB_SKIPPED) if name.endswith(".py")]


def _text_files(root: Path) -> list[str]:
    return [name for name in _walk(root) if _looks_like_text(root / name)]


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[str]:
    """List the non-empty files under ``root`` by relative path, sorted, without hidden ones."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [d for d in subfolders if d not in skipped and not d.startswith(".")]
        names += [Path(folder, f) for f in files if not f.startswith(".")]
    # Sorted as text: the order of a directory differs between file systems. Without this the bytes
    # of a split would differ between replica groups.
    return sorted(p.relative_to(root).as_posix() for p in names if p.is_file() and p.stat().st_size)


def _looks_like_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_SNIFFED_BYTES)
    try:
        # final=False where the file goes on: a character may be cut in two at the end.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _SNIFFED_BYTES)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


class TextBytes(Dataset[dict[str, torch.Tensor]]):
    """The bytes of a folder's text files, cut into windows that do not overlap.

    A sample is ``{"input_ids", "labels"}``, both int64 of shape (max_seq_len,). A label is the byte
    that follows its input, so it is already shifted. Neighbouring windows therefore share one byte:
    the last label of the first is the first input of the second. Bytes after the last full window
    are unused.

    Args:
        path: The folder. None: the running Python's standard library.
            ``check_text_folder`` says which files
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

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.max_seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.max_seq_len
        window = self._bytes[start : start + self.max_seq_len + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


def text_loader(
    batch_size: int,
    max_seq_len: int,
    *,
    path: str | None = None,
    split: Split = "train",
    seed: int = 0,
    replica_rank: int = 0,
    num_replica_groups: int = 1,
) -> DataLoader:
    """Build a loader over ``TextBytes`` for this rank of this replica group.

    "train": the samples are dealt to all ranks of all groups, in a new order every epoch. If a
    group is missing, its share is not read.

    "eval": every group reads all samples, divided between its own ranks. Their order is random and
    always the same, so that the first few batches (``eval_subset_num_batches``) are a fair sample,
    and the same one at each evaluation.

    Args:
        batch_size: Samples per batch and rank.
        max_seq_len: Bytes in one sample.
        path: See ``TextBytes``.
        split: "train" or "eval".
        seed: Of the order. It has to be equal in all groups, else their shares overlap.
        replica_rank: The group's number, from 0: ``${replica_rank}`` in a config.
        num_replica_groups: How many groups there are: ``${num_replica_groups}`` in a config.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: An argument is impossible, or the text does not fill one batch.
    """
    is_train = split == "train"
    dataset: Dataset = TextBytes(path, max_seq_len=max_seq_len, split=split)
    if not is_train:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
        dataset = Subset(dataset, order.tolist())
    sampler = DistributedSampler(
        dataset,
        replica_rank=replica_rank if is_train else 0,
        num_replica_groups=num_replica_groups if is_train else 1,
        group_rank=dist.get_global_rank(),
        num_replicas=dist.get_world_size(),
        shuffle=is_train,
        seed=seed,
        drop_last=is_train,  # Composer removes doubled samples from an evaluation's metrics
    )
    if is_train and len(sampler) < batch_size:
        raise ValueError(
            f"split={split!r} has {len(sampler)} samples for each rank, less than one batch of "
            f"batch_size={batch_size}. Use more data or a smaller batch_size."
        )
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        drop_last=is_train,
        # A DataLoader draws from torch's default generator whenever it starts. Simulated replicas
        # are threads that share it: without a generator of its own, a loader's order would depend
        # on which thread came first.
        generator=torch.Generator().manual_seed(seed),
    )
