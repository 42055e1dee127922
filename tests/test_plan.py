"""The planner: seconds, bytes and memory by hand, and beside the rounds that were measured.

Run: pytest tests/test_plan.py.
"""

import math
import re

import pytest
from plan_errors import measured_rounds, plan_errors

from composer_replication.plan import HOST_S_PER_PARAM, NOTES, PlannedRun, parse_link, plan_rows


def planned(**changed):
    """1 billion parameters in 2 groups; 4 GB take 32 s on the link, and a sync 1 s on the host."""
    given = {
        "params": 10**9,
        "link_bits_per_s": 1e9,
        "step_s": 1.0,
        "groups": 2,
        "host_s_per_param": 1e-9,
    }
    return PlannedRun(**(given | changed))


# ---- seconds, bytes and memory by hand ----------------------------------------------------------


def test_a_vanilla_round_is_its_steps_and_one_sync():
    assert planned().round_s == pytest.approx(100 + 32 + 1)
    assert planned(step_s=2.0, sync_every=50).round_s == pytest.approx(50 * 2 + 32 + 1)


@pytest.mark.parametrize(
    ("fragments", "delay", "round_s"),
    [
        (2, 0, 100 + 1 + 2 * 16),
        (2, 5, 100 + 1 + 2 * (16 - 5)),
        (4, 5, 100 + 1 + 4 * (8 - 5)),
        (2, 16, 100 + 1),
        (2, 40, 100 + 1),
    ],
)
def test_a_delay_hides_what_is_sent_and_nothing_of_the_host(fragments, delay, round_s):
    run = planned(num_fragments=fragments, fragment_sync_delay=delay)
    assert run.round_s == pytest.approx(round_s)


def test_a_sync_waits_a_round_trip_for_every_2_mib_and_two_more():
    waits = (
        planned(params=5 * 2**20, round_trip_s=0.1).blocked_s - planned(params=5 * 2**20).blocked_s
    )
    assert waits == pytest.approx(0.1 * (2 + 20 / 2))  # 5 Mi parameters are 20 MiB


def test_a_small_model_waits_for_each_hop_of_the_ring():
    near, far = (planned(params=1000, groups=8, round_trip_s=r) for r in (0.0, 0.1))
    assert far.blocked_s - near.blocked_s == pytest.approx(0.1 * (2 + 7))  # 14 hops, one way


@pytest.mark.parametrize(
    ("wire_format", "num_bytes"),
    [("float32", 4e9), ("bfloat16", 2e9), ("int8", 1.015625e9), ("fp4", 0.53125e9)],
)
def test_a_wire_format_sends_fewer_bytes(wire_format, num_bytes):
    run = planned(wire_format=wire_format)
    assert run.bytes_per_sync == num_bytes
    assert run.blocked_s == pytest.approx(8 * num_bytes / 1e9 + 1)


def test_eight_groups_send_seven_quarters_in_any_number_of_fragments():
    run = planned(groups=8, num_fragments=4)
    assert 4 * run.bytes_per_sync == planned(groups=8).bytes_per_sync == 7e9


def test_a_step_of_ddp_hides_the_link_and_not_the_host():
    assert planned().ddp_step_s == pytest.approx(32 + 1)
    assert planned(step_s=100.0).ddp_step_s == pytest.approx(100 + 1)
    trips = planned(round_trip_s=0.1).ddp_step_s - planned().ddp_step_s
    assert trips == pytest.approx(0.1 * 4e9 / 2**21)


@pytest.mark.parametrize(
    ("changed", "resident", "peak", "device"),
    [
        ({}, 8e9, 12e9, 4e9),
        # A copy of the local parameters beside the pseudo-gradient, of a half each.
        ({"num_fragments": 2, "fragment_sync_delay": 5}, 8e9, 12e9, 2e9),
        # The error feedback, and the messages three times.
        ({"wire_format": "bfloat16"}, 12e9, 12e9 + 4e9 + 6e9, 4e9),
        # A quarter of theta and momentum on each rank, which gathers the whole in a sync.
        ({"ranks": 4}, 2e9, 2e9 + 4e9, 4e9),
        ({"ranks": 4, "wire_format": "bfloat16"}, 3e9, 3e9 + 4e9 + 1.5e9, 4e9),
    ],
)
def test_memory_by_hand(changed, resident, peak, device):
    memory = planned(**changed).memory
    assert (memory.host_resident, memory.host_peak, memory.device) == (resident, peak, device)


