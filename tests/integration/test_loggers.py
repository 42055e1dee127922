"""What TensorBoard, MLflow and W&B have of a run of two groups, side by side in their own files.

Run: pytest tests/integration/test_loggers.py. Real: all of it; MLflow and W&B have no server.
"""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Script

from composer_replication.callback.loggers import name_runs
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.options import ReplicaOptions

pytest.importorskip("mlflow")
pytest.importorskip("tensorboard")
pytest.importorskip("wandb")
pytestmark = [pytest.mark.integration, pytest.mark.together]

GROUPS = {"replica_0", "replica_1"}
STEPS = {
    "loss/train/total": {0, 1, 2, 3},
    "diloco/outer_step": {2, 4},  # at the first step after each sync
    "diloco/sync_seconds": {2, 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a run of two groups, which have its id from the coordinator."""
    folder = tmp_path_factory.mktemp("loggers")
    mlflow_client(folder).create_experiment(
        "diloco"
    )  # MLflow lets only one of two groups create it
    coordinator = Coordinator(
        DiLoCoSettings(sync_every=2),
        "a test",
        state_dir=folder / "state",
        num_replicas=2,
        bind="127.0.0.1:0",
        run_id="exp-7",
    )
    environ = {
        "COMPOSER_REPLICATION_COORDINATOR": coordinator.address,
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_SILENT": "true",
    }
    script = Path(__file__).with_name("logging_group.py")
    groups = [
        Script(
            script,
            folder,
            environ=environ | {"REPLICA_GROUP_ID": str(group)},
            output=folder / f"{group}.txt",
        )
        for group in range(2)
    ]
    try:
        for group in groups:
            group.wait(time.monotonic() + 300)
    finally:
        for group in groups:
            group.kill()
        coordinator.shutdown()
    return folder


def test_tensorboard_has_a_folder_of_the_run_with_one_for_each_group(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = folder / "tensorboard"
    assert {path.parent for path in root.rglob("events.*")} == {root / "exp-7" / g for g in GROUPS}
    for group in GROUPS:
        events = EventAccumulator(str(root / "exp-7" / group))
        events.Reload()
        for metric, steps in STEPS.items():
            assert {event.step for event in events.Scalars(metric)} == steps


def test_mlflow_has_one_experiment_with_a_run_for_each_group(folder):
    client = mlflow_client(folder)
    experiment = client.get_experiment_by_name("diloco")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.run_group = 'exp-7'")
    assert {run.info.run_name for run in runs} == GROUPS and len(runs) == 2
    for run in runs:
        for metric, steps in STEPS.items():
            history = client.get_metric_history(run.info.run_id, metric)
            assert {point.step for point in history} == steps


def test_wandb_has_one_group_with_a_run_for_each_group(folder):
    runs = [read_wandb(path) for path in folder.glob("wandb/offline-run-*/run-*.wandb")]
    assert [run["group"] for run in runs] == ["exp-7", "exp-7"]
    assert {run["name"] for run in runs} == {run["job_type"] for run in runs} == GROUPS
    for run in runs:
        for metric, steps in STEPS.items():
            assert run["steps"].get(metric) == steps


def test_a_group_and_a_name_that_the_script_gave_stay(tmp_path):
    import wandb
    from composer.loggers import WandBLogger

    init = {"mode": "offline", "dir": str(tmp_path), "settings": {"silent": True}}
    logger = WandBLogger(project="diloco", group="mine", name="first", init_kwargs=init)
    state = SimpleNamespace(run_name="exp")
    logger.init(state, None)
    try:
        options = ReplicaOptions(replica_id=0, num_replicas=2, run_id="exp-7")
        name_runs(state, SimpleNamespace(destinations=[logger]), options)
        run = wandb.run
        assert (run.group, run.name, run.job_type) == ("mine", "first", "replica_0")
    finally:
        wandb.teardown()


def mlflow_client(folder):
    from mlflow import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # read when the client is made
        return MlflowClient((folder / "mlflow").as_uri())


def read_wandb(path):
    """The newest name, group and job type of an offline run, and the steps of each metric."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, run = DataStore(), {"steps": {}}
    store.open_for_scan(str(path))
    records = list(iter(store.scan_data, None))
    store.close()
    for data in records:
        record = Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            run |= {"name": record.run.display_name, "group": record.run.run_group}
            run |= {"job_type": record.run.job_type}
        if record.HasField("history"):
            values = {
                item.key or item.nested_key[0]: item.value_json for item in record.history.item
            }
            step = json.loads(values["_step"]) if "_step" in values else record.history.step.num
            for metric in values:
                run["steps"].setdefault(metric, set()).add(step)
    return run
