"""A run's goodput, by traces computed by hand. Run: pytest tests/benchmarks/test_account.py

A sync waits for nobody. The files are those of a run; no group has written them.
"""

from functools import partial

import pytest
import traces
from account import describe_goodput, fault_windows, measure_goodput
from traces import start, write_group

from composer_replication.launch.run_record import open_run

sync, rounds = (partial(line, waited=0.0) for line in (traces.sync, traces.rounds))


def one_of_two_is_killed(run_dir):
    """Group 0 trains eight rounds; group 1 two, then four after 2.4 s in which it is away."""
    write_group(run_dir, 0, [start(10.0)], rounds(10.0, 8))
    starts = [start(10.0), start(14.8, started=13.4, trained_at=12.9, before=25)]
    joins = sync(14.8, 4, 0, blocked=0.0)
    write_group(run_dir, 1, starts, [*rounds(10.0, 2), joins, *rounds(14.8, 4, outer_step=4)])


def test_a_run_with_a_kill(tmp_path):
    one_of_two_is_killed(tmp_path)
    goodput = measure_goodput(open_run(tmp_path))
    # 80 + 60 inner steps of twice 9.6 s, which are 192; the dead time is 5 of them.
    assert goodput["goodput"] == pytest.approx(140 / 192, abs=1e-4)
    assert goodput["goodput_outside_faults"] == pytest.approx(140 / 187, abs=1e-4)
    assert (goodput["inner_steps"], goodput["inner_steps_thrown_away"]) == (140, 5)
    assert goodput["inner_steps_possible"] == pytest.approx(192)
    assert goodput["group_seconds"] == pytest.approx(19.2)
    assert goodput["seconds"] == pytest.approx(
        {"training": 14.0, "syncs": 2.8, "waiting": 0.0, "starting": 1.4}
        | {"thrown_away": 0.5, "dead": 0.5, "other": 0.0}
    )
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["group_seconds"])
    assert goodput["costs"] == pytest.approx(
        {"inner_step_s": 0.1, "sync_s": 0.2, "wait_s": 0.0, "dead_s": 0.5, "starting_s": 1.4}
        | {"inner_steps_thrown_away": 5.0, "ends": 1}
    )
    assert goodput["groups"]["0"]["goodput"] == pytest.approx(8 / 9.6, abs=1e-4)


def test_the_text_has_the_number_and_the_parts(tmp_path):
    one_of_two_is_killed(tmp_path)
    rows = dict(describe_goodput(measure_goodput(open_run(tmp_path))))
    assert rows["goodput"] == "72.9% (74.9% of the time that faults left)"
    assert rows["the groups' time"] == (
        "training 72.9%, syncs 14.6%, starting 7.3%, thrown away 2.6%, dead 2.6%"
    )


def test_each_group_is_measured_by_its_own_pace(tmp_path):
    # The fast group could have trained 48 steps, and the slow one, which takes 0.2 s, 44.
    write_group(tmp_path, 0, [start(10.0)], rounds(10.0, 4))
    write_group(tmp_path, 1, [start(10.0)], rounds(10.0, 4, step_s=0.2))
    goodput = measure_goodput(open_run(tmp_path))
    assert goodput["inner_steps_possible"] == pytest.approx(48 + 44)
    assert goodput["goodput"] == pytest.approx(80 / 92, abs=1e-4)
    assert describe_goodput(goodput)[0] == ("goodput", "87.0%")


def test_a_group_that_has_not_come_back_counts_until_the_last_sync_of_the_run(tmp_path):
    write_group(tmp_path, 0, [start(10.0)], rounds(10.0, 8))
    status = {"phase": "not back", "trained_at": 12.9}
    write_group(tmp_path, 1, [start(10.0)], rounds(10.0, 2), status, is_finished=False)
    goodput = measure_goodput(open_run(tmp_path))
    assert goodput["group_seconds"] == pytest.approx(19.2)
    assert goodput["groups"]["1"]["seconds"]["dead"] == pytest.approx(19.6 - 12.9)
    assert goodput["goodput"] == pytest.approx(100 / 192, abs=1e-4)


def test_faults_that_hold_a_group_up_are_windows_of_the_wall_clock():
    def fault(kind, at, seconds, victims, ends_at=None):
        return {"kind": kind, "at": at, "seconds": seconds, "victims": victims, "ends_at": ends_at}

    chaos = {
        "began_at": 1000.0,
        "injected": [
            fault("stop", 5.0, 3.0, [1]),
            fault("unreachable", 20.0, 4.0, [1], ends_at=25.5),  # it began with the next sync
            fault("unreachable", 40.0, None, [1]),  # it ended the group
            fault("kill", 60.0, 0.0, [1]),
            fault("disk_full", 70.0, 5.0, [1]),
            fault("one_way", 80.0, 2.0, [0, 1]),
            fault("lighthouse", 90.0, 2.0, []),
        ],
    }
    assert fault_windows(chaos, "1") == [(1005, 1008), (1020, 1025.5), (1080, 1082)]
    assert fault_windows(chaos, "2") == fault_windows({}, "1") == []


def test_a_run_whose_groups_have_not_said_when_they_started_has_no_goodput(tmp_path):
    write_group(tmp_path, 0, [], rounds(10.0, 4))
    assert measure_goodput(open_run(tmp_path)) == {} and describe_goodput({}) == []
