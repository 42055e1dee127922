"""What a Composer script prints about the run. Run: pytest tests/callback/test_console.py

Real: Composer's Trainer, its progress bar and its console logger. The network is faked: replica
groups are threads over the simulation's shared buffer.
"""

import collections
import contextlib
import fcntl
import logging
import os
import re
import struct
import termios
import threading

import pytest
from composer_jobs import callback_of, fit, trainer_of
from run_events import syncs_of

from composer_replication.callback import DiLoCoCallback
from composer_replication.callback.console import changes, members_of, short_bar_format
from composer_replication.callback.words import listed_groups
from composer_replication.simulation.simulation import Fault, simulate

package_log = logging.getLogger("composer_replication")


@pytest.fixture(autouse=True)
def fresh_log():
    """The package's logger as it is in a new process."""
    handlers, package_log.handlers = package_log.handlers, []
    yield
    package_log.handlers = handlers


@pytest.fixture
def printed(monkeypatch, capsys):
    """What stands on stderr after a function was called where logging is not configured."""

    def call(function, *arguments, **named):
        # pytest has handlers of its own on the root logger while a test runs.
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger(), "handlers", [])
            function(*arguments, **named)
        return [line for line in capsys.readouterr().err.splitlines() if line]

    return call


def train(num_replicas, *faults, max_duration="8ba", **diloco):
    def replica(sim):
        late = any(fault.kind == "late" for fault in faults)
        own = diloco | ({"num_replicas": 1} if late else {})
        callback = callback_of(sim, **own)
        trainer = trainer_of(callback, replica_id=sim.replica_id, max_duration=max_duration)
        trainer.fit()
        trainer.close()
        return callback.result

    return simulate(replica, num_replicas=num_replicas, faults=faults)


def without_numbers(line):
    line = re.sub(r"parameters [0-9a-f]{8}", "parameters DIGEST", line)
    return re.sub(r"blocked for \d+\.\d s of \d+ s \(\d+ %\)$", "blocked for TIME", line)


def test_each_group_says_who_is_there_what_travels_and_what_it_cost(printed):
    lines = [without_numbers(line) for line in printed(train, 2, sync_every=4, num_fragments=2)]
    assert collections.Counter(lines) == {
        "[diloco] Started with groups 0 and 1; here is group 0, 1 rank": 1,
        "[diloco] Started with groups 0 and 1; here is group 1, 1 rank": 1,
        "[diloco] The largest of 2 fragments has 70 % of the bytes": 2,
        "[diloco] A round is 4 inner steps and a sync of each of 2 fragments": 2,
        "[diloco] A round sends 1.94 kB (float32); data parallel would send 7.74 kB in its 4 steps,"
        " 4 times as much": 2,
        "[diloco] Ended after 5 outer steps: global parameters DIGEST, 4.47 kB sent, training "
        "blocked for TIME": 2,
    }


def test_the_digest_and_the_numbers_are_those_of_the_result(printed):
    results = []
    lines = printed(lambda: results.extend(train(2)))
    assert any(f"Ended after {results[0]['outer_steps']} outer steps: " in line for line in lines)
    assert any(f"parameters {results[0]['global_digest'][:8]}, " in line for line in lines)


def test_a_delay_and_a_wire_format_are_named(printed):
    streaming = {"num_fragments": 2, "fragment_sync_delay": 1, "wire_format": "int8"}
    lines = printed(train, 2, sync_every=4, **streaming)
    assert any(line.endswith("2 fragments, overlapped with 1 inner step") for line in lines)
    assert any(" (int8); data parallel" in line and "16 times" in line for line in lines)


def test_a_group_that_comes_is_announced(printed):
    lines = printed(train, 2, Fault("late", replica_id=1, step=3), sync_every=2)
    assert "[diloco] Started with group 0; here is group 0, 1 rank" in lines
    joined = "Joined after 3 outer steps with groups 0 and 1; here is group 1, 1 rank"
    assert f"[diloco] {joined}" in lines
    news = [line for line in lines if "Outer step" in line]
    assert news == ["[diloco] Outer step 3: group 1 has joined; 2 groups take part"]


