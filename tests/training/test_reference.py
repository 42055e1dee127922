"""What a config says of data parallel on its text. Run: pytest tests/training/test_reference.py

Real: simulated groups on a small text, with Composer.
"""

import pytest

from composer_replication.training.config import ConfigError, load_config
from composer_replication.training.loaders import TextBytes
from composer_replication.training.trainer import simulate_replicas

CONFIG = """
max_duration: 4ba
eval_interval: 4ba
global_train_batch_size: 2
device_eval_batch_size: 2
device: cpu
model: {name: byte_gpt, d_model: 16, n_heads: 2, n_layers: 1, max_seq_len: 16}
train_loader: {name: text, path: PATH, max_seq_len: 16}
eval_loader: {name: text, path: PATH, max_seq_len: 16}
optimizer: {name: adamw, lr: 1.0e-3}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}}
reference: {data_parallel_bits_per_byte: 2.5, text: "TEXT", tokens: TOKENS}
callbacks: {diloco: {sync_every: 2}}
"""


@pytest.fixture
def reference(tmp_path):
    """Trains two groups with a reference for some tokens, and returns what is shown of it."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abcdefgh":
        (folder / f"{name}.txt").write_text(f"A sample of {name} is read by one group. " * 50)

    def train(tokens, *overrides):
        text = TextBytes(folder, max_seq_len=16).name
        path = tmp_path / "config.yaml"
        written = CONFIG.replace("PATH", str(folder)).replace("TEXT", text)
        path.write_text(written.replace("TOKENS", str(tokens)))
        results = simulate_replicas(load_config(path, overrides), num_replicas=2)
        return {result["eval"].get("data_parallel_bits_per_byte") for result in results}

    return train


@pytest.mark.slow
def test_it_is_shown_for_that_text_and_as_many_tokens_of_all_groups(reference):
    tokens = 4 * 2 * 2 * 16  # steps, samples of a group, groups, bytes
    assert reference(tokens) == {2.5}
    assert reference(tokens, "max_duration=3ba") == {None}
    assert reference(tokens, "reference.text=another") == {None}
    with pytest.raises(ConfigError, match="reference has no 'bits'"):
        reference(tokens, "reference.bits=2.4")
