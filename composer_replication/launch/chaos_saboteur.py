"""Which faults strike a run, and how: what a seed stands for, and whoever carries it out."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from composer_replication.callback.run_folder import STOP, log_path
from composer_replication.launch.chaos_history import SERVICES, History, Strike
from composer_replication.launch.chaos_services import KillableCoordinator
from composer_replication.launch.fault_injection import ORDERED, Order, give_order
from composer_replication.launch.supervision import Supervisor

HANG_TIMEOUT_S = 15.0
"""After how long a group that hangs ends itself: sooner than in a run that nobody watches."""

LASTS_S = {
    "stop": (1.0, 8.0),  # within the heartbeat's timeout, or beyond it
    "unreachable": (0.5, 20.0),
    "one_way": (0.5, 20.0),
    "disk_full": (2.0, 20.0),
    "slow": (5.0, 20.0),
    "lighthouse": (1.0, 8.0),
    "coordinator": (1.0, 8.0),
}
KINDS = ("first_round", "kill", "end", "hang", *LASTS_S)
FOR_GOOD = 0.25
"""The part of the groups that cannot be reached which stay so."""

QUIET_START_S = 5.0
RECOVERY_S = 45.0
"""How long before the end the last fault is over, for the last groups to be back. To leave, a group
that hangs takes ``HANG_TIMEOUT_S`` before that, and one that nobody can reach ``LEAVES_S``."""
LEAVES_S = 35.0

SLOW_CYCLE_S = 0.3
"""Of each, a group that is slow runs for a third."""


def plan(seed: int, kinds: Sequence[str], replicas: int) -> Iterator[tuple[float, Strike]]:
    """The faults that a seed stands for, each with the pause before it, where 1 is the mean.

    Every kind comes once before one comes again.
    """
    draw = random.Random(seed)
    bag: list[str] = []
    number = 1
    if "first_round" in kinds:
        yield 0.0, Strike(number, "first_round", (draw.randrange(replicas),))
    again = [kind for kind in kinds if kind != "first_round"]
    while again:
        number += 1
        bag = bag or draw.sample(again, len(again))
        strike = Strike(number, bag.pop())
        victim, other = draw.sample(range(replicas), 2)
        if strike.kind in SERVICES:
            strike.how = draw.choice(("killed", "stopped"))
        else:
            strike.victims = (victim, other) if strike.kind == "one_way" else (victim,)
        strike.seconds = draw.uniform(*LASTS_S.get(strike.kind, (0.0, 0.0)))
        if strike.kind == "hang" or (strike.kind == "unreachable" and draw.random() < FOR_GOOD):
            strike.seconds = None
        yield draw.uniform(0.5, 1.5), strike


class Saboteur:
    """Strikes as planned, and never the last group that trains.

    Args:
        history: Told of every strike.
        planned: From ``plan``.
        faults_per_minute: On average.
        duration_s: How long training takes.
    """

    def __init__(
        self,
        history: History,
        planned: Iterator[tuple[float, Strike]],
        faults_per_minute: float,
        duration_s: float,
    ) -> None:
        self._history = history
        self._planned = planned
        self._mean_pause_s = 60 / faults_per_minute
        self._duration_s = duration_s
        self._coordinator: KillableCoordinator | None = None
        self._supervisor: Supervisor | None = None
        self._lasting: list[Strike] = []
        self._next: Strike | None = None
        self._due = 0.0

    def make_coordinator(self, *arguments: Any, **named: Any) -> KillableCoordinator:
        """Make the coordinator of the run, which this object may kill; ``launch`` calls it."""
        self._coordinator = KillableCoordinator(*arguments, **named)
        return self._coordinator

    def seconds_left(self) -> float | None:
        """How long training still goes on, in seconds; None before all groups train."""
        if self._history.began is None:
            return None
        return max(0.0, self._duration_s - self._history.now())

    def finish(self) -> None:
        """Check what the groups have written since the last look; call it after the run."""
        if self._supervisor is not None:
            self._history.look(self._supervisor)

    def __call__(self, supervisor: Supervisor) -> None:
        """Check the run, end the faults that are over, and make the next one if it is due."""
        history = self._history
        self._supervisor = supervisor
        history.look(supervisor)
        if history.began is None:
            if len(self._healthy(supervisor)) == supervisor.replicas:
                history.begin()
                self._plan_next()
            return
        now = history.now()
        for strike in list(self._lasting):
            self._go_on(supervisor, strike, now)
        if now > self._duration_s:
            (supervisor.run_dir / STOP).touch()
        strike = self._next
        if strike is not None and now >= self._due and self._may(supervisor, strike):
            history.add(strike)
            self._strike(supervisor, strike)
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
            lasts = HANG_TIMEOUT_S if kind == "hang" else LEAVES_S
        if self._due > self._duration_s - RECOVERY_S - lasts and kind != "first_round":
            self._next = None  # nor any later one

    def _healthy(self, supervisor: Supervisor) -> set[int]:
        """The groups that train, and have not been struck since they last committed."""
        return {
            replica_id
            for replica_id in supervisor.records
            if supervisor.trains(replica_id) and not self._history.open_strikes(replica_id)
        }

    def _may(self, supervisor: Supervisor, strike: Strike) -> bool:
        """Whether a strike leaves a group that is not struck, and can be told from those before.

        If a service or a connection fails, no group may be struck at the same time: nobody could
        say then who it was that failed.
        """
        healthy = self._healthy(supervisor)
        others = self._history.open_strikes()
        alone = ("unreachable", "one_way", *SERVICES)
        is_clear = not others or not any(s.kind in alone for s in [strike, *others])
        return is_clear and healthy.issuperset(strike.victims) and healthy > set(strike.victims)

    def _strike(self, supervisor: Supervisor, strike: Strike) -> None:
        kind, seconds = strike.kind, strike.seconds
        if kind in SERVICES:
            self._strike_service(strike)
        elif kind in ORDERED:
            target = str(strike.victims[1]) if kind == "one_way" else None
            folder = log_path(supervisor.run_dir, strike.victims[0]).parent
            give_order(folder, Order(strike.number, kind, seconds, target))
            return
        elif kind == "disk_full":
            _limit_files(supervisor, strike, 0)
        elif kind in ("stop", "slow"):
            supervisor.groups.signal(strike.victims[0], signal.SIGSTOP)
        else:
            number = signal.SIGTERM if kind == "end" else signal.SIGKILL
            supervisor.groups.signal(strike.victims[0], number)
            return
        self._lasting.append(strike)

    def _strike_service(self, strike: Strike) -> None:
        assert self._coordinator is not None, "launch has made it"
        service = self._coordinator.services[strike.kind]
        service.kill() if strike.how == "killed" else service.signal(signal.SIGSTOP)

    def _go_on(self, supervisor: Supervisor, strike: Strike, now: float) -> None:
        """What a fault that lasts needs meanwhile, and at its end."""
        is_over = now > strike.at + (strike.seconds or 0.0)
        if is_over:
            self._lasting.remove(strike)
        if strike.kind in SERVICES and is_over:
            assert self._coordinator is not None, "it has been struck"
            service = self._coordinator.services[strike.kind]
            service.start() if strike.how == "killed" else service.signal(signal.SIGCONT)
        elif strike.kind == "disk_full" and is_over:
            _limit_files(supervisor, strike, psutil.RLIM_INFINITY)
        elif strike.kind == "slow" or (strike.kind == "stop" and is_over):
            runs = is_over or (now - strike.at) % SLOW_CYCLE_S > SLOW_CYCLE_S * 2 / 3
            number = signal.SIGCONT if runs else signal.SIGSTOP
            supervisor.groups.signal(strike.victims[0], number)


def _limit_files(supervisor: Supervisor, strike: Strike, size: int) -> None:
    """Let no process of a group write files beyond a size: its writes then fail, as on a full
    disk."""
    for process in supervisor.groups.members(strike.victims[0]):
        try:
            _, most = process.rlimit(psutil.RLIMIT_FSIZE)
            soft = most if size == psutil.RLIM_INFINITY else size
            process.rlimit(psutil.RLIMIT_FSIZE, (soft, most))
        except psutil.Error:
            continue  # it has ended
