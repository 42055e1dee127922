"""A group that stops for a while, and what it has trained by then.

Real processes, a real lighthouse, real gloo. Run: pytest tests/integration/test_late_steps.py
"""

import os
import signal
import subprocess
import time

import pytest
import torch
from common import plain_sgd, take_step
from integration.replicas import run_groups
from integration.test_faults import Scalar

from composer_replication.diloco.algorithm import DiLoCo

pytestmark = pytest.mark.integration

STOPPED = 1
STOPS_FOR_S = 4
SYNC_EVERY = 8


def trains_and_stops(group, **settings):
    """Train; one group is stopped, with all its threads, in the middle of its third round."""
    model, reports = Scalar(), []
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"sync_every": SYNC_EVERY, "weight_by": "steps", "digest_every": 1} | settings
    with group.manager() as manager:
        diloco = DiLoCo(manager, model, inner, plain_sgd(), num_replicas=3, **settings)
        with diloco:
            has_stopped, until = False, time.monotonic() + STOPS_FOR_S + 8.0
            while time.monotonic() < until:
                time.sleep(0.05)
                take_step(inner, -1.0)
                reports += diloco.pop_finished_syncs()
                in_round = diloco.inner_steps % SYNC_EVERY
                if (
                    group.replica_id == STOPPED
                    and not has_stopped
                    and len(reports) == 2
                    and in_round == 4
                ):
                    has_stopped = True
                    wakes = f"sleep {STOPS_FOR_S}; kill -CONT {os.getpid()}"
                    with subprocess.Popen(["sh", "-c", wakes]):
                        os.kill(os.getpid(), signal.SIGSTOP)
            diloco.final_sync()
            reports += diloco.pop_finished_syncs()
            return reports, diloco.inner_steps, diloco.global_digest()


def test_its_steps_from_before_the_stop_are_in_the_model_once():
    results = run_groups(trains_and_stops, 3)
    reports, inner_steps, _ = results[STOPPED]
    missed = len(results[0][0]) - len(reports)
    late = [report for report in reports if report.late_steps]
    assert missed >= 2, "the others went on without it"
    assert [report.late_steps for report in late] == [SYNC_EVERY] and late[0].healed
    for reports, inner_steps, _ in results:
        assert not any(report.steps_lost for report in reports)
        assert sum(report.contribution for report in reports) == inner_steps
    assert len({digest for _, _, digest in results}) == 1


def test_after_too_many_outer_steps_they_are_dropped_and_counted():
    results = run_groups(trains_and_stops, 3, max_missed_outer_steps=1)
    reports, inner_steps, _ = results[STOPPED]
    assert sum(report.steps_lost for report in reports) == SYNC_EVERY
    assert sum(report.contribution for report in reports) == inner_steps - SYNC_EVERY
    assert not any(report.late_steps for report in reports)
    assert len({digest for _, _, digest in results}) == 1
