"""Configs of tests, with a text to train on."""

from pathlib import Path


def text_job(
    own: str, *, d_model: int = 32, n_layers: int = 1, length: int = 32, batch: int = 4
) -> str:
    """A config that trains the quickstart's model on text, with what a test adds to it.

    Args:
        own: The rest of the YAML, with ``callbacks.diloco``.
        d_model: Width of the model.
        n_layers: Its blocks.
        length: Bytes in one sample.
        batch: Samples in a batch of one process.
    """
    return f"""
model:
  _target_: examples.quickstart.byte_gpt.ByteGPT
  d_model: {d_model}
  n_heads: 2
  n_layers: {n_layers}
  max_seq_len: {length}
train_dataloader:
  _target_: examples.quickstart.text.text_loader
  path: null
  max_seq_len: ${{model.max_seq_len}}
  batch_size: {batch}
  replica_rank: ${{replica_rank}}
  num_replica_groups: ${{num_replica_groups}}
optimizers: {{_target_: torch.optim.AdamW, lr: 1.0e-3}}
{own}"""


DILOCO = "_target_: composer_replication.DiLoCoCallback"
TINY = text_job(f"max_duration: 20ba\ncallbacks: {{diloco: {{{DILOCO}, sync_every: 10}}}}\n")
"""A config that trains at once, on the source of Python's standard library."""


def write_config(folder: Path, config: str) -> Path:
    """Write a config into a folder, with a small text there in the place of the library."""
    text = folder / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text("to be or not to be, that is the question\n" * 20)
    path = folder / "config.yaml"
    path.write_text(config.replace("path: null", f"path: {text}"))
    return path
