"""What ``visits.py`` asks of a replica group, and ``shaped_group.py`` answers."""

from __future__ import annotations

from dataclasses import dataclass

from .links import Endpoint


@dataclass(frozen=True)
class Method:
    """How the groups train: ``DDP``, ``vanilla`` or ``streaming``, and the settings of DiLoCo."""

    name: str
    wire_format: str
    sync_every: int
    num_fragments: int = 1
    fragment_sync_delay: int = 0


@dataclass(frozen=True)
class Probe:
    """Send bytes over the link. End 0 answers with the seconds of a round trip, end 1 with the bits
    of payload a second."""

    end: Endpoint
    num_bytes: int


@dataclass(frozen=True)
class TimeSteps:
    """Take a batch size. Answers: seconds of the fastest of so many inner steps."""

    batch: int
    count: int


@dataclass(frozen=True)
class Steps:
    """Inner steps without communication. Answers: ``Taken``."""

    count: int


@dataclass(frozen=True)
class Join:
    """Meet the other group on a link."""

    end: Endpoint
    port: int
    method: Method


@dataclass(frozen=True)
class Round:
    """One round, of DDP one step. Answers: ``Taken``.

    Attributes:
        trains: Without, an inner step is the inner optimizer's alone, so that little is left of the
            round but its syncs.
    """

    trains: bool = True


@dataclass(frozen=True)
class Taken:
    """What steps took in one group.

    Attributes:
        steps: How many.
        seconds: Of all.
        sync_s: How long training stood still for syncs in them, in seconds.
        waited_s: The part of that spent waiting for the other group to come to them.
    """

    steps: int
    seconds: float
    sync_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True)
class BytesSent:
    """Answers: bytes that the device has sent so far, as the kernel counts them; 0 before a
    visit."""


@dataclass(frozen=True)
class Leave:
    """End the visit."""


@dataclass(frozen=True)
class Failed:
    """What went wrong in a group, in place of an answer."""

    traceback: str
