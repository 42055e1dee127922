"""Several fragments in flight: schedules, an independent reference, and a model to train with.

The reference is plain Python, with one number for each fragment of each group.
"""

import pytest
import torch

from composer_replication import DiLoCo

LR, OUTER_LR, MOMENTUM, ALPHA = 0.1, 0.7, 0.6, 0.5

ONE_STEP_A_TURN = {"sync_every": 24, "num_fragments": 24, "fragment_sync_delay": 2}
THREE_IN_FLIGHT = {"sync_every": 12, "num_fragments": 4, "fragment_sync_delay": 7}
SCHEDULES = {"H = P = 24, tau = 2": ONE_STEP_A_TURN, "H = 12, P = 4, tau = 7": THREE_IN_FLIGHT}


def target(group, fragment):
    """What a group's inner steps pull the number of a fragment to."""
    return float((3 * group + 1) * (fragment % 5 + 1))


class Reference:
    """The algorithm, without a network and without tensors.

    Args:
        schedule: The settings of the schedule.
        num_groups: How many groups train from the beginning.
        lost: By group: from which sync on it contributes nothing, since it has died.
    """

    def __init__(self, schedule, num_groups, lost=None):
        self.num_fragments = schedule["num_fragments"]
        self.between = schedule["sync_every"] // self.num_fragments
        self.turns, self.delay = divmod(schedule["fragment_sync_delay"], self.between)
        self.theta, self.momentum = [10.0] * self.num_fragments, [0.0] * self.num_fragments
        self.local = {group: list(self.theta) for group in range(num_groups)}
        self.lost = lost or {}
        self.in_flight, self.num_sent, self.num_steps = [], 0, 0

    def step(self):
        self.num_steps += 1
        for group, local in self.local.items():
            for fragment, value in enumerate(local):
                local[fragment] = value - LR * (value - target(group, fragment))
        if (self.num_steps + self.delay) % self.between == 0:
            fragment = self.num_sent % self.num_fragments
            moved = {g: self.theta[fragment] - own[fragment] for g, own in self.local.items()}
            self.in_flight.append((self.num_sent, fragment, moved))
            self.num_sent += 1
        if self.num_steps % self.between == 0 and len(self.in_flight) > self.turns:
            self._take_outer_step(*self.in_flight.pop(0))

    def _take_outer_step(self, number, fragment, moved):
        given = [m for g, m in moved.items() if number < self.lost.get(g, number + 1)]
        mean = sum(given) / len(given)
        self.momentum[fragment] = MOMENTUM * self.momentum[fragment] + mean
        self.theta[fragment] -= OUTER_LR * (mean + MOMENTUM * self.momentum[fragment])
        for local in self.local.values():
            kept = ALPHA * local[fragment]
            local[fragment] = kept + (1 - ALPHA) * self.theta[fragment]


class Pulled(torch.nn.Module):
    """A model of one number for each fragment, which the inner steps pull to a target."""

    def __init__(self, num_fragments):
        super().__init__()
        for index in range(num_fragments):
            self.register_parameter(f"f{index:02d}", torch.nn.Parameter(torch.tensor([10.0])))


def build(manager, schedule, **more):
    model = Pulled(schedule["num_fragments"])
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    patterns = [f"f{index:02d}" for index in range(schedule["num_fragments"])]
    settings = {key: value for key, value in schedule.items() if key != "num_fragments"}
    settings |= {"outer_lr": OUTER_LR, "outer_momentum": MOMENTUM, "fragment_patterns": patterns}
    return model, inner, DiLoCo(manager, model, inner, **settings | more)


def pull(model, inner, group):
    for fragment, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.detach() - target(group, fragment)
    inner.step()


def numbers(tensors):
    return [tensor.item() for tensor in tensors]


def train(manager, group, schedule, steps, **more):
    """The (local, global) numbers after each inner step, and at the end the digest."""
    model, inner, diloco = build(manager, schedule, **more)
    trace = []
    with diloco:
        for _ in range(steps):
            pull(model, inner, group)
            theta = numbers(diloco.global_parameters().values())
            trace.append((numbers(model.parameters()), theta))
        diloco.final_sync()
        assert numbers(model.parameters()) == numbers(diloco.global_parameters().values())
        return trace, diloco.global_digest(), diloco.pop_finished_syncs()


def check(trace, reference, group):
    for local, theta in trace:
        reference.step()
        assert theta == pytest.approx(reference.theta, abs=1e-6, rel=1e-6), reference.num_steps
        assert local == pytest.approx(reference.local[group], abs=1e-6, rel=1e-6)
