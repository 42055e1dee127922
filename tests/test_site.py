"""The built site in a real browser: what a search finds first, and tables and code that fit it.

Run: make docs; pytest tests/test_site.py. It is skipped where the site or a browser is missing.
"""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import chromium
from debian import MissingProgram

SITE = Path(__file__).parent.parent / "build" / "docs"
FIRST = {
    "bandwidth": "plan",
    "hang": "troubleshooting",
    "power loss": "checkpoints",
    "FSDP": "fsdp",
    "GPU": "limits",
    "W%26B": "watching",
    "resume": "checkpoints",
    "Slurm": "slurm",
    "batch size": "choose",
    "TRL": "hugging-face",
}
"""What people search for, and the page with the answer."""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.together,
    pytest.mark.skipif(not SITE.exists(), reason="needs build/docs: make docs"),
]


@pytest.fixture(scope="module")
def page(pytestconfig):
    """A page of a browser, and the address of the site."""
    handler = partial(SimpleHTTPRequestHandler, directory=SITE)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with chromium(pytestconfig.cache.mkdir("chromium")) as browser:
                context = browser.new_context(
                    base_url=f"http://127.0.0.1:{server.server_port}",
                    viewport={"width": 1280, "height": 900},
                )
                yield context.new_page()
        except MissingProgram as error:
            pytest.skip(str(error))
        finally:
            server.shutdown()


@pytest.mark.parametrize(("query", "name"), FIRST.items())
def test_a_search_finds_the_right_page_first(page, query, name):
    page.goto(f"/search.html?q={query}")
    first = page.locator("#search-results ul.search li a").first
    assert first.get_attribute("href").partition("#")[0] == f"{name}.html"


def test_no_table_and_no_code_is_wider_than_its_page(page):
    for path in SITE.glob("*.html"):
        page.goto(f"/{path.name}")
        boxes = "[...document.querySelectorAll('.table-wrapper, pre')]"
        cut = f"{boxes}.filter(e => e.scrollWidth > e.clientWidth + 2).map(e => e.innerText)"
        assert page.evaluate(cut) == [], path.name
