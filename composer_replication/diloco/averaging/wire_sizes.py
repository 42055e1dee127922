"""How many bytes each wire format takes; without torch, for who only plans."""

from __future__ import annotations

WIRE_FORMATS = ("float32", "bfloat16", "int8", "fp4")

BLOCK = {"int8": 256, "fp4": 32}
"""Elements that share a scale, of which bfloat16 has none."""

BYTES_PER_PARAMETER = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "int8": 1 + 4 / BLOCK["int8"],
    "fp4": 0.5 + 1 / BLOCK["fp4"],
}
"""Of a large message."""

PART = 512
"""What is encoded at a time has a multiple of so many elements."""

FRAME = 2**18
"""Elements that are encoded by themselves on a CPU: all groups have to agree on it."""

FP4_HEADER = 4
"""Bytes before the scales of an fp4 frame: what they are relative to."""


def encoded_bytes(wire_format: str, num_elements: int) -> int:
    """Bytes of ``num_elements`` in a wire format, a multiple of ``PART`` unless it is float32.

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
