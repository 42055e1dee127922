"""What rounds of a planned run take and send, and which link they need: the command ``plan``.

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

import itertools
import math
import re
from dataclasses import dataclass, replace

from rich.filesize import decimal
from rich.table import Table

from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER
from composer_replication.settings import DiLoCoSettings

HOST_S_PER_PARAM = 6e-9
"""One sync of 100 M fp32 parameters over loopback on 2 CPU cores (``benchmarks/sync.py``), rounded
up: 5.1e-9 in the run of docs/performance.md, 5.9e-9 in an earlier one."""

_PARAMS = re.compile(r"(\d*\.?\d+(?:e\d+)?)\s*([kMBT]?)")
_RATE = re.compile(r"(\d*\.?\d+(?:e\d+)?)\s*([kMGT]?)(bit|b|B)(?:/s|ps)?")
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What is known of a run before it starts.

    Args:
        params: Trainable parameters (n).
        step_s: Seconds of an inner step (s).
        groups: Replica groups (k).
        link_bits_per_s: What a replica group can send to the others, in bits per second.
        rtt_s: Seconds of a round trip between two groups (r).
        host_s_per_param: Seconds a parameter that a sync takes on the host (h).
        settings: With H, P, tau and the wire format.

    Raises:
        ValueError: A value is out of range; the message has the value and the fix.
    """

    params: float
    step_s: float
    groups: int
    link_bits_per_s: float
    rtt_s: float = 0.0
    host_s_per_param: float = HOST_S_PER_PARAM
    settings: DiLoCoSettings

    def __post_init__(self) -> None:
        if self.groups < 2:
            raise ValueError(f"groups={self.groups}: use an integer of at least 2")
        # Each by the name of its option.
        above_0 = {"params": self.params, "step_time": self.step_s, "link": self.link_bits_per_s}
        for name, value in above_0.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: use a number above 0")
        seconds = {"rtt": self.rtt_s, "host_s_per_param": self.host_s_per_param}
        for name, value in seconds.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: use seconds of 0 or more")

    @property
    def train_s(self) -> float:
        """Seconds of a round's inner steps."""
        return self.settings.sync_every * self.step_s

    @property
    def bytes_per_sync(self) -> float:
        """Bytes that each group sends in one sync."""
        sent = self.params * BYTES_PER_PARAMETER[self.settings.wire_format]
        return 2 * (self.groups - 1) / self.groups * sent / self.settings.num_fragments

    @property
    def _waits_s(self) -> float:
        return self.rtt_s * max(self.bytes_per_sync / 2**21, self.groups - 1)

    @property
    def _send_s(self) -> float:
        return 8 * self.bytes_per_sync / self.link_bits_per_s + self._waits_s

    @property
    def ddp_step_s(self) -> float:
        """Seconds of a step of DDP over all groups, if it sends what this run sends in a sync."""
        return max(self.step_s, self._send_s) + self.host_s_per_param * self.params

    @property
    def blocked_s(self) -> float:
        """Seconds of a round beyond those of its inner steps."""
        hidden_s = self.settings.fragment_sync_delay * self.step_s
        late_s = max(0.0, self._send_s + 2 * self.rtt_s - hidden_s)
        return self.host_s_per_param * self.params + self.settings.num_fragments * late_s

    def round_for(self, share: float) -> int:
        """The least ``sync_every`` with which this share of the time is inner steps."""
        steps = self.blocked_s * share / (1 - share) / self.step_s
        fragments, delay = self.settings.num_fragments, self.settings.fragment_sync_delay
        # Rounded first: in floats 76 * 1.25 may be a little above 95, and is not 96.
        return fragments * max(math.ceil(round(steps / fragments, 6)), delay + 1)

    def link_for(self, share: float) -> float | None:
        """The slowest link, in bits per second, with which this share of the time is inner steps.

        None: the host's work and the round trips leave no time to send in.
        """
        spare_s = self.train_s * (1 / share - 1) - self.host_s_per_param * self.params
        send_s = spare_s / self.settings.num_fragments - self._waits_s - 2 * self.rtt_s
        send_s += self.settings.fragment_sync_delay * self.step_s
        return 8 * self.bytes_per_sync / send_s if min(spare_s, send_s) > 0 else None


def plan_table(run: PlannedRun, share: float) -> Table:
    """Compare DDP, vanilla DiLoCo and the run itself, in every wire format.

    Args:
        run: The run. Its wire format has no effect.
        share: The share of the time that should be inner steps.

    Raises:
        ValueError: The share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share}: use a number between 0 and 1, e.g. 0.95")
    percent, steps = f"{100 * share:.4g} %", run.settings.sync_every
    columns = ("method", "wire format", f"{steps} steps, s", "training", "sent")
    table = Table(*columns, f"steps: {percent}", f"Mbit/s: {percent}")
    whole = replace(run.settings, num_fragments=1, fragment_sync_delay=0, wire_format="float32")
    ddp = replace(run, settings=whole)
    round_s, sent = steps * ddp.ddp_step_s, decimal(round(steps * ddp.bytes_per_sync))
    table.add_row("DDP", "float32", f"{round_s:,.1f}", f"{run.train_s / round_s:.1%}", sent)
    schedules = {"vanilla": whole, "streaming": run.settings}
    for method, wire_format in itertools.product(schedules, BYTES_PER_PARAMETER):
        settings = replace(schedules[method], wire_format=wire_format)
        each = replace(run, settings=settings)
        link, round_s = each.link_for(share), run.train_s + each.blocked_s
        table.add_row(
            *(method, wire_format, f"{round_s:,.1f}", f"{run.train_s / round_s:.1%}"),
            decimal(round(settings.num_fragments * each.bytes_per_sync)),
            f"{each.round_for(share):,}",
            "none" if link is None else f"{math.ceil(link / 1e6):,}",
        )
    return table


def parse_params(text: str) -> float:
    """Read a number of parameters such as ``7B``, ``124M`` or ``7e9``.

    Raises:
        ValueError: It is none.
    """
    match = _PARAMS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"params={text!r}: write how many there are, e.g. 7B, 124M or 7e9")
    return float(match[1]) * _PREFIX[match[2]]


def parse_link(text: str) -> float:
    """Read a rate such as ``10Gbit``, ``100Mbit``, ``1Gb/s`` or ``250MB/s`` (bytes), as bits/s.

    Raises:
        ValueError: It is no rate.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"link={text!r}: write a rate such as 1Gbit, 100Mbit or 1Gb/s, or in bytes 250MB/s"
        )
    return float(match[1]) * _PREFIX[match[2]] * (8 if match[3] == "B" else 1)
