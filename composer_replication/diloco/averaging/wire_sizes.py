"""How many bytes each wire format takes. Torch-free, so that ``plan`` can import it."""

from __future__ import annotations

from typing import Literal, get_args

WireFormatName = Literal["float32", "bfloat16", "int8", "fp4"]
WIRE_FORMATS: tuple[WireFormatName, ...] = get_args(WireFormatName)

BLOCK = {"int8": 256, "fp4": 32}
"""Elements that share a scale. bfloat16 has no scales."""

BYTES_PER_PARAMETER = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "int8": 1 + 4 / BLOCK["int8"],
    "fp4": 0.5 + 1 / BLOCK["fp4"],
}
"""Bytes per parameter of a large message."""

PART = 512
"""A part of a message has a multiple of this number of elements."""

FRAME = 2**18
"""Elements that are encoded at a time on a CPU. It has to be the same in all groups."""

FP4_HEADER = 4
"""Bytes before the scales of an fp4 frame: the base that the scales are relative to."""


def encoded_bytes(wire_format: str, num_elements: int) -> int:
    """Return the bytes that ``num_elements`` take in a wire format.

    Args:
        wire_format: One of ``WIRE_FORMATS``.
        num_elements: A multiple of ``PART``, unless the format is float32.

    Raises:
        ValueError: There is no such format.
    """
    blocks = num_elements // BLOCK.get(wire_format, 1)
    sizes = {
        "float32": 4 * num_elements,
        "bfloat16": 2 * num_elements,
        "int8": num_elements + 4 * blocks,
        "fp4": FP4_HEADER + num_elements // 2 + blocks,
    }
    if wire_format not in sizes:
        raise ValueError(f"wire_format={wire_format!r}: use one of {', '.join(WIRE_FORMATS)}")
    return sizes[wire_format]
