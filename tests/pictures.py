"""Takes the pictures of the documents. Run: make docs; python tests/pictures.py docs [site]

It trains configs/quickstart.yaml in two groups, kills one of them, and takes pictures of the run's
page, of what a terminal shows and of the report. Another picture is of the site in build/docs; with
``site`` it takes only this one. ``page.sha256`` says what the pictures show, so that test_docs.py
finds those that are older than the code that draws them.
"""

import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import psutil
from browser import chromium
from recorded_groups import recorded
from rich.console import Console

from composer_replication.launch import outcome
from composer_replication.launch.display import LiveRun, live_table
from composer_replication.launch.run_record import describe

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = ROOT / "build/docs/index.html"
TOKEN = "a-token-for-the-pictures"
KILL_AT, SHOW_AT = 15, 80
"""Outer steps at which group 1 is killed, and at which the page's pictures are taken."""
COLUMNS = (80, 120)
"""Widths, in columns, of the terminals of which pictures are taken."""


# ---- what the pictures show --------------------------------------------------------------------


def digests():
    """A digest for each kind of picture, which changes when the picture would.

    The digest of the page is of its files, that of a terminal of how it shows a run that is always
    the same, and that of the site of the landing page and of the titles beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = recorded(Path(folder), 2)
        shown = [terminal(width, run, [], describe(run)).export_text() for width in COLUMNS]
    web = sorted((ROOT / "composer_replication/coordinator/web").iterdir())
    titles = [page.read_text().partition("\n")[0] for page in sorted(DOCS.glob("*.md"))]
    parts = {
        "page": [file.read_bytes() for file in web],
        "terminal": [text.encode() for text in shown],
        "site": [(DOCS / name).read_bytes() for name in ("conf.py", "index.md")]
        + [title.encode() for title in titles],
    }
    return {kind: hashlib.sha256(b"".join(each)).hexdigest() for kind, each in parts.items()}


def taken_of():
    """The digests for which the pictures in docs were taken."""
    lines = (DOCS / "page.sha256").read_text().splitlines()
    return {kind: digest for digest, kind in map(str.split, lines)}


def terminal(width, run, lines, rows=()):
    """What ``launch`` shows on a terminal, drawn by its own code.

    Args:
        width: Of the terminal, in columns.
        run: A ``LiveRun`` that has been updated.
        lines: What has been said so far.
        rows: The result of the run; empty before its end.

    Returns:
        A console that has recorded it.
    """
    console = Console(width=width, force_terminal=True, record=True, file=io.StringIO())
    for line in lines:
        console.print(line, markup=False, highlight=False)
    console.print(live_table(run, height=24))
    with mock.patch.object(outcome, "Console", lambda **_: console):
        outcome.print_rows(rows)
    return console


# ---- the run -----------------------------------------------------------------------------------


def launch(output):
    """Start the run, which writes into a file, and wait for its address.

    Returns:
        Its process, its folder and the address of its page.
    """
    command = [sys.executable, "-m", "composer_replication", "launch", "configs/quickstart.yaml"]
    process = subprocess.Popen(
        [*command, "--replicas", "2"],
        env=os.environ | {"COMPOSER_REPLICATION_TOKEN": TOKEN},
        cwd=ROOT,
        stdout=output.open("w"),
    )
    while process.poll() is None:
        time.sleep(0.1)
        found = re.match(r"Run folder: (\S+)\n(?:.*\n)*?Page: (http://\S+)", output.read_text())
        if found:
            return process, ROOT / found[1], found[2]
    raise SystemExit("the launch has ended without an address")


def kill_group(process, group):
    """Kill the training processes of a group; the launcher starts it again."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("REPLICA_GROUP_ID") == str(group):
            child.kill()


def wait_for_outer_step(page, least):
    """Wait until the page shows an outer step of at least this."""
    facts = page.locator("#facts strong")
    while int(facts.inner_text().replace(",", "") or 0) < least:
        page.wait_for_timeout(500)


# ---- the pictures ------------------------------------------------------------------------------


def take_pictures_of_a_run(page, terminal_page, folder, output):
    process, run_dir, address = launch(output)
    try:
        page.goto(address)
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.locator("#facts strong").wait_for()
        wait_for_outer_step(page, KILL_AT)
        kill_group(process, 1)
        page.get_by_text("1 of 2 groups alive").wait_for()
        take_terminals(terminal_page, run_dir, output, folder, "terminal-{}.png")
        page.get_by_text("2 of 2 groups alive").wait_for()
        wait_for_outer_step(page, SHOW_AT)
        for name, width, scheme in (
            ("page.png", 1280, "light"),
            ("page-dark.png", 1280, "dark"),
            ("page-400.png", 400, "light"),
        ):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(1500)  # until the page is drawn again at this width
            page.screenshot(path=folder / name, full_page=True)
        process.wait()
    finally:
        process.terminate()
        process.wait()
    take_terminals(terminal_page, run_dir, output, folder, "terminal-{}-end.png")
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"file://{run_dir}/report.html")
    page.screenshot(path=folder / "report.png", full_page=True)


def take_terminals(page, run_dir, output, folder, name):
    said = output.read_text().replace(f"{ROOT}/", "").splitlines()
    # In a file there are lines about all groups in place of the table, and of the result's.
    rows = [(line[:24].rstrip(), line[24:]) for line in said if line[:1].islower()]
    lines = [line for line in said if not line[:1].islower() and ", step " not in line]
    run = LiveRun(run_dir, range(2))
    run.update()
    for width in COLUMNS:
        svg = terminal(width, run, lines, rows).export_svg(title="make train")
        # Without its fonts, which are on the internet.
        page.set_content(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))
        page.set_viewport_size({"width": 13 * width, "height": 900})
        page.locator("svg").first.screenshot(path=folder / name.format(width))


def main():
    folder, *only = sys.argv[1:]
    folder = Path(folder)
    cache = ROOT / ".pytest_cache/d/chromium"  # where the tests keep theirs
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, chromium(cache) as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 960})  # up to the table's end
        page.set_default_timeout(1_800_000)
        page.goto(f"file://{SITE}")
        page.screenshot(path=folder / "site.png")
        if only != ["site"]:
            terminal_page = browser.new_page()
            take_pictures_of_a_run(page, terminal_page, folder, Path(scratch, "output.txt"))
    taken = digests() if only != ["site"] else taken_of() | {"site": digests()["site"]}
    lines = [f"{digest}  {kind}\n" for kind, digest in taken.items()]
    (folder / "page.sha256").write_text("".join(lines))


if __name__ == "__main__":
    main()
