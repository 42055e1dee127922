"""What the coordinator's work units cost: leases a second, latency, and a large data set.

    python benchmarks/coordinator.py [--quick] [--json OUT] [--seconds 15] [--leases 1e6]

The real service, as a process of its own on a temporary folder, with one data set of 1,000,000
units and 100 replica groups; the groups are connections of this process. Every answer is on the
disk before it is given, so the disk's own time for that is shown too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from results import command_line, count, write
from rich.console import Console
from rich.table import Table

from composer_replication import __version__
from composer_replication.coordinator.database import Database
from composer_replication.coordinator.server import STATE
from composer_replication.coordinator.work_units import WorkUnits

GROUPS = 100
UNITS = 1_000_000
UNIT_SIZE = 64
RATE = 200
"""Requests a second, of all groups together."""

QUICK = {"seconds": 3.0, "paced_s": 6.0, "leases": 100_000, "starts": 1}

LIMIT_MS = 50.0
CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
DATASET = {"dataset_id": "large", "length": UNITS * UNIT_SIZE, "seed": 0, "unit_size": UNIT_SIZE}


class Service:
    """The coordinator on a folder; ``start_s`` is the time until it answered, in seconds."""

    def __init__(self, folder: Path) -> None:
        began = time.perf_counter()
        command = [str(Path(sys.executable).with_name("composer-replication")), "coordinator"]
        command += [str(CONFIG), "--bind", "127.0.0.1:0", "--state-dir", str(folder)]
        environment = os.environ | {"COMPOSER_REPLICATION_TOKEN": "", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        told = next((line for line in self.process.stdout if "COORDINATOR=" in line), "")
        if not told:
            raise RuntimeError(f"the coordinator ended with {self.process.wait()}: {command}")
        address = told.split("=", 1)[1].split()[0]
        self.port = int(address.rpartition(":")[2])
        asyncio.run(self._info())
        self.start_s = time.perf_counter() - began

    async def _info(self) -> None:
        await (await Group.connect(self.port, 0)).ask("GET", "info")

    @property
    def rss_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()


class Group:
    """A replica group: one connection, one request at a time. HTTP by hand, to cost little."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self.leases = itertools.count()
        self.stream = self.samples = 0

    @classmethod
    async def connect(cls, port: int, number: int) -> Group:
        return cls(number, *await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request; its answer."""
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        )
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(headers.split("content-length:")[1].split("\r\n")[0])
        answer = json.loads(await self._reader.readexactly(size))
        if headers[9] != "2":
            raise RuntimeError(f"{method} {path}: {headers.splitlines()[0]}: {answer}")
        return answer

    async def begin(self) -> None:
        """Register, and open a stream."""
        name = str(self.number)
        about = {"replica_id": name, "session": name, "host": "x", "world_size": 1, "model": "x"}
        versions = {"composer_replication": __version__, "torchft": version("torchft-nightly")}
        await self.ask("POST", "replicas", about | versions)
        stream = {"name": name, "replica_id": name, "session": name, "dataset_id": "large"}
        self.stream = (await self.ask("POST", "streams", stream))["stream"]

    async def lease(self) -> None:
        async with self._turn:
            wanted = {"number": next(self.leases), "epoch": 0}
            lease = await self.ask("POST", f"streams/{self.stream}/leases", wanted)
            self.samples = lease["stream_start"] + lease["stop"] - lease["start"]

    async def beat(self) -> None:
        async with self._turn:
            told = {"session": str(self.number), "outer_step": 1, "phase": "training", "loss": 2.5}
            await self.ask("POST", f"replicas/{self.number}/heartbeat", told)

    async def commit(self, groups: list[Group], outer_step: int) -> None:
        """Report that the model has all that was leased."""
        ledger = [[g.stream, g.samples, g.samples] for g in groups]
        present = [g.stream for g in groups]
        told = {"outer_step": outer_step, "ledger": ledger, "present": present, "age_s": 0.1}
        async with self._turn:
            await self.ask("POST", "commits", told)


async def load(port: int, flat_out_s: float, paced_s: float) -> dict[str, float]:
    """Requests of 100 groups: as fast as they can, then at a steady rate."""
    groups = [await Group.connect(port, number) for number in range(GROUPS)]
    await groups[0].ask("POST", "datasets", DATASET)
    for group in groups:
        await group.begin()
    rate = await flat_out(groups, flat_out_s)
    taken = await paced(groups, paced_s)
    found = {"leases_per_s": rate}
    for kind, times in taken.items():
        cuts = statistics.quantiles(times, n=100, method="inclusive")
        found |= {f"{kind}_p50_ms": 1e3 * cuts[49], f"{kind}_p99_ms": 1e3 * cuts[98]}
    return found


async def flat_out(groups: list[Group], seconds: float) -> float:
    """Leases a second."""
    end = time.perf_counter() + seconds

    async def lease(group: Group) -> int:
        count = 0
        while time.perf_counter() < end:
            await group.lease()
            count += 1
        return count

    began = time.perf_counter()
    counts = await asyncio.gather(*map(lease, groups))
    return sum(counts) / (time.perf_counter() - began)


async def paced(groups: list[Group], seconds: float) -> dict[str, list[float]]:
    """Seconds that each request took, from when it was due: three leases to a heartbeat, and some
    reports of syncs."""
    taken: dict[str, list[float]] = {"all": [], "lease": [], "beat": [], "commit": []}

    async def one(kind: str, group: Group, number: int, due: float) -> None:
        if kind == "commit":
            await group.commit(groups, number)
        else:
            await getattr(group, kind)()
        for name in ("all", kind):
            taken[name].append(time.perf_counter() - due)

    began, tasks = time.perf_counter(), []
    for number in range(round(RATE * seconds)):
        due = began + number / RATE
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        kind = "commit" if number % 20 == 0 else "beat" if number % 4 == 1 else "lease"
        group = groups[number * 37 % GROUPS]
        tasks.append(asyncio.create_task(one(kind, group, number, due)))
    await asyncio.gather(*tasks)
    return taken


def fill(folder: Path, num_leases: int) -> float:
    """Lease units to 100 streams, without HTTP and many to a transaction; leases a second."""
    database = Database(folder / STATE)
    units = WorkUnits(database)
    units.create_dataset(**DATASET)
    streams = [units.open_stream(str(n), "large", str(n), str(n)) for n in range(GROUPS)]
    began = time.perf_counter()
    every = 10_000
    for start in range(0, num_leases, every):
        with database.transaction():
            for i in range(start, min(start + every, num_leases)):
                units.lease(streams[i % GROUPS], i // GROUPS, 0)
    took = time.perf_counter() - began
    database.close()
    return num_leases / took


def sync_ms(folder: Path) -> float:
    """What this disk takes to have a page safely, in ms."""
    times = []
    with open(folder / "probe", "wb", buffering=0) as file:
        for _ in range(200):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def large(root: Path, num_leases: int, starts: int) -> dict[str, float]:
    """What a state folder of that many leases costs, next to an empty one."""
    full = root / "full"
    full.mkdir()
    found = {"leases": float(num_leases), "fill_per_s": fill(full, num_leases)}
    found["database_mb"] = (full / STATE).stat().st_size / 1e6
    seconds: dict[str, list[float]] = {"empty": [], "full": []}
    for number in range(starts):
        for kind, folder in (("empty", root / f"empty {number}"), ("full", full)):
            with Service(folder) as service:
                seconds[kind].append(service.start_s)
                found[f"{kind}_rss_mb"] = service.rss_mb
    for kind, times in seconds.items():
        found[f"{kind}_start_s"] = statistics.median(times)
    return found


def main() -> None:
    parser = command_line(__doc__, quick="under 50 s, with fewer leases")
    parser.add_argument("--seconds", type=float, default=15.0, help="of requests as fast as can be")
    parser.add_argument("--paced-s", type=float, default=60.0, help="of those at a steady rate")
    parser.add_argument("--leases", type=count, default=UNITS, help="in the large state folder")
    parser.add_argument("--starts", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found = {"sync_ms": sync_ms(root)}
        with console.status("requests"), Service(root / "load") as service:
            found |= asyncio.run(load(service.port, arguments.seconds, arguments.paced_s))
        with console.status("a large state folder"):
            found |= large(root, arguments.leases, arguments.starts)
    show(console, found)
    write(found, arguments)


def show(console: Console, found: dict[str, float]) -> None:
    """The figures as a table."""
    table = Table("what", "measured", "limit")
    leases = f"{found['leases']:,.0f}"
    table.add_row("fdatasync of this disk, ms", f"{found['sync_ms']:.2f}", "")
    table.add_row(f"leases a second, {GROUPS} groups", f"{found['leases_per_s']:,.0f}", "")
    for kind in ("all", "lease", "beat", "commit"):
        name = f"{RATE} requests a second: {kind}, p50 / p99, ms"
        p50, p99 = found[f"{kind}_p50_ms"], found[f"{kind}_p99_ms"]
        table.add_row(name, f"{p50:.1f} / {p99:.1f}", f"{LIMIT_MS:.0f}" if kind == "all" else "")
    table.add_row("leases a second without HTTP, in batches", f"{found['fill_per_s']:,.0f}", "")
    table.add_row(f"{leases} leases on the disk, MB", f"{found['database_mb']:.1f}", "")
    for name, unit in (("start", "s"), ("rss", "mb")):
        empty, full = found[f"empty_{name}_{unit}"], found[f"full_{name}_{unit}"]
        what = {"start": "start to the first answer, s", "rss": "resident memory, MB"}[name]
        table.add_row(
            f"{what}: empty / {leases} leases / more",
            f"{empty:.2f} / {full:.2f} / {full - empty:+.2f}",
            "",
        )
    console.print(table)


if __name__ == "__main__":
    main()
