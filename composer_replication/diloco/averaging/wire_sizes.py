"""How many bytes each wire format takes. Torch-free, so that ``plan`` can import it."""

from __future__ import annotations

from typing import NamedTuple

from composer_replication.settings import WireFormatName

PART = 512
"""A part of a message has a multiple of this number of elements."""

FRAME = 2**18
"""Elements that are encoded at a time on a CPU. It has to be the same in all groups."""


class WireSize(NamedTuple):
    """What a message takes in a wire format.

    Attributes:
        bits: Of an element.
        block: Elements that share a scale, a divisor of ``PART``.
        scale: Bytes of a scale. 0: there are no scales.
        header: Bytes before the scales of a frame: in fp4 the base that the scales are relative to.
    """

    bits: int
    block: int = 1
    scale: int = 0
    header: int = 0


SIZES: dict[WireFormatName, WireSize] = {
    "float32": WireSize(32),
    "bfloat16": WireSize(16),
    "int8": WireSize(8, block=256, scale=4),
    "fp4": WireSize(4, block=32, scale=1, header=4),
}

BYTES_PER_PARAMETER = {
    name: size.bits / 8 + size.scale / size.block for name, size in SIZES.items()
}
"""Bytes per parameter of a large message."""


def sections(wire_format: WireFormatName, num_elements: int) -> list[int]:
    """Return the bytes of a message's header, scales and codes, in this order.

    Args:
        wire_format: Its name.
        num_elements: A multiple of ``PART``, unless the format is float32.
    """
    size = SIZES[wire_format]
    scales = num_elements // size.block * size.scale
    codes = num_elements * size.bits // 8
    return [size.header, scales, codes]
