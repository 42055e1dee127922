"""The plan of a run: seconds by hand, and the command.

Run: pytest tests/test_plan.py. The constants here are made up, and nobody's measurements.
"""

import json
import math
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from composer_replication.cli import app
from composer_replication.plan import (
    BYTES_PER_PARAMETER,
    PlannedRun,
    blocked_seconds,
    ddp_step_seconds,
    memory,
    round_seconds,
    smallest_sync_every,
)
from composer_replication.plan_calibration import Calibration, parse_link

CONSTANTS = {
    "sync_s": 0.5,
    "round_trips_per_sync": 3.0,
    "round_trips_per_message": 0.5,
    "link_time": 1.25,
    "send_s_per_param.float32": 2e-9,
    "send_s_per_param.bfloat16": 3e-9,
    "send_s_per_param.int8": 5e-9,
    "send_s_per_param.fp4": 8e-9,
    "host_s_per_param.float32": 1e-9,
    "host_s_per_param.bfloat16": 2e-9,
    "host_s_per_param.int8": 2.5e-9,
    "host_s_per_param.fp4": 3e-9,
    "ddp_link_time": 1.25,
    "ddp_s_per_param": 1e-9,
    "ddp_round_trips_per_message": 0.25,
    "ddp_overlap": 0.5,
}


def planned(**changed):
    given = {"params": 10**9, "link_bits_per_s": 1e9, "step_s": 1.0, "groups": 2}
    return PlannedRun(**(given | changed))


def calibration(**changed):
    measured = {
        "params": [25_000_000, 25_000_000],
        "groups": [2, 2],
        "link_bits_per_s": [1e8, 1e10],
        "round_trip_s": [0.0, 0.05],
        "step_s": [0.5, 2.5],
        "num_fragments": [1, 4],
        "fragment_sync_delay": [0, 5],
        "wire_formats": list(BYTES_PER_PARAMETER),
    }
    given = {
        "constants": CONSTANTS,
        "not_told_apart": [],
        "error": {"median": 0.02, "max": 0.07, "rows": 30},
        "measured": measured,
        "date": "2026-01-02",
        "machine": "no machine",
        "command": "made up",
    }
    return Calibration(**(given | changed))


# ---- seconds, bytes and memory by hand ----------------------------------------------------------


def test_a_vanilla_round_by_hand():
    # 4 GB at 1 Gbit/s are 32 s, 40 s at 80 % of it; 0.5 s; 2 s of summing; 1 s of the host.
    assert round_seconds(planned(), CONSTANTS) == pytest.approx(100 + 40 + 0.5 + 2 + 1)


def test_a_delay_hides_what_is_sent_and_not_what_the_host_does():
    halves = {"num_fragments": 2, "sync_every": 100}
    late = planned(**halves, fragment_sync_delay=5)  # each: 0.5 + 20 + 1 s, 5 s of them hidden
    assert round_seconds(late, CONSTANTS) == pytest.approx(100 + 2 * (0.5 + 16.5))
    hidden = planned(**halves, fragment_sync_delay=22)
    assert round_seconds(hidden, CONSTANTS) == pytest.approx(100 + 2 * 0.5)


def test_round_trips_count_once_a_sync_and_once_a_message_and_hop():
    # 4 GB are 120 messages of 32 MiB; among 3 groups each goes round in twice as many hops, and a
    # group sends 4/3 of the bytes instead of 1.
    one_way = blocked_seconds(planned(), CONSTANTS)
    two = blocked_seconds(planned(round_trip_s=0.1), CONSTANTS)
    assert two - one_way == pytest.approx(0.1 * (3 + 0.5 * 120))
    three = blocked_seconds(planned(round_trip_s=0.1, groups=3), CONSTANTS)
    assert three - two == pytest.approx(0.1 * 0.5 * 120 + 40 / 3)


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
    assert trips == pytest.approx(41.5 + 0.1 * 0.25 * 153)  # messages of 25 MiB


