"""Stopping and going on: bit for bit, alone or together, also in the middle of a sync.

Run: pytest tests/diloco/test_resume.py. Real torchft schedule, simulated network. A replica here
stops after some step, throws its model, optimizer and DiLoCo away, and goes on from copies.
"""

import io
import re

import pytest
import torch
from common import Buffered, TinyMLP, batch, mse, run_scripted

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.outer_optimizer import nesterov_sgd
from composer_replication.settings import SettingsMismatch
from composer_replication.simulation.simulation import Fault, SimulationError

STREAMING = {
    "sync_every": 8,
    "num_fragments": 2,
    "fragment_sync_delay": 2,
    "fragment_update_alpha": 0.5,
}
STEPS = 20


class Replica:
    """A replica that can be stopped and resumed like a job that is saved and loaded."""

    def __init__(self, sim, settings, seed=0):
        self.sim = sim
        self.settings = dict(settings)
        self.outer = nesterov_sgd(**self.settings.pop("outer", {}))
        self.model = self.settings.pop("model", Buffered)(seed)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.diloco = DiLoCo(
            sim.manager, self.model, self.inner, self.outer, digest_every=1, **self.settings
        )

    def train(self, first, last):
        for step in range(first, last):
            self.inner.zero_grad()
            mse(self.model, *batch(self.sim.replica_id, step)).backward()
            self.inner.step()

    def save(self):
        """Through a file, as tensors and plain containers."""
        file = io.BytesIO()
        state = [self.diloco.state_dict(), self.model.state_dict(), self.inner.state_dict()]
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved):
        state, model, inner = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(model)
        self.inner.load_state_dict(inner)
        self.diloco.load_state_dict(state)

    def end(self):
        """What it holds at the end."""
        reports = [(r.outer_step, r.contribution) for r in self.diloco.pop_finished_syncs()]
        self.diloco.final_sync()
        local = [tensor.clone() for tensor in self.model.state_dict().values()]
        return self.diloco.global_digest(), local, self.diloco.inner_steps, reports


def slow(settings, **named):
    return pytest.param(settings, marks=pytest.mark.slow, **named)


def run_whole(settings, num_replicas=2):
    """Train without a stop: how each replica ends, and what each would have saved after a step."""

    def replica(sim):
        replica = Replica(sim, {"num_replicas": num_replicas} | settings)
        saved = {}
        replica.diloco.__enter__()
        for step in range(STEPS):
            replica.train(step, step + 1)
            saved[step + 1] = replica.save()
        return replica.end(), saved

    ends, saved = zip(*simulate(replica, num_replicas=num_replicas), strict=True)
    return ends, saved


def resume(sim, saved, at, settings, *, until=STEPS):
    """Go on, as a new process would, from what was saved after step ``at``."""
    replica = Replica(sim, {"num_replicas": sim.num_replicas} | settings, seed=5)
    replica.load(saved[sim.replica_id][at])
    replica.diloco.__enter__()
    replica.train(at, until)
    return replica


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
        assert one[2] == other[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"sync_every": 4}, id="vanilla"),
        pytest.param(STREAMING, id="streaming"),
        pytest.param({"sync_every": 4, "wire_format": "int8"}, id="int8"),
        # What the others show already, in other settings.
        slow({"sync_every": 4, "weight_by": "steps"}, id="weighted"),
        slow({"sync_every": 6, "num_fragments": 3}, id="fragments"),
        slow({**STREAMING, "fragment_sync_delay": 3}, id="nearly always in flight"),
        slow({**STREAMING, "wire_format": "fp4"}, id="streaming in fp4"),
    ],
)
def test_stopped_after_any_step_and_resumed_is_bitwise_uninterrupted(settings):
    ends, saved = run_whole(settings)
    for at in range(1, STEPS + 1):  # the last one is extended by nothing but the final sync
        resumed = simulate(
            lambda sim, at=at: resume(sim, saved, at, settings).end(), num_replicas=2
        )
        assert_equal(ends, resumed)


def test_one_group_in_flight_and_one_not_yet_are_bitwise_uninterrupted_too():
    # Both stand at the same outer step. The one in flight sends again what it had sent, when its
    # outer step is due; the other one gets there in its own time.
    ends, saved = run_whole(STREAMING)

    def replica(sim):
        return resume(sim, saved, (7, 5)[sim.replica_id], STREAMING).end()

    assert_equal(ends, simulate(replica, num_replicas=2))


