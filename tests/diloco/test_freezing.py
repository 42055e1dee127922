"""What all groups have frozen takes the outer step that is due, and then does not move by a bit."""

from functools import partial

import pytest
import torch
from common import Constant, plain_sgd
from harness.groups import STREAMING, run

from composer_replication.diloco.outer_optimizer import nesterov_sgd

MOVES = (1.0, -3.0)
"""What an inner step of each group adds to every parameter."""


def train(group, steps, freeze_after, *, by=(0, 1)):
    """After so many steps these groups freeze ``a``: its local and global values after every step,
    the global ones of ``b``, and the digest at the end."""
    seen = []
    for step in range(steps):
        if step == freeze_after and group.id in by:
            group.model.a.requires_grad_(False)
            group.model.a.grad = None
        group.step(MOVES[group.id])
        seen.append((group.local[0], *group.theta))
    return [list(column) for column in zip(*seen, strict=True)], group.diloco.global_digest()


def trained(*arguments, replica=train, dtype=torch.float32, by=(0, 1), **settings):
    """What two groups return that end with the same digest."""
    settings = {"outer": nesterov_sgd(0.7, 0.9), "sync_every": 2} | settings
    settings["model"] = partial(Constant, 10.0, dtype, a=(2,), b=(3,))
    runs = run(2, lambda group: replica(group, *arguments, by=by), **settings)
    assert runs[0][1] == runs[1][1]
    return [columns for columns, _ in runs]


AT_THE_END_OF_A_ROUND = [
    {"outer": outer, "sync_every": 4}
    for outer in (nesterov_sgd(0.7, 0.9), plain_sgd(), lambda p: torch.optim.Adam(p, 0.1))
]
IN_MID_ROUND = [
    {"wire_format": wire_format, "dtype": dtype, **settings}
    for wire_format in ("float32", "int8", "fp4")
    for dtype in (torch.float32, torch.bfloat16)
    for settings in ({"sync_every": 2}, {"sync_every": 4, **STREAMING, "fragment_sync_delay": 2})
]


@pytest.mark.parametrize(
    ("settings", "after"), [(e, 4) for e in AT_THE_END_OF_A_ROUND] + [(e, 3) for e in IN_MID_ROUND]
)
def test_frozen_it_takes_the_outer_step_that_is_due_and_never_moves_again(settings, after):
    for local_a, theta_a, theta_b in trained(20, after, **settings):
        # The sync of step 4 has what was trained until then.
        assert set(theta_a[4:]) == {theta_a[4]} and theta_a[4] != theta_a[0]
        assert set(local_a[4:]) == {torch.tensor(theta_a[4]).to(settings.get("dtype")).item()}
        assert len(set(theta_b[4:])) > 3, "what is not frozen goes on"


def test_by_hand_the_last_step_is_nesterovs_and_the_momentum_is_forgotten():
    # The mean step of the groups is -1: deltas of 2 and, with one step, of 1. Momentum 2, then 2.8.
    first = 10 - 0.7 * (2 + 0.9 * 2)
    second = first - 0.7 * (1 + 0.9 * 2.8)

    def replica(group, **by):
        columns, digest = train(group, 8, 3, **by)
        state = group.diloco.state_dict()["fragments"][0]["optimizer"]["state"]
        momenta = [each["momentum_buffer"].any().item() for each in state.values()]
        assert momenta == [False, True], "b alone has momentum"
        return columns, digest

    for _, theta_a, _ in trained(replica=replica):
        assert theta_a[3:] == pytest.approx([second] * 5)


def test_what_one_group_alone_has_frozen_goes_on_moving():
    for _, theta_a, _ in trained(8, 2, by=(0,), outer=plain_sgd()):
        # Each round of two steps: group 0 adds 0 to a and group 1 adds -6, so -3 on average.
        assert theta_a[-1] == pytest.approx(10 - 2 - 3 * 3)


def test_a_parameter_that_is_thawed_again_moves_again_without_its_old_momentum():
    def replica(group):
        seen = []
        for step in range(8):
            group.model.a.requires_grad_(not 2 <= step < 6)
            if not group.model.a.requires_grad:
                group.model.a.grad = None
            group.step(1.0)
            seen.append(group.theta[0])
        return seen

    model = partial(Constant, a=(2,), b=(3,))
    (seen,) = run(1, replica, model=model, outer=nesterov_sgd(0.7, 0.9), sync_every=2)
    first = 10 + 0.7 * 1.9 * 2
    assert seen[1:7] == pytest.approx([first] * 6)
    assert seen[7] == pytest.approx(first + 0.7 * 1.9 * 2)


def test_an_outer_optimizer_whose_state_is_there_from_the_start_keeps_it():
    def replica(group):
        group.model.a.requires_grad_(False)
        group.model.a.grad = None
        group.step(1.0, 1.0)
        group.model.a.requires_grad_(True)
        group.step(1.0, 1.0)
        return group.theta

    model = partial(Constant, a=(1,), b=(1,))
    (theta,) = run(1, replica, model=model, outer=torch.optim.Adagrad, sync_every=2)
    # Each first step of Adagrad is its learning rate.
    assert theta == pytest.approx([10.01, 10.01 + 0.01 / 2**0.5])
