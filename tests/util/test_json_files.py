"""JSON files on a full disk and after a power cut. Run: pytest tests/util/test_json_files.py

Real: files in ``tmp_path``, and a disk that is full: no file may grow beyond ``RLIMIT_FSIZE``.
"""

import logging
import os

import pytest
from failing_disk import no_file_above

from composer_replication.util import json_files
from composer_replication.util.json_files import (
    JsonLineReader,
    JsonLineWriter,
    read_json,
    replace_json,
)

WHOLE = b'{"a": 1}\n'


def read_all(path):
    return list(JsonLineReader(path).read())


def test_of_too_many_waiting_lines_the_newest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "MAX_WAITING", 3)
    writer = JsonLineWriter(tmp_path / "lines.jsonl")
    for a in range(5):
        writer.append({"a": a})
    assert (writer.num_waiting, writer.num_lost) == (3, 2)
    writer.flush()
    assert [line["a"] for line in read_all(tmp_path / "lines.jsonl")] == [2, 3, 4]


def test_a_half_line_that_a_killed_writer_left_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(WHOLE + b'{"a"')
    writer = JsonLineWriter(path)
    writer.append({"a": 2})
    writer.flush()
    reader = JsonLineReader(path)
    assert list(reader.read()) == [{"a": 1}, {"a": 2}] and reader.num_damaged == 1


@pytest.mark.parametrize(
    ("damage", "num_damaged"),
    [
        (b'{"a"\n', 1),
        (bytes(64) + b"\n", 1),
        (b"\n", 1),
        (b"[1]\n\xff\n7\n", 3),
        (bytes(64), 0),  # no end of a line: somebody may be writing it
        (b'{"a": 2', 0),
    ],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path, damage, num_damaged):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(WHOLE + damage)
    reader = JsonLineReader(path)
    assert list(reader.read()) == [{"a": 1}] and reader.num_damaged == num_damaged


@pytest.mark.parametrize("content", [b"", b'{"phase": "tr', bytes(40), b"[]", b"\xff", b"7"])
def test_what_is_no_object_counts_as_nothing_and_the_log_says_so_once(tmp_path, caplog, content):
    path = tmp_path / "status.json"
    assert read_json(path) == {}  # a missing one is nothing to tell of
    path.write_bytes(content)
    for _ in range(3):
        assert read_json(path) == {}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{path} is ignored: it " in caplog.text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "status.json"
    replace_json(path, {"a": 1})
    with no_file_above(10), pytest.raises(OSError, match="too large"):
        replace_json(path, {"a": "x" * 100})
    assert read_json(path) == {"a": 1}


def test_what_has_to_survive_a_power_cut_is_on_the_disk_before_it_gets_its_name(
    tmp_path, monkeypatch
):
    path = tmp_path / "result.json"
    seen = []
    monkeypatch.setattr(os, "fsync", lambda number: seen.append((os.fstat(number), path.exists())))
    replace_json(path, {"a": 1})
    assert seen == []
    path.unlink()
    replace_json(path, {"a": 1}, survives_power_cut=True)
    [(synced, existed)] = seen
    assert synced.st_ino == path.stat().st_ino and synced.st_size > 0 and not existed
