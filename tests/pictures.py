"""Takes the pictures of the page that docs/watching.md shows. Run: python tests/pictures.py docs

It launches configs/quickstart.yaml with two groups and a smaller model, kills one of them, and
writes page.png, page-dark.png and page-400.png into the folder, and page.sha256: of which code of
the page they are, so that test_docs.py finds pictures that are older than it.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from browser import chromium

ROOT = Path(__file__).parent.parent
TOKEN = "a-token-for-the-pictures"
KILL_AT, SHOW_AT = 15, 60
"""Outer steps: group 1 is killed, the pictures are taken."""


def page_digest():
    """A digest of all files of the page."""
    files = sorted((ROOT / "composer_replication/coordinator/web").iterdir())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def launch(run_dir):
    """Start the run; its process and the page's address."""
    options = [f"run_dir={run_dir}", "model.d_model=64", "reference=null"]
    options.append("callbacks.diloco.digest_every=1")
    process = subprocess.Popen(
        [sys.executable, "-m", "composer_replication", "launch", "configs/quickstart.yaml"]
        + ["--replicas", "2", *options],
        env=os.environ | {"COMPOSER_REPLICATION_TOKEN": TOKEN},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        found = re.match(r"Page: (http://\S+)", line)
        if found:
            return process, found[1]
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


def take_pictures(browser, process, address, folder):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1_800_000)
    page.goto(address)
    page.locator("#token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.locator("#facts strong").wait_for()
    wait_for_outer_step(page, KILL_AT)
    kill_group(process, 1)
    page.get_by_text("1 of 2 groups alive").wait_for()
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


def main():
    [folder] = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch, chromium(Path(scratch)) as browser:
        process, address = launch(Path(scratch) / "quickstart")
        try:
            take_pictures(browser, process, address, Path(folder))
            Path(folder, "page.sha256").write_text(f"{page_digest()}\n")
        finally:
            process.terminate()
            process.communicate()


if __name__ == "__main__":
    main()
