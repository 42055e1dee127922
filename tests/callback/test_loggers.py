"""Which of a logger's runs are named. Run: pytest tests/callback/test_loggers.py

Real: Composer's TensorBoard logger. tests/integration/test_loggers.py has a run of two groups.
"""

import logging
from types import SimpleNamespace

import pytest

from composer_replication.callback.loggers import _renamed, name_runs
from composer_replication.replica.options import ReplicaOptions

pytest.importorskip("tensorboard")


@pytest.fixture
def folder_of(tmp_path):
    """The folder to which a logger of a group writes, which has these options."""

    def folder_of(**options):
        from composer.loggers import TensorboardLogger

        tensorboard, state = TensorboardLogger(str(tmp_path)), SimpleNamespace(run_name="exp")
        tensorboard.init(state, None)
        name_runs(state, SimpleNamespace(destinations=[tensorboard]), ReplicaOptions(**options))
        tensorboard.writer.close()
        [file] = tmp_path.rglob("events.*")
        return str(file.parent.relative_to(tmp_path))

    return folder_of


def test_a_group_of_a_run_is_named(folder_of):
    assert folder_of(replica_id="a", num_replicas=2, run_dir="runs/x") == "x/replica_a"


def test_what_an_earlier_run_has_written_stays(folder_of, tmp_path):
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "earlier").touch()
    assert folder_of(replica_id="a", num_replicas=2, run_id="x") == "x/replica_a"
    assert (tmp_path / "exp" / "earlier").exists()


def test_a_group_that_trains_alone_is_left_as_it_is(folder_of, caplog):
    assert folder_of(replica_id="0", num_replicas=1, run_dir="runs/x") == "exp"
    assert not caplog.records


def test_a_run_without_an_id_is_left_as_it_is_and_the_fix_is_said(folder_of, caplog):
    with caplog.at_level(logging.WARNING):
        assert folder_of(replica_id="a", lighthouse_addr="http://head:1") == "exp"
    assert "TensorboardLogger cannot put" in caplog.text
    assert "set COMPOSER_REPLICATION_RUN_ID to the same name in all groups" in caplog.text


@pytest.mark.parametrize(
    ("current", "name"),
    [("exp", "replica_a"), ("exp-rank1", "replica_a-rank1"), (None, "replica_a"), ("my", "my")],
)
def test_a_name_of_the_script_stays(current, name):
    assert _renamed(current, "replica_a", "exp") == name
