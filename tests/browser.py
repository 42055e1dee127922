"""Headless Chromium and axe-core for the tests of the page, without installing them."""

import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from debian import MissingProgram, run, unpacked

PACKAGE = "chromium-headless-shell"
PROGRAM = f"usr/lib/chromium/{PACKAGE}"
INSTALLED = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
AXE = "axe-core@4.14.1"


def find_chromium(folder: Path) -> tuple[Path, dict[str, str]]:
    """Find an installed Chromium, or download and unpack Debian's into a folder, once.

    Returns:
        The program, and the variables that it needs.

    Raises:
        MissingProgram: There is none, and this is no Debian, or its packages cannot be downloaded.
    """
    for name in INSTALLED:
        installed = shutil.which(name)
        if installed:
            return Path(installed), {}
    root = unpacked(folder, PACKAGE, program=PROGRAM, dependencies=True)
    libraries = {str(path.parent) for path in (root / "usr/lib").rglob("*.so*")}
    return root / PROGRAM, {"LD_LIBRARY_PATH": os.pathsep.join(sorted(libraries))}


def fetch_axe(folder: Path) -> str:
    """Download axe-core from npm into a folder, once, and return its script.

    Raises:
        MissingProgram: There is no npm, or the package cannot be downloaded.
    """
    script = folder / "axe.min.js"
    if not script.exists():
        if not shutil.which("npm"):
            raise MissingProgram("there is no npm to download axe-core with")
        name = run("npm", "pack", "--silent", AXE, cwd=folder).split()[-1]
        with tarfile.open(folder / name) as package:
            member = package.extractfile("package/axe.min.js")
            assert member is not None, f"{name} has no axe.min.js"
            content = member.read()
        draft = folder / f"axe-{os.getpid()}.js"
        draft.write_bytes(content)
        draft.replace(script)
    return script.read_text()


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """Start a headless Chromium, found in or unpacked into a folder.

    Yields:
        Playwright's browser.

    Raises:
        MissingProgram: There is none, or no playwright.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise MissingProgram("playwright is not installed: pip install playwright") from error
    program, variables = find_chromium(folder)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox"],  # in a container, root has no other way
            env={**os.environ, **variables},  # pyright: ignore
        )
        yield browser
        browser.close()
