"""What the command ``plan`` prints, writes and refuses. Run: pytest tests/test_plan_command.py."""

import json
import subprocess
import sys

import pytest
from made_up_plan import CONSTANTS, calibration
from typer.testing import CliRunner

from composer_replication.cli import app
from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER


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


@pytest.mark.parametrize("constants", [{"round_trips_per_message": 1.0}, 3])
def test_constants_that_the_model_does_not_have_are_refused(tmp_path, constants):
    calibration(constants=constants).save(tmp_path / "other.json")
    answer = run_command("--calibration", tmp_path / "other.json")
    assert answer.returncode == 2 and "has the constants of another model" in answer.stderr
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
