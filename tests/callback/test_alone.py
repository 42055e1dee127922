"""One Composer job without other groups: an outer optimizer around it, and no network.

Run: pytest tests/callback/test_alone.py. Real: everything. Several ranks, and the step from one
group to two, are in tests/integration/test_alone.py.
"""

import threading

import psutil
import pytest
from harness.trainers import Each, alone, data, train, trainer_of
from torch import is_tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from composer_replication.data.loader import ReplicaDataLoader

pytestmark = pytest.mark.usefixtures("no_network")


# ---- the way in -----------------------------------------------------------------------------


@pytest.mark.slow
def test_it_opens_no_socket_starts_no_process_and_only_its_two_watches():
    process, seen = psutil.Process(), []

    def look(state):
        threads = set(threading.enumerate())
        seen.append((process.net_connections("all"), process.children(recursive=True), threads))

    look(None)
    callback = train(alone(), Each(look)).callback
    look(None)
    [(sockets, children, threads), *training, _] = seen
    assert callback.result["outer_steps"] == 2 and len(training) == 4
    for opened, started, running in training:
        assert (opened, started) == (sockets, children)
        assert {thread.name for thread in running - threads} == {"hang_watch", "fit watch"}
    assert seen[-1][:2] == (sockets, children)


def storages(callback, model):
    """Where what would be saved is in memory."""
    leaves, _ = tree_flatten_with_path([callback.state_dict(), model.state_dict()])
    return {keystr(path): leaf.data_ptr() for path, leaf in leaves if is_tensor(leaf)}


@pytest.mark.slow
@pytest.mark.parametrize("wire_format", ["float32", "int8"])  # int8 leaves a residual too
def test_the_end_of_a_fit_copies_nothing(wire_format):
    seen, callback = [], alone(wire_format=wire_format, schedule=[])
    look = Each(lambda state: seen.append(storages(callback, state.model)))
    trainer = trainer_of(callback, look, max_duration="4ba")
    trainer.fit()
    assert storages(callback, trainer.state.model) == seen[-1]
    trainer.close()
    assert any("momentum" in key for key in seen[-1])


# ---- what a job does beside training ----------------------------------------------------------


def test_a_replica_data_loader_gives_it_every_sample_of_an_epoch():
    seen = []
    look = Each(lambda state: seen.extend(map(tuple, state.batch[0].tolist())))
    dataset = data().dataset
    loader = ReplicaDataLoader(dataset, 8, dataset_id="tiny", unit_size=8)
    train(alone(), look, train_dataloader=loader, max_duration="1ep")
    assert sorted(seen) == sorted(tuple(x.tolist()) for x, _ in dataset)
