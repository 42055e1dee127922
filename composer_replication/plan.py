"""How long a round of a planned run takes, what it sends and what memory it needs.

A model of seconds, fitted to measured rounds by ``benchmarks/calibrate.py``. Of n parameters in P
fragments, k replica groups, inner steps of s seconds, a round trip of r and wire format w, a sync
has

    bytes(w) = 2 (k - 1) / k * n / P * b(w)                          leaving each group
    send(w)  = c1 + (c2 + c3 m) r + c4 bytes(w) / link + c5(w) n / P
    host(w)  = c6(w) n / P

where m is the bytes in MiB, c1 the seconds of quorum and vote, c2 and c3 round trips, c4 one over
the share of the link that is used, c5 the seconds of coding and summing a parameter, and c6 those
of forming, outer step and way back. Round trips count by the MiB too: TCP has a window, and gloo's
allreduce sends segments of that size, two of which are under way at a time (``kMaxSegmentSize`` in
its ``allreduce.h``). ``host`` stands on the training's path always, ``send`` as far as it is longer
than the tau inner steps that overlap it, and of what these overlap a share o, since sending takes
processors and memory from them:

    round = H s + P (host + max(0, send - tau s) + o min(send, tau s))

The bytes are a ring's: each group sends a k-th part 2 (k - 1) times, one after the other (Patarasuk
and Yuan 2009, what gloo does), so m is at least that. Vanilla DiLoCo, P = 1 and tau = 0, is
arXiv 2311.08105; P and tau are those of arXiv 2501.18512, algorithm 2. DDP allreduces n fp32
gradients in every step, of which a share f of the step hides what it can (arXiv 2006.15704):

    step = s + max(0, d1 m r + d2 bytes(float32) / link + d3 n - f s)

Every group has the same link and step time, and all its ranks share that link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER
from composer_replication.diloco.settings import DiLoCoSettings

SEGMENT_BYTES = 2**20
"""What gloo sends at a time."""

OVERLAP_COST = "overlap_cost"
"""o above: by what share of the sending that they overlap inner steps take longer."""

DDP_OVERLAP = "ddp_overlap"
"""f above: the share of a step that hides what DDP sends."""

CONSTANTS = (
    "link_time",
    *(f"host_s_per_param.{name}" for name in BYTES_PER_PARAMETER),
    *(f"send_s_per_param.{name}" for name in BYTES_PER_PARAMETER),
    "round_trips_per_mib",
    "round_trips_per_sync",
    "sync_s",
    OVERLAP_COST,
    "ddp_link_time",
    "ddp_s_per_param",
    "ddp_round_trips_per_mib",
    DDP_OVERLAP,
)
"""All that are fitted. What rounds cannot tell apart counts as the first: as what grows with the
model and nothing hides, so that for a larger model a plan is rather too long than too short."""

Terms = dict[str, float]
"""What each constant is multiplied by. The fit and the plan read the same ones."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What is known of a run before it is made.

    Args:
        params: Trainable parameters (n).
        link_bits_per_s: What a replica group can send to the others, in bits per second.
        step_s: Seconds of an inner step (s).
        groups: Replica groups (k).
        round_trip_s: Between two groups, in seconds (r).
        sync_every: See ``DiLoCoSettings`` (H), like the next two (P and tau).
        wire_format: See ``DiLoCoSettings``.
        ranks: Processes in a group that hold the same parameters, as under DDP.

    Raises:
        ValueError: A value is out of range; the message has the value and the fix.
    """

    params: int
    link_bits_per_s: float
    step_s: float
    groups: int
    round_trip_s: float = 0.0
    sync_every: int = DiLoCoSettings.sync_every
    num_fragments: int = DiLoCoSettings.num_fragments
    fragment_sync_delay: int = DiLoCoSettings.fragment_sync_delay
    wire_format: str = "float32"
    ranks: int = 1

    def __post_init__(self) -> None:
        for name, least in (("params", 1), ("groups", 2), ("ranks", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name}={getattr(self, name)}: use an integer of at least {least}"
                )
        # A link of infinitely many bits per second is one that nobody has limited.
        if not self.link_bits_per_s > 0:
            raise ValueError(f"link_bits_per_s={self.link_bits_per_s}: use a number above 0")
        if not 0 < self.step_s < math.inf:
            raise ValueError(f"step_s={self.step_s}: use seconds above 0, e.g. 2.0")
        if not 0 <= self.round_trip_s < math.inf:
            raise ValueError(f"round_trip_s={self.round_trip_s}: use seconds of 0 or more")
        if self.wire_format not in BYTES_PER_PARAMETER:
            known = ", ".join(BYTES_PER_PARAMETER)
            raise ValueError(f"wire_format={self.wire_format!r}: use one of {known}")
        DiLoCoSettings(
            sync_every=self.sync_every,
            num_fragments=self.num_fragments,
            fragment_sync_delay=self.fragment_sync_delay,
        )

    @property
    def is_vanilla(self) -> bool:
        """Whether it is neither in fragments nor overlapped."""
        return self.num_fragments == 1 and self.fragment_sync_delay == 0

    @property
    def fragment_params(self) -> float:
        """Parameters in a fragment, all fragments being equally large."""
        return self.params / self.num_fragments

    @property
    def bytes_per_sync(self) -> float:
        """What leaves a group in one sync, in bytes."""
        return _ring(self.groups) * self.fragment_params * BYTES_PER_PARAMETER[self.wire_format]

    @property
    def ddp_bytes_per_step(self) -> float:
        """What would leave a group in every step of DDP over all groups, in bytes."""
        return _ring(self.groups) * self.params * BYTES_PER_PARAMETER["float32"]


def send_terms(run: PlannedRun) -> Terms:
    """Of the seconds of a sync that inner steps can overlap."""
    return {
        "sync_s": 1.0,
        "round_trips_per_sync": run.round_trip_s,
        "round_trips_per_mib": _segments(run.bytes_per_sync, run.groups) * run.round_trip_s,
        "link_time": 8 * run.bytes_per_sync / run.link_bits_per_s,
        f"send_s_per_param.{run.wire_format}": run.fragment_params,
    }


def host_terms(run: PlannedRun) -> Terms:
    """Of the seconds of a sync that always stand on the training's path."""
    return {f"host_s_per_param.{run.wire_format}": run.fragment_params}


