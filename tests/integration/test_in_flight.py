"""Several fragments in flight between real groups. Run: pytest tests/integration/test_in_flight.py

Real: processes, the lighthouse, torchft's Manager, gloo.
"""

import time

import pytest
from in_flight import SCHEDULES, Reference, build, check, pull, train
from integration.replicas import run_groups

pytestmark = pytest.mark.integration
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def train_for_real(group, schedule, steps):
    with group.manager() as manager:
        awaited = {"num_replicas": group.num_replicas}
        trace, digest, _ = train(manager, group.replica_id, schedule, steps, **awaited)
        return trace, digest


@schedules
def test_real_groups_come_to_the_reference(schedule):
    results = run_groups(train_for_real, num_replicas=3, schedule=schedule, steps=40)
    for group, (trace, _) in enumerate(results):
        check(trace, Reference(schedule, 3), group)
    assert len({digest for _, digest in results}) == 1


def die_join_and_end(group, schedule, wire_format):
    """Group 2 dies while syncs are in flight, and then group 3 joins the others."""
    if group.replica_id == 3:
        assert group.signal.wait(120.0)
    awaited = {"num_replicas": 3, "wire_format": wire_format, "start_timeout_s": 120.0}
    with group.manager() as manager:
        model, inner, diloco = build(manager, schedule, **awaited)
        reports, joined = [], group.replica_id == 3
        with diloco:
            for step in range(200):
                pull(model, inner, group.replica_id)
                reports += diloco.pop_finished_syncs()
                if group.replica_id == 2 and step == 25:
                    group.signal.set()
                    group.kill()
                joined |= any("group_3" in member for member in manager.members)
                if joined and step > 60:
                    break
            diloco.final_sync()
            reports += diloco.pop_finished_syncs()
            lost = sum(report.steps_lost for report in reports)
            return diloco.global_digest(), lost, [report.outer_step for report in reports]


@pytest.mark.slow
@pytest.mark.parametrize("wire_format", ["float32", "int8"])
@schedules
def test_a_death_and_a_join_while_syncs_are_in_flight_cost_the_others_nothing(
    schedule, wire_format
):
    results = run_groups(
        die_join_and_end, num_replicas=4, killed={2}, schedule=schedule, wire_format=wire_format
    )
    living = [result for result in results if result is not None]
    assert len(living) == 3 and len({digest for digest, _, _ in living}) == 1
    for _, lost, outer_steps in living[:2]:
        assert lost == 0
        assert outer_steps == list(range(1, len(outer_steps) + 1)), "an outer step was lost"


LONG = {"sync_every": 48, "num_fragments": 24, "fragment_sync_delay": 47}


def join_while_no_sync_ends(group):
    """Group 2 joins in one of the first 23 turns, and reads what it is sent slowly."""
    if group.replica_id == 2:
        assert group.signal.wait(120.0)
    awaited = {"num_replicas": 2, "start_timeout_s": 120.0}
    with group.manager() as manager:
        if group.replica_id == 2:
            receive = manager._checkpoint_transport.recv_checkpoint

            def receive_late(*arguments, **named):
                time.sleep(0.5)  # the others' vote in this turn would be over
                return receive(*arguments, **named)

            manager._checkpoint_transport.recv_checkpoint = receive_late
        model, inner, diloco = build(manager, LONG, **awaited)
        with diloco:
            at_start = manager.connection
            for step in range(200):
                if step == 4:
                    group.signal.set()
                pull(model, inner, group.replica_id)
                if any("group_2" in member for member in manager.members) and step > 100:
                    break
                time.sleep(0.05)  # else they are through before it has started
            connections = at_start, manager.connection
            diloco.final_sync()
            return diloco.global_digest(), connections, diloco.outer_step


@pytest.mark.slow
def test_a_group_joins_in_turns_in_which_no_sync_ends():
    first, second, joiner = run_groups(join_while_no_sync_ends, num_replicas=3)
    assert first[0] == second[0] == joiner[0]
    assert joiner[1] == (1, 1), "it has connected more than once: a heal has failed"
    for before, after in (first[1], second[1]):  # before: once, or first without the other
        assert after == before + 1, "the join has connected the others more than once"
    assert first[2] == second[2] == joiner[2]
