"""Where checkpoints of a config go.

Run: pytest tests/training/test_saving.py. Real: Composer's Trainer, training alone on the CPU.
"""

import shutil

import pytest
from text_config import DILOCO, text_job, write_config

from composer_replication.config_file import ConfigError
from composer_replication.training import load_config, save_folder_of, train

OWN = f"""
max_duration: 4ba
device: cpu
callbacks: {{diloco: {{{DILOCO}, num_replicas: 1}}}}
"""
CONFIG = text_job(OWN, d_model=16, length=16, batch=2)


pytestmark = pytest.mark.usefixtures("no_network")


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
    assert save_folder_of(saving | {"run_dir": run_dir}, 3) == folder


def test_an_interval_alone_saves_below_the_run_folder(config, tmp_path):
    run_dir = tmp_path / "run"
    train(load_config(config, ["save_interval=2ba", f"run_dir={run_dir}"]))
    folder = run_dir / "replica_0" / "checkpoints"
    assert {path.name for path in folder.iterdir()} >= {"ep0-ba2-rank0.pt", "latest-rank0.pt"}


@pytest.mark.slow
def test_an_interval_alone_saves_and_autoresume_goes_on(config, tmp_path):
    longer = "max_duration=110ba"
    whole = train(load_config(config, [longer]))
    assert whole["replica_id"] == "0"
    assert (whole["inner_steps"], whole["outer_steps"]) == (110, 6)  # rounds of 20, and the end
    saving = ["autoresume=true", f"run_dir={tmp_path / 'run'}", "save_interval=50ba"]
    train(load_config(config, [*saving, "max_duration=50ba"]))
    assert train(load_config(config, [*saving, longer])) == whole


def test_the_run_folder_of_the_environment_goes_before_those_of_the_config(
    config, tmp_path, monkeypatch
):
    given = [f"run_dir={tmp_path / 'top'}", f"callbacks.diloco.run_dir={tmp_path / 'section'}"]
    for expected in ("section", "top", "environment"):  # each goes before those to its left
        if expected == "environment":
            monkeypatch.setenv("COMPOSER_REPLICATION_RUN_DIR", str(tmp_path / expected))
        train(load_config(config, given[1:] if expected == "section" else given))
        used = [path.parent for path in tmp_path.glob("*/replica_0")]
        assert used == [tmp_path / expected]
        shutil.rmtree(tmp_path / expected)


def test_an_interval_without_any_folder_is_an_error(config):
    message = "save_interval='17ba' without save_folder and without a run folder: .* run_dir="
    with pytest.raises(ConfigError, match=message):
        train(load_config(config, ["save_interval=17ba"]))
