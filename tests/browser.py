"""Headless Chromium and axe-core for the tests of the page, without installing them."""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "chromium-headless-shell"
PROGRAM = f"usr/lib/chromium/{PACKAGE}"
INSTALLED = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
AXE = "axe-core@4.14.1"


class MissingBrowser(Exception):
    """Chromium or axe-core cannot be had here; the message says why."""


def find_chromium(folder: Path) -> tuple[Path, dict[str, str]]:
    """Find an installed Chromium, or download and unpack Debian's into a folder, once.

    Returns:
        The program, and the variables that it needs.

    Raises:
        MissingBrowser: There is none, and this is no Debian, or its packages cannot be downloaded.
    """
    for name in INSTALLED:
        installed = shutil.which(name)
        if installed:
            return Path(installed), {}
    root = folder / "root"
    if not root.exists():
        _unpack_debians(folder, root)
    libraries = {str(path.parent) for path in (root / "usr/lib").rglob("*.so*")}
    return root / PROGRAM, {"LD_LIBRARY_PATH": os.pathsep.join(sorted(libraries))}


def _unpack_debians(folder: Path, root: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise MissingBrowser("there is no Chromium, and no apt-get to download its packages with")
    part = folder / f"part-{os.getpid()}"
    part.mkdir(parents=True)
    try:
        # What the system lacks of its dependencies; nothing is installed.
        would = _run("apt-get", "-s", "--no-install-recommends", "install", PACKAGE, cwd=part)
        names = [line.split()[1] for line in would.splitlines() if line.startswith("Inst ")]
        _run("apt-get", "download", *names, cwd=part)
        for package in part.glob("*.deb"):
            _run("dpkg", "-x", package.name, "root", cwd=part)
        if not (part / "root" / PROGRAM).exists():
            raise MissingBrowser("this system's package of Chromium is not like Debian's")
        (part / "root").replace(root)
    finally:
        shutil.rmtree(part)


def fetch_axe(folder: Path) -> str:
    """Download axe-core from npm into a folder, once, and return its script.

    Raises:
        MissingBrowser: There is no npm, or the package cannot be downloaded.
    """
    script = folder / "axe.min.js"
    if not script.exists():
        if not shutil.which("npm"):
            raise MissingBrowser("there is no npm to download axe-core with")
        name = _run("npm", "pack", "--silent", AXE, cwd=folder).split()[-1]
        with tarfile.open(folder / name) as package:
            member = package.extractfile("package/axe.min.js")
            assert member is not None, f"{name} has no axe.min.js"
            content = member.read()
        draft = folder / f"axe-{os.getpid()}.js"
        draft.write_bytes(content)
        draft.replace(script)
    return script.read_text()


def _run(*command: str, cwd: Path) -> str:
    # RES_OPTIONS: conftest.py keeps the name server from being asked.
    environ = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    try:
        return subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=180, check=True
        ).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        words = " ".join(command[:3])
        raise MissingBrowser(f"{words} ... has failed: {error.stderr or error}") from error


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """Start a headless Chromium, found in or unpacked into a folder.

    Yields:
        Playwright's browser.

    Raises:
        MissingBrowser: There is none, or no playwright.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise MissingBrowser("playwright is not installed: pip install playwright") from error
    program, variables = find_chromium(folder)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox"],  # in a container, root has no other way
            env={**os.environ, **variables},  # pyright: ignore
        )
        yield browser
        browser.close()
