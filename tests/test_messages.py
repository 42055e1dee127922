"""Holds docs/messages.md to the messages that the package raises or warns with."""

from pathlib import Path

import pytest
from message_texts import Texts

from composer_replication.coordinator.database import FIXES

PAGE = Path(__file__).parents[1] / "docs/messages.md"

# What these raise or log is an error with a text of its own, or one of somebody else. Some are a
# signal that nobody sees. Whoever adds one decides that the page needs no row for it.
PASSED_ON = {
    "callback/export.py": ["raise ValueError(f'{path} {error}') from None"],
    "callback/sharded_folder.py": ["raise cause from None"],
    "cli.py": [
        "raise typer.Exit",
        "raise typer.Exit(status)",
        "raise typer.Exit(run(load_config(config, overrides or []), config, replicas))",
        "raise typer.Exit(doctor(self))",
    ],
    "coordinator/database.py": ["raise StorageError(f'{self._path}: {error}. {fix}') from error"],
    "coordinator/membership.py": ["raise self._refusal"],
    "coordinator/run_settings.py": ["raise RejectedError(str(error)) from error"],
    "coordinator/strangers.py": ["log.warning('%s', error)"],
    "coordinator/work_units/streams.py": ["raise UnknownStream(stream)"],
    "coordinator/work_units/work_units.py": ["raise UnknownStream(stream)"],
    "diloco/averaging/exchange.py": ["raise _PeerFailed"],
    "replica/group_layout.py": ["raise SettingsMismatch(rejection)"],
    "replica/heal/client.py": [
        "raise HealError(f'{address}{path}: {type(error).__name__}: {error}') from error"
    ],
    "replica/heal/donor.py": [
        "raise KeyError(path)",
        "raise KeyError(step)",
        "raise KeyError(name)",
    ],
    "replica/heal/state_bytes.py": ["raise NotAState(reason.splitlines()[0]) from error"],
    "replica/quorum_watch.py": [
        "raise QuorumFailed((str(error) or repr(error)).splitlines()[0]) from error",
        "raise QuorumDeclined",
    ],
    "replica/ranks.py": ["raise error"],
    "simulation/manager.py": ["raise Stopped", "raise Stopped(restarts=True)"],
    "simulation/shared_buffer.py": ["raise Stopped"],
    "training/building.py": [
        "raise ConfigError(' '.join(str(inner).split())) from cause",
        "raise ConfigError(f'{where}: {error}') from error",
        "raise cause from None",
    ],
    "training/signatures.py": ["raise _Unclear"],
    "training/target_checks.py": [
        "raise ConfigError(f'{where}: {error}') from error",
        "raise wrong",
    ],
    "training/trainer.py": ["raise error.__cause__ from None"],
}


@pytest.fixture(scope="module")
def texts():
    return Texts()


def rows():
    """The message, the cause and the fix of each row of the page."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert all(len(each) == 3 for each in cells), [each for each in cells if len(each) != 3]
    return [(message.strip("`"), cause, fix) for message, cause, fix in cells]


def messages():
    return [message for message, _, _ in rows()]


def test_every_message_of_the_package_has_a_row(texts):
    begins = tuple(messages())
    missing = sorted(text for text in texts.all() if not text.startswith(begins))
    assert missing == [], "docs/messages.md has no row for these"


def test_every_row_is_the_only_one_of_a_message_of_the_package(texts):
    """So that the test above misses each row that is removed."""
    known = messages()
    rows_of = {text: [each for each in known if text.startswith(each)] for text in texts.all()}
    needed = {found[0] for found in rows_of.values() if len(found) == 1}
    # Errors of the database begin with a path and SQLite's own text: the page has what follows.
    ends = [each for each in known if any(end.startswith(each) for end in FIXES.values())]
    assert sorted({*known} - needed) == sorted(ends), "no message begins with these"


def test_every_row_has_a_cause_and_a_fix():
    for message, cause, fix in rows():
        assert cause and fix, message
    assert len(set(messages())) == len(rows())


def test_a_text_that_cannot_be_read_from_the_code_is_known(texts):
    unread = {}
    for (file, code), found in texts.by_place.items():
        if not found:
            unread.setdefault(file, []).append(code)
    assert {f: sorted(c) for f, c in unread.items()} == {f: sorted(c) for f, c in PASSED_ON.items()}