def ddp_terms(run: PlannedRun) -> Terms:
    """Of the seconds of a DDP step's allreduce."""
    segments = _segments(run.ddp_bytes_per_step, run.groups)
    return {
        "ddp_round_trips_per_mib": segments * run.round_trip_s,
        "ddp_link_time": 8 * run.ddp_bytes_per_step / run.link_bits_per_s,
        "ddp_s_per_param": float(run.params),
    }


def seconds(terms: Terms, constants: Mapping[str, float]) -> float:
    """Add the terms up. A constant that the calibration could not tell from others is 0."""
    return sum(constants.get(name, 0.0) * value for name, value in terms.items())


def blocked_seconds(run: PlannedRun, constants: Mapping[str, float]) -> float:
    """Seconds of a round beyond those of its inner steps alone."""
    send = seconds(send_terms(run), constants)
    overlapped = min(send, run.fragment_sync_delay * run.step_s)
    costs = constants.get(OVERLAP_COST, 0.0) * overlapped
    return run.num_fragments * (seconds(host_terms(run), constants) + send - overlapped + costs)


def round_seconds(run: PlannedRun, constants: Mapping[str, float]) -> float:
    """Seconds of a round."""
    return run.sync_every * run.step_s + blocked_seconds(run, constants)


def ddp_step_seconds(run: PlannedRun, constants: Mapping[str, float]) -> float:
    """Seconds of a step of DDP over all groups."""
    hidden = constants.get(DDP_OVERLAP, 0.0) * run.step_s
    return run.step_s + max(0.0, seconds(ddp_terms(run), constants) - hidden)


def smallest_sync_every(
    run: PlannedRun, constants: Mapping[str, float], utilisation: float
) -> int | None:
    """The shortest round, in inner steps, that trains for this share of its time.

    What a round is blocked for does not depend on its length, so the answer is one division, made
    in fractions: it is the first of the lengths that P divides and that are above P tau.

    Returns:
        None if there is none: all of the time cannot be reached by a run that waits at all.
    """
    check_utilisation(utilisation)
    fragments, delay = run.num_fragments, run.fragment_sync_delay
    blocked = Fraction(str(blocked_seconds(run, constants)))
    wanted = Fraction(str(utilisation))
    if blocked and wanted == 1:
        return None
    steps = blocked * wanted / (1 - wanted) / Fraction(str(run.step_s)) if blocked else Fraction(0)
    return fragments * max(math.ceil(steps / fragments), delay + 1)


def check_utilisation(utilisation: float) -> None:
    """Raise ``ValueError`` unless it is a share of the time, above 0 and at most 1."""
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation={utilisation}: use a share above 0 and up to 1, e.g. 0.95")


@dataclass(frozen=True)
class Memory:
    """Bytes beyond the model, of each process: resting, at the peak of a sync, and on an
    accelerator if its groups average over NCCL (over gloo nothing)."""

    host_resting: float
    host_peak: float
    device: float


def memory(run: PlannedRun) -> Memory:
    """What a sync holds, by the code; measured on CPUs for float32 alone (benchmarks/memory.py).

    In host memory global parameters, momentum and, below float32, the error feedback; at the peak a
    fragment's pseudo-gradient, its messages three times (what is sent, what comes, what is
    gathered) and, while it is overlapped, a copy of the local parameters. Over NCCL the accelerator
    has the fragment's flat pseudo-gradient.
    """
    fragment = 4 * run.fragment_params
    is_coded = run.wire_format != "float32"
    resting = (8 + 4 * is_coded) * run.params
    share = run.fragment_params / run.ranks
    messages = 3 * share * BYTES_PER_PARAMETER[run.wire_format] * is_coded
    copy = fragment * (run.fragment_sync_delay > 0)
    return Memory(resting, resting + fragment + messages + copy, fragment)


def _ring(groups: int) -> float:
    return 2 * (groups - 1) / groups


def _segments(num_bytes: float, groups: int) -> float:
    return max(num_bytes / SEGMENT_BYTES, 2 * (groups - 1))
