"""What is read from a run folder, and printed. Run: pytest tests/launch/test_run_record.py."""

import dataclasses
import json
import math

import pytest
from recorded_groups import sync_line
from run_events import write_events

import composer_replication
from composer_replication.group.words import format_duration
from composer_replication.launch.processes import last_lines
from composer_replication.launch.run_record import describe, open_run, write_summary
from composer_replication.settings import DiLoCoSettings
from composer_replication.util.json_files import JsonLineReader


def sync(outer_step, **changes):
    """One of two fragments, every 5 inner steps."""
    fragment = {"diloco/fragment": (outer_step - 1) % 2, "inner_steps": 5 * outer_step}
    return sync_line(outer_step, digest=None, **fragment | changes)


def write_run(run_dir, syncs=None, evaluation=None, digests=("ab", "ab")):
    syncs = [sync(step) for step in range(1, 9)] if syncs is None else syncs
    for replica_id, digest in enumerate(digests):
        folder = run_dir / f"replica_{replica_id}"
        write_events(folder, "sync", *syncs)
        result = {"replica_id": str(replica_id), "inner_steps": 40, "outer_steps": 8}
        result |= {"global_digest": digest * 32, "final_loss": 4.2, "eval": evaluation or {}}
        write_events(folder, "end", result)
    return run_dir


ROW = {"outer_step": 9, "outer_lr": 0.5}
BITS = {"BitsPerByte": 3.2}


def test_groups_are_in_the_order_of_their_numbers_also_one_that_was_killed_early(tmp_path):
    write_run(tmp_path, digests=["ab"] * 11)
    (tmp_path / "replica_11").mkdir()
    run, names = open_run(tmp_path), [str(i) for i in range(12)]
    assert list(run.groups) == names and list(run.results) == names[:11]


def test_the_share_of_time_in_inner_steps_leaves_out_syncs_and_stops(tmp_path):
    folder = tmp_path / "replica_0"
    blocked = {"diloco/sync_seconds": 0.5}
    write_events(folder, "start", {"time": 10.0})
    write_events(folder, "sync", *(sync(i, time=10.0 + 2 * i, **blocked) for i in (1, 2)))
    write_events(folder, "start", {"time": 16.0})  # dead for two of these seconds
    write_events(folder, "sync", sync(3, time=18.0, **blocked))
    assert open_run(tmp_path).groups["0"].inner_share == 4.5 / 8
    write_events(folder, "continued", {"time": 500.0})  # the run was stopped until then
    write_events(folder, "start", {"time": 510.0})
    write_events(folder, "sync", sync(4, time=512.0, **blocked))
    assert open_run(tmp_path).groups["0"].inner_share == 6 / 10
    rows = dict(describe(open_run(tmp_path)))
    assert rows["time in inner steps"] == "group 0 60%"


def test_the_result_comes_first_in_the_text(tmp_path):
    syncs = [sync(step, ranks=2, **{"diloco/group_cosine": 0.5}) for step in range(1, 9)]
    run_dir = write_run(tmp_path, syncs, evaluation=BITS)
    for at in (0.0, 9.0):
        write_events(run_dir / "replica_1", "start", {"time": at, "started": at})
    write_events(run_dir / "replica_1", "end", {"outer_steps": 8, "global_digest": "ab" * 32})
    # Eight syncs of one of two fragments of 4000 bytes of each rank, against both of them 40 times.
    assert describe(open_run(run_dir))[:4] == [
        ("evaluation", "BitsPerByte 3.2"),
        ("sent by each group",
         "64 kB in 8 syncs; data parallel: 640 kB in 40 inner steps (10 times as much)"),
        ("global parameters", "equal in 2 groups after 8 outer steps: abababab"),
        ("lost and came back", "group 1 (1 time)"),
    ]  # fmt: skip


