"""The models of the study, and what they are trained on: all of it is there without a network."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from examples.quickstart.byte_gpt import ByteGPT
from examples.quickstart.text import TextBytes

LENGTH, SHORT = 128, 64
SIDE, TRAINED, HELD_OUT, COPIES, NOISE = 12, 1440, 357, 24, 0.4

Batch = dict[str, Tensor]


class Pictures(Dataset[Batch]):
    """scikit-learn's 8 x 8 digits, each in several copies: shifted, and with noise.

    Without that a small network learns them by heart in a few hundred steps.
    """

    def __init__(self, split: str) -> None:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

        pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        own = order[:TRAINED] if split == "train" else order[-HELD_OUT:]
        own = own.repeat(COPIES if split == "train" else COPIES // 4)
        random = torch.Generator().manual_seed(len(own))
        self._labels = labels[own, None]
        self._pixels = NOISE * torch.randn(len(own), 1, SIDE, SIDE, generator=random)
        shifts = torch.randint(SIDE - 7, (len(own), 2), generator=random)
        for noisy, (down, right), digit in zip(self._pixels, shifts.tolist(), own, strict=True):
            noisy[0, down : down + 8, right : right + 8] += pixels[digit].view(8, 8) / 16
        self.name = f"digits {len(labels)} {float(pixels.sum()):g}"

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Batch:
        return {"input_ids": self._pixels[index], "labels": self._labels[index]}


class Text(TextBytes):
    """The quickstart's samples, with a name."""

    @property
    def name(self) -> str:
        """It is equal wherever the samples are equal, on any machine and in any folder."""
        digest = hashlib.sha256(self._bytes.numpy().data).hexdigest()[:16]
        return f"text {digest} by {self.max_seq_len}"


@lru_cache
def data_of(name: str, split: Any) -> Any:
    """The samples of one of ``DATA``, those to train on or those held out."""
    return DATA[name](split)


def _headers() -> Path:
    return Path(torch.__file__).parent / "include" / "torch"


def _docstrings(root: Path, files: str, length: int, split: Any) -> Text:
    """The docstrings of files, those of each in one. ``Text`` reads the folder at once."""
    with tempfile.TemporaryDirectory() as folder:
        for source in root.glob(files):
            nodes = ast.walk(ast.parse(source.read_text(encoding="utf-8")))
            found = [ast.get_docstring(each) for each in nodes if isinstance(each, _DOCUMENTED)]
            if text := "\n\n".join(filter(None, found)):
                file = Path(folder, source.relative_to(root))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
        return Text(folder, max_seq_len=length, split=split)


_DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef

DATA: dict[str, Callable[[Any], Any]] = {
    "stdlib": lambda split: Text(max_seq_len=LENGTH, split=split),
    "headers": lambda split: Text(_headers(), max_seq_len=LENGTH, split=split),
    "docstrings": partial(_docstrings, Path(torch.__file__).parent, "**/*.py", LENGTH),
    "digits": Pictures,
    "manual": partial(_docstrings, Path(sysconfig.get_path("stdlib")), "*.py", SHORT),
    "another manual": partial(_docstrings, Path(torch.__file__).parent, "**/*.py", SHORT),
}
"""The source of Python's standard library; torch's C++ headers; its docstrings; pictures; the
docstrings of the standard library's modules; torch's in windows as short as these."""


class GRU(nn.Module):
    """A recurrent network over bytes."""

    loss = ByteGPT.loss

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(256, 96)
        self.gru = nn.GRU(96, 160, batch_first=True)
        self.lm_head = nn.Linear(160, 256)

    def forward(self, batch: Batch) -> Tensor:
        return self.lm_head(self.gru(self.wte(batch["input_ids"]))[0])


class Convolutions(nn.Module):
    """Residual convolutions over bytes, each of which sees twice as far back as the last."""

    loss = ByteGPT.loss

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(256, 128)
        self.layers = nn.ModuleList(nn.Conv1d(128, 128, 3, dilation=2**i) for i in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(7))
        self.lm_head = nn.Linear(128, 256)

    def forward(self, batch: Batch) -> Tensor:
        x = self.wte(batch["input_ids"])
        for norm, layer in zip(self.norms, self.layers, strict=False):
            past = functional.pad(norm(x).mT, (2 * layer.dilation[0], 0))
            x = x + functional.gelu(layer(past)).mT
        return self.lm_head(self.norms[-1](x))


class CNN(nn.Module):
    """Three convolutions with BatchNorm. Its logits are those of a text of one byte."""

    loss = ByteGPT.loss

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, more in ((1, 16), (16, 32), (32, 64)):
            convolution = nn.Conv2d(channels, more, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(more), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(64, 10)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.layers(batch["input_ids"]))[:, None]


_gpt = partial(ByteGPT, d_model=128, n_heads=4, max_seq_len=LENGTH)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(_gpt, n_layers=2),
    "deep": partial(_gpt, n_layers=4),
    "gru": GRU,
    "cnn": CNN,
    "convolutions": Convolutions,
    "small": partial(ByteGPT, d_model=48, n_heads=4, n_layers=2, max_seq_len=SHORT),
}
"""443,648 parameters, 837,888, 189,632, 24,058, 363,264 and 71,136."""
