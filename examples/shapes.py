"""Images of lines in four directions, drawn when they are read: a dataset without files."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))


class Shapes(Dataset[tuple[Tensor, int]]):
    """Noise with a bright line in it. The class is the line's direction.

    A sample depends on its index and the seed alone, so it is the same in every replica group.

    Args:
        length: Number of images.
        size: Height and width in pixels.
        seed: Of all images.
    """

    def __init__(self, length: int, size: int = 32, seed: int = 0) -> None:
        self.length, self.size, self.seed = length, size, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(f"image {index} of {self.length}")
        generator = torch.Generator().manual_seed(self.seed * self.length + index)
        image = 0.5 * torch.randn(3, self.size, self.size, generator=generator)
        start = torch.randint(self.size, (2,), generator=generator).tolist()
        label = index % len(DIRECTIONS)
        down, right = DIRECTIONS[label]
        for step in range(self.size):
            row, column = start[0] + step * down, start[1] + step * right
            image[:, row % self.size, column % self.size] = 3.0
        return image, label
