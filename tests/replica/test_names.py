"""The names of runs and groups. Run: pytest tests/replica/test_names.py. Pure, no process."""

import re

import pytest

from composer_replication.replica.names import check_replica_id, run_id_of_folder
from composer_replication.replica.options import ReplicaOptions


@pytest.mark.parametrize("name", [0, 17, "0", "berlin", "eu-west_1.a", "a" * 64])
def test_a_group_s_name_is_of_letters_digits_and_three_signs(name):
    check_replica_id(name)
    ReplicaOptions(replica_id=name)


@pytest.mark.parametrize(
    "name",
    ["", " ", "eu/west", "a?b", "a#b", "..", ".a", "-a", "a b", "a:b", "a&b", "it's", "50%",
     "\u00fcber", "a\n", "a" * 65, True],
)  # fmt: skip
def test_a_name_that_would_be_misread_elsewhere_is_refused_with_the_rule(name):
    rule = "of at most 64 letters, digits, '.', '_' and '-', with a letter or a digit in front"
    for make in (check_replica_id, lambda name: ReplicaOptions(replica_id=name)):
        with pytest.raises(ValueError, match=re.escape(f"replica_id={name!r}: ")) as error:
            make(name)
        assert rule in str(error.value)


@pytest.mark.parametrize("run_id", ["", "a/b", "..", "-a", "a b", "a\n", "a" * 129, 7])
def test_an_id_that_would_be_misread_elsewhere_is_refused_with_the_rule(run_id):
    with pytest.raises(ValueError, match=re.escape(f"run_id={run_id!r}: name the run with")):
        ReplicaOptions(run_id=run_id)


@pytest.mark.parametrize(
    ("folder", "run_id"),
    [
        ("runs/exp-7", "exp-7"),
        ("runs/my run (2)/", "my-run-2-"),
        ("/", None),
        ("x/..-", None),
        ("y" * 200, "y" * 128),
    ],
)
def test_a_folder_gives_the_run_an_id_that_may_be_one(folder, run_id):
    assert ReplicaOptions(run_dir=folder).run_id_or_folder == run_id_of_folder(folder) == run_id
    ReplicaOptions(run_id=run_id)


def test_an_id_beats_the_folder_and_an_argument_the_environment():
    environ = {"COMPOSER_REPLICATION_RUN_ID": "exp-7"}
    assert ReplicaOptions(run_dir="x").with_environment(environ).run_id_or_folder == "exp-7"
    assert ReplicaOptions(run_id="mine").with_environment(environ).run_id_or_folder == "mine"
