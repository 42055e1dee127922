"""A group's options and names, from arguments and the environment.

Run: pytest tests/replica/test_options.py. Pure, no process.
"""

import math
import re

import pytest

from composer_replication.options import (
    ReplicaEnv,
    ReplicaOptions,
    _warn_of,
    check_replica_id,
    read_tokens,
)

# ---- the environment ------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["0", "-1", "two", "2.0", ""])
def test_a_number_of_groups_that_is_none_is_refused_with_the_variable(count):
    with pytest.raises(ValueError, match=re.escape(f"NUM_REPLICA_GROUPS={count!r}: use the ")):
        ReplicaEnv.from_env({"NUM_REPLICA_GROUPS": count})


DOCUMENTED = set(re.findall(r"\| ``(\w+)`` \|", str(ReplicaEnv.__doc__)))


class ReadLog(dict):
    """An environment that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return default


def test_the_docstring_s_table_lists_what_is_read():
    environ = ReadLog()
    ReplicaEnv.from_env(environ)
    assert environ.asked == DOCUMENTED


# ---- the run's secret -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", ()),
        (" \n", ()),
        ("abc\n", ("abc",)),  # as files and Kubernetes secrets have it
        ("new,old", ("new", "old")),
        ("new\r\nold\r\n", ("new", "old")),
        ("new,\n old ,", ("new", "old")),
        ("of the run", ("of the run",)),
    ],
)
def test_a_token_is_read_without_what_surrounds_it_and_there_may_be_an_old_one(text, tokens):
    assert read_tokens(text) == tokens
    env = ReplicaEnv.from_env({"COMPOSER_REPLICATION_TOKEN": text})
    assert env.token == (tokens[0] if tokens else None)


@pytest.mark.parametrize(("text", "place"), [("schl\u00fcssel", 5), ("ok,a\tb", 2)])
def test_a_token_that_no_http_header_can_hold_is_refused_without_showing_it(text, place):
    with pytest.raises(ValueError, match=f"TOKEN: character {place} ") as error:
        ReplicaEnv.from_env({"COMPOSER_REPLICATION_TOKEN": text})
    assert text not in str(error.value)


def test_more_than_two_tokens_are_refused():
    with pytest.raises(ValueError, match="token_file has 3 tokens"):
        read_tokens("a,b,c", "token_file")


def test_no_token_is_printed():
    assert "secret" not in repr(ReplicaEnv.from_env({"COMPOSER_REPLICATION_TOKEN": "secret"}))


# ---- arguments and environment together -----------------------------------------------------


def test_what_was_not_given_comes_from_the_environment_and_an_argument_beats_it():
    environ = {
        "REPLICA_GROUP_ID": "1",
        "NUM_REPLICA_GROUPS": "2",
        "TORCHFT_LIGHTHOUSE": "http://head:29510",
    }
    options = ReplicaOptions(replica_id=0, timeout=7.0).with_environment(environ)
    assert options == ReplicaOptions(
        replica_id=0, num_replicas=2, lighthouse_addr="http://head:29510", timeout=7.0
    )


@pytest.mark.parametrize(
    ("environ", "is_alone"),
    [
        ({}, False),
        ({"NUM_REPLICA_GROUPS": "1"}, True),
        ({"NUM_REPLICA_GROUPS": "2"}, False),
        ({"NUM_REPLICA_GROUPS": "1", "TORCHFT_LIGHTHOUSE": "http://head:29510"}, False),
        ({"NUM_REPLICA_GROUPS": "1", "COMPOSER_REPLICATION_COORDINATOR": "http://head:1"}, False),
    ],
)
def test_one_group_that_knows_of_no_other_is_alone_and_needs_no_name(environ, is_alone):
    options = ReplicaOptions().with_environment(environ)
    assert (options.is_alone, options.replica_id) == (is_alone, "0" if is_alone else None)
    named = ReplicaOptions(replica_id="berlin").with_environment(environ)
    assert (named.is_alone, named.replica_id) == (is_alone, "berlin")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("COMPOSER_REPLICATION_TLS_DIR", "those of groups are REPLICA_GROUP_ID, NUM_REPLICA"),
        ("COMPOSER_REPLICATION_NUM_REPLICAS", "those of groups are REPLICA_GROUP_ID, NUM_"),
        ("COMPOSER_REPLICATION_COORDINATOR_PORT", "those of groups are REPLICA_GROUP_ID"),
        ("COMPOSER_REPLICATION_RUNDIR", "did you mean COMPOSER_REPLICATION_RUN_DIR?"),
        ("COMPOSER_REPLICATION_HANG_TIMEOUT", "did you mean COMPOSER_REPLICATION_HANG_TIMEOUT_S?"),
        ("COMPOSER_REPLICATON_TOKEN", "did you mean COMPOSER_REPLICATION_TOKEN?"),
        ("COMPOSER_REPL_TOKEN", "did you mean COMPOSER_REPLICATION_TOKEN?"),
    ],
)
def test_a_variable_of_ours_that_nothing_reads_is_named_once(name, fix, caplog):
    _warn_of.cache_clear()
    for _ in range(2):
        ReplicaEnv.from_env({name: "value", "COMPOSERS": "1"})
    [message] = caplog.messages
    assert message.startswith(f"Nothing reads the variable {name}: {fix}")
    assert "value" not in message


def test_no_variable_that_is_read_is_warned_of(caplog):
    ReplicaEnv.from_env(dict.fromkeys(DOCUMENTED, "7"))
    assert caplog.messages == []


def test_an_empty_variable_is_none():
    empty = dict.fromkeys(DOCUMENTED - {"REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"}, "")
    assert ReplicaEnv.from_env(empty) == ReplicaEnv.from_env({})


def test_the_environment_is_checked_like_an_argument():
    with pytest.raises(ValueError, match="min_replica_size=3 is above num_replicas=2: no sync"):
        ReplicaOptions(min_replica_size=3).with_environment({"NUM_REPLICA_GROUPS": "2"})
    with pytest.raises(ValueError, match="backend='mpi': use .*gloo"):
        ReplicaOptions().with_environment({"COMPOSER_REPLICATION_BACKEND": "mpi"})


SECONDS = ("start_timeout_s", "timeout", "give_up_after_s")
COUNTS = {"min_replica_size": 1, "num_replicas": 1, "digest_every": 0}


@pytest.mark.parametrize(
    ("name", "value", "use"),
    [
        (n, v, "a number of seconds")
        for n in SECONDS
        for v in (0, -1.0, math.inf, math.nan, "60", True)
    ]
    + [(n, v, f"an integer of at least {least}") for n, least in COUNTS.items() for v in (-1, 1.0)],
)
def test_a_number_out_of_range_is_refused_with_its_name_and_the_range(name, value, use):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: use {use}")):
        ReplicaOptions(**{name: value})


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


def test_a_slash_behind_the_lighthouses_address_is_no_part_of_it():
    environ = {"TORCHFT_LIGHTHOUSE": "http://host:29510/"}
    for options in (
        ReplicaOptions(lighthouse_addr="http://host:29510/"),
        ReplicaOptions().with_environment(environ),
    ):
        assert options.lighthouse_addr == "http://host:29510"
