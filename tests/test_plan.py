"""The planner by hand, beside the rounds that were measured, and as a command.

Run: pytest tests/test_plan.py.
"""

import json
import math
import shlex
import statistics

import pytest
from page_blocks import ROOT, block
from typer.testing import CliRunner

from composer_replication.cli import app
from composer_replication.plan import PlannedRun, parse_link, parse_params
from composer_replication.settings import DiLoCoSettings

GIVEN = shlex.split(block("docs/plan.md", "composer-replication plan"))[1:]
HEADERS = 0.956
"""The part of a link's rate that is not headers of TCP, IP and Ethernet."""
MEDIAN, MOST = 8.2, 19.0
"""Error in percent beside the measured rounds."""

RUNS = """
1 10 10  0.2663 382.387 49.637  0.2657 372.221 49.545  0.2670 381.459 49.614
1 30 30  0.7977 249.101 198.491  0.7970 248.177 198.501  0.7981 250.368 198.509
1 90 90  2.4064 137.988 992.659  2.3953 138.105 992.614  2.3947 137.847 992.645
1 90 90  2.4013 30.959 4963.557  2.4584 31.193 4963.631  2.3930 30.9627 4963.615
8 72 9  1.8457 338.629 49.617  1.8267 340.909 49.621  1.8240 349.6 49.608
8 140 17  3.5942 144.848 198.505  3.5476 144.622 198.514  3.5391 143.713 198.490
8 140 17  3.6200 29.3 992.647  3.5572 29.227 992.664  3.5541 29.1593 992.641
8 140 17  3.6654 9.108 4963.529  3.5501 8.9864 4963.608  3.5489 8.9802 4963.371
32 140 4  3.6485 151.519 49.616  3.5347 153.4445 49.619  3.5239 153.6183 49.616
32 140 4  3.6684 36.653 198.491  3.5299 36.687 198.493  3.5262 36.8852 198.491
32 140 4  3.6476 10.1305 992.607  3.5393 9.9474 992.661  3.5303 9.9735 992.647
32 140 4  3.6505 5.3602 4963.582  3.5259 5.2403 4963.433  3.5308 5.2227 4963.524
128 180 1  4.7032 40.7205 49.620  4.5434 41.5865 49.628  4.5447 39.7492 49.629
128 180 1  4.7303 13.108 198.492  4.5492 13.0742 198.486  4.5469 13.3107 198.487
128 180 1  4.7150 6.5922 992.678  4.5519 6.4247 992.642  4.5329 6.4665 992.636
128 180 1  4.7167 5.4214 4963.557  4.5490 5.2873 4963.557  4.5457 5.2907 4963.615
"""
"""Inner steps of a round, inner steps after the warm-up, and syncs among these. Then of each of
three runs the seconds of the steps, those of all, and what iperf measured of the link in Mbit/s.
From diloco-measured (github.com/Adnan082/diloco-measured, results/raw, cu_grid-diloco-30m-*),
others' runs of DiLoCo on four L40S over NCCL and four shaped links, with 30.8 million parameters.
"""
OTHERS_MEDIAN, OTHERS_MOST = 9.6, 27.0
"""Error in percent of the planned share beside these, each a mean of three runs."""
OTHERS_STEPS_MS = 25.2, 27.3
"""The shortest and the longest mean step among these, in milliseconds."""


def planned(fragments=1, delay=0, wire_format="float32", sync_every=100, **changed):
    """1 billion parameters in 2 groups; 4 GB take 32 s on the link, and a sync 1 s on the host."""
    settings = DiLoCoSettings(
        sync_every=sync_every,
        num_fragments=fragments,
        fragment_sync_delay=delay,
        wire_format=wire_format,
    )
    given = {"params": 1e9, "link_bits_per_s": 1e9, "step_s": 1.0, "groups": 2}
    return PlannedRun(settings=settings, **(given | {"host_s_per_param": 1e-9} | changed))


