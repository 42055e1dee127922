"""The images of ``shapes`` in a folder, as mosaicml-streaming stores them.

Write them with ``python -m examples.streamed_shapes FOLDER [LENGTH]``.
"""

import sys
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataset
from torch import Tensor

from examples.shapes import Shapes


class StreamedShapes(StreamingDataset):
    """Images and their classes, from a folder.

    Args:
        local: The folder.
        batch_size: Samples that a rank reads at a time. The loader decides which ones.
    """

    def __init__(self, local: str, batch_size: int = 1) -> None:
        super().__init__(local=local, batch_size=batch_size)

    def __getitem__(self, at: int) -> tuple[Tensor, int]:  # pyright: ignore
        sample: dict[str, Any] = super().__getitem__(at)
        return torch.tensor(sample["image"]), int(sample["label"])


def write(folder: str, length: int = 2048, size: int = 16) -> None:
    """Write images into a new folder.

    Args:
        folder: The folder.
        length: Number of images.
        size: Height and width in pixels.
    """
    columns = {"image": f"ndarray:float32:3,{size},{size}", "label": "int"}
    with MDSWriter(out=folder, columns=columns, size_limit=1 << 18) as out:
        for image, label in map(Shapes(length, size).__getitem__, range(length)):
            out.write({"image": image.numpy().astype(np.float32), "label": label})


if __name__ == "__main__":
    write(sys.argv[1], *map(int, sys.argv[2:3]))
