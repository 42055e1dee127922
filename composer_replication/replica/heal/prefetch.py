"""Fetching the global state before this group asks for a quorum.

While a joiner fetches its state inside a quorum, all other groups wait with it, for ``timeout`` at
most. So a joiner fetches first. Meanwhile it sends the lighthouse no heartbeat, so no quorum waits
for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torchft.coordination import ManagerClient

from composer_replication.replica.addresses import host_and_port
from composer_replication.replica.heal.donor import answer_limit_s, download_limit_s
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.lighthouse import (
    CONNECT_TIMEOUT_S,
    Member,
    can_connect,
    read_status,
)
from composer_replication.replica.peer_client import NothingThere, PeerError

log = logging.getLogger(__name__)

POLL_S = 0.2

WAIT_FOR_COMMIT = 4.0
"""A joiner waits for the next commit at most so many times as long as its download took: right
after a commit there is most time for another download. If no commit comes in that time, syncs are
so rare that they hardly overtake the next download."""


class Prefetch:
    """Downloads the global state of the groups in training before a quorum needs it.

    If the peers commit nothing between the download and the quorum, this group has the state
    already. Otherwise it fetches again in the quorum, where all others wait for it.

    Args:
        transport: The transport of this rank, which takes over the download.
        lighthouse_addr: ``http://host:port``.
        rank: This process's rank in its group; it fetches from the same rank of a peer.
        timeout: How long peers wait for this group in a quorum, in seconds.
    """

    def __init__(
        self, transport: HealTransport, *, lighthouse_addr: str, rank: int, timeout: float
    ) -> None:
        self._transport = transport
        self._lighthouse_addr = lighthouse_addr
        self._rank = rank
        self._timeout = timeout
        # The last download: its donor, the donor's manager step, and when it began.
        self._donor = ""
        self._step = 0
        self._began = 0.0
        self._is_too_slow = False
        """Whether the others sync too often for this group to be ready in time."""

    def fetch(self, *, follows_commit: bool = False) -> None:
        """Download the global state of the groups in training, if there are any.

        Args:
            follows_commit: Whether they have just committed.

        Raises:
            PeerError: There are donors, and none of them could send the state, or none fast enough:
                a download that peers overtake again and again may take a quarter of ``timeout``.
                This group would only delay the others.
        """
        reasons: list[str] = []
        for donor in _donors(self._lighthouse_addr, self._rank, self._transport):
            try:
                return self._fetch_from(donor, follows_commit)
            except PeerError as error:
                log.warning("No global state from %s: %s", donor, error)
                # Otherwise it has just left or died, and is no donor any more.
                if not isinstance(error, NothingThere) and _answers(donor):
                    reasons.append(str(error))
        if reasons:
            raise PeerError(
                f"{len(reasons)} replica groups have the global state, and it could not be fetched "
                f"from any. The last error: {reasons[-1]}"
            )

    def newest(self) -> dict[str, Any] | None:
        """Return the state that was downloaded, or another one if the peers have committed since.

        Call it right before the quorum, and prepare what it returns; that takes time, so call it
        again until it returns a state of the same name. None if nothing was downloaded. It gives up
        if the peers commit again before a state is prepared that was fetched right after a commit.

        Raises:
            PeerError: See ``fetch``.
        """
        if self._donor and not self._is_too_slow and self._is_overtaken():
            log.info("The others have synced since the download of their global state")
            is_right_after = self._wait_for_commit(self._donor, time.monotonic() - self._began)
            self.fetch(follows_commit=is_right_after)
            self._is_too_slow = is_right_after  # if that is overtaken too
        return self._transport.downloaded_state

    def _is_overtaken(self) -> bool:
        """Whether the peers will have another state in their next quorum."""
        try:
            latest = self._transport.ask(self._donor, "latest", limit_s=self._timeout)
        except PeerError:
            return True  # the donor is gone: another one may have the same state
        return latest.step != self._step or latest.is_syncing

    def _fetch_from(self, donor: str, follows_commit: bool = False) -> None:
        while True:
            self._began = time.monotonic()
            num_bytes = self._transport.ask(donor, "latest", limit_s=self._timeout).num_bytes
            limit_s = answer_limit_s(self._timeout, num_bytes)
            offer = self._transport.ask(donor, "copy", limit_s=limit_s)
            state = offer.state
            if state is None:
                raise PeerError(f"{donor} offers no state: {offer}")
            size = state.num_bytes
            log.info("Fetching the global state, %.1f MB, from %s", size / 1e6, donor)
            deadline = time.monotonic() + download_limit_s(self._timeout, size)
            self._transport.download(donor, state, deadline)
            self._donor = donor
            self._step = offer.step
            seconds = time.monotonic() - self._began
            if not self._is_overtaken():
                return
            if follows_commit:
                break
            follows_commit = True
            self._wait_for_commit(donor, seconds)
        if seconds < self._timeout / 4:
            return
        raise PeerError(
            f"the global state, {size / 1e6:.1f} MB, takes {seconds:.1f} s to arrive "
            f"({size / 1e6 / seconds:.2f} MB/s), which is longer than the others take from one "
            f"sync to the next, and too much of timeout={self._timeout:g} for them to wait: this "
            "group leaves. Use a faster link, a larger sync_every, or "
            f"timeout={4.5 * seconds:.0f} in all groups"
        )

    def _wait_for_commit(self, donor: str, download_s: float) -> bool:
        """Wait for the donor's next commit. Returns whether there was one in time."""
        try:
            before = self._transport.ask(donor, "latest", limit_s=self._timeout).step
            deadline = time.monotonic() + WAIT_FOR_COMMIT * download_s
            while time.monotonic() < deadline:
                latest = self._transport.ask(donor, "latest", limit_s=self._timeout)
                if latest.step != before and not latest.is_syncing:
                    return True
                time.sleep(POLL_S)
        except PeerError as error:
            log.info("%s does not answer any more: %s", donor, error)
        return False


def _donors(lighthouse_addr: str, rank: int, transport: HealTransport) -> Iterator[str]:
    """The servers of the living groups of the last quorum, the highest step first.

    The first of them is the one that a quorum makes the donor of this rank if no other group joins
    (``restrict_quorum``): it then knows the state's name already.
    """
    members = read_status(lighthouse_addr).members
    members = sorted(members, key=lambda member: -member.step)
    newest = [member for member in members if member.step == members[0].step]
    older = members[len(newest) :]
    turn = rank % max(1, len(newest))
    for member in (*newest[turn:], *newest[:turn], *older):
        if not _answers(member.manager_addr):
            continue  # it has died; torchft's client would wait for the limit
        try:
            address = _server_of(member, rank)
            latest = transport.ask(address, "latest", limit_s=CONNECT_TIMEOUT_S)
        except (RuntimeError, OSError, ValueError) as error:
            # It has died, or is no donor. If the quorum makes it one, the heal there says why not.
            reason = str(error) or repr(error)
            log.info("%s is no donor: %s", member.replica_id, reason.splitlines()[0])
            continue
        if latest.step > 0:
            yield address


def _server_of(member: Member, rank: int) -> str:
    """The address of the server of one of a member's ranks."""
    limit = timedelta(seconds=CONNECT_TIMEOUT_S)
    manager = ManagerClient(member.manager_addr, connect_timeout=limit)
    return manager._checkpoint_metadata(rank, timeout=limit)


def _answers(address: str) -> bool:
    try:
        return can_connect(*host_and_port(address))
    except ValueError:  # a stranger has written it
        return False
