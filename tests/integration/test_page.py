"""The page and report.html in headless Chromium. Run: pytest tests/integration/test_page.py

Real: Chromium, axe-core, and in one test a launched run of two groups. The other tests open the
report of a run's folder. Without a browser they are skipped with the reason.
"""

import re
import subprocess
import sys

import pytest
from browser import MissingBrowser, chromium, fetch_axe
from forked_commands import ForkedCommand
from integration.test_coordinator import CONFIG, TOKEN
from launch import recorded_run
from pace import paced
from run_events import syncs_of

from composer_replication.launch.page_record import write_page

pytestmark = [pytest.mark.integration, pytest.mark.together]


@pytest.fixture(scope="module")
def browser(pytestconfig):
    try:
        with chromium(pytestconfig.cache.mkdir("chromium")) as browser:
            yield browser
    except MissingBrowser as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def axe(pytestconfig):
    try:
        return fetch_axe(pytestconfig.cache.mkdir("axe"))
    except MissingBrowser as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_page(recorded_run.write_run(tmp_path_factory.mktemp("runs") / "run")).as_uri()


@pytest.fixture
def open_page(browser):
    """Opens an address; at the end the page must have reported no error."""
    contexts, errors = [], []

    def open_page(address, width=1280, scheme="light"):
        size = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
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
def test_the_report_is_readable_at_both_widths_and_in_the_dark(
    open_page, axe, report, width, scheme
):
    page = open_page(report, width, scheme)
    page.get_by_role("heading", name="Finished").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert violations(page, axe) == []
    for heading in ("Replica groups", "Loss of all groups", "Outer loop", "Settings"):
        assert page.get_by_role("heading", name=re.compile(f"^{heading}")).is_visible(), heading
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 27)"
    assert dark == (scheme == "dark")


def test_axe_finds_what_is_wrong(open_page, axe, report):
    page = open_page(report)
    page.evaluate(
        "document.querySelector('#range').parentElement.replaceWith(document.querySelector('#range'))"
    )
    assert violations(page, axe) == ["select-name: ['#range']"]


def test_the_report_shows_what_the_folder_has(open_page, report):
    page = open_page(report)
    assert page.locator("#chart .curve").count() == 3
    assert page.locator("#chart .sync").count() == recorded_run.SYNCS
    assert page.locator("#chart .changed").all_text_contents() == ["v2"]
    spread = page.locator("#spread").inner_text()
    assert "spread before a sync 0.21" in spread and "after it 0.05" in spread
    assert page.get_by_text("means that the groups do not exchange").is_visible()
    label = page.locator("#timeline svg").get_attribute("aria-label")
    assert "4 joins, 1 lost, 1 injected fault" in label
    assert page.locator("#timeline .lost, #timeline .fault").count() == 2
    events = page.locator("#events").inner_text()
    assert "replica group 1: injected: kill" in events and "replica group 1 was lost" in events
    assert f"since outer step {recorded_run.CHANGED_AT}" in page.locator("#changes").inner_text()
    assert page.locator("#readings tr").count() == 5
    assert page.locator("#readings").get_by_text("0.40").is_visible()
    assert not page.locator("#change").is_visible()  # nobody is there to change anything
    assert page.get_by_role("link", name="chaos.json").get_attribute("href") == "chaos.json"


def test_the_chart_is_read_with_the_keyboard_and_can_be_narrowed(open_page, report):
    page = open_page(report)
    page.locator("#chart").focus()
    page.keyboard.press("Home")
    assert "at batch 10" in page.locator("#h-loss").inner_text()
    page.keyboard.press("ArrowRight")
    assert "at batch 20" in page.locator("#h-loss").inner_text()
    assert page.locator("#legend strong").all_inner_texts() == ["5.10", "5.12", "5.14"]
    page.keyboard.press("Escape")
    page.get_by_label("Show").select_option("10")
    assert page.locator("#chart .sync").count() == 10


@pytest.fixture
def launched(tmp_path):
    """A launched run of two groups, which ends with the file ``STOP``: its process and folder."""
    config, run_dir = tmp_path / "tiny.yaml", tmp_path / "run"
    config.write_text(CONFIG)
    process = ForkedCommand(
        [sys.executable, "-m", "composer_replication", "launch", str(config), "--replicas", "2"]
        + [f"run_dir={run_dir}"],
        env=paced(0.02) | {"OMP_NUM_THREADS": "1", "COMPOSER_REPLICATION_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process, run_dir
    process.terminate()
    process.communicate()


def address_of(process):
    for line in process.stdout:
        found = re.match(r"Page: (http://\S+)", line)
        if found:
            return found[1]
    raise AssertionError("the launch has ended without an address")


def metrics(run_dir, group):
    return syncs_of(run_dir / f"replica_{group}")


def first_step_with(run_dir, group, outer_lr):
    steps = [
        s["diloco/outer_step"] for s in metrics(run_dir, group) if s["diloco/outer_lr"] == outer_lr
    ]
    return steps[0] if steps else None


def test_a_change_through_the_form_takes_effect_in_all_groups_at_one_outer_step(
    open_page, axe, launched
):
    process, run_dir = launched
    page = open_page(address_of(process))
    page.set_default_timeout(240_000)
    page.locator("#token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.locator("#readings").wait_for()  # after the first sync
    field = page.get_by_label("outer_lr", exact=True)
    field.fill("0.35")
    shown = page.locator("#facts").inner_text()
    page.locator("#facts").filter(has_not_text=shown).wait_for()
    assert field.input_value() == "0.35"  # the next answers have not replaced it
    field.press("Enter")
    page.get_by_text("is in force in all groups since outer step").wait_for()
    said = int(re.search(r"since outer step (\d+)", page.locator("#changed").inner_text())[1])
    assert violations(page, axe) == []

    page.get_by_label("sync_every").fill("21")
    page.get_by_role("button", name="Change for all groups").click()
    page.get_by_text("Nothing has changed: sync_every=21 is not divisible").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="report.html").click()
    assert "0.7 -> 0.35" in download.value.path().read_text()

    (run_dir / "STOP").touch()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and f"{run_dir}/report.html" in output, output
    assert [first_step_with(run_dir, group, 0.35) for group in range(2)] == [said, said]
    page = open_page((run_dir / "report.html").as_uri())
    page.get_by_role("heading", name="Finished").wait_for()
    assert f"outer_lr 0.7 -> 0.35 since outer step {said}" in page.locator("#changes").inner_text()