def test_the_cosine_between_groups_is_the_mean_over_the_last_twenty_syncs(tmp_path):
    cosines = [0.2] * 11 + [0.4] * 10
    syncs = [sync(n, **{"diloco/group_cosine": each}) for n, each in enumerate(cosines, 1)]
    write_events(tmp_path / "replica_0", "sync", *syncs[:19])
    assert "outer loop" not in dict(describe(open_run(tmp_path)))
    write_events(tmp_path / "replica_0", "sync", *syncs[19:])
    assert dict(describe(open_run(tmp_path)))["outer loop"] == "cosine between groups 0.30"


def test_a_jobs_own_evaluation_is_shown_also_before_its_end(tmp_path):
    evaluation = {"MulticlassAccuracy": 0.86421, "other/CrossEntropy": 1.5}
    text = "MulticlassAccuracy 0.8642, other/CrossEntropy 1.5"
    speeds = {"eval_runtime": 2.5, "eval_samples_per_second": 40.0}
    rows = describe(open_run(write_run(tmp_path / "ended", evaluation=evaluation | speeds)))
    assert rows[0] == ("evaluation", text)
    folder = tmp_path / "live" / "replica_0"
    write_events(folder, "sync", sync(1))
    write_events(folder, "evaluation", {"batch": 5, "eval": evaluation})
    assert describe(open_run(tmp_path / "live"))[0] == ("evaluation", text)


def test_a_run_is_read_as_plain_values(tmp_path):
    write_run(tmp_path, evaluation=BITS)
    settings = DiLoCoSettings(sync_every=10, num_fragments=2, schedule=[ROW])
    for at in (1.0, 2.0):
        start = {"time": at, "started": at, "settings": dataclasses.asdict(settings)}
        write_events(tmp_path / "replica_1", "start", start)
    write_events(tmp_path / "replica_0", "evaluation", {"time": 3.0, "batch": 40, "eval": BITS})
    write_events(tmp_path / "replica_1", "error", {"error": "ValueError: no"})
    run = composer_replication.read_run(tmp_path)
    assert run.settings == settings
    assert [group.replica_id for group in run.groups] == ["0", "1"]
    first, second = run.groups
    assert (first.syncs, first.inner_steps, first.outer_step) == (8, 40, 8)
    assert (first.bytes_sent, first.data_parallel_bytes) == (32_000, 320_000)
    assert (first.final_loss, first.global_digest) == (4.2, "ab" * 32)
    assert (second.starts, second.errors, second.final_loss) == (2, ["ValueError: no"], None)
    assert len(run.syncs) == 16 and run.syncs[8]["replica_id"] == "1"
    assert run.syncs[0].keys() >= {"diloco/outer_step", "diloco/bytes_sent", "loss"}
    assert run.evaluations == [{"replica_id": "0", "time": 3.0, "batch": 40, **BITS}]


def test_what_the_record_of_samples_lacks_is_printed(tmp_path):
    run = open_run(write_run(tmp_path))
    assert "samples" not in dict(describe(run)) and write_summary(run, {})["samples_gap"] is None
    gap = {"outer_step": 6, "samples": 312}
    (tmp_path / "page.json").write_text(json.dumps({"samples_gap": gap}))
    text = dict(describe(run))["samples"]
    assert text.startswith("the record is complete up to outer step 6 only: ")
    assert "312 samples" in text and write_summary(run, {})["samples_gap"] == gap


def test_different_digests_are_told_apart(tmp_path):
    rows = dict(describe(open_run(write_run(tmp_path, digests=("ab", "cd")))))
    assert rows["global parameters"].startswith("DIFFERENT: group 0 abababab (8 outer steps), gr")


@pytest.mark.parametrize("own", [{}, {"own_buffers": {"mean": "aa", "mask": "bb"}}])
def test_buffers_in_which_models_differ_are_named(tmp_path, own):
    run_dir = write_run(tmp_path)
    for replica_id, digest in enumerate(("aa", "cc")):
        if own:
            own = {"own_buffers": own["own_buffers"] | {"mean": digest}}
        end = {"outer_steps": 8, "global_digest": "ab" * 32} | own
        write_events(run_dir / f"replica_{replica_id}", "end", end)
    run, names = open_run(run_dir), ["mean"] if own else []
    assert write_summary(run, restarts={})["differing_buffers"] == names
    text = "DIFFERENT, by sync_buffers=none: the models differ in mean" if own else None
    assert dict(describe(run)).get("buffers") == text


