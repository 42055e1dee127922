"""What the command ``plan`` prints, writes and refuses. Run: pytest tests/test_plan_command.py."""

import json
import shlex
import subprocess
import sys

import pytest
from page_blocks import ROOT, block, fenced
from typer.testing import CliRunner

from composer_replication.cli import app
from composer_replication.plan import HOST_S_PER_PARAM

GIVEN = shlex.split(block("docs/plan.md", "composer-replication plan"))[1:]


def plan(*arguments):
    """The command in this process, on a wide terminal."""
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [*GIVEN, *map(str, arguments)])


def cells_of(answer, method, wire_format):
    """The cells of its line in each of the tables."""
    lines = [line.split("│")[1:-1] for line in answer.output.splitlines()]
    stripped = [[cell.strip() for cell in line] for line in lines]
    return [cells[2:] for cells in stripped if cells[:2] == [method, wire_format]]


def test_the_page_shows_what_the_command_prints():
    shown = fenced(ROOT / "docs" / "plan.md", "")[0]
    answer = CliRunner(env={"COLUMNS": "100"}).invoke(app, GIVEN)
    assert [line.rstrip() for line in answer.output.splitlines()] == shown.splitlines()


def test_the_tables_by_hand():
    answer = plan("--host-s-per-param", "1e-9")
    assert answer.exit_code == 0, answer.exception
    # 7/4 * 28 GB at 1 Gbit/s are 392 s, and 7 s of the host; 200 s of training. 19 * 399 / 2 =
    # 3790.5. Two fragments of 196 s, of which 10 s are hidden: 379 s, and 19 * 379 / 2 = 3600.5.
    times, memory = cells_of(answer, "vanilla", "float32")
    assert times == ["599.0", "33.4%", "49.0 GB", "3,791"]
    assert memory == ["56.0 GB", "84.0 GB", "28.0 GB"]
    times, memory = cells_of(answer, "streaming", "float32")
    assert times == ["579.0", "34.5%", "49.0 GB", "3,602"]
    assert memory == ["56.0 GB", "84.0 GB", "14.0 GB"]
    assert cells_of(answer, "DDP", "float32") == [["39,900.0", "0.5%", "4.9 TB", "-"]]
    text = " ".join(answer.output.split())
    assert "7,000,000,000 parameters in 8 replica groups." in text
    assert "2 s an inner step, 1e-09 s a parameter on the host." in text
    assert "Streaming: 2 fragments, each overlapped with 5 inner steps." in text


def test_the_json_has_the_run_and_the_rows(tmp_path):
    out = tmp_path / "plan.json"
    assert plan("--json", out, "--ranks", 8, "--round-trip", 0.5).exit_code == 0
    found = json.loads(out.read_text())
    assert found["run"] == {
        "params": 7_000_000_000,
        "link_bits_per_s": 1e9,
        "step_s": 2.0,
        "groups": 8,
        "round_trip_s": 0.5,
        "host_s_per_param": HOST_S_PER_PARAM,
        "ranks": 8,
        "sync_every": 100,
        "num_fragments": 2,
        "fragment_sync_delay": 5,
    }
    assert found["utilisation"] == 0.95
    assert [row["method"] for row in found["rows"]] == ["DDP", *["vanilla"] * 4, *["streaming"] * 4]
    vanilla = found["rows"][1]
    assert vanilla["round_s"] == pytest.approx(200 + 392 + 42 + 0.5 * (2 + 49e9 / 2**21))
    assert vanilla["memory"] == {"host_resident": 7e9, "host_peak": 35e9, "device": 28e9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "3 foo"], "link='3 foo': write a rate such as 1Gbit"),
        (["--params", "nan"], "params=nan: write how many there are, e.g. 7e9"),
        (["--sync-every", "7"], "sync_every=7 is not divisible by num_fragments=2: use 6 or 8"),
        (["--fragment-sync-delay", "100"], "fragment_sync_delay=100 is not below sync_every=100"),
        (["--utilisation", "95"], "utilisation=95.0: use a share between 0 and 1, e.g. 0.95"),
        (["--utilisation", "1"], "utilisation=1.0: use a share between 0 and 1, e.g. 0.95"),
    ],
)
def test_bad_input_is_refused_with_the_value_and_the_fix(arguments, message):
    answer = plan(*arguments)
    assert isinstance(answer.exception, ValueError) and message in str(answer.exception)


def test_as_a_command_it_needs_neither_torch_nor_composer_nor_numpy():
    check = (
        "import sys\n"
        "from composer_replication.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "sys.exit(bool({'torch', 'composer', 'numpy'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", check, *GIVEN]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0 and "vanilla" in answer.stdout, answer.stderr


def test_an_error_is_one_line_without_a_traceback():
    command = [sys.executable, "-m", "composer_replication", *GIVEN, "--ranks", "0"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr == "Error: ranks=0: use an integer of at least 1\n"
