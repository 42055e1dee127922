"""Where checkpoints go, and which mistakes are the config's.

Run: pytest tests/training/test_saving.py. Real: Composer's Trainer, training alone on the CPU.
"""

from pathlib import Path

import pytest
from composer.core import Time
from text_config import write_config

from composer_replication.training.building import composers_errors_in_the_config
from composer_replication.training.config import ConfigError, load_config
from composer_replication.training.preflight import check_group, run_dir_of, save_folder_of
from composer_replication.training.trainer import train

CONFIG = """
max_duration: 4ba
device: cpu
global_train_batch_size: 2
model: {name: byte_gpt, d_model: 16, n_heads: 2, n_layers: 1, max_seq_len: 16}
train_loader: {name: text, max_seq_len: 16, path: TEXT}
optimizer: {name: decoupled_adamw, lr: 1.0e-3}
callbacks: {diloco: {num_replicas: 1, sync_every: 2}}
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE", "COMPOSER_REPLICATION_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("saving", "run_dir", "folder"),
    [
        ({}, "runs/mine", None),
        ({}, None, None),
        ({"save_interval": "17ba"}, "runs/mine", "runs/mine/replica_3/checkpoints"),
        ({"save_folder": "saved"}, "runs/mine", "runs/mine/replica_3/saved"),
        ({"save_folder": "saved", "save_interval": "1ep"}, None, "saved/replica_3"),
        ({"save_folder": "/saved"}, "runs/mine", "/saved/replica_3"),
        ({"save_folder": "s3://bucket/run/"}, "runs/mine", "s3://bucket/run/replica_3"),
    ],
)
def test_each_group_has_a_folder_of_its_own(saving, run_dir, folder):
    assert save_folder_of(saving, run_dir, 3) == folder


def test_an_interval_alone_saves_below_the_run_folder(config, tmp_path):
    run_dir = tmp_path / "run"
    train(load_config(config, ["save_interval=2ba", f"run_dir={run_dir}"]))
    folder = run_dir / "replica_0" / "checkpoints"
    assert {path.name for path in folder.iterdir()} >= {"ep0-ba2-rank0.pt", "latest-rank0.pt"}
    again = ["save_interval=2ba", f"run_dir={run_dir}", "autoresume=true", "max_duration=6ba"]
    assert train(load_config(config, again))["inner_steps"] == 6


def test_an_interval_without_any_folder_is_an_error_before_composer_is_imported(config):
    loaded = load_config(config, ["save_interval=17ba"])
    message = "save_interval='17ba' without save_folder and without a run folder: .* run_dir="
    with pytest.raises(ConfigError, match=message):
        check_group(loaded, {})
    run_dir = {"COMPOSER_REPLICATION_RUN_DIR": "/run"}
    check_group(loaded, run_dir)
    assert run_dir_of({"run_dir": "/other"}, run_dir) == "/run"
    assert run_dir_of({"run_dir": "/other"}, {}) == "/other"


@pytest.mark.parametrize("override", ["save_interval=5xx", "precision=fp31"])
def test_what_composer_rejects_is_an_error_of_the_config(config, tmp_path, override):
    with pytest.raises(ConfigError, match=r"(?s)Composer rejects the config: .*(5xx|fp31)"):
        train(load_config(config, [override, f"run_dir={tmp_path}"]))


def test_so_is_what_it_rejects_when_it_begins_to_train(config, tmp_path):
    saving = ["save_interval=4ba", "autoresume=true", f"run_dir={tmp_path}"]
    train(load_config(config, saving))
    with pytest.raises(ConfigError, match="(?s)Composer rejects the config: .*max_duration"):
        train(load_config(config, saving))


def test_an_error_of_composer_in_the_midst_of_training_is_none_of_the_config():
    with pytest.raises(ValueError) as caught, composers_errors_in_the_config(lambda: False):
        Time.from_timestring("5xx")
    assert not isinstance(caught.value, ConfigError)


def test_an_error_of_another_library_is_none_of_the_config():
    with pytest.raises(ValueError) as caught, composers_errors_in_the_config():
        Path("a\0b").stat()
    assert not isinstance(caught.value, ConfigError)
