"""What the groups of a launch run, and where. Run: pytest tests/launch/test_job.py.

Real: files, and in the test of a script without the callback the processes and the lighthouse.
Faked: the cores and GPUs of the machine, by what names them; the coordinator's addresses.
"""

import json
import os
import sys
from types import SimpleNamespace

import pytest
from scripted_groups import supervise

from composer_replication.config_file import ConfigError, diloco_section, read_yaml, save_config
from composer_replication.group.run_folder import STATUS, ReplicaFolder
from composer_replication.launch import job as job_module
from composer_replication.launch.commands import JobOptions
from composer_replication.launch.job import (
    TRAIN,
    environment,
    group_command,
    group_environment,
    job_of,
)
from composer_replication.launch.launcher import LaunchOptions, launch_groups
from composer_replication.launch.supervision import MISSING_CALLBACK
from composer_replication.util.lazy import MissingExtraError


def test_a_command_gets_its_group_and_the_runs_folder(tmp_path):
    command = ["llmfoundry", "train", "a.yaml", "data={run_dir}/{replica_id}", '{"lr": 1}', "{x}"]
    own = group_command(command, None, tmp_path, 3)
    assert own == [*command[:3], f"data={tmp_path}/3", '{"lr": 1}', "{x}"]
    assert group_command(TRAIN, 1, tmp_path, 3)[-2:] == ["train", f"{tmp_path}/config.yaml"]


def test_several_ranks_start_under_composers_launcher(tmp_path):
    run_dir = tmp_path / "{odd}"
    command = group_command(TRAIN, 2, run_dir, 1)
    assert command[:4] == [sys.executable, "-m", "composer.cli.launcher", "--nproc=2"]
    # Composer formats this name: the folder's own braces must survive that.
    output = command[4].format(rank=1)
    assert output == f"--stdout={run_dir}/replica_1/log_rank1.txt"
    assert command[-6:] == ["--command_mode", *group_command(TRAIN, 1, run_dir, 1)]


def test_settings_come_from_a_file_of_the_job_and_are_replaced(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "variables: {runs: /runs}\n"
        "max_seq_len: ${not.ours}\n"
        "callbacks:\n"
        "  lr_monitor: {}\n"
        "  diloco: {sync_every: 5, timeout: 9, run_dir: '${variables.runs}/a'}\n"
    )
    command = ["true", "${HOME}", "job.yaml"]
    job = job_of(JobOptions(command=command, settings=path, set=["sync_every=20", "outer_lr=0.5"]))
    assert job.config["callbacks"]["diloco"] == {"sync_every": 20, "outer_lr": 0.5}
    left_out = "(without timeout: name such options in the command)"
    assert job.source == f"{path} --set sync_every=20 --set outer_lr=0.5 {left_out}"
    assert job.config["run_dir"] == "/runs/a"
    assert job.name == "job.yaml" and job.nproc is None
    save_config(job.config, tmp_path / "config.yaml")
    saved = read_yaml(tmp_path / "config.yaml")
    assert diloco_section(saved)["sync_every"] == 20 and list(saved.command) == command


def test_a_command_line_with_settings_alone_is_a_job(tmp_path):
    given = {"set": ["sync_every=3"], "run_dir": tmp_path, "resume": True, "nproc": 2}
    job = job_of(JobOptions(command=["true"], **given))
    assert job.config["callbacks"] == {"diloco": {"sync_every": 3}}
    assert job.config["run_dir"] == str(tmp_path) and job.config["autoresume"] is True
    assert job.nproc == 2 and job.source == "--set sync_every=3"


