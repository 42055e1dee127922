"""The page, live and saved, in headless Chromium. Run: pytest tests/integration/test_page.py

Real: Chromium, axe-core, and a launched run of two groups. Without a browser the tests are skipped
with the reason.
"""

import math
import re

import pytest
from browser import chromium, fetch_axe
from debian import MissingProgram
from harness.commands import Launch
from integration.test_coordinator import TOKEN, config_of
from launch import recorded_run
from recorded_groups import write_group
from run_events import write_events

from composer_replication.launch.outcome import write_page
from composer_replication.launch.run_record import open_run

pytestmark = [pytest.mark.integration, pytest.mark.together]


@pytest.fixture(scope="module")
def browser(pytestconfig):
    try:
        with chromium(pytestconfig.cache.mkdir("chromium")) as browser:
            yield browser
    except MissingProgram as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def axe(pytestconfig):
    try:
        return fetch_axe(pytestconfig.cache.mkdir("axe"))
    except MissingProgram as missing:
        pytest.skip(str(missing))


def page_of(run_dir):
    """Save the page of a run, and return its address."""
    return write_page(open_run(run_dir)).as_uri()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return page_of(recorded_run.write_run(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture
def folder(tmp_path):
    return recorded_run.write_run(tmp_path / "run")


@pytest.fixture
def open_page(browser):
    """Opens an address; at the end the page must have reported no error."""
    contexts, errors = [], []

    def open_page(address, width=1280, scheme="light"):
        size = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(f"a script ran: {dialog.message}"))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not errors


def violations(page, axe):
    """The violations that axe-core finds on a page, a line each."""
    page.evaluate(axe)
    found = page.evaluate("axe.run()")["violations"]
    return [f"{one['id']}: {node['target']}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_readable_at_both_widths_and_in_the_dark(open_page, axe, report, width, scheme):
    page = open_page(report, width, scheme)
    page.get_by_role("heading", name="Finished").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert violations(page, axe) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 27)"
    assert dark == (scheme == "dark")


def test_the_saved_page_shows_what_the_folder_has(open_page, report):
    page = open_page(report)
    assert "run: Finished" in page.locator("#state").inner_text()
    assert page.locator("#agreement").inner_text() == (
        "Parameters equal in 3 groups at outer step 40: 28282828"
    )
    curves = page.locator("#chart .curve")
    # Group 1 was away for a while, and its curve has a gap there.
    assert [curves.nth(i).get_attribute("d").count("M") for i in range(3)] == [1, 2, 1]
    assert "24.50" in page.locator("#evaluations").inner_text()
    assert "epoch 0, 500 of 2,000 samples done (25.0 %), 64 leased" in page.content()
    events = page.locator("#events").inner_text()
    assert "replica group 1 was lost" in events and "2 retries of the sync" in events
    assert "outer_lr" in page.locator("#settings").inner_text()
    assert not page.locator("#defaults").is_visible()
    page.get_by_text("As by default").click()
    page.set_viewport_size({"width": 900, "height": 900})  # it is drawn again
    assert "wire_format" in page.locator("#defaults").inner_text()
    assert page.get_by_role("link", name="config.yaml").get_attribute("href") == "config.yaml"
    # What strangers send is text.
    assert "<img src=x onerror=alert(1)> has connected" in events
    assert "<b>here</b> 2 ranks" in page.locator("#groups").inner_text()
    assert page.locator("img, b").count() == 0


def written(folder, *, losses=(), fruitless=0):
    """The report of a group with these losses, and then syncs to which nobody contributes."""
    nothing = {"diloco/contribution": 0.0, "diloco/total_contribution": 0.0, "loss": math.nan}
    lines = [recorded_run.sync(0, step) | {"loss": loss} for step, loss in enumerate(losses, 1)]
    lines += [recorded_run.sync(0, len(losses)) | nothing for _ in range(fruitless)]
    write_events(folder / "replica_0", "sync", *lines)
    end = {"inner_steps": 10 * len(lines), "outer_steps": len(losses), "global_digest": "28" * 32}
    write_events(folder / "replica_0", "end", end)
    return page_of(folder)


def test_at_400_pixels_numbers_are_whole_and_a_long_error_is_two_lines_until_it_is_opened(
    open_page, axe, folder
):
    text = "NothingToContinueFromError: this run has taken 40 outer steps, and " + 300 * "so on "
    error = {"time": recorded_run.sync_time(recorded_run.SYNCS + 1), "error": text}
    write_events(folder / "replica_2", "error", error)
    page = open_page(page_of(folder), 400)
    cell = page.locator("#groups td.error").nth(2)
    assert cell.bounding_box()["height"] < 70 and violations(page, axe) == []
    cell.locator("summary").click()
    assert cell.inner_text().rstrip().endswith("so on")
    heights = [cell.bounding_box()["height"] for cell in page.locator("#evaluations th").all()]
    assert max(heights) < 40, "a heading is broken into several lines"


def test_of_a_run_that_was_stopped_no_group_is_lost_and_no_time_is_left(open_page, folder):
    at = recorded_run.sync_time(recorded_run.SYNCS + 1)
    progress = {"batch": 400, "max_batches": 800, "steps_per_second": 5.0}
    for group, phase in enumerate(["stopped", "training", "sync"]):
        write_events(folder / f"replica_{group}", "start", recorded_run.start(at, at))
        write_group(folder, group, phase=phase, **progress)
    page = open_page(page_of(folder))
    page.get_by_role("heading", name="Ended early").wait_for()
    assert page.locator("#facts").inner_text().endswith("3 groups, 3 stopped")
    assert page.locator("#bar").inner_text().strip() == "400 of 800 batches"
    assert "lost" not in page.locator("#groups").inner_text()


def test_a_fold_that_is_open_stays_with_its_text_and_failed_groups_are_counted(open_page, folder):
    for group, phase in enumerate(["failed", "left out"]):
        (folder / f"replica_{group}" / "status.json").write_text(f'{{"phase": "{phase}"}}')
        at = recorded_run.sync_time(recorded_run.SYNCS + 1 + group)
        error = {"time": at, "error": f"{group}: {60 * 'so on '}"}
        write_events(folder / f"replica_{group}", "start", recorded_run.start(at, at))
        write_events(folder / f"replica_{group}", "error", error)
    page = open_page(page_of(folder))
    assert "2 failed" in page.locator("#facts").inner_text()
    assert "stopped" not in page.locator("#facts").inner_text()
    page.locator("#events summary").first.click()
    [opened] = page.locator("#events details[open]").all_inner_texts()
    page.evaluate(
        "status.events.push({time: 4e9, text: 'a newer one: ' + 'and so on '.repeat(30)}); draw()"
    )
    assert page.locator("#events details[open]").all_inner_texts() in ([], [opened])


def test_a_run_that_has_learned_nothing_is_red_and_says_why(open_page, axe, tmp_path):
    page = open_page(written(tmp_path / "run", fruitless=3))
    state = page.get_by_role("heading", name="Learned nothing").locator(".bad")
    assert state.inner_text() == "Learned nothing"
    why = page.get_by_role("alert").filter(has_text="this run has learned nothing: in its last 3")
    assert "bad" in why.get_attribute("class")
    assert "Every loss is NaN or infinite." in page.locator("#chart").inner_text()
    assert violations(page, axe) == []


@pytest.mark.parametrize(
    ("losses", "pieces", "lines"),
    [
        ([5.0, None, None, 4.0, 3.0, None], 1, 2),
        ([5.0, 4.0, math.nan, 3.0, None], 2, 1),  # a point alone is a dot
        ([None, 5.0, None], 1, 0),
    ],
)
def test_a_curve_runs_over_syncs_without_a_loss_and_has_a_gap_where_it_is_no_number(
    open_page, tmp_path, losses, pieces, lines
):
    page = open_page(written(tmp_path / "run", losses=losses))
    page.get_by_role("heading", name="Finished").wait_for()
    path = page.locator("#chart .curve").get_attribute("d")
    assert (path.count("M"), path.count("L"), path.count("h0")) == (pieces, lines, pieces + lines)
    assert page.locator("#failure").inner_text() == ""


def test_the_chart_is_read_with_the_keyboard(open_page, report):
    page = open_page(report)
    page.locator("#chart").focus()
    page.keyboard.press("Home")
    assert "at batch 10" in page.locator("#h-loss").inner_text()
    page.keyboard.press("ArrowRight")
    assert "at batch 20" in page.locator("#h-loss").inner_text()
    assert page.locator("#legend strong").all_inner_texts() == ["5.10", "5.12", "5.14"]
    page.keyboard.press("Escape")
    assert "batch" not in page.locator("#h-loss").inner_text()


@pytest.fixture
def launched(tmp_path):
    """A launched run of two groups."""
    config = tmp_path / "tiny.yaml"
    config.write_text(config_of("sync_every: 20, num_fragments: 2, schedule: []"))
    words, environ = ["callbacks.diloco.digest_every=1"], {"COMPOSER_REPLICATION_TOKEN": TOKEN}
    with Launch(config, tmp_path / "run", *words, pace_s=0.02, **environ) as launch:
        yield launch


def check_run(page):
    """What the page shows of the launched run, live as saved."""
    page.locator("#agreement").filter(has_text="equal in 2 groups at outer step").wait_for()
    page.locator("#chart .curve").nth(1).wait_for()
    assert page.locator("#state").inner_text().startswith("run: ")
    rows = page.locator("#groups tbody tr")
    assert rows.count() == 2 and page.locator("#groups .bad").count() == 0
    shares = page.locator("#groups [data-label='Inner share']").all_inner_texts()
    assert all(0 < float(share.removesuffix(" %")) <= 100 for share in shares)
    assert "replica group 1 has connected" in page.locator("#events").inner_text()
    assert re.search(r"sync_every\s+20\b", page.locator("#settings").inner_text())


def test_a_run_live_and_the_same_page_saved_in_the_middle_and_at_the_end(
    open_page, axe, launched, tmp_path
):
    address = re.compile(r"(?m)^Page: (http://\S+)\s")
    page = open_page(launched.wait_until(lambda: address.search(launched.said()))[1])
    page.set_default_timeout(240_000)
    page.locator("#token").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("The service rejected this token.").wait_for()
    page.locator("#token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.locator("#facts").filter(has_text=re.compile(r"Outer step [2-9].* steps/s")).wait_for()
    check_run(page)
    assert violations(page, axe) == []
    with page.expect_download() as download:
        page.get_by_role("button", name="report.html").click()
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)

    launched.stop()
    launched.summary()
    report = launched.run_dir / "report.html"
    assert str(report) in launched.said()
    check_run(open_page(saved.as_uri()))
    page = open_page(report.as_uri())
    check_run(page)
    assert page.get_by_role("heading", name="Finished").is_visible()