# ---- the shortest round -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "sync_every"),
    [
        ({}, 627),  # 19 * 33
        ({"num_fragments": 2, "fragment_sync_delay": 5}, 438),  # 19 * 23 = 437
        ({"num_fragments": 4}, 628),  # a multiple of 4
        (
            {"num_fragments": 2, "fragment_sync_delay": 16},
            32,
        ),  # 19 * 1, and 0.95 * 2 * 16 on the link
    ],
)
def test_the_shortest_round_by_hand(changed, sync_every):
    assert planned(**changed).shortest_round(0.95) == sync_every


def test_several_in_flight_hide_what_one_cannot_until_the_link_is_full():
    """Each of 4 fragments takes 8 s to send: 4 take 32 s."""
    run = planned(num_fragments=4, sync_every=40, fragment_sync_delay=10)
    assert run.round_s == pytest.approx(40.0 + 1.0)  # the host; two are in flight
    assert run.memory.device == 2 * 1e9
    full = planned(num_fragments=4, sync_every=24, fragment_sync_delay=10)
    assert full.round_s == pytest.approx(32.0)


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

    found = of_length(100 * fragments).shortest_round(utilisation)
    enough = []
    for sync_every in range(1, found + 1):
        try:
            run = of_length(sync_every)
        except ValueError:
            continue  # the schedule does not allow it
        if 0.1 * sync_every / run.round_s >= utilisation:
            enough.append(sync_every)
    assert enough == [found]


# ---- rounds that were measured ------------------------------------------------------------------


def test_the_plan_is_as_far_from_the_rounds_that_were_measured_as_it_prints():
    """In whole percent; the page's table is compared with them by ``test_numbers.py``."""
    assert len(list(measured_rounds(HOST_S_PER_PARAM))) == 36
    errors = plan_errors(HOST_S_PER_PARAM)
    assert any("36 measured rounds" in note for note in NOTES)
    printed = re.search(r"to (\d+) % in the median and (\d+) % at most", NOTES[0])
    assert printed is not None
    assert float(printed[1]) == round(errors[0]) and errors[1] <= float(printed[2])


# ---- rows and input -----------------------------------------------------------------------------


def test_the_rows_compare_ddp_vanilla_and_the_run_in_every_wire_format():
    rows = list(plan_rows(planned(num_fragments=2, fragment_sync_delay=5), 0.95))
    formats = ["float32", "bfloat16", "int8", "fp4"]
    kinds = [(row.method, row.wire_format) for row in rows]
    schedules = [(method, each) for method in ("vanilla", "streaming") for each in formats]
    assert kinds == [("DDP", "float32"), *schedules]
    ddp, vanilla, *_ = rows
    assert ddp.round_s == pytest.approx(3300) and ddp.bytes_per_round == 400e9
    assert ddp.memory is ddp.shortest_round is None
    assert vanilla.utilisation == pytest.approx(100 / 133) and vanilla.bytes_per_round == 4e9
    assert rows[5].round_s == pytest.approx(123) and rows[5].bytes_per_round == 4e9
    assert rows[5].shortest_round == 438


def test_a_vanilla_run_is_in_the_rows_once():
    assert [row.method for row in plan_rows(planned(), 0.95)] == ["DDP", *["vanilla"] * 4]


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10Gbit", 1e10),
        ("100Mbit", 1e8),
        ("1Gb/s", 1e9),
        ("250MB/s", 2e9),
        ("1.5 Gbit/s", 1.5e9),
        (".5Gbit", 5e8),
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
        ({"step_s": 0.0}, "step_s=0.0: use a number above 0"),
        ({"step_s": math.nan}, "step_s=nan: use a number above 0"),
        ({"round_trip_s": -1.0}, "round_trip_s=-1.0: use seconds of 0 or more"),
        ({"host_s_per_param": math.inf}, "host_s_per_param=inf: use seconds of 0 or more"),
        ({"link_bits_per_s": 0.0}, "link_bits_per_s=0.0: use a number above 0"),
        ({"wire_format": "fp8"}, "wire_format='fp8': use one of float32, bfloat16, int8, fp4"),
        ({"sync_every": 99, "num_fragments": 2}, "sync_every=99 is not divisible by num_fragments"),
        ({"fragment_sync_delay": 100}, "fragment_sync_delay=100 is not below sync_every=100"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changed, message):
    with pytest.raises(ValueError) as refused:
        planned(**changed)
    assert message in str(refused.value)
