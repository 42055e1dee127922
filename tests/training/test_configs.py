"""Every file in configs/ is read, and its parts are built, on a CPU."""

from pathlib import Path

import pytest

from composer_replication import DiLoCoCallback, simulate
from composer_replication.config_file import diloco_section
from composer_replication.training import build_trainer, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SMALL = [
    *("device=cpu", "precision=fp32", "model.d_model=32", "model.n_heads=2"),  # the same blocks
    *("model.max_seq_len=32", "eval_dataloader.max_seq_len=32", "eval_dataloader.batch_size=2"),
    *("train_dataloader.batch_size=2", "device_train_microbatch_size=1"),
    "eval_subset_num_batches=1",
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_config_builds_its_trainer_and_splits_its_model(path):
    text = ".dataset" if path.stem == "leased" else ""
    config = load_config(path, [*SMALL, f"train_dataloader{text}.max_seq_len=32"])
    section = diloco_section(config)

    def replica(sim):
        callback = DiLoCoCallback(**section, replica_id=0, num_replicas=1, manager=sim.manager)
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
