"""What only shows how a training goes does not end it, whatever is wrong with it.

Run: pytest tests/callback/test_fence.py

Real: Composer's Trainer, its progress bar and loggers, the run's folder, one process of its own.
The groups of the other fits are threads over the simulation's shared buffer.
"""

import contextlib
import io
import logging
import os
import sys

import pytest
import tqdm.auto
from composer.loggers import InMemoryLogger, LoggerDestination
from failing_disk import no_file_above
from harness.trainers import fit_alone, fit_groups, saving
from run_events import result_of

from composer_replication.simulation.simulation import SimulationError
from composer_replication.util import fence as fences
from composer_replication.util.fence import fence

pytestmark = pytest.mark.slow


class Broken(LoggerDestination):
    """A logger that cannot log what is DiLoCo's."""

    def log_metrics(self, metrics, step=None):
        if any(name.startswith("diloco/") for name in metrics):
            raise RuntimeError("the service is away")


class BrokenHandler(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("outer step"):
            raise RuntimeError("the service is away")


class BarsOff(tqdm.auto.tqdm):
    """What a bar is with TQDM_DISABLE=1, which tqdm reads when it is imported."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options | {"disable": True})


def bars_off(monkeypatch):
    monkeypatch.setattr(tqdm.auto, "tqdm", BarsOff)


def closed_stdout(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)


def no_columns(monkeypatch):  # tqdm takes one less
    monkeypatch.setenv("COLUMNS", "1")
    monkeypatch.setenv("LINES", "1")


@contextlib.contextmanager
def broken_handler(monkeypatch):
    handler = BrokenHandler()
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


class Console(io.TextIOWrapper):
    """A stdout that claims to be a terminal, so that the progress bar is drawn."""

    def isatty(self):
        return True


AROUND = {
    "TQDM_DISABLE=1": (bars_off, None),
    "closed stdout": (closed_stdout, None),
    "full disk": (lambda _: no_file_above(0), "Cannot show the result of this group"),
    "console of width 0": (no_columns, None),
    "a logger that raises": (lambda _: None, "Cannot show the metrics of a sync in Broken"),
    "a handler that raises": (broken_handler, "Cannot show the syncs"),
}
"""What is around a fit, and how the one line about it begins; None: there is nothing to say."""


@pytest.mark.parametrize("around", AROUND)
def test_a_fit_ends_whatever_is_wrong_with_what_shows_it(around, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fences, "_logged", set())
    enter, said = AROUND[around]
    kept = [InMemoryLogger(), InMemoryLogger()]

    def loggers(group):
        return {"loggers": [*([Broken()] if around == "a logger that raises" else []), kept[group]]}

    with (
        caplog.at_level(logging.INFO),
        Console(open(os.devnull, "wb")) as console,
        enter(monkeypatch) or contextlib.nullcontext(),
    ):
        bar = {"progress_bar": True, "console_stream": console}
        diloco = {"run_dir": str(tmp_path)}
        fits = fit_groups(2, own=loggers, max_duration="8ba", diloco=diloco, **bar)
    one, other = (fit.result for fit in fits)
    assert one["outer_steps"] == other["outer_steps"] == 4
    assert one["global_digest"] == other["global_digest"]
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Cannot show")]
    assert [line[: len(said)] for line in lines] == [said] if said else lines == []
    for logger in kept:  # those that work get what they are due
        assert len(logger.data["diloco/outer_step"]) == 4
    if around != "full disk":
        assert result_of(tmp_path / "replica_1") == other


def test_a_checkpoint_that_cannot_be_written_stays_an_error(tmp_path):
    with pytest.raises(SimulationError), no_file_above(0):
        fit_alone(**saving(tmp_path, 0, "2ba"))


def test_a_fence_says_the_first_error_of_a_kind_and_lets_an_interrupt_through(caplog, monkeypatch):
    monkeypatch.setattr(fences, "_logged", set())

    @fence("a bar")
    def draw(error):
        raise error

    for number in range(3):
        assert draw(ZeroDivisionError(number)) is None
    with pytest.raises(KeyboardInterrupt):
        draw(KeyboardInterrupt())
    [line] = caplog.messages
    assert line == "Cannot show a bar, and goes on without it: ZeroDivisionError: 0"
