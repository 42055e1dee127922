"""The model behind the plan: seconds, bytes and memory by hand. Run: pytest tests/test_plan.py."""

import math

import pytest
from made_up_plan import CONSTANTS, planned

from composer_replication.plan import (
    blocked_seconds,
    ddp_step_seconds,
    memory,
    round_seconds,
    smallest_sync_every,
)
from composer_replication.plan_calibration import parse_link

# ---- seconds, bytes and memory by hand ----------------------------------------------------------


def test_a_vanilla_round_by_hand():
    # 4 GB at 1 Gbit/s are 32 s, 40 s at 80 % of it; 0.5 s; 2 s of summing; 1 s of the host.
    assert round_seconds(planned(), CONSTANTS) == pytest.approx(100 + 40 + 0.5 + 2 + 1)


def test_a_delay_hides_seven_eighths_of_what_is_sent_and_nothing_of_what_the_host_does():
    halves = {"num_fragments": 2, "sync_every": 100}
    late = planned(**halves, fragment_sync_delay=5)  # each: 0.5 + 20 + 1 s, 5 s of them overlapped
    assert round_seconds(late, CONSTANTS) == pytest.approx(100 + 2 * (0.5 + 16.5 + 5 / 8))
    hidden = planned(**halves, fragment_sync_delay=22)
    assert round_seconds(hidden, CONSTANTS) == pytest.approx(100 + 2 * (0.5 + 21.5 / 8))


def test_round_trips_count_by_the_sync_and_by_the_mib():
    # Among 3 groups each sends 4/3 of the 4 GB, instead of 1.
    near = blocked_seconds(planned(), CONSTANTS)
    two = blocked_seconds(planned(round_trip_s=0.1), CONSTANTS)
    assert two - near == pytest.approx(0.1 * (3 + 0.5 * 4e9 / 2**20))
    three = blocked_seconds(planned(round_trip_s=0.1, groups=3), CONSTANTS)
    assert three - two == pytest.approx(0.1 * 0.5 * 4e9 / 2**20 / 3 + 40 / 3)


def test_a_small_model_goes_round_in_as_many_hops_as_a_ring_has():
    near, far = (planned(params=1000, groups=8, round_trip_s=r) for r in (0.0, 0.1))
    waits = blocked_seconds(far, CONSTANTS) - blocked_seconds(near, CONSTANTS)
    assert waits == pytest.approx(0.1 * (3 + 0.5 * 14))


@pytest.mark.parametrize(
    ("wire_format", "num_bytes", "send_s", "host_s"),
    [
        ("float32", 4e9, 2, 1),
        ("bfloat16", 2e9, 3, 2),
        ("int8", 1.015625e9, 5, 2.5),
        ("fp4", 0.53125e9, 8, 3),
    ],
)
def test_a_wire_format_sends_less_and_computes_more(wire_format, num_bytes, send_s, host_s):
    run = planned(wire_format=wire_format)
    assert run.bytes_per_sync == num_bytes
    on_the_line = 1.25 * 8 * num_bytes / 1e9
    assert blocked_seconds(run, CONSTANTS) == pytest.approx(0.5 + on_the_line + send_s + host_s)


def test_eight_groups_send_seven_quarters_in_as_many_fragments_as_they_like():
    run = planned(groups=8, num_fragments=4)
    assert 4 * run.bytes_per_sync == planned(groups=8).bytes_per_sync == 7e9


def test_a_step_of_ddp_by_hand():
    assert ddp_step_seconds(planned(), CONSTANTS) == pytest.approx(1 + 40 + 1 - 0.5)
    assert ddp_step_seconds(planned(step_s=100.0), CONSTANTS) == 100.0  # all of it is hidden
    trips = ddp_step_seconds(planned(round_trip_s=0.1), CONSTANTS)
    assert trips == pytest.approx(41.5 + 0.1 * 0.25 * 4e9 / 2**20)


