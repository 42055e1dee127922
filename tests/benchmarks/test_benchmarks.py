"""What the benchmarks compute of what they measure.

Run: pytest tests/benchmarks/test_benchmarks.py.
"""

import json
import re
import sys

import goodput
import overlap
import pytest
import results
import torch
from number_sources import RESULTS, read_results
from traces import rounds, start, sync, write_group

from composer_replication.launch.run_record import open_run


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([(0.0, 20.0)], 1.0),
        ([(10.0, 11.0), (13.0, 14.0)], 0.5),
        ([(10.0, 12.0), (11.0, 13.0), (10.5, 11.5)], 0.75),  # two streams at the same time
        ([(8.0, 11.0), (13.5, 99.0)], 0.375),
        ([(0.0, 10.0), (14.0, 15.0)], 0.0),
    ],
)
def test_how_much_of_a_sync_kernels_cover(intervals, expected):
    assert overlap.covered(intervals, (10.0, 14.0)) == pytest.approx(expected)


def costs_of(**changes):
    """A round is 1 s and a sync 0.2 s; a failure is noticed after 2 s, and costs its group 4 s."""
    values = {"inner_step_s": 0.1, "sync_every": 10, "sync_s": 0.2}
    return goodput.Costs(**values | {"detection_s": 2.0, "restart_s": 4.0} | changes)


def test_goodput_with_one_failure():
    # Group 1 fails in the third round, at 3.0 s. Group 0 has trained it by 3.4 s, has its quorum at
    # 5.0 s and commits at 5.2, 6.4 and 7.6 s alone. Group 1 is ready at 7.0 s, joins with the sync
    # of 7.4 s, and shares the commits at 8.8, 10.0, 11.2 and 12.4 s.
    found = goodput.simulate(costs_of(), 2, [(3.0, 1)], 12.0)
    assert found == pytest.approx(10 * (2 * 2 + 3 + 4 * 2) * 0.1 / (2 * 12.4))


def test_a_failure_early_in_a_round_is_noticed_while_the_others_train():
    costs = costs_of(sync_every=100, restart_s=9.0)
    # A round is 10 s. Group 1 fails at 1.0 s, which is noticed by 3 s and costs group 0 nothing. It
    # is ready at 10.0 s, as the sync begins, and trains the second round.
    found = goodput.simulate(costs, 2, [(1.0, 1)], 20.0)
    assert found == pytest.approx((100 + 200) * 0.1 / (2 * 20.4))


def test_a_failure_in_a_sync_begins_it_again_and_takes_the_group_s_round():
    # At 1.1 s, in the first sync: group 0 has a quorum at 3.1 s and commits at 3.3 s.
    found = goodput.simulate(costs_of(), 2, [(1.1, 1)], 3.3)
    assert found == pytest.approx(10 * 0.1 / (2 * 3.3))


@pytest.mark.parametrize(("every", "kept"), [(1, 40), (2, 40), (3, 0)])
def test_if_all_groups_fail_the_rounds_since_the_checkpoint_are_lost(every, kept):
    # Both have committed twice. Group 0 fails at 3.0 s, group 1 at 3.2 s; both go on at 7.2 s, with
    # the failure at 5.0 s ignored, since nobody trains, and commit at 8.4 and 9.6 s.
    costs = costs_of(checkpoint_rounds=every)
    strikes = [(3.0, 0), (3.2, 1), (5.0, 1)]
    found = goodput.simulate(costs, 2, strikes, 9.0)
    assert found == pytest.approx((kept + 40) * 0.1 / (2 * 9.6))


def test_failures_come_as_often_as_asked_and_a_seed_repeats_them():
    strikes = goodput.random_strikes(1, 8, 50.0, 10_000.0)
    assert strikes == goodput.random_strikes(1, 8, 50.0, 10_000.0) == sorted(strikes)
    assert 1400 < len(strikes) < 1800  # 1600 in the mean
    assert {group for _, group in strikes} == set(range(8))