def test_a_group_that_leaves_is_announced(printed):
    lines = printed(train, 3, Fault("kill", replica_id=1, step=2), sync_every=2)
    news = [line for line in lines if "Outer step" in line]
    # Both groups that are left say it, once.
    assert news == 2 * ["[diloco] Outer step 2: group 1 has left; 2 groups take part"]


@pytest.mark.parametrize("place", ["", "composer_replication"])
def test_a_configured_logging_is_left_alone(capsys, place):
    """The lines are its records, each of them once, and nothing else is written."""

    class Collect(logging.Handler):
        def emit(self, record):
            records.append(record)

    records, handler = [], Collect()
    logging.getLogger(place).addHandler(handler)
    try:
        train(1)
    finally:
        logging.getLogger(place).removeHandler(handler)
    assert "[diloco]" not in capsys.readouterr().err
    said = [record.getMessage() for record in records if record.name.endswith(".console")]
    assert [line.split()[0] for line in said] == ["Started", "A", "A", "Ended"]
    assert {record.levelno for record in records if record.getMessage() in said} == {logging.INFO}


def test_without_verbose_nothing_is_said_and_warnings_still_are(printed, tmp_path):
    assert printed(train, 2, verbose=False) == []
    assert package_log.handlers == []
    with pytest.raises(ValueError, match="verbose='no': use true or false"):
        DiLoCoCallback(verbose="no")


def test_warnings_of_the_package_are_shown_and_its_other_information_is_not(printed):
    def speak():
        train(1)
        other = logging.getLogger("composer_replication.replica.manager")
        other.info("a detail")
        other.warning("No quorum: %s", "the lighthouse is away")

    assert printed(speak)[-1] == "[diloco] WARNING: No quorum: the lighthouse is away"


def test_the_end_by_stop_is_explained(printed, tmp_path):
    (tmp_path / "STOP").touch()
    lines = printed(train, 1, run_dir=str(tmp_path))
    assert "[diloco] Ending after outer step 1: the run's folder contains STOP" in lines


def test_a_round_that_is_a_time_is_named_and_its_steps_are_in_the_metrics(printed, tmp_path):
    settings = {"sync_every": 4, "round_seconds": 600, "num_fragments": 2}
    lines = printed(train, 2, run_dir=str(tmp_path), **settings)
    round_is = "600 s, at most 4 inner steps, and a sync of each of 2 fragments"
    assert lines.count(f"[diloco] A round is {round_is}") == 2
    syncs = syncs_of(tmp_path / "replica_0")
    # The fewest at first: a step a turn. From then on as many as are allowed, in 600 s.
    assert [sync["inner_steps"] for sync in syncs] == [1, 3, 5, 7, 8, 8]
    assert [sync["diloco/sync_every"] for sync in syncs] == [4] * 6
    log = printed(train, 1, sync_every=4, round_seconds="auto")
    assert any("A round is as long as the fastest group takes for 4 inner" in line for line in log)


def test_a_warm_up_is_named(printed):
    lines = printed(train, 2, sync_every=1, schedule=[{"outer_step": 3, "sync_every": 2}])
    of = "and a sync of the whole model"
    assert f"[diloco] A round is 1 inner step (2 from outer step 3) {of}" in lines


def test_a_group_that_trains_alone_says_so(printed, monkeypatch):
    for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)

    def alone():
        callback = DiLoCoCallback(num_replicas=1, sync_every=2)
        trainer = trainer_of(callback, max_duration="4ba")
        trainer.fit()
        trainer.close()

    lines = printed(alone)
    assert lines[0].startswith("[diloco] Training alone, without a network: num_replicas is 1")
    assert lines[1] == "[diloco] A round is 2 inner steps and an outer step of the whole model"
    assert without_numbers(lines[2]) == (
        "[diloco] Ended after 2 outer steps: global parameters DIGEST, training blocked for TIME"
    )


@pytest.fixture
def terminal(request):
    """A terminal of so many columns: its file, and a function that returns what was written."""
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 50, request.param, 0, 0))
    shown = bytearray()

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(reading, 4096):
                shown.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    file = open(writing, "w")

    def close():
        file.close()
        reader.join()
        return shown.decode()

    yield file, close
    close()
    os.close(reading)


