"""What rounds of a planned run take, send and hold: the command ``plan``.

The run has n parameters in P fragments of equal size, k replica groups, H inner steps a round, and
a delay of tau inner steps before a sync is applied. Between groups there is a link and a round trip
of r seconds. Two numbers are measured: s, the seconds of an inner step, and h, the seconds a
parameter that a sync takes on the host. In a wire format of b bytes a parameter,

    bytes = 2 (k - 1) / k * b n / P                        each group sends in a sync
    send  = bytes / link + r (2 + max(MiB / 2, k - 1))     seconds; MiB = bytes / 2**20
    round = H s + h n + P max(0, send - tau s)             seconds

A ring allreduce sends these bytes, in 2 (k - 1) hops (Patarasuk and Yuan 2009). gloo cuts them into
segments of 1 MiB and has two of them on the way (``kMaxSegmentSize`` in its ``allreduce.h``). Two
more round trips are the quorum's and that of the table in which groups report to each other. The
delay hides what is sent (arXiv 2501.18512, algorithm 2). It hides nothing of the host's work: to
form the pseudo-gradient, to encode and sum it, to take the outer step and to write the result back.

DDP sends n gradients in float32 in each step, beside the backward pass (arXiv 2006.15704):

    step = max(s, bytes / link + r max(MiB / 2, k - 1)) + h n
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER
from composer_replication.diloco.settings import DiLoCoSettings

HOST_S_PER_PARAM = 6e-9
"""One sync of 100 M fp32 parameters over loopback on 2 CPU cores: 2.03 times 293 ms
(docs/performance.md, ``benchmarks/sync.py``)."""

_RATE = re.compile(r"(\d*\.?\d+(?:e\d+)?)\s*([kMGT]?)(bit|b|B)(?:/s|ps)?")
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

NOTES = (
    "Time: by a formula with two measured numbers, the step time and the host's seconds a "
    "parameter. It met 36 measured rounds of a small model to 8 % in the median and 20 % at most; "
    "overlapped rounds took longer than it says (docs/plan.md). Groups and fragments are equally "
    "large, and the ranks of a group share its link. What a longer round, a delay or a wire format "
    "costs in loss is not in the tables.",
    "Memory: by the code, of each rank under DDP. The host's has been measured for float32 on "
    "CPUs, the device's never. Groups that average over gloo need none on the device.",
)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What is known of a run before it is made.

    Args:
        params: Trainable parameters (n).
        link_bits_per_s: What a replica group can send to the others, in bits per second.
        step_s: Seconds of an inner step (s).
        groups: Replica groups (k).
        round_trip_s: Seconds of a round trip between two groups (r).
        host_s_per_param: Seconds a parameter that a sync takes on the host (h).
        ranks: Processes of a group that hold the same parameters, as under DDP.
        sync_every: See ``DiLoCoSettings`` (H), like the next two (P and tau).
        wire_format: See ``DiLoCoSettings``.

    Raises:
        ValueError: A value is out of range; the message has the value and the fix.
    """

    params: int
    link_bits_per_s: float
    step_s: float
    groups: int
    round_trip_s: float = 0.0
    host_s_per_param: float = HOST_S_PER_PARAM
    ranks: int = 1
    sync_every: int = DiLoCoSettings.sync_every
    num_fragments: int = DiLoCoSettings.num_fragments
    fragment_sync_delay: int = DiLoCoSettings.fragment_sync_delay
    wire_format: str = "float32"

    def __post_init__(self) -> None:
        for name, least in (("params", 1), ("groups", 2), ("ranks", 1)):
            if getattr(self, name) < least:
                value = getattr(self, name)
                raise ValueError(f"{name}={value}: use an integer of at least {least}")
        for name in ("link_bits_per_s", "step_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: use a number above 0")
        for name in ("round_trip_s", "host_s_per_param"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: use seconds of 0 or more")
        _ = self._settings  # which checks the rest

    @property
    def _settings(self) -> DiLoCoSettings:
        return DiLoCoSettings(
            sync_every=self.sync_every,
            num_fragments=self.num_fragments,
            fragment_sync_delay=self.fragment_sync_delay,
            wire_format=self.wire_format,
        )

    @property
    def is_vanilla(self) -> bool:
        """Whether the model is one fragment and nothing is overlapped."""
        return self.num_fragments == 1 and self.fragment_sync_delay == 0

    @property
    def bytes_per_sync(self) -> float:
        """Bytes that each group sends in one sync."""
        sent = self.params * BYTES_PER_PARAMETER[self.wire_format] / self.num_fragments
        return 2 * (self.groups - 1) / self.groups * sent

    @property
    def blocked_s(self) -> float:
        """Seconds of a round beyond those of its inner steps.

        A sync that takes longer than the delay is waited for. With several in flight the link may
        be busy for longer than a round's inner steps, although each sync ends in time.
        """
        busy_s = self.num_fragments * self._send_s - self.sync_every * self.step_s
        return max(self._host_and_late_s, busy_s)

    @property
    def _send_s(self) -> float:
        return self._allreduce_s + 2 * self.round_trip_s

    @property
    def _host_and_late_s(self) -> float:
        late_s = max(0.0, self._send_s - self.fragment_sync_delay * self.step_s)
        return self.host_s_per_param * self.params + self.num_fragments * late_s

    @property
    def round_s(self) -> float:
        """Seconds of a round."""
        return self.sync_every * self.step_s + self.blocked_s

    @property
    def ddp_step_s(self) -> float:
        """Seconds of a step of DDP over all groups, if it sends what this run sends in a sync."""
        return max(self.step_s, self._allreduce_s) + self.host_s_per_param * self.params

    @property
    def _allreduce_s(self) -> float:
        round_trips = max(self.bytes_per_sync / 2**21, self.groups - 1)
        return 8 * self.bytes_per_sync / self.link_bits_per_s + self.round_trip_s * round_trips

    def shortest_round(self, utilisation: float) -> int:
        """The least ``sync_every`` with which this share of the time is inner steps.

        It is a multiple of ``num_fragments``, and long enough for the delay.
        """
        steps = self._host_and_late_s * utilisation / (1 - utilisation) / self.step_s
        steps = max(steps, utilisation * self.num_fragments * self._send_s / self.step_s)
        # Rounded first: in floats 76 * 1.25 may be a little above 95, and is not 96.
        turns = math.ceil(round(steps / self.num_fragments, 6))
        return self.num_fragments * max(turns, self.fragment_sync_delay // self.num_fragments + 1)

    @property
    def memory(self) -> Memory:
        """What the process of each rank holds for DiLoCo, beside the model.

        Each rank keeps its share of global parameters, outer momentum and, below float32, the
        error feedback. In a sync it also has the whole fragment in fp32, which the ranks gather;
        the messages of its share three times (to send, to receive, to gather); and, while the sync
        is overlapped, a copy of the local parameters. That is so for each fragment in flight.
        """
        is_encoded = self.wire_format != "float32"
        fragment = 4 * self.params / self.num_fragments
        resident = (12 if is_encoded else 8) * self.params / self.ranks
        encoded = fragment / 4 * BYTES_PER_PARAMETER[self.wire_format] / self.ranks
        copies = 2 if self.fragment_sync_delay else 1
        in_flight = self._settings.turns_in_flight + 1
        peak = in_flight * (copies * fragment + 3 * encoded * is_encoded)
        return Memory(resident, resident + peak, in_flight * fragment)


@dataclass(frozen=True)
class Memory:
    """Bytes of one process beyond the model: in host memory between syncs, at the peak of a sync,
    and on an accelerator if its groups average over NCCL."""

    host_resident: float
    host_peak: float
    device: float


@dataclass(frozen=True)
class PlanRow:
    """One method in one wire format, in a round of ``sync_every`` inner steps.

    Attributes:
        method: ``DDP``, ``vanilla`` or ``streaming``.
        wire_format: What it sends.
        round_s: Seconds of the round.
        utilisation: The share of it that is inner steps.
        bytes_per_round: What each group sends, in bytes; under DDP its ranks send equal parts.
        shortest_round: The fewest inner steps of a round with the wanted utilisation; None for DDP,
            which has no rounds.
        memory: None for DDP, which needs no more than its gradients.
    """

    method: str
    wire_format: str
    round_s: float
    utilisation: float
    bytes_per_round: float
    shortest_round: int | None = None
    memory: Memory | None = None


def plan_rows(run: PlannedRun, utilisation: float) -> Iterator[PlanRow]:
    """Compare DDP, vanilla DiLoCo and the run itself, in every wire format.

    Args:
        run: Its own wire format does not matter.
        utilisation: The share of the time that should be inner steps.

    Raises:
        ValueError: The utilisation is not between 0 and 1.
    """
    if not 0 < utilisation < 1:
        raise ValueError(f"utilisation={utilisation}: use a share between 0 and 1, e.g. 0.95")
    steps, train_s = run.sync_every, run.sync_every * run.step_s
    vanilla = replace(run, num_fragments=1, fragment_sync_delay=0, wire_format="float32")
    ddp_s = steps * vanilla.ddp_step_s
    yield PlanRow("DDP", "float32", ddp_s, train_s / ddp_s, steps * vanilla.bytes_per_sync)
    for schedule in (vanilla,) if run.is_vanilla else (vanilla, run):
        for wire_format in BYTES_PER_PARAMETER:
            each = replace(schedule, wire_format=wire_format)
            yield PlanRow(
                method="vanilla" if each.is_vanilla else "streaming",
                wire_format=wire_format,
                round_s=each.round_s,
                utilisation=train_s / each.round_s,
                bytes_per_round=each.num_fragments * each.bytes_per_sync,
                shortest_round=each.shortest_round(utilisation),
                memory=each.memory,
            )


def print_plan(run: PlannedRun, utilisation: float, console: Console) -> None:
    """Print the run, a table of times and bytes, a table of memory, and notes."""
    times = _table(
        f"A round of {run.sync_every} inner steps (H)",
        *("round, s", "training", "sent by a group", f"H for {100 * utilisation:.4g} %"),
    )
    memory = _table(
        "Memory of a process, beyond the model",
        *("host, resident", "host, peak in a sync", "device, over NCCL"),
    )
    for row in plan_rows(run, utilisation):
        times.add_row(
            row.method,
            row.wire_format,
            f"{row.round_s:,.1f}",
            f"{row.utilisation:.1%}",
            decimal(round(row.bytes_per_round)),
            "-" if row.shortest_round is None else f"{row.shortest_round:,}",
        )
        if row.memory:
            sizes = (decimal(round(value)) for value in asdict(row.memory).values())
            memory.add_row(row.method, row.wire_format, *sizes)
    ranks = f" of {run.ranks} ranks" if run.ranks > 1 else ""
    streaming = (
        f" Streaming: {run.num_fragments} fragments, each overlapped with "
        f"{run.fragment_sync_delay} inner steps."
    )
    heading = (
        f"{run.params:,} parameters in {run.groups} replica groups{ranks}. {run.step_s:g} s an "
        f"inner step, {run.host_s_per_param:g} s a parameter on the host. Between groups "
        f"{run.link_bits_per_s / 1e9:,g} Gbit/s and {run.round_trip_s:g} s of round trip."
        f"{'' if run.is_vanilla else streaming}"
    )
    for part in (heading, times, memory, *NOTES):
        console.print(part, markup=False, highlight=False)


def plan_as_json(run: PlannedRun, utilisation: float) -> dict[str, Any]:
    """The run and all rows, in seconds, bytes and bits per second."""
    facts = asdict(run)
    del facts["wire_format"]  # there are rows of all of them
    rows = [asdict(row) for row in plan_rows(run, utilisation)]
    return {"run": facts, "utilisation": utilisation, "rows": rows}


def parse_link(text: str) -> float:
    """Read a rate such as ``10Gbit``, ``100Mbit``, ``1Gb/s`` or ``250MB/s`` (bytes).

    Returns:
        Bits per second; the prefixes are powers of 1000, as networks have them.

    Raises:
        ValueError: It is no rate.
    """
    match = _RATE.fullmatch(text.strip())
    value = float(match[1]) * _PREFIX[match[2]] * (8 if match[3] == "B" else 1) if match else 0
    if not 0 < value < math.inf:
        raise ValueError(
            f"link={text!r}: write a rate such as 1Gbit, 100Mbit or 1Gb/s, or in bytes 250MB/s"
        )
    return value


def _table(title: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("method", "wire format"):
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
