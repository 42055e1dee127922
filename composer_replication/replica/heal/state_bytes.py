"""A group's state as bytes: a small head that says what there is, and then all tensors' numbers.

``torch.save`` would copy a large state again and again: into a buffer that grows, with a checksum
of its own, and out of it.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from composer_replication.diloco.averaging.flat_buffer import fresh_pages

ALIGNMENT = 64
PIECE = 1 << 24
_LENGTH = struct.Struct("<Q")


class NotAState(ValueError):
    """These bytes are not what ``dump`` makes."""


def memory(num_bytes: int) -> memoryview:
    """Fresh memory."""
    return memoryview(fresh_pages(num_bytes))[:num_bytes]


def dump(content: Any) -> list[memoryview]:
    """Tensors and plain containers as bytes, which one after the other are what ``load`` takes.

    They are the memory of the tensors, where that is of the host: nobody may write there.
    """
    tensors: list[Tensor] = []

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf.detach())
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    buffer = io.BytesIO()
    torch.save(tree_map(describe, content), buffer)
    parts = [memoryview(_LENGTH.pack(buffer.tell()) + buffer.getvalue())]
    end = len(parts[0])
    for tensor, start in zip(tensors, _layout(end, tensors), strict=False):
        numbers = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        parts += [memoryview(bytes(start - end)), numbers.numpy().data]
        end = start + tensor.nbytes
    return parts


def load(body: memoryview) -> Any:
    """What ``dump`` made, and nothing that could run code. The tensors are parts of ``body``.

    Raises:
        NotAState: It is something else.
    """
    described: list[Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.device.type != "meta":
                raise NotAState(f"a tensor in the head, on {leaf.device}")
            described.append(leaf)
        return leaf

    try:
        (size,) = _LENGTH.unpack_from(body)
        head = io.BytesIO(body[_LENGTH.size : _LENGTH.size + size])
        content = tree_map(collect, torch.load(head, weights_only=True))
    except Exception as error:  # torch's own text is a page of advice; its cause is one line
        reason = str(error.__cause__ or error) or type(error).__name__
        raise NotAState(reason.splitlines()[0]) from error
    *starts, end = _layout(_LENGTH.size + size, described)
    if end != len(body):
        raise NotAState(f"it has {len(body)} bytes, and its head speaks of {end}")
    parts = iter([_part(body, *each) for each in zip(starts, described, strict=True)])
    return tree_map(lambda leaf: next(parts) if isinstance(leaf, Tensor) else leaf, content)


def digest(parts: Sequence[memoryview]) -> str:
    """The SHA-256 of the SHA-256 of each piece of all: all cores work at it."""

    def digest_of(piece: list[memoryview]) -> bytes:
        found = hashlib.sha256()
        for part in piece:
            found.update(part)
        return found.digest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return hashlib.sha256(b"".join(pool.map(digest_of, _cut(parts)))).hexdigest()


def _cut(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Pieces of equal sizes, however the bytes are divided into parts."""
    piece: list[memoryview] = []
    room = PIECE
    for part in parts:
        while len(part):
            piece.append(part[:room])
            part = part[room:]
            room -= len(piece[-1])
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


def _layout(head: int, tensors: list[Tensor]) -> Iterator[int]:
    """Where each tensor's numbers begin, after a head of so many bytes; at last, where they end."""
    end = head
    for tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        yield start
        end = start + tensor.nbytes
    yield end


def _part(body: memoryview, start: int, like: Tensor) -> Tensor:
    numbers = torch.frombuffer(body, dtype=torch.uint8)[start : start + like.nbytes]
    return numbers.view(like.dtype).view(like.shape)
