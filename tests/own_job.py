"""The page on own jobs as commands: for the tests that run them as they stand."""

import re
import subprocess
import time
from pathlib import Path

import httpx
from integration.groups import free_port
from page_blocks import block

PAGE = Path(__file__).parent.parent / "docs" / "composer-job.md"


def page() -> str:
    """Return the text of the page on own jobs."""
    return PAGE.read_text()


def blocks(language: str) -> list[str]:
    """The code in one language, in its order."""
    return re.findall(rf"```{language}\n(.*?)```", page(), re.DOTALL)


class OwnJob:
    """The commands of the page, for this machine.

    They are changed in what the text says to change: HOST, the id in the other place, and which of
    the commands starts the job. The port is a free one.

    Args:
        folder: Where everything is started.
        environ: The environment in which it is.
    """

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder, self._environ = folder, environ
        self.port = str(free_port())
        self.coordinator_block, self.group_block = (
            commands.replace("29512", self.port).replace("HOST:", "localhost:")
            for commands in (
                block("docs/composer-job.md", "export COMPOSER_REPLICATION_TOKEN"),
                block("docs/composer-job.md", "export COMPOSER_REPLICATION_COORDINATOR"),
            )
        )
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "OwnJob":
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self.processes:
            process.terminate()
            process.wait()

    def _start(self, commands: str, name: str) -> subprocess.Popen[str]:
        # exec, so that a signal reaches the last command and not the shell.
        *setup, last = commands.strip().splitlines()
        with (self.folder / f"{name}.txt").open("w") as out:
            process = subprocess.Popen(
                ["bash", "-ec", "\n".join([*setup, f"exec {last}"])],
                cwd=self.folder,
                env=self._environ,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.processes.append(process)
        return process

    def start_coordinator(self) -> None:
        process = self._start(self.coordinator_block, "coordinator")
        deadline = time.monotonic() + 240
        while True:
            try:
                httpx.get(f"http://localhost:{self.port}/")
                return
            except httpx.TransportError:
                assert process.poll() is None, self.said("coordinator")
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def start_group(self, group: int, job: str = "python train.py", more: str = ""):
        """Start the group of an id, by one of the commands that the page names for it."""
        *setup, last = self.group_block.strip().splitlines()
        assert job in last, f"the page names no {job!r}: {last}"
        assert "export REPLICA_GROUP_ID=0   # 1 in the other place" in setup
        token = self.coordinator_block.splitlines()[0]  # "with the same token"
        block = "\n".join([token, *setup, f"{job} {more}"])
        return self._start(block.replace("GROUP_ID=0", f"GROUP_ID={group}"), f"group_{group}")

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()