@pytest.mark.parametrize("unit", ["ba", "ep"])
@pytest.mark.parametrize("terminal", [80, 120], indirect=True)
def test_composers_progress_bar_shows_the_position_and_the_loss_as_far_as_it_fits(
    terminal, request, unit
):
    file, close = terminal
    width = request.node.callspec.params["terminal"]

    def replica(sim):
        shows = sim.replica_id == 0
        bar = {"progress_bar": True, "console_stream": file} if shows else {}
        fit(sim, max_duration={"ba": "8ba", "ep": "2ep"}[unit], **bar)

    simulate(replica, num_replicas=2)
    drawn = [line for line in re.split(r"[\r\n]", close()) if "train" in line]
    drawn = [re.sub(r"\x1b\[[A-Za-z]", "", line) for line in drawn]
    positions = [re.search(r"round \d\.\d, outer step \d, 2 groups: +\d+%\|", d) for d in drawn]
    assert any("round 2.0, outer step 2, 2 groups: 100%|" in line for line in drawn)
    # Composer draws a bar before its first batch, and a finished one without a loss.
    assert sum(map(bool, positions)) >= len(drawn) / 2
    assert max(map(len, drawn)) <= width
    # With Composer's own format 120 columns would end before the loss.
    whole = [line for line in drawn if "groups:" in line and "loss/train/total=" in line]
    assert bool(whole) == (width == 120)


@pytest.mark.parametrize("terminal", [160], indirect=True)
def test_without_verbose_composers_progress_bar_is_composers(terminal):
    file, close = terminal

    def replica(sim):
        bar = {"progress_bar": True, "console_stream": file} if sim.replica_id == 0 else {}
        fit(sim, max_duration="8ba", diloco={"verbose": False}, **bar)

    simulate(replica, num_replicas=2)
    shown = close()
    assert "loss/train/total=" in shown and "round" not in shown
    assert "train" + 20 * " " in shown


def test_a_shortened_format_of_a_bar_stays_as_it_is():
    composers = "train                         {l_bar}{bar:25}{r_bar}{bar:-1b}"
    short = short_bar_format(composers)
    assert short == short_bar_format(short) == "train {l_bar}{bar:10}{r_bar}{bar:-1b}"


@pytest.mark.parametrize("verbose", [True, False])
def test_composers_console_logger_shows_the_position_at_each_batch_that_it_prints(
    tmp_path, verbose
):
    def replica(sim):
        with (tmp_path / f"{sim.replica_id}").open("w") as file:
            shown = {"log_to_console": True, "console_stream": file, "console_log_interval": "2ba"}
            fit(sim, max_duration="8ba", diloco={"verbose": verbose}, **shown)

    simulate(replica, num_replicas=2)
    said = (tmp_path / "0").read_text()
    names = ("round", "outer_step", "num_participants")
    values = [re.findall(rf"Train diloco/{name}: ([\d.]+)", said) for name in names]
    # A sync every four batches. Each group's own metrics of a sync are shown in any case.
    rounds, steps, participants = values
    if verbose:
        assert [float(value) for value in rounds] == [0.25, 0.5, 1.0, 1.5, 2.0]
        assert [int(value) for value in steps] == [0, 0, 1, 1, 2]
    else:
        assert [float(value) for value in rounds] == [1.0, 2.0]
    assert participants == ["2"] * len(rounds)


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, "group 0"), (2, "groups 0 and 1"), (3, "groups 0, 1 and 2"), (9, "9 groups")],
)
def test_groups_are_listed_as_far_as_people_read(number, words):
    assert listed_groups([str(i) for i in range(number)]) == words


class Members:
    """What a manager says of its quorum: torchft's names, with a uuid for each life of a group."""

    def __init__(self, *members):
        self.members = members


@pytest.mark.parametrize(
    ("later", "news"),
    [
        (("1:a", "0:b"), ""),
        (("0:b",), "group 1 has left"),
        (("0:b", "1:c"), "group 1 has been started again"),
        (("2:d", "3:e", "1:a"), "group 0 has left, groups 2 and 3 have joined"),
    ],
)
def test_a_change_is_told_from_the_members_of_two_quorums(later, news):
    before = members_of(Members("0:b", "1:a"))
    assert changes(before, members_of(Members(*later))) == news
