"""The heal state as bytes: a small head that describes it, followed by the data of all tensors.

``torch.save`` would copy a large state several times: into a buffer that grows, through a checksum
of its own, and out of the buffer. Here the data of tensors in host memory is not copied at all.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from composer_replication.diloco.averaging.flat_buffer import fresh_pages
from composer_replication.replica.peer_client import PeerError

ALIGNMENT = 64
"""The data of a tensor starts at a multiple of this many bytes."""

HASH_CHUNK = 1 << 24
"""How many bytes one core hashes at a time."""

_LENGTH = struct.Struct("<Q")


def memory(num_bytes: int) -> memoryview:
    """Allocate memory for a state of this size."""
    return memoryview(fresh_pages(num_bytes))[:num_bytes]


def dump(content: Any, *, copies: bool = False) -> list[memoryview]:
    """Turn tensors and plain containers into bytes: equal ones into equal bytes.

    Args:
        content: Dicts, lists and tuples of tensors, numbers, strings and None. Numbers of NumPy's
            become Python's.
        copies: Whether to copy tensors in host memory.

    Returns:
        The bytes in parts, to be sent one after the other. Without ``copies`` the parts of tensors
        in host memory are that memory itself, so nobody may write to those tensors while the parts
        are in use. With ``copies`` there is one part, of memory that goes back to the system as
        soon as the part is dropped.
    """
    tensors: list[Tensor] = []

    def describe(each: Any) -> Any:
        if isinstance(each, np.generic):
            return each.item()
        tensors.append(each.detach())
        return torch.empty(each.shape, dtype=each.dtype, device="meta")

    buffer = io.BytesIO()
    described = tree_map_only((Tensor, np.generic), describe, content)
    torch.save(described, buffer, pickle_module=_BY_CONTENT)
    head = memoryview(_LENGTH.pack(buffer.tell()) + buffer.getvalue())
    end = len(head)
    *starts, size = _layout(end, tensors)
    if copies:
        body = memory(size)
        body[:end] = head
        for start, tensor in zip(starts, tensors, strict=True):
            _part(body, start, tensor).copy_(tensor)
        return [body]
    parts = [head]
    for start, tensor in zip(starts, tensors, strict=True):
        numbers = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        parts += memoryview(bytes(start - end)), numbers.numpy().data
        end = start + tensor.nbytes
    return parts


class _ContentPickler(pickle.Pickler):
    """Pickles by content alone, and not by which parts are the same object.

    A donor that was healed itself has its settings from a peer, in objects of their own. Its state
    is to have the same name as that of the other donors.
    """

    def __init__(self, *to: Any, **how: Any) -> None:
        super().__init__(*to, **how)
        self.fast = True


_BY_CONTENT = SimpleNamespace(__name__="pickle", Pickler=_ContentPickler)
"""What ``torch.save`` takes a pickler from."""


def load(body: memoryview) -> Any:
    """Turn bytes that ``dump`` has made back into tensors and containers. It runs no code in them.

    Args:
        body: All parts, one after the other. The tensors are views of this memory.

    Raises:
        PeerError: The bytes are something else.
    """
    try:
        (size,) = _LENGTH.unpack_from(body)
        head_end = _LENGTH.size + size
        head = io.BytesIO(body[_LENGTH.size : head_end])
        content = torch.load(head, weights_only=True)
        described = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
        for tensor in described:
            if tensor.device.type != "meta":
                raise ValueError(f"a tensor in the head, on {tensor.device}")
        *starts, end = _layout(head_end, described)
        if end != len(body):
            raise ValueError(f"it has {len(body)} bytes, and its head speaks of {end}")
    except Exception as error:  # torch's own text is a page of advice; its cause is one line
        reason = str(error.__cause__ or error) or type(error).__name__
        raise PeerError(
            "a peer's state is rejected, it is more than tensors and plain containers: "
            f"{reason.splitlines()[0]}"
        ) from error
    parts = map(functools.partial(_part, body), starts, described)
    return tree_map_only(Tensor, lambda _: next(parts), content)


def digest_of_bytes(parts: Sequence[memoryview]) -> str:
    """Hash a state: the SHA-256 of the SHA-256s of its chunks, so that all cores can work at it.

    Args:
        parts: The bytes. How they are divided into parts makes no difference.
    """

    def sha256_of(chunk: list[memoryview]) -> bytes:
        sha256 = hashlib.sha256()
        for part in chunk:
            sha256.update(part)
        return sha256.digest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        of_chunks = b"".join(pool.map(sha256_of, _cut(parts)))
    return hashlib.sha256(of_chunks).hexdigest()


def _cut(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut the bytes into chunks of ``HASH_CHUNK``, however they are divided into parts."""
    chunk: list[memoryview] = []
    room = HASH_CHUNK
    for part in parts:
        while len(part):
            chunk.append(part[:room])
            part = part[room:]
            room -= len(chunk[-1])
            if not room:
                yield chunk
                chunk = []
                room = HASH_CHUNK
    if chunk:
        yield chunk


def _layout(head: int, tensors: list[Tensor]) -> Iterator[int]:
    """Yield the offset of each tensor's data, after a head of this many bytes; then the end."""
    end = head
    for tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        yield start
        end = start + tensor.nbytes
    yield end


def _part(body: memoryview, start: int, like: Tensor) -> Tensor:
    numbers = torch.frombuffer(body, dtype=torch.uint8)[start : start + like.nbytes]
    return numbers.view(like.dtype).view(like.shape)