def test_memory_by_hand():
    vanilla = memory(planned())
    assert (vanilla.host_resting, vanilla.host_peak, vanilla.device) == (8e9, 12e9, 4e9)
    halves = memory(planned(num_fragments=2, fragment_sync_delay=5))  # a pseudo-gradient and a copy
    assert (halves.host_resting, halves.host_peak, halves.device) == (8e9, 12e9, 2e9)
    coded = memory(planned(wire_format="bfloat16", ranks=4))  # 3 messages by quarters
    assert (coded.host_resting, coded.host_peak, coded.device) == (12e9, 17.5e9, 4e9)


# ---- the shortest round -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "sync_every"),
    [
        ({}, 827),  # 19 * 43.5 = 826.5
        ({"num_fragments": 2, "fragment_sync_delay": 5}, 670),  # 19 * 35.25 = 669.75
        ({"num_fragments": 4, "fragment_sync_delay": 0}, 856),  # 19 * 45 = 855, divided by 4
        ({"num_fragments": 2, "fragment_sync_delay": 22}, 122),  # 19 * 6.375 = 121.125
        (
            {"num_fragments": 2, "fragment_sync_delay": 80, "sync_every": 200},
            162,
        ),  # the same, but above 2 * 80
    ],
)
def test_the_shortest_round_by_hand(changed, sync_every):
    assert smallest_sync_every(planned(**changed), CONSTANTS, 0.95) == sync_every


@pytest.mark.parametrize("utilisation", [0.3, 0.5, 0.95, 0.999])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 1), (3, 0), (4, 7)])
def test_no_shorter_round_that_is_allowed_would_do(fragments, delay, utilisation):
    def of_length(sync_every):
        return planned(
            params=10**7,
            step_s=0.1,
            sync_every=sync_every,
            num_fragments=fragments,
            fragment_sync_delay=delay,
        )

    found = smallest_sync_every(of_length(100 * fragments), CONSTANTS, utilisation)
    enough = []
    for sync_every in range(1, found + 1):
        try:
            run = of_length(sync_every)
        except ValueError:
            continue  # the schedule does not allow it
        if 0.1 * sync_every / round_seconds(run, CONSTANTS) >= utilisation:
            enough.append(sync_every)
    assert enough == [found]


def test_all_of_the_time_is_reached_only_by_a_sync_that_takes_none():
    assert smallest_sync_every(planned(), CONSTANTS, 1.0) is None
    overlapped = planned(num_fragments=2, fragment_sync_delay=40)
    free = CONSTANTS | {"host_s_per_param.float32": 0.0, "overlap_cost": 0.0}
    assert smallest_sync_every(overlapped, free, 1.0) == 82
    assert smallest_sync_every(overlapped, free | {"overlap_cost": 0.01}, 1.0) is None


# ---- input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10Gbit", 1e10),
        ("100Mbit", 1e8),
        ("1Gb/s", 1e9),
        ("250MB/s", 2e9),
        ("1.5 Gbit/s", 1.5e9),
        ("56kbps", 56e3),
        ("1e9bit", 1e9),
    ],
)
def test_a_link_is_read(text, bits):
    assert parse_link(text) == bits


@pytest.mark.parametrize("text", ["3 foo", "1G", "", "0Gbit", "-1Gbit", "1.2.3Gbit", "1e999bit"])
def test_a_link_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="link='.*': write a rate such as 1Gbit"):
        parse_link(text)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params": 0}, "params=0: use an integer of at least 1"),
        ({"groups": 1}, "groups=1: use an integer of at least 2"),
        ({"ranks": 0}, "ranks=0: use an integer of at least 1"),
        ({"step_s": 0.0}, "step_s=0.0: use seconds above 0"),
        ({"step_s": math.nan}, "step_s=nan: use seconds above 0"),
        ({"round_trip_s": -1.0}, "round_trip_s=-1.0: use seconds of 0 or more"),
        ({"link_bits_per_s": 0.0}, "link_bits_per_s=0.0: use a number above 0"),
        ({"wire_format": "fp8"}, "wire_format='fp8': use one of float32, bfloat16, int8, fp4"),
        ({"sync_every": 99, "num_fragments": 2}, "sync_every=99 is not divisible by num_fragments"),
        ({"fragment_sync_delay": 100}, "fragment_sync_delay=100 is not below the 100 inner steps"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changed, message):
    with pytest.raises(ValueError) as refused:
        planned(**changed)
    assert message in str(refused.value)
