"""What ``bandwidth.py`` measures: every method over every link, and the overlap."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from .group_commands import Method
from .links import Link
from .visits import Pair, RoundTaken

OVERLAP_DELAY = 4
OVERLAP_SYNC_STEPS = 3
"""How many inner steps a sync of the model takes on the link of the overlap."""

ROUNDS = 2
"""In each turn of a method."""

Sample = tuple[RoundTaken, RoundTaken]
"""Inner steps without communication, and the round that followed."""

Spread = dict[str, float]
"""``median``, ``min`` and ``max``."""


class Bench:
    """All measurements of one run.

    Args:
        pair: The two groups.
        arguments: Of the command line.
        advance: Called with the part of a link's measurements, or the overlap's, that is done.
    """

    def __init__(
        self, pair: Pair, arguments: argparse.Namespace, advance: Callable[[float], None]
    ) -> None:
        self._pair = pair
        self._arguments = arguments
        self._advance = advance
        self.rows: list[dict[str, Any]] = []
        self.ratios: dict[str, Spread] = {}

    def methods(self) -> Iterator[Method]:
        """Every way to communicate that is measured on every link."""
        a = self._arguments
        yield Method("DDP", "float32", a.sync_every)
        for wire in a.wire_formats:
            yield Method("vanilla", wire, a.sync_every)
            yield Method("streaming", wire, a.sync_every, a.num_fragments, a.fragment_sync_delay)

    def measure(self, link: Link) -> None:
        """Every method on a link, taking turns."""
        bits_per_s, round_trip_s = self._pair.probe(link)
        self._note(f"{link.name}: reached / set rate", [bits_per_s / link.bits_per_s])
        self._note(f"{link.name}: round trip, ms", [1000 * round_trip_s])
        found: dict[Method, list[Sample]] = {method: [] for method in self.methods()}
        began = turn_began = time.monotonic()
        turn_s, part = 0.0, 1 / len(found)
        while not turn_s or turn_began - began + turn_s < self._arguments.link_s:
            for method, samples in found.items():
                samples += self._visit(link, method, method.sync_every // 2)
                self._advance(part)
            turn_s, turn_began, part = time.monotonic() - turn_began, time.monotonic(), 0.0
        none = Method("none", "float32", self._arguments.sync_every)
        alone = [alone for samples in found.values() for alone, _ in samples]
        self._add_row(link, none, [(each, each.scaled(none.sync_every)) for each in alone])
        for method, samples in found.items():
            self._add_row(link, method, samples)
        full = Method("vanilla", "float32", self._arguments.sync_every)
        if full not in found:
            return
        all_bytes = statistics.median(taken.bytes_sent for _, taken in found[full])
        for method, samples in found.items():
            part = [taken.bytes_sent / all_bytes for _, taken in samples]
            self._note(f"{_name(link, method)}: bytes / vanilla float32", part)

    def measure_overlap(self) -> None:
        """Rounds with a delay and without, over the time of their inner steps alone."""
        self._arguments.overlap_batch = self._pair.find_batch(self._arguments.overlap_step_s)
        sync_every = self._arguments.overlap_sync_every
        vanilla = Method("vanilla", "float32", sync_every)
        link = self._find_overlap_link(vanilla)
        found: dict[Method, list[Sample]] = {
            Method("streaming", "float32", sync_every, 1, OVERLAP_DELAY): [],
            vanilla: [],
        }
        for _ in range(self._arguments.overlap_turns):
            for method, samples in found.items():
                samples += self._visit(link, method, sync_every)
                self._advance(0.5 / self._arguments.overlap_turns)
        for method, samples in found.items():
            what = "overlap, delay 0" if method == vanilla else "overlap"
            ratios = [taken.seconds / alone.seconds for alone, taken in samples]
            self._note(f"{what}: round / no communication", ratios)
            ratios = [taken.awake_s / alone.seconds for alone, taken in samples]
            self._note(f"{what}: the same, less the wait for the slower group", ratios)
            ratios = [taken.sync_s / alone.seconds for alone, taken in samples]
            self._note(f"{what}: standing still / no communication", ratios)
            self._add_row(link, method, samples)

    def _find_overlap_link(self, vanilla: Method) -> Link:
        """The link on which one sync takes as long as ``OVERLAP_SYNC_STEPS`` inner steps do."""
        bits = 32.0 * self._pair.params
        link = Link.parse("10Gbit")
        self._pair.join(link, vanilla)
        step_s = self._pair.steps(vanilla.sync_every).step_s
        for _ in range(2):
            missing_s = OVERLAP_SYNC_STEPS * step_s - statistics.median(self._syncs())
            sent_s = max(bits / link.bits_per_s + missing_s, bits / 10e9)
            link = Link.parse(f"{bits / sent_s / 1e6:.0f}Mbit")
            self._pair.reshape(link)
        self._note(
            f"overlap, H = {vanilla.sync_every}: sync alone / inner step",
            [sync_s / step_s for sync_s in self._syncs()],
        )
        self._pair.leave()
        return link

    def _syncs(self) -> list[float]:
        return [self._pair.round(trains=False).sync_s for _ in range(3)]

    def _visit(self, link: Link, method: Method, steps: int) -> list[Sample]:
        """One turn of a method: rounds, each after so many steps without communication."""
        self._pair.join(link, method)
        samples = [(self._pair.steps(steps), self._pair.round()) for _ in range(ROUNDS)]
        self._pair.leave()
        return samples

    def _note(self, name: str, values: list[float]) -> None:
        self.ratios[name] = {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }

    def _add_row(self, link: Link, method: Method, samples: list[Sample]) -> None:
        rounds = [taken.seconds for _, taken in samples]
        computing = [method.sync_every * alone.step_s / taken.seconds for alone, taken in samples]
        self._note(f"{_name(link, method)}: computing", computing)
        self.rows.append(
            {
                "link": link.name,
                "bits_per_s": link.bits_per_s,
                "round_trip_s": link.round_trip_s,
                "method": method.name,
                "wire_format": method.wire_format,
                "sync_every": method.sync_every,
                "num_fragments": method.num_fragments,
                "fragment_sync_delay": method.fragment_sync_delay,
                "groups": 2,
                "params": self._pair.params,
                "step_s": statistics.median(alone.step_s for alone, _ in samples),
                "round_s": statistics.median(rounds),
                "round_s_min": min(rounds),
                "round_s_max": max(rounds),
                "compute_fraction": statistics.median(computing),
                "bytes_per_round": statistics.median(taken.bytes_sent for _, taken in samples),
            }
        )


def _name(link: Link, method: Method) -> str:
    return f"{link.name}, {method.name} {method.wire_format}"
