"""The run's secret in files, and where it is made; the exit status.

Run: pytest tests/launch/test_coordinator_command.py.
"""

import logging
import os
import re
import signal

import pytest

from composer_replication.config_file import ConfigError
from composer_replication.coordinator.server import Coordinator
from composer_replication.launch.coordinator_command import (
    CoordinatorCommand,
    choose_tokens,
    read_token_file,
    write_token_file,
)
from composer_replication.launch.launcher import token_hint

ANY = "[::]:29512"


@pytest.fixture(autouse=True)
def no_token_in_the_environment(monkeypatch):
    monkeypatch.delenv("COMPOSER_REPLICATION_TOKEN", raising=False)


def mode(path):
    return path.stat().st_mode & 0o777


def test_without_a_token_one_is_made_where_others_reach_the_service(tmp_path, capsys):
    (made,) = choose_tokens(None, False, ANY, tmp_path / "state")
    path = tmp_path / "state" / "token"
    assert re.fullmatch("[0-9a-f]{32}", made) and path.read_text() == made + "\n"
    assert mode(path) == 0o600
    said = capsys.readouterr().out
    assert str(path) in said and made not in said
    # Started again, it goes on with the token that the groups have.
    assert choose_tokens(None, False, "0.0.0.0:1", tmp_path / "state") == (made,)


@pytest.mark.parametrize("bind", ["127.0.0.1:1", "[::1]:1", "localhost:1"])
def test_on_loopback_none_is_made(tmp_path, bind):
    assert choose_tokens(None, False, bind, tmp_path) == ()
    assert not any(tmp_path.iterdir())


def test_no_token_is_made_for_who_insists(tmp_path, monkeypatch):
    assert choose_tokens(None, True, ANY, tmp_path) == ()
    monkeypatch.setenv("COMPOSER_REPLICATION_TOKEN", "secret")
    with pytest.raises(ConfigError, match="--no-token and COMPOSER_REPLICATION_TOKEN in the env"):
        choose_tokens(None, True, ANY, tmp_path)


def test_a_file_comes_before_the_environment_and_may_have_two_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_REPLICATION_TOKEN", "third")
    file = tmp_path / "tokens"
    file.write_text("new\r\nold\n")
    assert choose_tokens(file, False, ANY, tmp_path) == ("new", "old")
    assert choose_tokens(None, False, ANY, tmp_path) == ("third",)


@pytest.mark.parametrize(("text", "message"), [(None, "does not exist"), (" \n", "is empty")])
def test_a_file_without_a_token_is_refused(tmp_path, text, message):
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"tokens {message}"):
        read_token_file(file)


def test_a_malformed_token_is_refused_by_its_file_and_not_shown(tmp_path):
    file = tmp_path / "tokens"
    file.write_bytes("schl\u00fcssel".encode())
    with pytest.raises(ValueError, match="tokens: character 5 of the token is U\\+00FC") as error:
        read_token_file(file)
    assert "schl" not in str(error.value)


@pytest.mark.parametrize(("bits", "warnings"), [(0o600, 0), (0o640, 1), (0o604, 1)])
def test_a_file_that_others_can_read_is_warned_of(tmp_path, caplog, bits, warnings):
    file = tmp_path / "tokens"
    file.write_text("secret")
    file.chmod(bits)
    read_token_file(file)
    messages = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == warnings and not any("secret " in message for message in messages)


def test_a_token_is_never_written_through_a_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "token").symlink_to(elsewhere)
    choose_tokens(None, False, ANY, tmp_path)
    assert not elsewhere.exists() and mode(tmp_path / "token") == 0o600
    write_token_file(tmp_path / "token", "another")
    assert (tmp_path / "token").read_text() == "another\n"


def test_launch_prints_its_token_to_a_terminal_alone(tmp_path, monkeypatch):
    assert "own" not in token_hint("own", True, tmp_path) and not any(tmp_path.iterdir())
    hint = token_hint("made", False, tmp_path)
    assert "made" not in hint and str(tmp_path / "token") in hint
    assert (tmp_path / "token").read_text() == "made\n" and mode(tmp_path / "token") == 0o600
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert token_hint("made", False, tmp_path) == "#token=made"


def dies(coordinator):
    return False


def is_interrupted(coordinator):
    os.kill(os.getpid(), signal.SIGTERM)
    return True


@pytest.mark.parametrize(("event", "status"), [(dies, 1), (is_interrupted, 0)])
def test_it_has_failed_unless_it_was_asked_to_end(tmp_path, monkeypatch, capsys, event, status):
    monkeypatch.setattr(Coordinator, "is_serving", property(event))
    assert CoordinatorCommand(bind="127.0.0.1:0", state_dir=tmp_path).run() == status
    assert ("has ended by itself" in capsys.readouterr().err) == bool(status)
