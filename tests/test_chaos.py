"""What chaos makes of a run's metrics, and whom it strikes. Run: pytest tests/test_chaos.py

Metrics are written by hand; the supervisor's processes are stood in for. ``docs/chaos.md`` has what
the command measured on real ones.
"""

import json
import signal
from types import SimpleNamespace

import pytest

from composer_replication import chaos
from composer_replication.chaos import Saboteur, Strike, judge
from composer_replication.run_record import Run
from composer_replication.supervision import GroupRecord


def sync(outer_step, time, digest="a", lost=0):
    return {
        "diloco/outer_step": outer_step,
        "diloco/global_digest": f"{digest}{outer_step}",
        "diloco/steps_lost": lost,
        "time": time,
    }


def run_of(*groups, ends=("x", "x")):
    return Run(
        run_dir=None,
        sync_every=2,
        metrics={str(i): lines for i, lines in enumerate(groups)},
        results={str(i): {"global_digest": digest} for i, digest in enumerate(ends)},
    )


KILL = Strike(time=10.5, kind="kill", replica_id=1)


def test_a_clean_run_with_a_kill():
    survivor = [sync(1, 10.0), sync(2, 12.5), sync(3, 20.0)]
    killed = [sync(1, 10.0), sync(3, 20.0)]
    verdict = judge(run_of(survivor, killed), [KILL])
    assert verdict["is_clean"]
    assert (verdict["faults"], verdict["commits"], verdict["outer_steps"]) == (1, 5, 3)
    assert verdict["seconds_from_kill_to_survivors_next_commit"]["median"] == 2.0
    assert verdict["seconds_to_rejoin"] == {"median": 9.5, "max": 9.5, "count": 1}


@pytest.mark.parametrize(("survivor", "killed", "ends", "what"), [
    ([sync(1, 10), sync(2, 12, "b")], [sync(1, 10), sync(2, 12)], "xx",
     "outer_steps_with_different_digests"),
    ([sync(1, 10), sync(3, 12)], [sync(1, 10), sync(3, 12)], "xx", "outer_steps_lost"),
    ([sync(1, 10), sync(2, 12), sync(2, 13)], [sync(1, 10), sync(2, 13)], "xx",
     "outer_steps_lost"),
    ([sync(1, 10), sync(2, 12, lost=3)], [sync(1, 10), sync(2, 12)], "xx",
     "inner_steps_lost_by_survivors"),
    ([sync(1, 10), sync(2, 12)], [sync(1, 10)], "xx", "not_back"),
    ([sync(1, 10), sync(2, 12)], [sync(1, 10), sync(2, 12)], "xy", "final_digests_equal"),
])  # fmt: skip
def test_what_is_not_clean_is_seen(survivor, killed, ends, what):
    verdict = judge(run_of(survivor, killed, ends=ends), [KILL])
    assert not verdict["is_clean"]
    assert verdict[what] == (ends == "xx") * (3 if "inner" in what else 1)


def test_what_a_stopped_group_loses_is_not_a_survivor_s():
    stop = Strike(time=10.5, kind="stop", replica_id=1, seconds=5.0)
    stopped = [sync(1, 10), sync(4, 17, lost=2), sync(5, 20)]
    survivor = [sync(n, 8 + 2 * n) for n in range(1, 6)]
    assert judge(run_of(survivor, stopped), [stop])["is_clean"]
    stopped[2]["diloco/steps_lost"] = 1  # long after it came back
    assert judge(run_of(survivor, stopped), [stop])["inner_steps_lost_by_survivors"] == 1


def test_it_strikes_as_often_as_asked_never_the_last_and_ends_the_run(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(chaos.time, "time", lambda: now[0])
    sent = []
    supervisor = SimpleNamespace(
        run_dir=tmp_path,
        replicas=2,
        records={0: GroupRecord(), 1: GroupRecord()},
        groups=SimpleNamespace(signal=lambda replica_id, number: sent.append((replica_id, number))),
    )
    for replica_id in (0, 1):
        (tmp_path / f"replica_{replica_id}").mkdir()
        path = tmp_path / f"replica_{replica_id}" / "status.json"
        path.write_text(json.dumps({"phase": "training"}))
    saboteur = Saboteur(faults_per_minute=6, duration_s=600, seed=3)
    for _ in range(6100):
        saboteur(supervisor)
        now[0] += 0.1
    assert 44 < len(saboteur.strikes) < 65  # nine minutes
    assert {strike.kind for strike in saboteur.strikes} == {"kill", "stop", "end"}
    stops = [number for _, number in sent if number == signal.SIGSTOP]
    assert len(stops) == sum(number == signal.SIGCONT for _, number in sent)
    assert (tmp_path / "STOP").exists()

    (tmp_path / "replica_0" / "status.json").write_text(json.dumps({"phase": "joining"}))
    alone = Saboteur(faults_per_minute=60, duration_s=600, seed=3)
    alone._began = alone._next = now[0]
    for _ in range(100):
        alone(supervisor)
        now[0] += 0.1
    assert alone.strikes == []