def test_memory_by_hand():
    vanilla = memory(planned())
    assert (vanilla.host_resting, vanilla.host_peak, vanilla.device) == (8e9, 12e9, 4e9)
    halves = memory(planned(num_fragments=2, fragment_sync_delay=5))  # a pseudo-gradient and a copy
    assert (halves.host_resting, halves.host_peak, halves.device) == (8e9, 12e9, 2e9)
    coded = memory(planned(wire_format="bfloat16", ranks=4))  # 3 messages and gathering by quarters
    assert (coded.host_resting, coded.host_peak, coded.device) == (12e9, 17.5e9, 5e9)


# ---- the shortest round -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "sync_every"),
    [
        ({}, 827),  # 19 * 43.5 = 826.5
        ({"num_fragments": 2, "fragment_sync_delay": 5}, 646),  # 19 * 34, exactly
        ({"num_fragments": 4, "fragment_sync_delay": 0}, 856),  # 19 * 45 = 855, divided by 4
        ({"num_fragments": 2, "fragment_sync_delay": 22}, 46),  # 19, but above 2 * 22
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
    free = CONSTANTS | {"host_s_per_param.float32": 0.0}
    assert smallest_sync_every(overlapped, free, 1.0) == 82


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


# ---- the command --------------------------------------------------------------------------------


def plan(folder, *arguments, found=None):
    """The command in this process, with a calibration of made-up numbers."""
    path = folder / "calibration.json"
    (found or calibration()).save(path)
    given = ["--params", "7e9", "--link", "1Gbit", "--step-time", "2.0", "--groups", "8"]
    wide = CliRunner(env={"COLUMNS": "120"})
    return wide.invoke(app, ["plan", *given, "--calibration", str(path), *arguments])


def rows_of(folder, *arguments, found=None):
    out = folder / "plan.json"
    answer = plan(folder, "--json", str(out), *arguments, found=found)
    assert answer.exit_code == 0, answer.output
    return json.loads(out.read_text())


def test_the_command_prints_ddp_and_both_schedules_in_every_wire_format(tmp_path):
    answer = plan(tmp_path)
    assert answer.exit_code == 0, answer.exception
    lines = answer.output.splitlines()
    for method, wire_formats in (
        ("DDP", ["float32"]),
        ("vanilla", BYTES_PER_PARAMETER),
        ("streaming", BYTES_PER_PARAMETER),
    ):
        for wire_format in wire_formats:
            assert any(method in line and wire_format in line for line in lines)
    # 7/4 * 28 GB at 1 Gbit/s are 392 s, 490 at 80 %; 0.5, 14 and 7 s; 200 s of training. And
    # 19 * 511.5 / 2 = 4859.25.
    (row,) = [line for line in lines if "vanilla" in line and "float32" in line and "%" in line]
    assert [cell.strip() for cell in row.split("│")[3:7]] == ["711.5", "28.1%", "49.0 GB", "4,860"]
    text = " ".join(answer.output.split())
    assert "Calibrated on no machine, 2026-01-02, by `made up`: the model was within 7.0%" in text
    assert "7,000,000,000 parameters (measured: 25,000,000)" in text
    assert "8 replica groups (measured: 2)" in text
    assert "an accelerator or another processor takes another time" in text


def test_the_json_has_what_the_tables_have(tmp_path):
    found = rows_of(tmp_path)
    kinds = [(row["method"], row["wire_format"]) for row in found["rows"]]
    schedules = [(m, w) for m in ("vanilla", "streaming") for w in BYTES_PER_PARAMETER]
    assert kinds == [("DDP", "float32"), *schedules]
    ddp, vanilla, *_ = found["rows"]
    assert ddp["bytes_per_round"] == 100 * vanilla["bytes_per_round"] == 100 * 49e9
    assert vanilla["round_s"] == pytest.approx(711.5)
    assert vanilla["utilisation"] == pytest.approx(200 / 711.5)
    assert vanilla["memory"]["host_peak"] == 12 * 7e9
    assert found["run"]["link_bits_per_s"] == 1e9
    assert found["calibration"]["constants"] == CONSTANTS


def test_ranks_share_what_a_group_sends(tmp_path):
    rows = rows_of(tmp_path, "--ranks", "8")["rows"]
    assert all(row["bytes_per_rank"] == row["bytes_per_round"] / 8 for row in rows)
    assert rows[1]["bytes_per_round"] == 49e9
    assert "by a rank" in plan(tmp_path, "--ranks", "8").output


def test_one_fragment_without_a_delay_is_vanilla_and_is_there_once(tmp_path):
    rows = rows_of(tmp_path, "--num-fragments", "1", "--fragment-sync-delay", "0")["rows"]
    assert [row["method"] for row in rows] == ["DDP", *["vanilla"] * 4]


def test_what_was_not_measured_is_not_in_the_tables_and_is_named(tmp_path):
    constants = {name: value for name, value in CONSTANTS.items() if not name.startswith("ddp")}
    measured = calibration().measured | {"wire_formats": ["float32", "int8"]}
    found = rows_of(tmp_path, found=calibration(constants=constants, measured=measured))
    assert {(row["method"], row["wire_format"]) for row in found["rows"]} == {
        (method, wire) for method in ("vanilla", "streaming") for wire in ("float32", "int8")
    }
    assert any("not in the tables: DDP, bfloat16, fp4." in note for note in found["notes"])


def test_never_is_explained(tmp_path):
    answer = plan(tmp_path, "--utilisation", "1")
    assert "never" in answer.output
    assert "each sync keeps training waiting" in " ".join(answer.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "3 foo"], "link='3 foo': write a rate such as 1Gbit"),
        (["--params", "nan"], "params=nan: write how many there are, e.g. 7e9"),
        (["--sync-every", "7"], "sync_every=7 is not divisible by num_fragments=2: use 6 or 8"),
        (["--fragment-sync-delay", "50"], "fragment_sync_delay=50 is not below the 50 inner steps"),
        (["--utilisation", "95"], "utilisation=95.0: use a share above 0 and up to 1, e.g. 0.95"),
    ],
)
def test_bad_input_is_refused_with_the_value_and_the_fix(tmp_path, arguments, message):
    answer = plan(tmp_path, *arguments)
    assert isinstance(answer.exception, ValueError) and message in str(answer.exception)


