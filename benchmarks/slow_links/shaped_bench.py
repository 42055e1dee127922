"""What ``bandwidth.py`` measures: every method over every link, and the overlap."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .group_commands import Method
from .links import Link
from .visits import Pair, RoundTaken

OVERLAP_DELAY = 4
OVERLAP_SYNC_STEPS = 3
"""How many inner steps a sync of the model takes on the link of the overlap."""

SEVERAL_STEPS = 24
"""Inner steps of a round, and fragments of the model, where several are in flight."""
SEVERAL_SYNC_STEPS = 12
"""How many inner steps a sync of the model takes on the link there."""

READINGS_IN_STEP = 16
"""How often the bytes on the line are read in an inner step."""
WINDOWS = {"1/4 inner step": 0.25, "an inner step": 1.0}
"""In which the peak rate on the line is taken, in inner steps."""
NARROW = 1.2
"""The rate of the narrow line, over the bytes of a round by its inner steps' time."""

SEVERAL = "several in flight"
ON_NARROW = f"{SEVERAL}, on a line of {NARROW} x their mean rate"

ROUNDS = 2
"""In each turn of a method."""

Sample = tuple[RoundTaken, RoundTaken]
"""Inner steps without communication, and the round that followed."""

Spread = dict[str, float]
"""``median``, ``min`` and ``max``."""


@dataclass(frozen=True)
class Watched:
    """What was measured of one method where several fragments are in flight.

    Attributes:
        samples: Rounds, each with its inner steps without communication.
        peaks: Peak rates on the line over the mean of a round, by the window of the peak.
    """

    samples: list[Sample] = field(default_factory=list)
    peaks: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WINDOWS})


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
        link = self._find_overlap_link(vanilla, OVERLAP_SYNC_STEPS)
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

    def measure_several(self) -> None:
        """Rounds with several fragments in flight, and with what torchft allows, on a busy link.

        A sync of the model takes half of a round there.
        """
        link = self._find_overlap_link(
            Method("vanilla", "float32", SEVERAL_STEPS), SEVERAL_SYNC_STEPS
        )
        several = Method("streaming", "float32", SEVERAL_STEPS, SEVERAL_STEPS, 2)
        methods = {
            SEVERAL: several,
            "one in flight, as many fragments": replace(several, fragment_sync_delay=0),
            "one in flight, 2 fragments": replace(
                several, num_fragments=2, fragment_sync_delay=SEVERAL_STEPS // 2 - 1
            ),
            ON_NARROW: several,
        }
        watched = {name: Watched() for name in methods}
        for _ in range(self._arguments.several_turns):
            for name, method in methods.items():
                line = self._narrow(watched[SEVERAL]) if name == ON_NARROW else link
                self._watch(watched[name], line, method)
                self._advance(1 / self._arguments.several_turns / len(methods))
        for name, found in watched.items():
            ratios = [taken.seconds / alone.seconds for alone, taken in found.samples]
            self._note(f"overlap, {name}: round / no communication", ratios)
            for window, peaks in found.peaks.items():
                self._note(f"overlap, {name}: peak / mean rate, in {window}", peaks)

    def _narrow(self, watched: Watched) -> Link:
        """A line of little more than the bytes of a round by its inner steps' time."""
        rates = [8 * taken.bytes_sent / alone.seconds for alone, taken in watched.samples]
        return Link.parse(f"{NARROW * statistics.median(rates) / 1e6:.2f}Mbit")

    def _watch(self, watched: Watched, link: Link, method: Method) -> None:
        """One turn of a method, and one more round in which the line is watched."""
        self._pair.join(link, method)
        samples = self._samples(SEVERAL_STEPS)
        step_s = statistics.median(alone.step_s for alone, _ in samples)
        line = self._pair.watched_round(link, step_s / READINGS_IN_STEP)
        self._pair.leave()
        watched.samples.extend(samples)
        for window, steps in WINDOWS.items():
            watched.peaks[window].append(line.peak_over_mean(steps * step_s))

    def _find_overlap_link(self, vanilla: Method, sync_steps: int) -> Link:
        """The link on which one sync takes as long as so many inner steps do."""
        bits = 32.0 * self._pair.params
        link = Link.parse("10Gbit")
        self._pair.join(link, vanilla)
        step_s = self._pair.steps(vanilla.sync_every).step_s
        for _ in range(2):
            missing_s = sync_steps * step_s - statistics.median(self._syncs())
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
        samples = self._samples(steps)
        self._pair.leave()
        return samples

    def _samples(self, steps: int) -> list[Sample]:
        return [(self._pair.steps(steps), self._pair.round()) for _ in range(ROUNDS)]

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
