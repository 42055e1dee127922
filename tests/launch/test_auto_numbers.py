"""``auto`` in the config of a run on this machine. Run: pytest tests/launch/test_auto_numbers.py"""

import pytest
from run_events import write_events

from composer_replication.launch.auto_numbers import with_numbers
from composer_replication.training.config import load_config, save_config

CONFIG = """
max_duration: 8ba
global_train_batch_size: 8
model: {name: byte_gpt, d_model: 32, n_heads: 2, n_layers: 2, max_seq_len: 32}
train_loader: {name: text, path: null, max_seq_len: 32}
optimizer: {name: adamw, lr: "${variables.lr}"}
variables: {lr: 1.0e-3, outer: auto}
callbacks: {diloco: {sync_every: 30, outer_lr: "${variables.outer}", outer_momentum: auto}}
"""


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return lambda *overrides: load_config(path, overrides)


def numbers(config):
    section = config["callbacks"]["diloco"]
    return section["outer_lr"], section["outer_momentum"]


def train_a_step(run_dir):
    write_events(run_dir / "replica_0", "sync", {"diloco/outer_step": 1})


def test_the_saved_config_has_the_numbers_and_leaves_the_rest_as_it_was(load, tmp_path):
    config, line = with_numbers(load(), tmp_path, 8)
    assert numbers(config) == (0.8, 0.7)
    assert line == "outer_lr auto = 0.8, outer_momentum auto = 0.7 (num_replicas=8, sync_every=30)"
    save_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "outer_lr: 0.8" in text and "lr: ${variables.lr}" in text
    assert numbers(load_config(tmp_path / "config.yaml")) == (0.8, 0.7)


def test_a_run_that_goes_on_keeps_its_numbers_and_a_start_that_failed_has_none(load, tmp_path):
    save_config(with_numbers(load(), tmp_path, 2)[0], tmp_path / "config.yaml")
    assert numbers(with_numbers(load(), tmp_path, 8)[0]) == (0.8, 0.7)
    train_a_step(tmp_path)
    config, line = with_numbers(load(), tmp_path, 8)
    assert numbers(config) == (0.7, 0.5)
    assert line == "outer_lr auto = 0.7, outer_momentum auto = 0.5 (as this run began)"
    named, _ = with_numbers(load("callbacks.diloco.outer_lr=0.5"), tmp_path, 8)
    assert numbers(named) == (0.5, 0.5)


def test_a_run_that_began_with_the_defaults_keeps_these(load, tmp_path):
    config = load()
    config["callbacks"]["diloco"] = {"sync_every": 30}
    assert with_numbers(config, tmp_path, 8) == (config, "")
    save_config(config, tmp_path / "config.yaml")
    train_a_step(tmp_path)
    assert numbers(with_numbers(load(), tmp_path, 8)[0]) == (0.7, 0.9)