def test_a_round_trip_needs_a_calibration_with_one(tmp_path):
    measured = calibration().measured | {"round_trip_s": [0.0, 0.0]}
    answer = plan(tmp_path, "--round-trip", "0.1", found=calibration(measured=measured))
    assert "round_trip=0.1: the calibration has no round with" in str(answer.exception)


def run_command(*arguments):
    given = ["--params", "7e9", "--link", "1Gbit", "--step-time", "2.0", "--groups", "8"]
    command = [sys.executable, "-m", "composer_replication", "plan", *given, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_without_a_calibration_it_says_how_to_make_one(tmp_path):
    answer = run_command("--calibration", tmp_path / "none.json")
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.startswith("Error: there is no calibration at")
    assert "benchmarks/calibrate.py" in answer.stderr and answer.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"constants": {}}'])
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    answer = run_command("--calibration", path)
    assert answer.returncode == 2 and "benchmarks/calibrate.py" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_plan_needs_neither_torch_nor_composer_nor_numpy(tmp_path):
    path = tmp_path / "calibration.json"
    calibration().save(path)
    check = (
        "import sys\n"
        "from composer_replication.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "sys.exit(bool({'torch', 'composer', 'numpy'} & sys.modules.keys()))"
    )
    given = ["--params", "7e9", "--link", "1Gbit", "--step-time", "2.0", "--groups", "8"]
    command = [sys.executable, "-c", check, "plan", *given, "--calibration", str(path)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0 and "vanilla" in answer.stdout, answer.stderr
