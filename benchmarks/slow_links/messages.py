"""In how many messages the bytes of a sync should travel, when gloo does not allreduce them.

    python -m benchmarks.slow_links.messages [--quick] [--json OUT] [--link 100Mbit]

Two processes in network namespaces of their own, with a shaped link between them (``links.py``),
that send each other the same bytes: in one all-gather or all-to-all, and in several that are under
way at once. All take turns in each repetition; a row is the time over that of one allreduce which
sends as many bytes each way, of the slower process.

Needs what ``bandwidth.py`` needs. Where it may not make such a link it says so and exits with 2.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.results import command_line, report

from .links import Link, LinkError, Network

MESSAGES = (1, 2, 4, 16)
PORT = 29456
TIMEOUT_S = 600.0

Taken = dict[str, list[float]]


def exchange(rank: int, address: str, num_bytes: int, repetitions: int) -> Taken:
    """One process: the seconds of each way to send, in every repetition."""
    os.environ["GLOO_SOCKET_IFNAME"] = "veth0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=2)
    own = torch.zeros(2 * num_bytes, dtype=torch.uint8)
    other = torch.empty_like(own)

    def all_gather(start: int, stop: int) -> dist.Work | None:
        parts = [other[start:stop], other[num_bytes + start : num_bytes + stop]]
        return dist.all_gather(parts, own[start:stop], async_op=True)

    def all_to_all(start: int, stop: int) -> dist.Work | None:
        twice = slice(2 * start, 2 * stop)
        return dist.all_to_all_single(other[twice], own[twice], async_op=True)

    def in_messages(kind: Callable[[int, int], dist.Work | None], count: int) -> None:
        size = num_bytes // count
        works = [kind(start, start + size) for start in range(0, count * size, size)]
        for work in works:
            assert work is not None
            work.wait()

    flat = torch.zeros(num_bytes // 4)
    ways: dict[str, Callable[[], object]] = {"allreduce": lambda: dist.all_reduce(flat)}
    for kind, name in ((all_gather, "all-gather"), (all_to_all, "all-to-all")):
        for count in MESSAGES:
            ways[f"{name} in {count}"] = lambda kind=kind, count=count: in_messages(kind, count)
    taken: Taken = {name: [] for name in ways}
    for _ in range(repetitions + 1):
        for name, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in taken.items()}  # the first connects


def measure(link: Link, num_bytes: int, repetitions: int) -> Taken:
    """The slower process's seconds.

    Raises:
        LinkError: This machine does not let us make such a link, or a process has failed.
    """
    with Network() as network:
        network.shape(link)
        address = network.endpoint(link, 0).address
        processes: list[subprocess.Popen[str]] = []
        ends: list[Connection] = []
        try:
            for rank in range(2):
                ours, theirs = Pipe()
                own = [rank, address, num_bytes, repetitions, theirs.fileno()]
                command = [sys.executable, "-m", f"{__package__}.messages", "--process"]
                command += map(str, own)
                processes.append(network.start(rank, command, theirs.fileno(), sys.stderr))
                ends.append(ours)
                theirs.close()
            found: list[Taken] = [end.recv() for end in ends if end.poll(TIMEOUT_S)]
        except EOFError as error:
            raise LinkError("a process has ended: what it said is above") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if len(found) < len(ends):
        raise LinkError(f"no answer after {TIMEOUT_S:.0f} s: take a faster link or fewer bytes")
    return {name: list(map(max, *(taken[name] for taken in found))) for name in found[0]}


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="4 MB, 2 repetitions")
    parser.add_argument("--link", type=Link.parse, default=Link.parse("100Mbit"))
    parser.add_argument("--megabytes", type=float, default=20.0, help="that each sends")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.megabytes, arguments.repetitions = 4.0, 2
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of names that the link does not have
    num_bytes = round(arguments.megabytes * 1e6) // 64 * 64
    try:
        taken = measure(arguments.link, num_bytes, arguments.repetitions)
    except LinkError as error:
        print(f"no shaped link here: {error}", file=sys.stderr)
        sys.exit(2)
    reference = taken.pop("allreduce")
    rows = {
        name: [a / b for a, b in zip(seconds, reference, strict=True)]
        for name, seconds in taken.items()
    }
    rows["one allreduce, s"] = reference
    arguments.link = arguments.link.name
    report(f"{arguments.megabytes:g} MB each way over {arguments.link}", rows, arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        number, at, *counts, descriptor = sys.argv[2:]
        Connection(int(descriptor)).send(exchange(int(number), at, *map(int, counts)))
        os._exit(0)  # gloo's threads would wait for the other process
    main()