# ---- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "blocked_s"),
    [
        ({}, 1 + 32),
        ({"step_s": 2.0, "sync_every": 50}, 1 + 32),
        ({"fragments": 2}, 1 + 2 * 16),
        ({"fragments": 2, "delay": 5}, 1 + 2 * (16 - 5)),
        ({"fragments": 4, "delay": 5}, 1 + 4 * (8 - 5)),
        ({"fragments": 2, "delay": 16}, 1),  # nothing of the host's work is hidden
        ({"fragments": 2, "delay": 40}, 1),
        ({"wire_format": "bfloat16"}, 1 + 16),
        ({"wire_format": "int8"}, 1 + 8.125),
        ({"wire_format": "fp4"}, 1 + 4.25),
        ({"groups": 8}, 1 + 56),
        # A round trip for every 2 MiB and two more, or for each hop of the ring and two more.
        ({"rtt_s": 0.1}, 1 + 32 + 0.1 * (2 + 4e9 / 2**21)),
        ({"params": 1000, "groups": 8, "rtt_s": 0.1}, 1e-6 + 56e-6 + 0.1 * (2 + 7)),
    ],
)
def test_what_a_round_takes_beyond_its_inner_steps(changed, blocked_s):
    assert planned(**changed).blocked_s == pytest.approx(blocked_s)


def test_a_step_of_ddp_hides_the_link_and_not_the_host():
    assert planned().ddp_step_s == pytest.approx(32 + 1)
    assert planned(step_s=100.0).ddp_step_s == pytest.approx(100 + 1)
    trips = planned(rtt_s=0.1).ddp_step_s - planned().ddp_step_s
    assert trips == pytest.approx(0.1 * 4e9 / 2**21)


@pytest.mark.parametrize(
    ("changed", "sync_every"),
    [
        ({}, 627),  # 19 * 33
        ({"fragments": 2, "delay": 5}, 438),  # 19 * 23 = 437
        ({"fragments": 4}, 628),  # a multiple of 4
        ({"fragments": 2, "delay": 16}, 34),  # 19 * 1, and more than 2 * 16
    ],
)
def test_the_shortest_round(changed, sync_every):
    assert planned(**changed).round_for(0.95) == sync_every


@pytest.mark.parametrize("changed", [{}, {"fragments": 2, "delay": 5, "rtt_s": 0.001}])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
def test_the_needed_link_is_the_slowest_that_does(changed, share):
    link = planned(**changed).link_for(share)
    run = planned(**changed, link_bits_per_s=link)
    assert run.train_s / (run.train_s + run.blocked_s) == pytest.approx(share)


def test_by_hand_95_percent_need_7_5_gbit():
    # 100 s are 95 % of 105.26; 1 s is the host's, and 4 GB have 4.263 s to travel.
    assert planned().link_for(0.95) == pytest.approx(32e9 / (100 / 19 - 1))
    assert planned(host_s_per_param=6e-9).link_for(0.95) is None  # 6 s on the host alone
    assert planned(rtt_s=0.1).link_for(0.95) is None  # 191 s of round trips


def test_rounds_that_were_measured():
    """36 rounds over slow links: 10 million parameters, two groups on one core each."""
    found = json.loads((ROOT / "benchmarks" / "measured" / "bandwidth.json").read_text())
    given, errors = found["arguments"], []
    links = {"10Gbit": (1e10, 0.0), "1Gbit": (1e9, 0.0), "100Mbit": (1e8, 0.0)}
    links["100Mbit+50ms"] = 1e8, 0.1
    for row in found["rows"]:
        if row["link"] not in links or row["method"] == "none":
            continue
        rate, rtt_s = links[row["link"]]
        steps, is_streaming = given["sync_every"], row["method"] == "streaming"
        run = planned(
            fragments=given["num_fragments"] if is_streaming else 1,
            delay=given["fragment_sync_delay"] if is_streaming else 0,
            wire_format=row["wire_format"],
            sync_every=steps,
            params=given["params"],
            link_bits_per_s=HEADERS * rate,
            step_s=row["round_s"] * row["compute_fraction"] / steps,
            groups=given["groups"],
            rtt_s=rtt_s,
            host_s_per_param=6e-9,
        )
        is_ddp = row["method"] == "DDP"
        round_s = steps * run.ddp_step_s if is_ddp else run.train_s + run.blocked_s
        errors.append(100 * abs(round_s / row["round_s"] - 1))
    assert len(errors) == 36
    assert (round(statistics.median(errors), 1), round(max(errors), 1)) == (MEDIAN, MOST)


# ---- what is given ------------------------------------------------------------------------------


@pytest.mark.parametrize(("read", "texts", "numbers"), [
    (parse_params, ["7B", "124M", "7e9", "1.5 T", "10"], [7e9, 124e6, 7e9, 1.5e12, 10]),
    (parse_link, ["10Gbit", "1Gb/s", "250MB/s", ".5 Gbit/s", "56kbps"],
     [1e10, 1e9, 2e9, 5e8, 56e3]),
])  # fmt: skip
def test_numbers_of_parameters_and_links_are_read(read, texts, numbers):
    assert [*map(read, texts)] == numbers


