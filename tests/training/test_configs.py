"""Every file in configs/ is read, and its parts are built, on a CPU."""

from pathlib import Path

import pytest

from composer_replication import DiLoCoCallback, simulate
from composer_replication.training.building import build_one
from composer_replication.training.config import load_config
from composer_replication.training.trainer import build_trainer

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SMALL = [
    *("device=cpu", "precision=fp32", "model.d_model=32", "model.n_heads=2"),  # the same blocks
    *(f"{section}.max_seq_len=32" for section in ("model", "train_loader", "eval_loader")),
    *("global_train_batch_size=2", "device_train_microbatch_size=1", "device_eval_batch_size=2"),
    "eval_subset_num_batches=1",
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_config_builds_its_trainer_and_splits_its_model(path):
    config = load_config(path, SMALL)

    def replica(sim):
        own = {"replica_id": 0, "num_replicas": 1, "run_dir": None}
        section = config["callbacks"]["diloco"] | own
        callback = build_one("callbacks", {"diloco": section}, manager=sim.manager)
        assert isinstance(callback, DiLoCoCallback)
        trainer = build_trainer(config, callback)
        trainer.fit(duration="1ba")
        trainer.close()
        return callback.result["inner_steps"]

    assert simulate(replica, num_replicas=1) == [1]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_opens_with_the_command_that_runs_it(path):
    text = path.read_text()
    comment = text[: text.index("seed:")]
    assert f"configs/{path.name}" in comment and "composer" in comment