def test_a_file_of_settings_alone_also_names_the_folder_and_how_long_to_wait(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("sync_every: 3\nrun_dir: /runs/b\nstart_timeout_s: 5\n")
    job = job_of(JobOptions(command=["true"], settings=path))
    assert job.config["callbacks"] == {"diloco": {"sync_every": 3, "start_timeout_s": 5}}
    assert job.config["run_dir"] == "/runs/b" and job.source == str(path)
    path.write_text("sync_every: 3\nrun_dir: ${nowhere}\n")
    with pytest.raises(ConfigError, match=r"run_dir='\$\{nowhere\}' cannot be resolved"):
        job_of(JobOptions(command=["true"], settings=path))


def test_groups_that_do_not_join_are_named_once_with_what_is_missing(tmp_path):
    joins = {"phase": "joining", "inner_steps": 0, "trained_at": None}
    # The position of an earlier process, as `run` leaves it.
    earlier = {"phase": "starting", "inner_steps": 9, "trained_at": 5.0}
    for replica_id, status in enumerate((joins, {"phase": "x"}, earlier)):
        (tmp_path / f"replica_{replica_id}").mkdir()
        (tmp_path / f"replica_{replica_id}" / STATUS).write_text(json.dumps(status))

    def said(timeout_s):
        def finish(groups, looks):
            groups.lives = dict.fromkeys(range(4), [0 if len(looks) > 1 else None])

        lives = dict.fromkeys(range(4), [None])
        return supervise(tmp_path, lives, on_look=finish, start_timeout_s=timeout_s)[1].said

    text = f"Replica group 1, 2, 3 has not joined after 0 seconds. {MISSING_CALLBACK}"
    assert said(0.0) == [text] and said(60.0) == []


@pytest.mark.integration
@pytest.mark.parametrize("resume", [False, True])
def test_without_the_callback_the_line_to_add_is_printed(tmp_path, capsys, resume):
    if resume:  # an earlier process had the callback
        for replica_id in (0, 1):
            folder = ReplicaFolder(tmp_path / "run", replica_id)
            folder.write_status("training", inner_steps=9, trained_at=5.0)
    trains = "import time; print('epoch 1'); time.sleep(2)"
    (tmp_path / "a.yaml").write_text("callbacks: {diloco: {start_timeout_s: 0.5}}")
    command = [sys.executable, "-c", trains]
    own = {"settings": tmp_path / "a.yaml", "set": ["sync_every=3"], "run_dir": tmp_path / "run"}
    job = job_of(JobOptions(command=command, resume=resume, **own))
    assert launch_groups(job, LaunchOptions()) == 2
    said = capsys.readouterr()
    assert "Replica group 0, 1 has not joined after 0 seconds" in said.out
    assert "callbacks=[DiLoCoCallback()]" in said.out
    assert said.err.startswith("Error: replica group 0 has ended without a result. What trains")
    assert "callbacks=[DiLoCoCallback()]" in said.err and len(said.err) < 300


def environment_of(replicas, nproc):
    coordinator = SimpleNamespace(address="http://a:2", lighthouse_addr="http://a:1")
    return environment(1, replicas, nproc, coordinator)


def test_groups_share_cores_and_gpus_and_not_the_launchers_place_in_a_job(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("RANK", "3")
    environ = environment_of(2, 2)
    assert environ["TORCHFT_LIGHTHOUSE"] == "http://a:1"
    assert environ["COMPOSER_REPLICATION_COORDINATOR"] == "http://a:2"
    assert environ["OMP_NUM_THREADS"] == "2"
    assert environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert "RANK" not in environ
    assert environ["COMPOSER_REPLICATION_HOSTNAME"] == "127.0.0.1"
    # More groups than cores: one thread for each group.
    assert environment_of(16, 1)["OMP_NUM_THREADS"] == "1"
    # Too few GPUs for each to have its own: who shares which is the user's business.
    shared = environment_of(8, 1)
    assert shared["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    # A command that starts its own ranks gets an equal share.
    assert environment_of(2, None)["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert environment_of(3, None)["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment_of(8, None)["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    monkeypatch.setenv("COMPOSER_REPLICATION_HOSTNAME", "10.0.0.1")
    own = environment_of(2, 2)["COMPOSER_REPLICATION_HOSTNAME"]
    assert own == "10.0.0.1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment_of(2, 2)["OMP_NUM_THREADS"] == "5"


def test_a_group_gets_its_id_and_its_folder_from_the_environment(tmp_path):
    assert group_environment("site-a", tmp_path, 15.0) == {
        "REPLICA_GROUP_ID": "site-a",
        "COMPOSER_REPLICATION_RUN_DIR": str(tmp_path),
        "COMPOSER_REPLICATION_HANG_TIMEOUT_S": "15",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_config_without_composer_is_refused_before_a_group_starts(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("max_duration: 1ba")
    monkeypatch.setattr(job_module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"config needs Composer: run pip install"):
        job_of(JobOptions(config=tmp_path / "a.yaml"))
