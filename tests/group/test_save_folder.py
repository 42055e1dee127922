"""A folder in which one replica group saves is no other group's.

Run: pytest tests/group/test_save_folder.py. Real: the locks, and processes that hold them.
"""

import os
import signal
import subprocess
import sys

import pytest

from composer_replication.group.save_folder import hold, release
from composer_replication.options import DuplicateIdError

ARGUMENT = "a save_folder"

HOLDS = """
import os, sys, time
from composer_replication.group.save_folder import hold
hold([sys.argv[1]], "0", None, "a save_folder")
if not os.fork():
    print("forked", flush=True)
    time.sleep(60)  # a loader's worker, which outlives a group that is killed
    os._exit(0)
time.sleep(60)
"""


def refusal_of(folder, replica_id="1"):
    with pytest.raises(ValueError, match="in use by process") as caught:
        hold([str(folder)], replica_id, None, ARGUMENT)
    assert not isinstance(caught.value, DuplicateIdError)
    return str(caught.value)


@pytest.mark.integration
def test_another_process_is_refused_until_the_first_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "forked\n"
        said = refusal_of(tmp_path / "out")
        assert said.startswith(f"{tmp_path / 'out'} is in use by process {holder.pid} on ")
        assert " (replica group 0): wait" in said
        assert "give each replica group a save_folder of its own" in said
        with pytest.raises(DuplicateIdError):  # of which launch tries again
            hold([str(tmp_path / "out")], "0", None, ARGUMENT)
        holder.kill()
        holder.wait()
        hold([str(tmp_path / "out")], "1", None, ARGUMENT)  # its worker is still there
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate()
        release(None)


def test_a_group_may_be_built_anew_in_its_process_and_another_waits_for_its_release(tmp_path):
    first, second = object(), object()
    folder, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(folder)
    hold([str(folder)], "0", first, ARGUMENT)
    hold([str(link), "s3://bucket/out"], "0", second, ARGUMENT)
    release(first)
    assert str(os.getpid()) in refusal_of(folder)
    release(second)
    hold([str(folder)], "1", first, ARGUMENT)
    release(first)
