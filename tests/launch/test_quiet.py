"""The form of a command's log lines. Run: pytest tests/launch/test_quiet.py."""

import logging
import re

import pytest

from composer_replication.launch.quiet import ShortNames


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("composer_replication.callback.console", "callback.console"),
        ("torchft.manager", "torchft.manager"),
        ("composer_replication", "composer_replication"),
    ],
)
def test_a_line_begins_with_time_level_and_a_short_name(name, shown):
    record = logging.LogRecord(name, logging.INFO, "", 0, "a round is %d", (3,), None)
    line = ShortNames().format(record)
    assert re.fullmatch(rf"\d\d:\d\d:\d\d I {re.escape(shown)}: a round is 3", line)
