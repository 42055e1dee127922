"""An average that replaces the local parameters becomes the global ones, in all groups."""

from functools import partial

import pytest
import torch
from common import Constant
from promises.groups import STREAMING, run

from composer_replication.diloco.outer_optimizer import nesterov_sgd

MOVES = (1.0, -3.0, 0.7)
SETTINGS = {
    "vanilla": {"sync_every": 3},
    "fragments": {"sync_every": 4, "fragment_patterns": ["a", "b"]},
    "streaming": {"sync_every": 4, "fragment_patterns": ["a", "b"], **STREAMING},
}


def train(group, steps, replace_after, value=5.0, final=True):
    """The model is filled with a value on the way: the global parameters, the digest, and what
    ``a`` was after each step."""
    diloco, trace = group.diloco, []
    for step in range(1, steps + 1):
        if step == steps:
            diloco.expect_last_step()
        group.step(MOVES[group.id])
        if step == replace_after:
            for parameter in group.model.parameters():
                torch.nn.init.constant_(parameter, value)
            diloco.make_local_global()
        trace.append((group.local[0], group.theta[0], diloco.replaces_global))
    if final:
        group.end()
        assert not diloco.replaces_global and group.local == pytest.approx(group.theta)
    return (
        diloco.global_digest(),
        group.theta,
        [list(column) for column in zip(*trace, strict=True)],
    )


def trained(k, *arguments, settings, **named):
    """What groups return that end with the same digest."""
    settings = {"model": partial(Constant, a=(2,), b=(3,))} | settings
    settings |= {"outer": nesterov_sgd(momentum=0.9)}
    runs = run(k, lambda group: train(group, *arguments, **named), **settings)
    assert len({digest for digest, *_ in runs}) == 1
    return [(theta, trace) for _, theta, trace in runs]


@pytest.mark.parametrize("wire_format", ["float32", "fp4"])
@pytest.mark.parametrize("steps", [6, 7, 8, 9])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_after_the_last_step_it_is_what_the_model_ends_with(settings, steps, groups, wire_format):
    settings = settings | {"wire_format": wire_format}
    for theta, _ in trained(groups, steps, steps, value=0.1, settings=settings):
        assert theta == pytest.approx([0.1] * 2, abs=1e-6)  # no wire format rounds it


def test_in_mid_run_the_next_outer_step_is_the_plain_mean_and_momentum_begins_anew():
    runs = trained(2, 9, 4, final=False, settings={"sync_every": 3})
    for (_, (local, theta, replaces)), move in zip(runs, MOVES, strict=False):
        assert local[3:5] == [5.0, 5.0 + move]
        assert replaces == [False] * 3 + [True] * 2 + [False] * 4
        # Two steps after the average, of -1 in the mean; then a first outer step of 3 of them.
        assert theta[5] == pytest.approx(3.0)
        assert theta[8] == pytest.approx(3.0 - 0.7 * 1.9 * 3)


def test_what_is_in_flight_leaves_the_average_alone():
    settings = {"sync_every": 4, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
    runs = trained(2, 8, 3, final=False, settings=settings)
    for (_, (local, theta, _)), move in zip(runs, MOVES, strict=False):
        assert theta[3] == pytest.approx(10 - 0.7 * 1.9 * 2)  # what was sent after two steps
        assert local[3:6] == [5.0 + move, 5.0 + 2 * move, 5.0 + 3 * move]
        assert theta[7] == pytest.approx(5.0 - 3)  # what was sent after six
