"""What training over a slow link costs: rounds of two replica groups over shaped links.

    python -m benchmarks.slow_links.bandwidth [--quick] [--json OUT] [--links 1Gbit,100Mbit]

Two groups of one process and one core each, in network namespaces of their own (``links.py``), that
train a multilayer perceptron and meet over gloo. ``+50ms`` is one way: the round trip is 100 ms.

* Beside each round, just before it in the same processes, are the same inner steps without
  communication: their time over the round's is the fraction computing. The slower group counts.
* Bytes are what a group's device has sent, as the kernel counts them: with the headers of packets
  that a card would still cut, acknowledgements and what was sent twice. The rate of a link is with
  the headers of all segments, which leaves some 95.6 % of it.
* DDP is one step, scaled to a round.
* Overlap: over a link on which a sync of the model takes about three inner steps; with how much of
  the round training stood still, and what is left of it without the faster group's wait for the
  slower one. Where a sync begins both have to be there.

Needs root, iproute2 and a kernel with network namespaces, veth, tbf and TUN. Where it may not make
such links it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import Progress

from benchmarks.results import command_line, count, write

from .links import CONGESTION_CONTROL, Link, LinkError, Network
from .shaped_bench import Bench
from .shaped_tables import print_tables
from .visits import Pair

LINKS = "10Gbit,1Gbit,100Mbit,100Mbit+50ms"
WIRE_FORMATS = "float32,bfloat16,int8,fp4"

QUICK = {
    "params": 1_000_000,
    "step_s": 0.03,
    "overlap_step_s": 0.05,
    "links": [Link.parse("1Gbit"), Link.parse("100Mbit+10ms")],
    "wire_formats": ["float32", "fp4"],
    "link_s": 0.0,
    "overlap_turns": 1,
}


def measure_all(arguments: argparse.Namespace, console: Console) -> Bench:
    """Make the links, start the groups, measure, and take all away again.

    Raises:
        LinkError: This machine does not let us make such links.
    """
    with Progress(console=console, transient=True) as progress, Network() as network:
        task = progress.add_task("groups start", total=len(arguments.links) + 1)
        with Pair(network, arguments.params) as pair:
            arguments.params = pair.params
            arguments.batch = pair.find_batch(arguments.step_s)
            bench = Bench(pair, arguments, lambda part: progress.advance(task, part))
            for link in arguments.links:
                progress.update(task, description=link.name)
                bench.measure(link)
            progress.update(task, description="overlap")
            bench.measure_overlap()
    return bench


def parse_arguments() -> argparse.Namespace:
    """The command line; ``--quick`` takes the place of some of it."""
    parser = command_line(__doc__, quick="a small model, less of everything")
    parser.add_argument("--params", type=count, default=10_000_000)
    parser.add_argument("--step-s", type=float, default=0.08, help="aim of an inner step, seconds")
    parser.add_argument("--overlap-step-s", type=float, default=0.5, help="and in the overlap")
    parser.add_argument("--overlap-sync-every", type=int, default=20, help="inner steps there")
    parser.add_argument("--links", type=_links, default=_links(LINKS), help=f"{LINKS}, or none")
    parser.add_argument(
        "--wire-formats", type=lambda text: text.split(","), default=WIRE_FORMATS.split(",")
    )
    parser.add_argument("--sync-every", type=int, default=12)
    parser.add_argument("--num-fragments", type=int, default=2, help="of streaming")
    parser.add_argument("--fragment-sync-delay", type=int, default=4, help="of streaming")
    parser.add_argument(
        "--link-s", type=float, default=80.0, help="turns on a link: one, and more if they fit"
    )
    parser.add_argument("--overlap-turns", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    return arguments


def _links(text: str) -> list[Link]:
    try:
        return [Link.parse(each) for each in text.split(",") if each != "none"]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> None:
    """Measure, print the tables, write the JSON."""
    arguments = parse_arguments()
    console = Console()
    try:
        bench = measure_all(arguments, console)
    except LinkError as error:
        Console(stderr=True).print(f"no shaped links here: {error}", style="red", markup=False)
        sys.exit(2)
    arguments.tcp_congestion_control = CONGESTION_CONTROL.read_text().strip()
    print_tables(console, arguments, bench.rows, bench.ratios)
    arguments.links = [link.name for link in arguments.links]
    write({"ratios": bench.ratios, "rows": bench.rows}, arguments)


if __name__ == "__main__":
    main()
