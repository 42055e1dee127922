"""What a group of a launch runs, and where. Run: pytest tests/launch/test_group_process.py.

Faked: the cores and GPUs of the machine, by what names them; the coordinator's addresses.
"""

import os
import sys

from composer_replication.launch.group_process import environment, group_environment, train_command


def test_several_processes_start_under_composers_launcher(tmp_path):
    run_dir = tmp_path / "{odd}"
    command = train_command(2, run_dir, 1)
    assert command[:5] == [sys.executable, "-m", "composer.cli.launcher", "--nproc", "2"]
    # Composer formats this name: the folder's own braces must survive that.
    output = command[command.index("--stdout") + 1]
    assert output.format(rank=1) == str(run_dir / "replica_1" / "log_rank1.txt")
    alone = train_command(1, run_dir, 1)
    assert alone[-2:] == ["train", str(run_dir / "config.yaml")]
    assert command[-6:] == ["--command_mode", *alone]


class Addresses:
    """Of a coordinator."""

    address = "http://a:2"
    lighthouse_addr = "http://a:1"


def test_groups_share_cores_and_gpus_and_not_the_launchers_place_in_a_job(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("RANK", "3")
    environ = environment(1, 2, 2, Addresses())
    assert environ["TORCHFT_LIGHTHOUSE"] == "http://a:1"
    assert environ["COMPOSER_REPLICATION_COORDINATOR"] == "http://a:2"
    assert environ["OMP_NUM_THREADS"] == "2"
    assert environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert "RANK" not in environ
    assert environ["COMPOSER_REPLICATION_HOSTNAME"] == "127.0.0.1"
    # More groups than cores: one thread for each group.
    assert environment(1, 16, 1, Addresses())["OMP_NUM_THREADS"] == "1"
    # Too few GPUs for each to have its own: who shares which is the user's business.
    assert environment(1, 8, 1, Addresses())["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    # A command that starts its own ranks gets an equal share.
    assert environment(1, 2, None, Addresses())["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert environment(1, 3, None, Addresses())["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment(1, 8, None, Addresses())["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    monkeypatch.setenv("COMPOSER_REPLICATION_HOSTNAME", "10.0.0.1")
    own = environment(1, 2, 2, Addresses())["COMPOSER_REPLICATION_HOSTNAME"]
    assert own == "10.0.0.1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment(1, 2, 2, Addresses())["OMP_NUM_THREADS"] == "5"


def test_a_group_gets_its_id_and_its_folder_from_the_environment(tmp_path):
    assert group_environment("site-a", tmp_path, 15.0) == {
        "REPLICA_GROUP_ID": "site-a",
        "COMPOSER_REPLICATION_RUN_DIR": str(tmp_path),
        "COMPOSER_REPLICATION_HANG_TIMEOUT_S": "15",
        "PYTHONUNBUFFERED": "1",
    }