def test_an_end_of_before_is_not_that_of_a_run_that_is_continued(tmp_path):
    write_run(tmp_path, evaluation=BITS)
    write_events(tmp_path / "replica_0", "continued", {"time": 60.0})
    write_events(tmp_path / "replica_1", "start", {"time": 70.0})
    run = open_run(tmp_path)
    assert run.results == {} and run.groups["0"].num_syncs == 8
    for steps, bits in ((9, {}), (9, {"BitsPerByte": 3.0})):  # evaluated after its end
        end = {"outer_steps": steps, "global_digest": "ef" * 32, "eval": bits}
        write_events(tmp_path / "replica_0", "end", end | {"time": 80.0})
    assert end.items() <= open_run(tmp_path).results["0"].items()


def test_errors_and_rejections_are_printed(tmp_path):
    write_run(tmp_path)
    write_events(tmp_path / "replica_0", "rejection", {"error": "sync_every=3"})
    write_events(tmp_path / "replica_1", "error", {"error": "ValueError: no"})
    texts = [text for name, text in describe(open_run(tmp_path)) if name == "error"]
    assert texts == ["group 0: sync_every=3", "group 1: ValueError: no"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere is not a folder: give the run folder"),
        ("", "holds no replica_<id> folder.*start one with"),
    ],
)
def test_a_folder_without_a_run_is_refused(tmp_path, name, message):
    with pytest.raises(FileNotFoundError, match=message):
        open_run(tmp_path / name)


def test_a_run_without_a_sync_has_nothing_to_tell(tmp_path):
    (tmp_path / "replica_0").mkdir()
    with pytest.raises(ValueError, match="no committed sync.*after sync_every inner steps"):
        describe(open_run(tmp_path))


# ---- whether anything was learned ----------------------------------------------------------------

NOTHING = {"diloco/contribution": 0.0, "diloco/total_contribution": 0.0, "diloco/steps_lost": 5}
ILL = {**NOTHING, "diloco/pseudo_gradient_norm": math.nan}
WELL = {"diloco/contribution": 5.0, "diloco/total_contribution": 10.0}
OTHERS_ALONE = {**ILL, "diloco/total_contribution": 5.0}


def one_run(folder, *syncs, ended=True, **end):
    """A run of one group whose outer step grows in syncs to which somebody contributes."""
    step = 0
    for number, changes in enumerate(syncs, 1):
        step += changes["diloco/total_contribution"] > 0
        line = sync_line(step, digest=None, inner_steps=5 * number, time=float(number))
        write_events(folder / "replica_0", "sync", line | changes)
    result = {"inner_steps": 5 * len(syncs), "outer_steps": step, "global_digest": "ab" * 32}
    if ended:
        write_events(folder / "replica_0", "end", result | end)
    (folder / "replica_0").mkdir(exist_ok=True)
    return open_run(folder)


@pytest.mark.parametrize(
    ("syncs", "failure"),
    [
        ([ILL] * 4, "this run has learned nothing: in its last 4 syncs every group's"),
        ([ILL], "this run has learned nothing: in its last sync every"),
        ([WELL] * 3 + [ILL] * 2, "has learned nothing since outer step 3: in its last 2 syncs"),
        ([WELL] * 3 + [ILL], ""),  # a bad batch at the end
        ([WELL, ILL, ILL, ILL, WELL], ""),
        ([WELL] + [OTHERS_ALONE] * 5, ""),
    ],
)
def test_a_run_has_failed_if_no_group_has_contributed_to_its_last_syncs(tmp_path, syncs, failure):
    run = one_run(tmp_path, *syncs)
    assert failure in run.failure and bool(failure) == bool(run.failure)
    assert write_summary(run, {})["failure"] == (run.failure or None)
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    lost = 5 * sum(sync is not WELL for sync in syncs)
    assert dict(describe(run)).get("thrown away") == (
        f"group 0 {lost} inner steps" if lost else None
    )
    read = composer_replication.read_run(tmp_path)
    assert (read.failure, read.groups[0].steps_lost) == (run.failure, lost)


