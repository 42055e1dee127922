"""The fit of the plan's constants finds those that rounds were made from.

Run: pytest tests/benchmarks/test_calibrate.py. The rounds are made by an arithmetic of their own,
below, and measured nowhere.
"""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_replication.cli import app
from composer_replication.plan_calibration import Calibration

CALIBRATE = Path(__file__).parents[2] / "benchmarks" / "calibrate.py"

BYTES = {"float32": 4, "bfloat16": 2, "int8": 260 / 256, "fp4": 17 / 32}
SEND = {"float32": 1e-9, "bfloat16": 2e-9, "int8": 6e-9, "fp4": 9e-9}
HOST = {"float32": 3e-9, "bfloat16": 4e-9, "int8": 5e-9, "fp4": 5.5e-9}
SYNC_S, TRIPS, TRIPS_OF_A_MIB, LINK = 0.05, 4.0, 0.2, 1.1
DDP_S, DDP_TRIPS, DDP_LINK, OVERLAP = 2e-9, 0.3, 1.2, 0.4
COST = 0.3
N, STEP_S = 25_000_000, 0.25

SCHEDULES = [(1, 0), (2, 0), (2, 2), (2, 8), (4, 4)]


def made_up_round(
    method, wire_format="float32", bits_per_s=1e9, trip=0.0, fragments=1, delay=0, step_s=STEP_S
):
    """A row as bandwidth.py writes it: two groups, whose ring sends each parameter once."""
    rate = bits_per_s or math.inf
    round_s = 20 * step_s
    if method == "DDP":
        allreduce = DDP_TRIPS * 4 * N / 2**20 * trip + DDP_LINK * 32 * N / rate + DDP_S * N
        round_s += 20 * max(0.0, allreduce - OVERLAP * step_s)
    elif method != "none":
        n = N / fragments
        num_bytes = n * BYTES[wire_format]
        send = SYNC_S + (TRIPS + TRIPS_OF_A_MIB * num_bytes / 2**20) * trip
        send += LINK * 8 * num_bytes / rate + SEND[wire_format] * n
        hidden = min(send, delay * step_s)
        round_s += fragments * (HOST[wire_format] * n + send - (1 - COST) * hidden)
    return {
        "link": "made up",
        "bits_per_s": bits_per_s,
        "round_trip_s": trip,
        "method": method,
        "wire_format": wire_format,
        "sync_every": 20,
        "num_fragments": fragments,
        "fragment_sync_delay": delay,
        "groups": 2,
        "params": N,
        "step_s": step_s,
        "round_s": round_s,
        "round_s_min": round_s,
        "round_s_max": round_s,
        "compute_fraction": 20 * step_s / round_s,
        "bytes_per_round": 0,
    }


def made_up_table(
    wire_formats=tuple(BYTES), schedules=SCHEDULES, trips=(0.0, 0.05), step_times=(STEP_S, 0.5)
):
    lines = [(bits, trip) for bits in (1e8, 1e9, 1e10, None) for trip in trips]
    rows = []
    for bits, trip in lines:
        rows.append(made_up_round("none", bits_per_s=bits, trip=trip))
        for step_s in step_times:
            rows.append(made_up_round("DDP", bits_per_s=bits, trip=trip, step_s=step_s))
        for wire_format in wire_formats:
            for fragments, delay in schedules:
                method = "vanilla" if fragments == 1 else "streaming"
                rows.append(made_up_round(method, wire_format, bits, trip, fragments, delay))
    return {"ratios": {}, "rows": rows, "arguments": {}}


def calibrate(folder, table, *options):
    path = folder / "table.json"
    path.write_text(json.dumps(table))
    command = [sys.executable, CALIBRATE, path, "--machine", "none", "--out", folder / "found.json"]
    command += options
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def constants_of(folder, table):
    answer = calibrate(folder, table)
    assert answer.returncode == 0, answer.stderr
    return Calibration.load(folder / "found.json")


def test_the_constants_that_rounds_were_made_from_are_found(tmp_path):
    found = constants_of(tmp_path, made_up_table())
    expected = {
        "sync_s": SYNC_S,
        "round_trips_per_sync": TRIPS,
        "round_trips_per_mib": TRIPS_OF_A_MIB,
        "link_time": LINK,
        "ddp_link_time": DDP_LINK,
        "ddp_s_per_param": DDP_S,
        "ddp_round_trips_per_mib": DDP_TRIPS,
        "ddp_overlap": OVERLAP,
        "overlap_cost": COST,
    }
    for kind, values in (("send", SEND), ("host", HOST)):
        expected |= {f"{kind}_s_per_param.{name}": value for name, value in values.items()}
    assert found.constants == pytest.approx(expected, rel=1e-6)
    assert found.not_told_apart == []
    assert found.error["max"] < 1e-6
    assert found.measured["link_bits_per_s"] == [1e8, math.inf]
    assert found.measured["round_trip_s"] == [0.0, 0.05]


def test_noise_of_measuring_stays_about_as_large_as_it_is(tmp_path):
    table, noise = made_up_table(), random.Random(1)
    for row in table["rows"]:
        row["round_s"] *= 1 + noise.uniform(-0.05, 0.05)
    found = constants_of(tmp_path, table)
    assert found.constants["link_time"] == pytest.approx(LINK, rel=0.1)
    assert found.constants["ddp_link_time"] == pytest.approx(DDP_LINK, rel=0.1)
    assert min(found.constants.values()) >= 0.0
    assert 0.01 < found.error["median"] < 0.05 and found.error["max"] < 0.1


