"""What is said when a group has died. Run: pytest tests/launch/test_group_ends.py."""

import time
from types import SimpleNamespace

import pytest

from composer_replication.launch.group_ends import GroupEnds, describe_end
from composer_replication.launch.supervision import GroupRecord


def ends_of(**records):
    return GroupEnds(SimpleNamespace(records=records, max_restarts=3))


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (1, "ended with exit status 1"),
        (-9, "was ended by SIGKILL"),
        (-40, "was ended by signal 40"),
    ],
)
def test_an_end_is_described(status, text):
    assert describe_end(status) == text


def test_each_end_is_said_once_with_the_restart_that_follows():
    record = GroupRecord(deaths=[-9], due=time.monotonic() + 1.9, in_a_row=0)
    ends = ends_of(a=record, b=GroupRecord())
    line = "group a was ended by SIGKILL, starts again in 2 s (restart 1 of 3)"
    assert ends.new() == [line] and len(line) < 80
    assert ends.new() == []
    record.deaths.append(1)
    record.in_a_row, record.due = 1, time.monotonic()
    assert ends.new() == ["group a ended with exit status 1, starts again in 0 s (restart 2 of 3)"]


@pytest.mark.parametrize(
    ("what", "then"),
    [
        ({"is_left_out": True}, "; the others go on without it"),
        ({"is_given_up": True}, "; it is too late to join the others again"),
        ({}, ", and is not started again"),
    ],
)
def test_an_end_without_a_restart_says_what_follows(what, then):
    ends = ends_of(a=GroupRecord(deaths=[1], status=1, **what))
    assert ends.new() == [f"group a ended with exit status 1{then}"]