def test_a_sync_in_flight_survives_being_saved_again_before_it_is_sent():
    ends, saved = run_whole(STREAMING)
    again = simulate(
        lambda sim: {7: resume(sim, saved, 6, STREAMING, until=7).save()}, num_replicas=2
    )
    resumed = simulate(lambda sim: resume(sim, again, 7, STREAMING).end(), num_replicas=2)
    assert_equal(ends, resumed)


def test_a_group_whose_checkpoint_is_behind_takes_over_from_the_one_ahead():
    _, saved = run_whole(STREAMING)

    def replica(sim):
        at = (14, 6)[sim.replica_id]  # after outer steps 3 and 1, the second in flight
        replica = resume(sim, saved, at, STREAMING, until=at)
        joined_at = replica.diloco.outer_step
        replica.train(at, 26)
        return joined_at, replica.end()[0], replica.diloco.outer_step

    first, second = simulate(replica, num_replicas=2)
    assert first[0] == second[0] == 3
    assert first[1:] == second[1:]


def test_more_groups_and_fewer_groups_resume():
    # A third one without anything takes over; a second one that is left out is not missed.
    _, saved = run_whole(STREAMING)

    def replica(sim):
        if sim.replica_id < 2:
            return resume(sim, saved, 7, STREAMING).end()[0]
        replica = Replica(sim, STREAMING | {"num_replicas": 3}, seed=9)
        replica.diloco.__enter__()
        replica.train(7, STEPS)
        return replica.end()[0]

    assert len(set(simulate(replica, num_replicas=3))) == 1
    simulate(lambda sim: resume(sim, saved, 7, STREAMING).end(), num_replicas=1)


def test_groups_that_resume_with_other_global_parameters_find_out():
    # Two checkpoints of the same outer step that are not of the same run.
    _, saved = run_whole({"sync_every": 4})
    _, other = run_whole({"sync_every": 4, "weight_by": "steps", "outer": {"lr": 0.3}})

    def replica(sim):
        resume(sim, (saved, other)[sim.replica_id], 8, {"sync_every": 4})

    with pytest.raises(
        SimulationError, match="DivergenceError: .* differ in the global parameters"
    ):
        simulate(replica, num_replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"outer": {"lr": 0.4}}, "outer_optimizer: 'SGD(.*lr=0.7.*' before, 'SGD(.*lr=0.4.*' now"),
        ({"sync_every": 12}, "sync_every: 8 before, 12 now"),
        ({"sync_every": 4, "fragment_sync_delay": 1}, "fragment_sync_delay: 2 before, 1 now"),
        ({"fragment_update_alpha": 0.0, "fragment_sync_delay": 0}, "alpha: 0.5 before, 0.0 now"),
        ({"weight_by": "steps"}, "weight_by: 'uniform' before, 'steps' now"),
        ({"sync_buffers": "none"}, "sync_buffers: 'mean' before, 'none' now"),
    ],
)
@pytest.mark.parametrize("stops_at", [7, 8, 9])
def test_changed_settings_are_adopted_and_told(changed, told, stops_at, caplog):
    settings = STREAMING | {"model": TinyMLP}  # without buffers their setting may change too
    _, saved = run_whole(settings)

    def replica(sim):
        return resume(sim, saved, stops_at, settings | changed).end()

    first, second = simulate(replica, num_replicas=2)
    assert first[0] == second[0]
    assert first[2] == STEPS
    assert any(re.search(told.replace("SGD(", r"SGD\("), text) for text in caplog.messages)