def test_no_line_is_faster_than_its_rate_and_no_mib_waits_for_more_than_a_round_trip(tmp_path):
    table = made_up_table(["float32"])
    for row in table["rows"]:
        training = row["sync_every"] * row["step_s"]
        factor = 8 if row["round_trip_s"] else 0.3
        row["round_s"] = training + factor * (row["round_s"] - training)
    found = constants_of(tmp_path, table)
    assert found.constants["link_time"] >= 1 and found.constants["ddp_link_time"] >= 1
    assert found.constants["round_trips_per_mib"] <= 1
    assert found.constants["round_trips_per_sync"] > TRIPS


def test_what_the_rounds_cannot_tell_apart_is_named_and_counts_as_what_nothing_hides(tmp_path):
    found = constants_of(tmp_path, made_up_table(["float32"], [(1, 0)], trips=[0.0]))
    assert found.not_told_apart == ["send_s_per_param.float32", "sync_s", "overlap_cost"]
    per_sync = (SEND["float32"] + HOST["float32"]) * N + SYNC_S
    assert found.constants["host_s_per_param.float32"] * N == pytest.approx(per_sync)
    assert found.constants["link_time"] == pytest.approx(LINK)
    assert found.measured["wire_formats"] == ["float32"]
    assert found.error["max"] < 1e-6


def test_an_overlap_that_steps_of_one_length_do_not_show_is_named(tmp_path):
    # A longer overlap of all the same steps and more seconds for all the same parameters cancel.
    found = constants_of(tmp_path, made_up_table(step_times=[STEP_S]))
    assert found.not_told_apart == ["ddp_overlap"]
    assert found.constants["ddp_overlap"] <= OVERLAP and found.error["max"] < 1e-6


def test_a_table_without_ddp_has_no_constants_of_it(tmp_path):
    table = made_up_table()
    table["rows"] = [row for row in table["rows"] if row["method"] != "DDP"]
    found = constants_of(tmp_path, table)
    assert not found.has_ddp and not [name for name in found.constants if "ddp" in name]


def test_the_errors_of_all_rows_are_printed_and_the_none_rows_do_not_flatter_them(tmp_path):
    table = made_up_table()
    table["rows"][1]["round_s"] *= 3  # one of DDP's, the model cannot follow
    answer = calibrate(tmp_path, table)
    found = Calibration.load(tmp_path / "found.json")
    assert found.error["rows"] == sum(row["method"] != "none" for row in table["rows"])
    assert found.error["max"] > 0.2
    assert f"at most {found.error['max']:.1%}" in " ".join(answer.stdout.split())
    printed = [line for line in answer.stdout.splitlines() if line.count("│") == 11]
    assert len(printed) == len(table["rows"])


def test_the_errors_in_another_run_s_rounds_are_told(tmp_path):
    other = made_up_table(schedules=[(1, 0), (4, 3)], trips=[0.02])
    for row in other["rows"]:
        row["round_s"] *= 2 if row["method"] == "DDP" else 1.25  # of twice, the model lacks a half
    (tmp_path / "other.json").write_text(json.dumps(other))
    answer = calibrate(tmp_path, made_up_table(), "--held-out", tmp_path / "other.json")
    sending = sum(row["method"] != "none" for row in other["rows"])
    assert f"In {sending} rounds of {tmp_path / 'other.json'}, which nothing" in answer.stdout
    assert answer.stdout.rstrip().endswith("median 20.0%, at most 50.0%.")
    (tmp_path / "found.json").unlink()
    answer = calibrate(tmp_path, made_up_table(), "--held-out", tmp_path / "none.json")
    assert answer.returncode == 2 and "none.json" in answer.stderr
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[0].pop("step_s"), "row 0 has no 'step_s'"),
        (lambda rows: rows[1].update(round_s=0.0), "row 1: round_s=0.0"),
        (lambda rows: rows[1].update(method="fsdp"), "row 1: method='fsdp': use one of none"),
        (lambda rows: rows[3].update(wire_format="fp8"), "row 3: wire_format='fp8'"),
        (lambda rows: rows.clear(), "none of 0 rows is vanilla or streaming"),
    ],
)
def test_a_table_that_cannot_be_fitted_is_refused(tmp_path, change, message):
    table = made_up_table()
    change(table["rows"])
    answer = calibrate(tmp_path, table)
    assert answer.returncode == 2 and message in " ".join(answer.stderr.split())
    assert not (tmp_path / "found.json").exists()


def test_a_plan_of_a_measured_run_says_what_was_measured(tmp_path):
    found = constants_of(tmp_path, made_up_table())
    measured = made_up_round("streaming", "int8", 1e8, 0.05, 2, 2)
    given = f"--params {N} --link 100Mbit --step-time {STEP_S} --groups 2 --round-trip 0.05"
    schedule = "--sync-every 20 --num-fragments 2 --fragment-sync-delay 2"
    files = ["--calibration", str(tmp_path / "found.json"), "--json", str(tmp_path / "plan.json")]
    answer = CliRunner().invoke(app, ["plan", *given.split(), *schedule.split(), *files])
    assert answer.exit_code == 0, answer.output
    assert "Extrapolated" not in answer.output
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    kinds = {(row["method"], row["wire_format"]): row["round_s"] for row in rows}
    assert kinds["streaming", "int8"] == pytest.approx(measured["round_s"])
    assert kinds["DDP", "float32"] == pytest.approx(
        made_up_round("DDP", bits_per_s=1e8, trip=0.05)["round_s"]
    )
    assert found.error["rows"] == len(made_up_table()["rows"]) - 8
