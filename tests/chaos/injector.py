"""Plans the faults of a chaos run from a seed, and injects them."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from composer_replication.group.run_folder import STOP, log_path
from composer_replication.launch.supervision import Supervisor

from .at_start.fault_injection import IN_GROUP_KINDS, FaultRequest, request_fault
from .history import SERVICES, History, InjectedFault
from .services import KillableCoordinator
from .slow_groups import SLOWEST, Throttle

HANG_ENDS_S = 15.0
"""Seconds without progress after which a group that hangs ends itself.

It is shorter than the default, since people wait for a chaos run to end.
"""

LASTS_S = {
    "stop": (1.0, 8.0),  # within the heartbeat's timeout, or beyond it
    "unreachable": (0.5, 20.0),
    "one_way": (0.5, 20.0),
    "disk_full": (2.0, 20.0),
    "slow": (5.0, 20.0),
    "lighthouse": (1.0, 8.0),
    "coordinator": (1.0, 8.0),
}
"""By kind, the shortest and the longest duration of a fault in seconds."""
KINDS = ("first_round", "kill", "end", "hang", *LASTS_S)
"""All kinds of faults; ``CONTRIBUTING.md`` describes them."""
FOR_GOOD = 0.25
"""Fraction of the unreachable groups that stay unreachable."""

QUIET_START_S = 5.0
"""Seconds of training before the first fault, except ``first_round``."""
RECOVERY_S = 45.0
"""Seconds between the end of the last fault and the end of the run, so that all groups can recover.