def test_a_run_that_was_never_synced_has_failed(tmp_path):
    run = one_run(tmp_path, inner_steps=40)
    assert run.failure.startswith(
        "this run has learned nothing: its 40 inner steps were never sync"
    )


@pytest.mark.parametrize(
    "end",
    [
        {"inner_steps": 60, "outer_steps": 6},  # a finished run, resumed in a new folder
        {"inner_steps": 0, "outer_steps": 6},  # a group that came last, or had no samples
        {"inner_steps": 0, "outer_steps": 0},  # there were no samples at all
    ],
)
def test_a_process_that_has_learned_nothing_is_no_failed_run(tmp_path, end):
    run = one_run(tmp_path, **end)
    assert run.failure == ""
    assert dict(describe(run))["global parameters"].startswith("in 1 group after")


def test_a_run_is_judged_over_all_of_its_processes(tmp_path):
    assert one_run(tmp_path, WELL, WELL, ILL).failure == ""
    write_events(tmp_path / "replica_0", "continued", {"time": 4.0})
    write_events(tmp_path / "replica_0", "start", {"time": 4.0})
    assert one_run(tmp_path, ended=False).failure == ""
    write_events(tmp_path / "replica_0", "sync", sync_line(2, digest=None, time=5.0) | ILL)
    write_events(tmp_path / "replica_0", "end", {"outer_steps": 2, "global_digest": "ab" * 32})
    assert "nothing since outer step 2: in its last 2 syncs" in open_run(tmp_path).failure


def test_a_run_that_goes_on_has_not_failed_yet_and_the_most_advanced_group_knows_best(tmp_path):
    assert one_run(tmp_path, ILL, ended=False).failure == ""
    assert "in its last 2 syncs" in one_run(tmp_path, ILL, ended=False).failure
    write_events(tmp_path / "replica_1", "sync", sync_line(1, digest=None) | WELL)
    assert open_run(tmp_path).failure == ""


def test_a_line_that_is_being_written_is_left_for_the_next_time(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    reader = JsonLineReader(path)
    assert list(reader.read()) == [{"a": 1}, {"a": 2}]
    assert list(reader.read()) == []
    with path.open("a") as file:
        file.write(": 3}\n")
    assert list(reader.read()) == [{"a": 3}] and reader.num_damaged == 0


def test_damaged_lines_are_left_out_of_the_report_and_counted(tmp_path):
    write_run(tmp_path)
    with (tmp_path / "replica_1" / "events.jsonl").open("ab") as file:
        file.write(b'{"diloco/outer' + b"\n" + bytes(64) + b"\n" + b"\n" + b'{"event": "sync", "ti')
    run = open_run(tmp_path)
    assert list(run.results) == ["0", "1"] and run.groups["1"].num_syncs == 8
    assert dict(describe(run))["damaged"] == "3 lines of replica_1/events.jsonl left out"


def test_the_end_of_a_log_is_its_error_without_the_frames(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(
        "12:00:00 I started\n"
        "\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "train.py", line 3, in fit\n'
        "[rank0]:     step()\n"
        "[rank0]: \x1b[31mValueError: no\x1b[0m\n"
        "ERROR:__main__:Rank 0 crashed with exit code 1.\n"
        "----------Begin global rank 1 STDERR----------\n"
        "ValueError: no\n"
        "----------End global rank 1 STDERR----------\n"
    )
    assert last_lines(path) == ["12:00:00 I started", "ValueError: no"]
    path.write_text("".join(f"line {i}\n" for i in range(30)))
    assert last_lines(path, 2) == ["line 28", "line 29"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(4.4, "4 s"), (60, "1 min 0 s"), (3700, "1 h 1 min")]
)
def test_durations_are_words(seconds, words):
    assert format_duration(seconds) == words
