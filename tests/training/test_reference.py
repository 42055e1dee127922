"""What a config says of data parallel on its text. Run: pytest tests/training/test_reference.py

Real: simulated groups on a small text, with Composer.
"""

import pytest
from text_config import write_config

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
train_loader: {name: text, path: TEXT, max_seq_len: 16}
eval_loader: {name: text, path: TEXT, max_seq_len: 16}
optimizer: {name: adamw, lr: 1.0e-3}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}}
reference: {data_parallel_bits_per_byte: 2.5, tokens: 256}
callbacks: {diloco: {sync_every: 2}}
"""


@pytest.fixture
def reference(tmp_path):
    """Trains two groups on a text that the reference is of, and returns what is shown of it."""
    path = write_config(tmp_path, CONFIG)
    text = TextBytes(tmp_path / "text", max_seq_len=16).name

    def train(*overrides):
        config = load_config(path, [f"reference.text={text}", *overrides])
        results = simulate_replicas(config, num_replicas=2)
        return {result["eval"].get("data_parallel_bits_per_byte") for result in results}

    return train


@pytest.mark.slow
def test_it_is_shown_for_that_text_and_as_many_tokens_of_all_groups(reference):
    assert reference() == {2.5}  # 4 steps, 2 samples of a group, 2 groups, 16 bytes
    assert reference("max_duration=3ba") == {None}
    assert reference("reference.text=another") == {None}
    with pytest.raises(ConfigError, match="reference has no 'bits'"):
        reference("reference.bits=2.4")
