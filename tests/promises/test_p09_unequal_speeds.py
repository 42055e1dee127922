"""P9: groups may take different numbers of inner steps; ``weight_by`` says what that means."""

import pytest
from common import plain_sgd
from harness.groups import run


@pytest.mark.parametrize(("weight_by", "theta"), [
    ("uniform", 10 - (2 + 6) / 2),
    ("steps", 10 - (2 * 2 + 6 * 6) / 8),
    ("samples", 10 - (30 * 2 + 6 * 6) / 36),
    ("tokens", 10 - (60 * 2 + 600 * 6) / 660),
])  # fmt: skip
def test_unequal_groups_are_weighted_as_asked(weight_by, theta):
    # One group takes 2 steps of 15 samples of 2 tokens, the other 6 steps of 1 sample of 100
    # tokens, each step by -1.
    def replica(group):
        steps, samples, tokens = ((2, 15, 30), (6, 1, 100))[group.id]
        for _ in range(steps):
            group.diloco.count_samples(samples)
            group.diloco.count_tokens(tokens)
            group.step(-1.0)
        if not group.reports:
            group.end()
        return group.theta

    own = [{"sync_every": 6 if weight_by == "uniform" else steps} for steps in (2, 6)]
    settings = {"outer": plain_sgd(), "weight_by": weight_by}
    assert run(2, replica, own=own, **settings) == [[pytest.approx(theta)]] * 2
