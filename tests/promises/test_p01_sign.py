"""P1: after a sync the loss moves as the inner steps moved it."""

from functools import partial

import pytest
import torch
from common import Constant, TinyMLP, batch, mse, plain_sgd
from harness.groups import STREAMING, adamw, run, traces

from composer_replication.diloco import outer_optimizer
from composer_replication.diloco.outer_optimizer import check_sign, nesterov_sgd, pseudo_gradient


def test_the_loss_goes_down_with_the_default_outer_optimizer():
    def replica(group):
        before = mse(group.model, *batch(7, 0, 256)).item()
        group.learn(0, 40)
        return before, mse(group.model, *batch(7, 0, 256)).item()

    for before, after in run(2, replica, model=TinyMLP, inner=adamw, sync_every=5):
        assert after < 0.5 * before


def test_two_rounds_with_nesterov_momentum_follow_the_trace_computed_by_hand():
    # Two groups move by -0.5 and -1.5 a step, two steps a round: pseudo-gradients 1 and 3, mean 2.
    # Nesterov, lr 0.5, momentum 0.5: buffer = 0.5 * buffer + 2; theta -= 0.5 * (2 + 0.5 * buffer).
    #   round 1: buffer 2,   theta 10 - 0.5 * (2 + 1)   = 8.5
    #   round 2: buffer 3,   theta 8.5 - 0.5 * (2 + 1.5) = 6.75
    outer = nesterov_sgd(0.5, 0.5)
    first, second = traces(2, (-0.5, -1.5), 4, outer=outer, sync_every=2)
    assert first == [(9.5, 10.0), (8.5, 8.5), (8.0, 8.5), (6.75, 6.75)]
    assert second == [(8.5, 10.0), (8.5, 8.5), (7.0, 8.5), (6.75, 6.75)]


def test_two_groups_that_stream_two_fragments_follow_the_trace_computed_by_hand():
    # Two inner steps a fragment: its pseudo-gradient is formed after the first of them and applied
    # after the second (delay 1), then local = 0.5 * local + 0.5 * global. Outer step: theta - mean.
    # Group 0 adds -1 a step, group 1 adds -3.
    #         theta of a, b   group 0: a, b   group 1: a, b
    # step 1  16, 16          15, 15          13, 13          form a: deltas 1, 3
    # step 2  14, 16          14, 14          12, 10          a: 16 - 2; 14 -> 14, 10 -> 12
    # step 3  14, 16          13, 13           9,  7          form b: deltas 3, 9
    # step 4  14, 10          12, 11           6,  7          b: 16 - 6; 12 -> 11, 4 -> 7
    # step 5  14, 10          11, 10           3,  4          form a: deltas 3, 11
    # step 6   7, 10         8.5,  9         3.5,  1          a: 14 - 7; 10 -> 8.5, 0 -> 3.5
    # final   b: deltas 1, 9, 10 - 5 = 5; then a, which has step 6: deltas -1.5, 3.5, 7 - 1 = 6
    def replica(group):
        seen = []
        for _ in range(6):
            group.step(-1.0 - 2 * group.id)
            seen.append((*group.theta, *group.local))
        group.end()
        return [*seen, (*group.theta, *group.local)]

    settings = {"fragment_patterns": ["a", "b"], "sync_every": 4, **STREAMING}
    model = partial(Constant, 16.0, a=(), b=())
    ours, theirs = run(2, replica, model=model, outer=plain_sgd(), **settings)
    theta = [(16, 16), (14, 16), (14, 16), (14, 10), (14, 10), (7, 10), (6, 5)]
    first = [(15, 15), (14, 14), (13, 13), (12, 11), (11, 10), (8.5, 9), (6, 5)]
    second = [(13, 13), (12, 10), (9, 7), (6, 7), (3, 4), (3.5, 1), (6, 5)]
    assert ours == [(*both, *own) for both, own in zip(theta, first, strict=True)]
    assert theirs == [(*both, *own) for both, own in zip(theta, second, strict=True)]


@pytest.mark.parametrize(("delay", "alpha", "trace"), [
    (0, 0.0, [(9, 10), (8, 10), (7, 10), (6, 6), (5, 6), (4, 6), (3, 6), (2, 2)]),
    # Delta formed at step 2 is 10-8=2, applied at step 4: theta 8, local 0.5*6+0.5*8 = 7. Round 2:
    # at step 6 local is 5, delta 8-5=3, theta 5 at step 8, local 0.5*3+0.5*5 = 4.
    (2, 0.5, [(9, 10), (8, 10), (7, 10), (7, 8), (6, 8), (5, 8), (4, 8), (4, 5)]),
    (2, 1.0, [(9, 10), (8, 10), (7, 10), (6, 8), (5, 8), (4, 8), (3, 8), (2, 4)]),
])  # fmt: skip
def test_one_group_with_delay_and_alpha_follows_the_trace_computed_by_hand(delay, alpha, trace):
    settings = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    assert traces(1, (-1.0,), 8, sync_every=4, **settings) == [trace]


def test_fragments_take_turns_from_the_first_one_after_a_cold_start():
    def replica(group):
        seen = []
        for _ in range(12):
            group.step(-1.0)
            seen.append(group.theta)
        return group.of_reports("fragment"), [seen[i] for i in (1, 3, 5, 11)]

    shape = partial(Constant, a=(1,), b=(1,), c=(1,))
    settings = {"outer": plain_sgd(), "sync_every": 6, "fragment_patterns": ["a", "b", "c"]}
    assert run(1, replica, model=shape, **settings) == [
        ([0, 1, 2] * 2, [[8, 10, 10], [8, 6, 10], [8, 6, 4], [2, 0, -2]])
    ]


# ---- the guard ---------------------------------------------------------------------------------


def test_the_pseudo_gradient_is_global_minus_local_in_the_global_dtype():
    delta = pseudo_gradient(torch.tensor([10.0]), torch.tensor([9.0], dtype=torch.bfloat16))
    assert delta.item() == 1.0 and delta.dtype == torch.float32


def test_the_guard_passes_optimizers_that_descend_and_refuses_one_that_ascends():
    check_sign(nesterov_sgd(0.7, 0.9))
    check_sign(lambda p: torch.optim.SGD(p, lr=0.0))
    check_sign(lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1))
    with pytest.raises(ValueError, match="use maximize=False"):
        check_sign(lambda p: torch.optim.SGD(p, lr=0.7, maximize=True))


def test_the_guard_refuses_a_pseudo_gradient_with_the_sign_turned(monkeypatch):
    monkeypatch.setattr(outer_optimizer, "pseudo_gradient", lambda theta, local: local - theta)
    with pytest.raises(ValueError, match="although training moved it to -0.5"):
        check_sign(nesterov_sgd(0.7, 0.9))