def chaos_run(folder):
    """The files of two groups, and a kill of group 1 in its third round."""
    kill = {"kind": "kill", "at": 3.0, "seconds": 0.0, "victims": [1]}
    chaos = {"began_at": 10.0, "injected": [kill]}
    (folder / "chaos.json").write_text(json.dumps(chaos))
    (folder / "config.yaml").write_text("callbacks: {diloco: {sync_every: 10}}")
    # Group 0 has trained its third round at 13.4 s, and a quorum at 15.0 s.
    late = sync(15.15, 3, 30, blocked=1.75, waited=1.6)
    lines = [*rounds(10.0, 2), late, *rounds(15.15, 2, outer_step=3, steps=30)]
    write_group(folder, 0, [start(10.0)], lines)
    starts = [start(10.0), start(17.45, started=14.0, trained_at=13.0, before=26)]
    joins = sync(17.55, 5, 0, blocked=0.0, waited=0.0)
    write_group(folder, 1, starts, [*rounds(10.0, 2), joins])
    return open_run(folder), chaos


def test_the_costs_of_a_chaos_run_and_its_replay(tmp_path):
    run, chaos = chaos_run(tmp_path)
    account = goodput.measure_goodput(run)
    costs = goodput.measured_costs(run, account, chaos, costs_of(sync_every=99))
    # It was dead for 1 s, and started for 3.45 s, in half a round of which it waited for the sync.
    assert costs.restart_s == pytest.approx(1.0 + 3.45 - 0.5)
    assert (costs.sync_every, costs.checkpoint_rounds) == (10, 1)
    assert costs.inner_step_s == pytest.approx(0.1) and costs.sync_s == pytest.approx(0.2)
    assert costs.detection_s == pytest.approx(2.0)
    # The kill came 0.6 s after a commit, 3.0 s after the begin. The first commit after that is at
    # 3.6 s, so it is at 4.2 s. Group 0 has a quorum at 6.2 s, and commits at 6.4 s and, alone, at
    # 7.6 s; the run lasted for 7.55 s.
    replayed = goodput.replay(run, account, chaos, costs)
    assert replayed == pytest.approx(10 * (3 * 2 + 2) * 0.1 / (2 * 7.6))


def test_a_run_without_goodput_is_refused_with_what_to_give(tmp_path):
    (tmp_path / "replica_0").mkdir()
    with pytest.raises(ValueError, match="has no goodput or no sync_every: give the folder"):
        goodput.measured_costs(open_run(tmp_path), {}, {}, costs_of())


def test_the_usual_costs_are_those_of_the_run_that_their_comment_names():
    its, defaults = read_results()["chaos_8_groups"], goodput.DEFAULTS
    assert defaults.sync_every == its.sync_every
    assert round(defaults.inner_step_s, 2) == its.inner_step_s
    assert round(defaults.sync_s, 2) == pytest.approx(its.sync_s + its.quorum_s)
    assert defaults.detection_s < its.runs.kills.seconds_to_survivors_next_commit.median
    assert defaults.restart_s < its.runs.kills.seconds_to_recovery.median


def test_no_file_of_results_says_where_it_was_written():
    for path in RESULTS.glob("*.json"):
        assert not re.search(r"--json|/tmp/|\"json\":", path.read_text()), path.name


def test_a_file_of_results_says_what_has_made_it_and_is_read_by_the_pages(tmp_path, monkeypatch):
    words = ["--json", f"{tmp_path}/x-1.json", "--quick"]
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "benchmarks/sync.py", *words])
    arguments = results.command_line("", quick="less").parse_args(words)
    results.report("a title", {"ours / floor": [1.5, 1.0, 3.0]}, arguments)
    found = read_results(tmp_path)["x_1"]
    assert found.ratios == {"ours / floor": {"median": 1.5, "min": 1.0, "max": 3.0}}
    assert found.arguments == {"quick": True}  # and not where it was written
    about = found.measured
    assert about.command == "python benchmarks/sync.py --quick"
    assert about.torch == torch.__version__.partition("+")[0]
    assert about.cores >= 1 and about.memory_gib >= 1 and about.processor
    assert about.date[:2] == "20" and about.keys() >= {"commit", "gpu", "python"}
