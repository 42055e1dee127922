"""Configs of tests, with a text to train on."""

from pathlib import Path

TINY = """
max_duration: 20ba
global_train_batch_size: 4
model: {name: byte_gpt, d_model: 32, n_heads: 2, n_layers: 1, max_seq_len: 32}
train_loader: {name: text, path: null, max_seq_len: 32}
optimizer: {name: adamw, lr: 1.0e-3}
callbacks: {diloco: {sync_every: 10}}
"""
"""A config that trains at once, on the text that comes with the package."""


def write_config(folder: Path, config: str) -> Path:
    """Write a config into a folder, with the path of a small text in the place of TEXT."""
    text = folder / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text("to be or not to be, that is the question\n" * 20)
    path = folder / "config.yaml"
    path.write_text(config.replace("TEXT", str(text)))
    return path
