"""P6: training that the given optimizer does not do is an error, and stays in the model."""

from functools import partial

import pytest
import torch
from common import TinyMLP, batch, mse
from harness.groups import Group, adamw, attempt, run
from torch import nn

from composer_replication import simulate
from composer_replication.diloco.algorithm import BACKWARDS

ERROR = "ValueError: the weights change, and the AdamW that DiLoCo was given does not step"


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


# ---- what steps instead of the given optimizer, from a group ------------------------------------


def in_backward(group):
    """An optimizer for each parameter, in a hook, as in torch's tutorial and layerwise GaLore."""
    own = {p: torch.optim.SGD([p], lr=0.01, fused=True) for p in group.model.parameters()}

    def step(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step)
    return lambda: None


def of_gradients(group):
    """Hooks of gradients, as LOMO has them."""

    def step(parameter, gradient):
        parameter.data.add_(gradient, alpha=-0.01)
        return torch.zeros_like(gradient)

    for parameter in group.model.parameters():
        parameter.register_hook(partial(step, parameter))
    return lambda: None


def another_optimizer(group):
    return sgd(group.model.parameters()).step


def without_hooks(group):
    """A step that a library has put in the place of torch's, whose hooks it does not call."""
    parameters = [*group.model.parameters()]

    def step():
        torch.optim._functional.sgd(
            parameters, [p.grad for p in parameters], [None] * len(parameters),
            weight_decay=0.0, momentum=0.0, lr=0.01, dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip

    group.inner.step = torch.no_grad()(step)
    return group.inner.step


def by_hand(group):
    def step():
        for parameter in group.model.parameters():
            parameter.data = parameter.data - 0.01 * parameter.grad

    return step


STEPPERS = [in_backward, of_gradients, another_optimizer, without_hooks, by_hand]


def train(group, stepper, batches, first=0, every=None):
    """Train without the given optimizer."""
    step = stepper(group)
    for number in range(first, first + batches):
        group.model.zero_grad()
        mse(group.model, *batch(group.id, number)).backward()
        step()
        if every is not None:
            every()


def weights(group):
    return [p.detach().clone() for p in group.model.parameters()]


def stays(group, does):
    """What an action raises, and whether the weights are those from before it."""
    before = weights(group)
    said = attempt(does)()
    return said, all(map(torch.equal, before, weights(group)))


FRAGMENTS = {"num_fragments": 3, "sync_every": 6}
SETTINGS = [{}, FRAGMENTS, {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}]
of_settings = pytest.mark.parametrize(
    "settings",
    [
        pytest.param(SETTINGS[0], id="vanilla"),
        pytest.param(SETTINGS[1], id="fragments", marks=pytest.mark.slow),
        pytest.param(SETTINGS[2], id="streaming", marks=pytest.mark.slow),
    ],
)


def run_mlp(groups, replica, **settings):
    return run(groups, replica, **{"model": TinyMLP, "inner": adamw, "sync_every": 4} | settings)


@of_settings
@pytest.mark.parametrize("stepper", STEPPERS)
def test_the_end_of_a_batch_or_of_training_says_so_and_leaves_the_weights(stepper, settings):
    def replica(group):
        train(group, stepper, 3)
        ends = group.diloco.forget_counted, group.diloco.sync_idle, group.diloco.final_sync
        return [stays(group, end) for end in ends]

    for said in run_mlp(2, replica, **settings):
        assert [is_kept for _, is_kept in said] == [True] * 3
        assert all(text.startswith(f"{ERROR} (inner step 0)") for text, _ in said)


@pytest.mark.slow
@of_settings
@pytest.mark.parametrize("stepper", STEPPERS)
def test_a_loop_that_calls_nothing_hears_of_it_in_a_backward_pass(stepper, settings):
    def replica(group):
        counted = []
        end = attempt(train)(group, stepper, 10**9, every=lambda: counted.append(None))
        return end, len(counted)

    for said, batches in run_mlp(2, replica, **settings):
        assert said.startswith(ERROR) and batches == 2 * BACKWARDS - 1


@pytest.mark.parametrize("settings", [{}, FRAGMENTS], ids=["vanilla", "fragments"])
@pytest.mark.parametrize("stepper", STEPPERS)
def test_an_optimizer_that_is_replaced_after_a_sync_is_found_too(stepper, settings):
    def replica(group):
        group.learn(0, 12)  # the end of a sync
        train(group, stepper, 3, first=12)
        return stays(group, group.end)

    for said, is_kept in run_mlp(2, replica, **settings):
        assert said.startswith(f"{ERROR} (inner step 12)") and is_kept


@pytest.mark.parametrize("stepper", STEPPERS)
def test_one_that_is_replaced_within_a_round_loses_nothing_and_is_found_in_a_backward_pass(stepper):
    def replica(group, batches):
        group.learn(0, 5)
        said = attempt(train)(group, stepper, batches, first=5)
        before = weights(group)
        group.end()
        return said, before, weights(group)

    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    for said, *ends in run_mlp(1, partial(replica, batches=9), **plain):
        assert said is None
        for before, after in zip(*ends, strict=True):
            torch.testing.assert_close(before, after)
    for said, *_ in run_mlp(2, partial(replica, batches=999)):
        assert said.startswith(f"{ERROR} (inner step 5)")


def test_the_weights_stay_when_the_error_leaves_the_with_block():
    def replica(sim):
        group = Group(sim, TinyMLP, inner=adamw, sync_every=4)
        with pytest.raises(ValueError, match="does not step"), group:
            train(group, in_backward, 3)
            before = weights(group)
            group.end()
        return all(map(torch.equal, before, weights(group)))

    assert simulate(replica, num_replicas=2) == [True, True]


def test_weights_that_change_without_a_gradient_are_found_at_the_end():
    def replica(group):
        for parameter in group.model.parameters():
            parameter.data.mul_(0.5)
        return stays(group, group.end)

    for said, is_kept in run_mlp(2, replica):
        assert said.startswith(ERROR) and is_kept


# ---- what is no error ---------------------------------------------------------------------------

MANY = 3 * BACKWARDS


def backward(group, count=1):
    for number in range(count):
        mse(group.model, *batch(group.id, number)).backward()


def accumulates(group):
    backward(group, MANY)
    group.inner.step()


def is_skipped(group):
    backward(group, MANY)  # a gradient scaler that calls no step after an overflow
    group.diloco.forget_counted()


def does_not_learn(group):
    for of_group in group.inner.param_groups:
        of_group["lr"] = of_group["weight_decay"] = 0.0
    group.learn(0, 5)


def is_frozen(group):
    for parameter in [*group.model.parameters()][1:]:
        parameter.requires_grad_(False)
    accumulates(group)


def is_initialized(group):
    for parameter in group.model.parameters():
        nn.init.normal_(parameter, std=0.1)
    accumulates(group)


def is_evaluated_on_an_average(group):
    group.learn(0, 4)
    with torch.no_grad():
        for parameter in group.model.parameters():
            parameter.mul_(0.9)
    mse(group.model, *batch(9, 9)).item()


def is_replaced_in_memory(group):
    group.learn(0, 4)
    for parameter in group.model.parameters():
        parameter.data = parameter.data.clone()
    backward(group)


def looks_ahead(group):
    """SAM, when its second step is that of the given optimizer."""
    backward(group, BACKWARDS - 1)
    kept = weights(group)
    with torch.no_grad():
        for parameter in group.model.parameters():
            parameter.add_(parameter.grad, alpha=0.01)
    backward(group, BACKWARDS - 1)
    with torch.no_grad():
        for parameter, value in zip(group.model.parameters(), kept, strict=True):
            parameter.copy_(value)
    group.inner.step()


def searches(group):
    """A step that takes many backward passes, as those of LBFGS."""

    def closure():
        for parameter in group.model.parameters():
            parameter.data.mul_(0.999)
        backward(group, MANY)
        return torch.tensor(0.0)

    group.inner.step(closure)
    group.diloco.forget_counted()


def idles(group):
    group.learn(0, 4)
    backward(group)
    group.diloco.sync_idle()
    group.diloco.forget_counted()


HONEST = [
    accumulates, is_skipped, does_not_learn, is_frozen, is_initialized, is_evaluated_on_an_average,
    is_replaced_in_memory, looks_ahead, searches, idles,
]  # fmt: skip


@of_settings
@pytest.mark.parametrize("trains", HONEST)
def test_an_honest_job_hears_nothing(trains, settings):
    def replica(group):
        trains(group)
        group.end()
        return group.diloco.global_digest()

    assert len({*run_mlp(2, replica, **settings)}) == 1


@pytest.mark.parametrize("steps", [0, 4, 5])
def test_a_run_that_is_resumed_and_takes_no_step_hears_nothing(steps):
    def begin(group):
        group.learn(0, steps)
        return group.save()

    def go_on(group):
        backward(group)
        group.diloco.forget_counted()
        group.end()

    for settings in SETTINGS:
        saved = run_mlp(2, begin, **settings)
        run_mlp(2, go_on, own=[{"saved": each} for each in saved], **settings)


def test_rounding_of_bfloat16_is_no_change():
    def replica(group):
        for number in range(3):
            group.inner.zero_grad()
            x, y = batch(group.id, number)
            mse(group.model, x.bfloat16(), y.bfloat16()).backward()
            group.inner.step()
        group.diloco.sync_idle()
        mse(group.model, x.bfloat16(), y.bfloat16()).backward()
        group.diloco.forget_counted()
        group.end()

    run_mlp(2, replica, model=lambda: TinyMLP().bfloat16())
