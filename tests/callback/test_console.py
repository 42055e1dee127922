"""What a group says in its log and on Composer's console.

Run: pytest tests/callback/test_console.py

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
from common import batch
from harness.trainers import fit_groups
from torch.utils.data import TensorDataset

from composer_replication import ReplicaDataLoader
from composer_replication.callback.composer_job import short_bar_format
from composer_replication.group.reports import changes, members_of
from composer_replication.group.words import listed_groups
from composer_replication.simulation.simulation import Fault

pytestmark = pytest.mark.slow


def train(num_replicas, *faults, **diloco):
    if any(fault.kind == "late" for fault in faults):
        diloco["num_replicas"] = 1
    fits = fit_groups(num_replicas, faults=faults, max_duration="8ba", diloco=diloco)
    return [fit and fit.result for fit in fits]


@pytest.fixture
def said(caplog):
    """The records of the callback that a function leaves, of all groups."""

    def call(function, *arguments, **named):
        with caplog.at_level(logging.INFO):
            result = function(*arguments, **named)
        names = ("group.reports", "group.replica_group")
        lines = [r.getMessage() for r in caplog.records if r.name.endswith(names)]
        return result, [line for line in lines if not line.startswith(("outer step", "Settings"))]

    return call


def test_each_group_says_who_is_there_and_how_it_ended(said, capsys):
    results, lines = said(train, 2)
    digest = results[0]["global_digest"][:8]
    ended = f"Ended after {results[0]['outer_steps']} outer steps: global parameters {digest}"
    assert collections.Counter(lines) == {
        "Started with groups 0 and 1; here is group 0, 1 rank": 1,
        "Started with groups 0 and 1; here is group 1, 1 rank": 1,
        ended: 2,
    }
    assert capsys.readouterr().out == ""


def test_a_group_that_comes_is_announced(said):
    _, lines = said(train, 2, Fault("late", replica_id=1, step=3), sync_every=2)
    assert "Started with group 0; here is group 0, 1 rank" in lines
    assert "Joined after 3 outer steps with groups 0 and 1; here is group 1, 1 rank" in lines
    news = [line for line in lines if "Outer step" in line]
    assert news == ["Outer step 3: group 1 has joined; 2 groups take part"]


def test_a_group_that_leaves_is_announced(said):
    _, lines = said(train, 3, Fault("kill", replica_id=1, step=2), sync_every=2)
    news = [line for line in lines if "Outer step" in line]
    # Both groups that are left say it, once.
    assert news == 2 * ["Outer step 2: group 1 has left; 2 groups take part"]


def test_the_end_by_stop_is_explained(said, tmp_path):
    (tmp_path / "STOP").touch()
    _, lines = said(train, 1, run_dir=str(tmp_path))
    assert "Ending after outer step 1: the run's folder contains STOP" in lines


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


def bar_of_group_0(file):
    bar = {"progress_bar": True, "console_stream": file}
    return lambda group: {} if group else bar


@pytest.mark.parametrize("unit", ["ba", "ep"])
@pytest.mark.parametrize("terminal", [80, 120], indirect=True)
def test_composers_progress_bar_shows_the_position_and_the_loss_as_far_as_it_fits(
    terminal, request, unit
):
    file, close = terminal
    width = request.node.callspec.params["terminal"]

    duration = {"ba": "8ba", "ep": "2ep"}[unit]
    fit_groups(2, own=bar_of_group_0(file), max_duration=duration, diloco={"sync_every": 4})
    drawn = [line for line in re.split(r"[\r\n]", close()) if "train" in line]
    drawn = [re.sub(r"\x1b\[[A-Za-z]", "", line) for line in drawn]
    positions = [re.search(r"outer step \d, 2 groups: +\d+%\|", d) for d in drawn]
    assert any("outer step 2, 2 groups: 100%|" in line for line in drawn)
    # Composer draws a bar before its first batch, and a finished one without a loss.
    assert sum(map(bool, positions)) >= len(drawn) / 2
    assert max(map(len, drawn)) <= width
    # With Composer's own format 120 columns would end before the loss.
    whole = [line for line in drawn if "groups:" in line and "loss/train/total=" in line]
    assert bool(whole) == (width == 120)


@pytest.mark.parametrize("terminal", [120], indirect=True)
def test_a_bar_of_shared_samples_ends_where_the_groups_part_of_an_epoch_does(terminal):
    file, close = terminal
    samples = TensorDataset(*batch(0, 0, size=64))

    def own(group):
        loader = ReplicaDataLoader(samples, 4, unit_size=4)  # of which a group reads 8 batches
        return {"train_dataloader": loader} | bar_of_group_0(file)(group)

    fit_groups(2, own=own, max_duration="2ep")
    totals = re.findall(r"groups: +\d+%\|[^|]*\| +(\d+/\d+) ", close())
    assert totals[-1] == "8/8" and "4/8" in totals and "8/9" not in totals


def test_a_shortened_format_of_a_bar_stays_as_it_is():
    composers = "train                         {l_bar}{bar:25}{r_bar}{bar:-1b}"
    short = short_bar_format(composers)
    assert short == short_bar_format(short) == "train {l_bar}{bar:10}{r_bar}{bar:-1b}"


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
def test_a_change_is_found_in_the_members_of_two_quorums(later, news):
    before = members_of(Members("0:b", "1:a"))
    assert changes(before, members_of(Members(*later))) == news