def test_a_changed_outer_learning_rate_is_the_one_that_steps():
    settings = {"sync_every": 4, "outer": {"momentum": 0.0}, "model": TinyMLP}
    _, saved = run_whole(settings, num_replicas=1)

    def replica(sim, outer):
        replica = resume(sim, saved, 4, settings | {"outer": outer}, until=4)
        before = replica.diloco.global_digest()
        replica.train(4, 8)
        return before == replica.diloco.global_digest(), replica.diloco.outer_step

    still = {"momentum": 0.0, "lr": 0.0}
    assert simulate(lambda sim: replica(sim, still), num_replicas=1) == [(True, 2)]
    assert simulate(lambda sim: replica(sim, settings["outer"]), num_replicas=1) == [(False, 2)]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_fragments": 1}, "num_fragments: 1 here, 2 there"),
        ({"sync_buffers": "none"}, "sync_buffers: 'none' here, 'mean' there"),
        ({"weight_by": "samples"}, "weight_by: 'samples' here, 'uniform' there"),
    ],
)
def test_settings_that_the_state_does_not_allow_are_refused_with_both_values(changed, told):
    _, saved = run_whole(STREAMING, num_replicas=1)
    with pytest.raises(SimulationError, match=f"SettingsMismatch: .* the checkpoint(.|\n)*{told}"):
        simulate(lambda sim: resume(sim, saved, 7, STREAMING | changed), num_replicas=1)


@pytest.mark.slow
def test_two_groups_that_resume_with_different_settings_find_out_before_they_train():
    settings = {"sync_every": 4, "start_timeout_s": 1.0}
    _, saved = run_whole(settings)

    def replica(sim):
        outer = {"lr": (0.7, 0.4)[sim.replica_id]}
        try:
            resume(sim, saved, 8, settings | {"outer": outer})
        except (SettingsMismatch, TimeoutError) as error:
            return error

    first, second = simulate(replica, num_replicas=2)
    assert isinstance(first, TimeoutError)  # it goes on waiting for another one
    assert isinstance(second, SettingsMismatch)
    assert "lr=0.4" in str(second) and "lr=0.7" in str(second)


# ---- who may begin a run -----------------------------------------------------------------------

WHY = "The folder says that this run has made 57 outer steps"


def test_a_group_with_nothing_in_a_run_that_has_begun_refuses_when_all_are_there():
    def replica(sim):
        run_scripted(sim, -1.0, 2, sync_every=2, num_replicas=2, start_refusal=WHY)

    with pytest.raises(SimulationError, match=f"NothingToContinueFromError: .* run's state. {WHY}"):
        simulate(replica, num_replicas=2)


@pytest.mark.slow
def test_one_group_that_must_not_begin_holds_back_one_that_might():
    def replica(sim):
        why = WHY if sim.replica_id == 0 else None
        try:
            run_scripted(
                sim,
                -1.0,
                2,
                sync_every=2,
                num_replicas=(3, 1)[sim.replica_id],
                start_timeout_s=1.0,
                start_refusal=why,
            )
        except TimeoutError as error:
            return str(error)

    first, second = simulate(replica, num_replicas=2)
    assert WHY in first and "no start within start_timeout_s=1" in first
    assert second is None or "no start" in second


def test_a_group_that_must_not_begin_joins_one_that_has_the_state():
    def replica(sim):
        if sim.replica_id == 0:
            sim.manager.load_state_dict({"step": 3, "batches_committed": 6})
            return run_scripted(sim, -1.0, 4, sync_every=2, num_replicas=2)
        return run_scripted(
            sim, -1.0, 4, sync_every=2, num_replicas=2, value=50.0, start_refusal=WHY
        )

    first, second = simulate(replica, num_replicas=2)
    assert first == second and first[-1][0] < 10.0


@pytest.mark.slow
def test_groups_that_resume_wait_for_each_other():
    # The first would otherwise train by itself, and so would the second, without a word.
    def replica(sim):
        sim.manager.load_state_dict({"step": 3, "batches_committed": 6})
        return run_scripted(sim, -1.0, 2, sync_every=2, num_replicas=2)

    late = [Fault("late", replica_id=1, step=3)]
    assert simulate(replica, num_replicas=2, faults=late) == [[(9.0, 10.0), (8.0, 8.0)]] * 2
    alone = [Fault("late", replica_id=1, step=99)]
    with pytest.raises(SimulationError, match="no start within start_timeout_s=1: 1 of 2"):
        simulate(
            lambda sim: (
                sim.manager.load_state_dict({"step": 3, "batches_committed": 6}),
                run_scripted(sim, -1.0, 2, sync_every=2, num_replicas=2, start_timeout_s=1),
            ),
            num_replicas=2,
            faults=alone,
        )