@pytest.mark.parametrize(("changed", "message"), [
    ({"params": 0}, "params=0: use a number above 0"),
    ({"groups": 1}, "groups=1: use an integer of at least 2"),
    ({"step_s": math.nan}, "step_time=nan: use a number above 0"),
    ({"rtt_s": -1.0}, "rtt=-1.0: use seconds of 0 or more"),
])  # fmt: skip
def test_a_run_that_cannot_be_is_refused(changed, message):
    with pytest.raises(ValueError) as refused:
        planned(**changed)
    assert message in str(refused.value)


# ---- the command --------------------------------------------------------------------------------


def plan(*arguments, columns=120):
    """The command in this process, on a wide terminal."""
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [*GIVEN, *map(str, arguments)])


def cells_of(answer, method):
    lines = [line.split("│")[1:-1] for line in answer.output.splitlines()]
    stripped = [[cell.strip() for cell in line] for line in lines]
    [cells] = [cells[2:] for cells in stripped if cells[:2] == [method, "float32"]]
    return cells


def test_the_page_shows_what_the_command_prints():
    shown = block("docs/plan.md", "┏")
    answer = plan(columns=100)
    assert [line.rstrip() for line in answer.output.splitlines()] == shown.splitlines()


def test_the_table_by_hand():
    # 7/4 * 28 GB at 1 Gbit/s are 392 s, and 7 s of the host; 200 s of training. 19 * 399 / 2 =
    # 3790.5. Two fragments of 196 s, of which 10 s are hidden: 379 s, and 19 * 379 / 2 = 3600.5.
    # 95 % leave 10.53 s, 3.53 of them to send in: 392 / 3.53 Gbit/s; 2 * 10 more when hidden.
    given = "--params 7B --step-time 2 --groups 8 --sync-every 100 --rtt 0 --host-s-per-param 1e-9"
    answer = plan(*given.split())
    assert answer.exit_code == 0, answer.exception
    vanilla = ["599.0", "33.4%", "49.0 GB", "3,791", "111,165"]
    assert cells_of(answer, "vanilla") == vanilla
    streaming = ["579.0", "34.5%", "49.0 GB", "3,602", "16,663"]
    assert cells_of(answer, "streaming") == streaming
    assert cells_of(answer, "DDP") == ["39,900.0", "0.5%", "4.9 TB", "", ""]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--sync-every", "7"], "7 is not divisible by num_fragments=2: use sync_every=6 or 8"),
    (["--share", "95"], "share=95.0: use a number between 0 and 1, e.g. 0.95"),
])  # fmt: skip
def test_bad_input_is_refused_with_the_value_and_the_fix(arguments, message):
    answer = plan(*arguments)
    assert isinstance(answer.exception, ValueError) and message in str(answer.exception)


def test_the_shares_that_others_have_measured_are_near_the_planned_ones():
    errors, rows, steps_s = [], {}, []
    for line in RUNS.strip().splitlines():
        sync_every, steps, syncs, *numbers = map(float, line.split())
        measured, of_plan = [], []
        for train_s, total_s, link in zip(*[iter(numbers)] * 3, strict=True):
            run = planned(
                sync_every=int(sync_every),
                params=30.8e6,
                step_s=train_s / steps,
                groups=4,
                link_bits_per_s=1e6 * link,
                host_s_per_param=0.0,  # of two cores; their sums are on a GPU
            )
            measured.append(100 * train_s / total_s)
            of_plan.append(100 * train_s / (train_s + syncs * run.blocked_s))
            steps_s.append(train_s / steps)
        share, share_of_plan = statistics.mean(measured), statistics.mean(of_plan)
        errors.append(100 * abs(share_of_plan / share - 1))
        rows.setdefault(sync_every, []).append(f"{share:.3g} / {share_of_plan:.3g}")
    assert statistics.median(errors) == pytest.approx(OTHERS_MEDIAN, abs=0.05)
    assert max(errors) == pytest.approx(OTHERS_MOST, abs=0.05)
    found = min(steps_s), max(steps_s)
    assert tuple(round(1000 * each, 1) for each in found) == OTHERS_STEPS_MS
    table = "\n".join(f"| {each:.0f} | {' | '.join(cells)} |" for each, cells in rows.items())
    assert table in (ROOT / "docs/plan.md").read_text(), table
