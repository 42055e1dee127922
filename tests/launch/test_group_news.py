"""What is said when something happens to groups. Run: pytest tests/launch/test_group_news.py."""

import re
import time

from recorded_groups import recorded, sync_line, view_of, write_group

from composer_replication.launch.group_news import GroupNews


def looked(run_dir, count):
    return [view_of(run_dir / f"replica_{i}") for i in range(count)]


def test_a_run_without_events_has_no_news(tmp_path):
    news = GroupNews()
    assert news.of(looked(tmp_path, 2)) == []
    assert news.of(recorded(tmp_path, 2)) == []
    recorded(tmp_path, 2, phase="evaluating")
    assert news.of(looked(tmp_path, 2)) == []


def test_a_group_that_comes_back_is_announced_once(tmp_path):
    news = GroupNews()
    recorded(tmp_path, 2)
    write_group(tmp_path, 1, phase="restarting", restart_at=0.0)
    assert news.of(looked(tmp_path, 2)) == []
    write_group(tmp_path, 1, phase="joining")
    assert news.of(looked(tmp_path, 2)) == []
    write_group(tmp_path, 1, outer_step=9)
    (line,) = news.of(looked(tmp_path, 2))
    assert re.fullmatch(r"group 1 is back after \d+ s, at outer step 9", line)
    assert news.of(looked(tmp_path, 2)) == []


def test_a_group_that_is_left_out_does_not_come_back(tmp_path):
    news = GroupNews()
    recorded(tmp_path, 2)
    for phase in ("restarting", "left out", "training"):
        write_group(tmp_path, 1, phase=phase)
        assert news.of(looked(tmp_path, 2)) == []


def test_another_number_of_groups_in_a_sync_is_news(tmp_path):
    news = GroupNews()
    news.of(recorded(tmp_path, 3))
    for step in (3, 4):
        write_group(tmp_path, 0, outer_step=step, syncs=[sync_line(step, participants=2)])
        lines = news.of(looked(tmp_path, 3))
        expected = "outer step 3: 2 of 3 groups took part, 3 before"
        assert lines == ([expected] if step == 3 else [])


def test_a_long_silence_is_news_once(tmp_path):
    news = GroupNews()
    recorded(tmp_path, 3)
    for replica_id in (0, 2):
        write_group(tmp_path, replica_id, trained_at=time.time() - 300)
    said = ["groups 0 and 2 have completed no step for 5 min"]
    assert [line.replace("300 s", "5 min") for line in news.of(looked(tmp_path, 3))] == said
    assert news.of(looked(tmp_path, 3)) == []
    write_group(tmp_path, 1, trained_at=time.time() - 300)
    assert news.of(looked(tmp_path, 3)) == ["group 1 has completed no step for 5 min"]


def test_a_difference_is_news_once_and_again_after_it_has_ended(tmp_path):
    news = GroupNews()
    recorded(tmp_path, 2)
    expected = []
    for step, digest in [(3, "cd"), (4, "cd"), (5, "ab"), (6, "cd")]:
        write_group(tmp_path, 0, syncs=[sync_line(step)])
        write_group(tmp_path, 1, syncs=[sync_line(step, digest=digest)])
        expected += news.of(looked(tmp_path, 2))
    assert expected == [
        f"the groups' parameters are DIFFERENT at outer step {step}" for step in (3, 6)
    ]