A group that hangs needs ``HANG_ENDS_S`` before that to end itself, and one that nobody can reach
needs ``LEAVES_S``.
"""
LEAVES_S = 35.0
"""Seconds after which a group that nobody can reach ends itself."""

SLOW_SPEED = 1 / 3
"""The fraction of the time for which a group runs that the fault ``slow`` has hit."""


def plan_faults(
    seed: int, kinds: Sequence[str], replicas: int
) -> Iterator[tuple[float, InjectedFault]]:
    """Generate the faults that a seed stands for.

    Every kind comes once before one comes again.

    Args:
        seed: Seed of kinds, victims and pauses.
        kinds: Kinds of faults.
        replicas: Number of groups.

    Yields:
        The pause before a fault, in units of the mean pause, and the fault.
    """
    draw = random.Random(seed)
    bag: list[str] = []
    number = 1
    if "first_round" in kinds:
        yield 0.0, InjectedFault(number, "first_round", (draw.randrange(replicas),))
    again = [kind for kind in kinds if kind != "first_round"]
    while again:
        number += 1
        bag = bag or draw.sample(again, len(again))
        fault = InjectedFault(number, bag.pop())
        victim, other = draw.sample(range(replicas), 2)
        if fault.kind in SERVICES:
            fault.how = draw.choice(("killed", "stopped"))
        else:
            fault.victims = (victim, other) if fault.kind == "one_way" else (victim,)
        fault.seconds = draw.uniform(*LASTS_S.get(fault.kind, (0.0, 0.0)))
        if fault.kind == "hang" or (fault.kind == "unreachable" and draw.random() < FOR_GOOD):
            fault.seconds = None
        yield draw.uniform(0.5, 1.5), fault


class RandomFaultInjector:
    """Injects the planned faults, and always spares one group that trains.

    Args:
        history: Records the faults and checks the run.
        planned: From ``plan_faults``.
        faults_per_minute: Mean number of faults in a minute.
        duration_s: Length of the training, in seconds.
        speeds: The groups that are slow all the time, and the fraction of it for which they run.
        recovery_s: Seconds between the end of the last fault and the end of the run.
    """

    def __init__(
        self,
        history: History,
        planned: Iterator[tuple[float, InjectedFault]],
        faults_per_minute: float,
        duration_s: float,
        speeds: Mapping[int, float] | None = None,
        recovery_s: float = RECOVERY_S,
    ) -> None:
        self._history = history
        self._planned = planned
        self._mean_pause_s = 60 / faults_per_minute
        self._duration_s, self._recovery_s = duration_s, recovery_s
        self._coordinator: KillableCoordinator | None = None
        self._supervisor: Supervisor | None = None
        self._active: list[InjectedFault] = []
        self._speeds = speeds or {}
        self._throttles = {id: Throttle(speed) for id, speed in self._speeds.items()}
        self._next: InjectedFault | None = None
        self._due = 0.0

    def make_coordinator(self, *arguments: Any, **named: Any) -> KillableCoordinator:
        """Make a coordinator that this object can kill. ``launch_groups`` calls it."""
        self._coordinator = KillableCoordinator(*arguments, **named)
        return self._coordinator

    def finish(self) -> None:
        """Check what the groups have written since the last check. Call it after the run."""
        if self._supervisor is not None:
            self._history.check(self._supervisor)

    def __call__(self, supervisor: Supervisor) -> None:
        """Check the run, end the faults that are over, and inject the next one if it is due."""
        history = self._history
        self._supervisor = supervisor
        history.check(supervisor)
        if history.began is None:
            if len(self._healthy(supervisor)) == len(supervisor.records):
                history.begin()
                self._plan_next()
            return
        now = history.now()
        for fault in list(self._active):
            self._end_if_over(supervisor, fault, now)
        self._throttle(supervisor, now)
        if now > self._duration_s:
            (supervisor.run.run_dir / STOP).touch()
        fault = self._next
        if fault is not None and now >= self._due and self._is_allowed(supervisor, fault):
            history.record(fault)
            self._inject(supervisor, fault)
            self._plan_next()

    def _plan_next(self) -> None:
        pause, self._next = next(self._planned, (0.0, None))
        if self._next is None:
            return
        now, kind = self._history.now(), self._next.kind
        first = 0.0 if kind == "first_round" else QUIET_START_S
        self._due = max(first, now + pause * self._mean_pause_s) if now > 1.0 else first
        lasts = self._next.seconds or 0.0
        if self._next.seconds is None:
            lasts = HANG_ENDS_S if kind == "hang" else LEAVES_S
        if self._due > self._duration_s - self._recovery_s - lasts and kind != "first_round":
            self._next = None  # no later fault would end in time either

    def _healthy(self, supervisor: Supervisor) -> set[int]:
        """The groups that train and have recovered from every fault."""
        return {
            replica_id
            for replica_id, record in supervisor.records.items()
            if record.is_training and not self._history.open_faults(replica_id)
        }

    def _is_allowed(self, supervisor: Supervisor, fault: InjectedFault) -> bool:
        """Whether a fault may be injected now.

        It has to spare a healthy group. While a service or a connection fails, no other fault is
        injected: nobody could say which of the two made a group fail.
        """
        healthy = self._healthy(supervisor)
        others = self._history.open_faults()
        alone = ("unreachable", "one_way", *SERVICES)
        is_clear = not others or not any(s.kind in alone for s in [fault, *others])
        return is_clear and healthy.issuperset(fault.victims) and healthy > set(fault.victims)

    def _inject(self, supervisor: Supervisor, fault: InjectedFault) -> None:
        kind, seconds = fault.kind, fault.seconds
        if kind in SERVICES:
            self._inject_into_service(fault)
        elif kind in IN_GROUP_KINDS:
            target = str(fault.victims[1]) if kind == "one_way" else None
            folder = log_path(supervisor.run.run_dir, fault.victims[0]).parent
            request_fault(folder, FaultRequest(fault.number, kind, seconds, target))
            return
        elif kind == "disk_full":
            _limit_files(supervisor, fault, 0)
        elif kind == "slow":
            speed = SLOW_SPEED * self._speeds.get(fault.victims[0], 1.0)
            self._throttles[fault.victims[0]] = Throttle(max(speed, SLOWEST))
        elif kind == "stop":
            _signal(supervisor, fault.victims[0], signal.SIGSTOP)
        else:
            number = signal.SIGTERM if kind == "end" else signal.SIGKILL
            _signal(supervisor, fault.victims[0], number)
            return
        self._active.append(fault)

    def _inject_into_service(self, fault: InjectedFault) -> None:
        assert self._coordinator is not None, "launch_groups calls make_coordinator first"
        service = self._coordinator.services[fault.kind]
        service.kill() if fault.how == "killed" else service.signal(signal.SIGSTOP)

    def _end_if_over(self, supervisor: Supervisor, fault: InjectedFault, now: float) -> None:
        """End a lasting fault whose time is over."""
        if now <= fault.at + (fault.seconds or 0.0):
            return
        self._active.remove(fault)
        if fault.kind in SERVICES:
            assert self._coordinator is not None, "a fault was injected into it"
            service = self._coordinator.services[fault.kind]
            service.start() if fault.how == "killed" else service.signal(signal.SIGCONT)
            return
        victim = fault.victims[0]
        if fault.kind == "disk_full":
            _limit_files(supervisor, fault, psutil.RLIM_INFINITY)
        else:
            _signal(supervisor, victim, signal.SIGCONT)
            self._throttles.pop(victim, None)
            if victim in self._speeds:
                self._throttles[victim] = Throttle(self._speeds[victim])

    def _throttle(self, supervisor: Supervisor, now: float) -> None:
        """Let the slow groups run, or stop them, for now."""
        stopped = {fault.victims[0] for fault in self._active if fault.kind == "stop"}
        for replica_id, throttle in self._throttles.items():
            if replica_id not in stopped:
                number = signal.SIGCONT if throttle.runs(now) else signal.SIGSTOP
                _signal(supervisor, replica_id, number)


def _signal(supervisor: Supervisor, replica_id: int, number: int) -> None:
    """Send a signal to all processes of a group."""
    for process in supervisor.groups.members(replica_id):
        with suppress(psutil.Error):  # the process has ended
            process.send_signal(number)


def _limit_files(supervisor: Supervisor, fault: InjectedFault, size: int) -> None:
    """Limit the size of files that a group's processes may write.

    With a limit of 0 every write fails, as on a full disk.
    """
    for process in supervisor.groups.members(fault.victims[0]):
        with suppress(psutil.Error):
            _, most = process.rlimit(psutil.RLIMIT_FSIZE)
            soft = most if size == psutil.RLIM_INFINITY else size
            process.rlimit(psutil.RLIMIT_FSIZE, (soft, most))
