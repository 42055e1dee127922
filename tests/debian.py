"""Programs from Debian's packages, which are unpacked and not installed. For the tests."""

import os
import shutil
import subprocess
from pathlib import Path


class MissingProgram(Exception):
    """A program cannot be had here; the message says why."""


def unpacked(folder: Path, *packages: str, program: str, dependencies: bool = False) -> Path:
    """Download packages and unpack them into a folder, once.

    Args:
        folder: One that is kept from one session of tests to the next.
        *packages: Their names.
        program: A file that they have to bring, from the root of a system on.
        dependencies: Whether to take along what the system lacks of those that they need.

    Returns:
        The root of a system that has them alone.

    Raises:
        MissingProgram: This is no Debian, or the packages cannot be downloaded.
    """
    root, part = folder / "root", folder / f"part-{os.getpid()}"
    if root.exists():
        return root
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise MissingProgram(f"there is no apt-get here to download {packages[0]} with")
    part.mkdir(parents=True)
    try:
        if dependencies:
            would = run("apt-get", "-s", "--no-install-recommends", "install", *packages, cwd=part)
            lines = [line.split() for line in would.splitlines()]
            packages = tuple(words[1] for words in lines if words[:1] == ["Inst"])
        run("apt-get", "download", *packages, cwd=part)
        for package in part.glob("*.deb"):
            run("dpkg", "-x", package.name, "root", cwd=part)
        if not (part / "root" / program).exists():
            raise MissingProgram(f"this system's packages have no {program}, as Debian's have")
        (part / "root").replace(root)
    finally:
        shutil.rmtree(part)
    return root


def run(*command: str, cwd: Path) -> str:
    """What a command prints that downloads something.

    Raises:
        MissingProgram: It has failed.
    """
    # RES_OPTIONS: conftest.py keeps the name server from being asked.
    environ = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    try:
        return subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=180, check=True
        ).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        words = " ".join(command[:3])
        raise MissingProgram(f"{words} ... has failed: {error.stderr or error}") from error
