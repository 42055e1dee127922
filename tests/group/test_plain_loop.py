"""What a loop of one's own leaves in the run's folder. Run: pytest tests/group/test_plain_loop.py

With ``launch``: tests/hosts/test_launched.py.
"""

import pytest
import torch
from common import TinyMLP, batch, mse
from run_events import events_of, result_of, syncs_of

from composer_replication import DiLoCo, make_manager, read_run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_REPLICATION_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("REPLICA_GROUP_ID", "a")
    return tmp_path / "replica_a"


def train(steps, saved=None, fails=False, losses=()):
    """Train a group that is alone. Returns its state at the end, and its syncs by outer step.

    It adds the loss of each step to ``losses``.
    """
    losses = losses if isinstance(losses, list) else []
    model, manager = TinyMLP(0), make_manager(num_replicas=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco, syncs = DiLoCo(manager, model, optimizer, sync_every=2), []
    if saved is not None:
        diloco.load_state_dict(saved)
    with diloco:
        for number in range(steps):
            optimizer.zero_grad()
            loss = mse(model, *batch(0, number))
            loss.backward()
            losses.append(loss.item())
            diloco.note_loss(loss)
            optimizer.step()
            if number % 4 == 3:  # a loop may pop seldom
                syncs += diloco.pop_finished_syncs()
        if fails:
            raise KeyError("no")
        state = diloco.state_dict()
        diloco.final_sync()
    return state, [sync.outer_step for sync in syncs + diloco.pop_finished_syncs()]


def test_each_sync_is_written_once_and_the_loop_still_gets_it(folder):
    _, syncs = train(7)
    assert syncs == [1, 2, 3, 4]
    assert [sync["diloco/outer_step"] for sync in syncs_of(folder)] == syncs
    [saved] = events_of(folder, "saved")
    assert saved["batch"] == 7 and result_of(folder)["outer_steps"] == 4
    assert read_run(folder.parent).failure == ""


def test_each_sync_has_the_mean_of_the_losses_that_the_loop_has_noted(folder):
    losses = []
    train(7, losses=losses)
    found = [sync["loss"] for sync in syncs_of(folder)]
    means = [sum(losses[i : i + 2]) / len(losses[i : i + 2]) for i in range(0, 7, 2)]
    assert found == pytest.approx(means)
    assert result_of(folder)["final_loss"] == found[-1]


def test_a_loop_that_loads_its_state_goes_on_and_one_that_does_not_is_refused(folder):
    state, _ = train(4)
    with pytest.raises(ValueError, match="has made 2 outer steps.*diloco.load_state_dict, before"):
        train(4)
    assert [event["error"][:8] for event in events_of(folder, "rejection")] == ["1 of 1 r"]
    assert train(4, state)[1] == [3, 4]
    assert [event["batch"] for event in events_of(folder, "resume")] == [4]


def test_a_loop_in_two_parts_goes_on_with_what_it_holds(folder):
    model, manager = TinyMLP(0), make_manager(num_replicas=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = DiLoCo(manager, model, optimizer, sync_every=2)
    for part in range(2):
        with diloco:
            for number in range(4):
                optimizer.zero_grad()
                mse(model, *batch(part, number)).backward()
                optimizer.step()
    assert [sync["diloco/outer_step"] for sync in syncs_of(folder)] == [1, 2, 3, 4]
    assert not events_of(folder, "resume")


def test_an_error_in_the_loop_is_written(folder):
    with pytest.raises(KeyError):
        train(4, fails=True)
    assert [event["error"] for event in events_of(folder, "error")] == ["KeyError: 'no'"]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(4)[1] == [1, 2]
    assert not [*tmp_path.iterdir()]
