"""One Composer job without other groups: an outer optimizer around it, and no network.

Run: pytest tests/callback/test_alone.py. Real: everything. Several ranks, and the step from one
group to two, are in tests/integration/test_alone.py.
"""

import threading

import psutil
import pytest
from composer_jobs import Each, data, trainer_of
from text_config import write_config
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composer_replication.callback import DiLoCoCallback
from composer_replication.data.loader import ReplicaDataLoader
from composer_replication.group.replica_group import ReplicaGroup
from composer_replication.training.config import load_config
from composer_replication.training.trainer import train


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)


def alone(**diloco):
    return DiLoCoCallback(num_replicas=1, **{"sync_every": 2} | diloco)


def fit(*others, diloco=None, **arguments):
    """Train one group alone; its callback and trainer, closed."""
    callback = alone(**diloco or {})
    trainer = trainer_of(callback, *others, **arguments)
    trainer.fit()
    trainer.close()
    return callback, trainer


# ---- the way in -----------------------------------------------------------------------------

CONFIG = """
max_duration: 110ba
device: cpu
global_train_batch_size: 2
model: {name: byte_gpt, d_model: 16, n_heads: 2, n_layers: 1, max_seq_len: 16}
train_loader: {name: text, max_seq_len: 16, path: TEXT}
optimizer: {name: decoupled_adamw, lr: 1.0e-3}
callbacks:
  diloco:
    num_replicas: 1
"""


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path, CONFIG)


@pytest.mark.slow
def test_three_lines_of_yaml_train_and_autoresume_goes_on(config, tmp_path):
    result = train(load_config(config))
    assert result["replica_id"] == "0"
    assert (result["inner_steps"], result["outer_steps"]) == (110, 2)  # the last one at the end
    saving = ["autoresume=true", f"save_folder={tmp_path}/saved", "save_interval=50ba"]
    train(load_config(config, [*saving, "max_duration=50ba"]))
    assert train(load_config(config, saving)) == result


def test_it_opens_no_socket_starts_no_process_and_only_its_two_watches():
    process, seen = psutil.Process(), []

    def look(state):
        threads = set(threading.enumerate())
        seen.append((process.net_connections("all"), process.children(recursive=True), threads))

    look(None)
    callback, _ = fit(Each(look), max_duration="4ba")
    look(None)
    [(sockets, children, threads), *training, _] = seen
    assert callback.result["outer_steps"] == 2 and len(training) == 4
    for opened, started, running in training:
        assert (opened, started) == (sockets, children)
        assert {thread.name for thread in running - threads} == {"hang_watch", "fit watch"}
    assert seen[-1][:2] == (sockets, children)


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors in new memory."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        before = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if is_tensor(t)}
        result = call(*args, **kwargs or {})
        for tensor in filter(is_tensor, tree_leaves(result)):
            if tensor.untyped_storage().data_ptr() not in before:
                self.num_bytes += tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("wire_format", ["float32", "int8"])  # int8 leaves a residual too
def test_the_end_of_a_fit_copies_nothing(wire_format, monkeypatch):
    keep, counted = ReplicaGroup._keep, []

    def count(group):
        with Allocated() as allocated:
            keep(group)
        counted.append((allocated.num_bytes, sum(p.nbytes for p in trained(group))))

    def trained(group):
        return group.diloco.global_parameters().values()

    monkeypatch.setattr(ReplicaGroup, "_keep", count)
    callback, _ = fit(diloco={"wire_format": wire_format}, max_duration="4ba")
    assert "momentum" in callback.state_dict()
    [(num_bytes, of_parameters)] = counted
    assert num_bytes < of_parameters / 10


# ---- what it computes -----------------------------------------------------------------------


# ---- what a job does beside training ----------------------------------------------------------


def test_a_replica_data_loader_gives_it_every_sample_of_an_epoch():
    seen = []
    look = Each(lambda state: seen.extend(map(tuple, state.batch[0].tolist())))
    callback, dataset = alone(), data().dataset
    loader = ReplicaDataLoader(dataset, 8, dataset_id="tiny", unit_size=8)
    trainer = trainer_of(callback, look)
    trainer.fit(train_dataloader=loader, duration="1ep")
    trainer.close()
    assert sorted(seen) == sorted(tuple(x.tolist()) for x, _ in dataset)
