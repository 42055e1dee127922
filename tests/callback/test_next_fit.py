"""What one fit of a process leaves to the next one. Run: pytest tests/callback/test_next_fit.py"""

import logging

import pytest
import torch
from composer_jobs import Each, trainer_of

from composer_replication.callback import DiLoCoCallback
from composer_replication.replica.lighthouse import start_lighthouse

HEAD = "mlp.layers.4.weight"
OTHER = "mlp.layers.0.weight"


@pytest.fixture
def lighthouse():
    server = start_lighthouse(bind="127.0.0.1:0", heartbeat_timeout_ms=500)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def callback_of(lighthouse, **diloco):
    """A replica group of its own, which syncs every two inner steps."""
    return DiLoCoCallback(
        sync_every=2,
        replica_id=0,
        num_replicas=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        **diloco,
    )


def two_fits(lighthouse, between, **diloco):
    """Two fits of a Trainer, and something done to its model in between.

    Returns:
        The global parameters and the outer momentum in the first batch of the second fit, and the
        trainer.
    """
    callback = callback_of(lighthouse, **diloco)
    seen = []

    def look(state):
        saved = callback.diloco.state_dict()["fragments"][0]
        momentum = {
            name: saved["optimizer"]["state"].get(place, {}).get("momentum_buffer")
            for place, name in enumerate(saved["theta"])
        }
        seen.append((saved["theta"], momentum))

    trainer = trainer_of(callback, Each(look))
    trainer.fit(duration="4ba")
    between(dict(trainer.state.model.named_parameters()))
    seen.clear()
    trainer.fit(duration="4ba")
    trainer.close()
    return *seen[0], trainer


def new_head(parameters):
    with torch.no_grad():
        parameters[HEAD].fill_(0.25)


def test_what_is_replaced_in_the_model_between_two_fits_stays_so(lighthouse, caplog):
    theta, momentum, _ = two_fits(lighthouse, new_head)
    assert set(theta[HEAD].flatten().tolist()) == {0.25}
    assert momentum[HEAD] is None and momentum[OTHER].abs().max() > 0
    assert "1 tensors of the model were replaced since the last fit" in caplog.text
    assert HEAD in caplog.text


def test_it_is_trained_on_as_under_composer_alone(lighthouse):
    _, _, trainer = two_fits(lighthouse, new_head, outer_lr=1.0, outer_momentum=0.0)
    alone = trainer_of()
    alone.fit(duration="4ba")
    new_head(dict(alone.state.model.named_parameters()))
    alone.fit(duration="4ba")
    alone.close()
    for name, parameter in alone.state.model.named_parameters():
        torch.testing.assert_close(trainer.state.model.get_parameter(name), parameter)


def test_nothing_is_said_or_lost_if_the_model_is_left_alone(lighthouse, caplog):
    with caplog.at_level(logging.INFO):
        theta, momentum, _ = two_fits(lighthouse, lambda parameters: None)
    assert all(buffer.abs().max() > 0 for buffer in momentum.values())
    assert "were replaced" not in caplog.text


def test_a_fit_that_fails_after_another_one_has_replaced_nothing(lighthouse, caplog):
    def fail(state):
        if state.timestamp.batch == 7 and not failed:
            failed.append(state)
            raise RuntimeError("the user's own error")

    failed = []
    callback = callback_of(lighthouse)
    trainer = trainer_of(callback, Each(fail))
    trainer.fit(duration="4ba")
    with pytest.raises(RuntimeError, match="the user's own error"):
        trainer.fit(duration="4ba")
    trainer.fit(duration="1ba")
    trainer.close()
    assert callback.result["inner_steps"] == 8
    assert "were replaced" not in caplog.text
