"""Text as a causal language model of Hugging Face takes it."""

from typing import Literal

from torch import Tensor
from torch.utils.data import Dataset

from examples.quickstart.text import TextBytes


class Tokens(Dataset[dict[str, Tensor]]):
    """Bytes as tokens. Labels are the inputs, since the models shift them themselves.

    Args:
        max_seq_len: Tokens in one sample.
        path: A folder of text. None: the source of Python's standard library.
        split: "train", or "eval" for the held-out files.
    """

    def __init__(
        self, max_seq_len: int, path: str | None = None, split: Literal["train", "eval"] = "train"
    ) -> None:
        self._text = TextBytes(path, max_seq_len=max_seq_len, split=split)

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._text[index]["input_ids"]
        return {"input_ids": tokens, "labels": tokens}
