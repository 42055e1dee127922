"""Our transport for torchft's heals: authenticated, checked by hash, and without pickles.

torchft's own ``HTTPTransport`` unpickles whatever the peer sends. It advertises the machine's host
name, whatever ``hostname`` is. And it serves only while the donor waits in a quorum, so that a slow
download stops all groups.

Here the state has a name, a hash over its bytes (``Part``). While a joiner fetches its state inside
a quorum, all other groups wait with it, for ``timeout`` at most. So a joiner fetches before it asks
for a quorum. Meanwhile it sends the lighthouse no heartbeat, so no quorum waits for it. In the
quorum it then needs only the name, and sees that it has this state already (ADR-011).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchft.checkpointing.transport import CheckpointTransport
from torchft.coordination import ManagerClient

from composer_replication.diloco.torchft_api import HEAL_STATE, STATE_NAME
from composer_replication.replica.addresses import does_answer
from composer_replication.replica.heal import state_bytes
from composer_replication.replica.heal.donor import (
    Donor,
    Offer,
    Part,
    answer_limit_s,
    download_limit_s,
)
from composer_replication.replica.lighthouse import CONNECT_TIMEOUT_S, read_status
from composer_replication.replica.peer_client import NothingThere, PeerClient, PeerError
from composer_replication.replica.peer_server import PeerServer

log = logging.getLogger(__name__)

POLL_S = 0.2

WAIT_FOR_COMMIT = 4.0
"""A joiner waits for the next commit at most so many times as long as its download took: right
after a commit there is most time for another download. If no commit comes in that time, syncs are
so rare that they hardly overtake the next download."""


class Download(NamedTuple):
    """A global state that was downloaded.

    Attributes:
        body: Its bytes. The next download may be written into this memory.
        state: The same as tensors, views of ``body``, and containers, with its name.
    """

    body: memoryview
    state: dict[str, Any]


class HealTransport(CheckpointTransport[dict[str, Any]]):
    """Serves this rank's state to joiners, and fetches the state of a donor.

    A donor has two offers, see ``Donor``. While it waits in a quorum with a joiner, torchft has it
    offer the state of that quorum's step (``send_checkpoint`` to ``disallow_checkpoint``). The
    global state can also be asked for at any other time (``serve``).

    A joiner calls ``fetch``, then ``newest`` before its first quorum, which downloads again if the
    peers have committed. If they commit nothing more before the quorum, it has the state already.
    Otherwise it downloads in the quorum (``recv_checkpoint``), where all others wait for it.

    Args:
        server: Gives the state to peers. Its tokens are the run's: both sides of a heal prove that
            they know one of them.
        timeout: How long a peer may be silent, and peers wait for this group in a quorum, in
            seconds.
        lighthouse_addr: ``http://host:port``. Its page names the groups in training.
        rank: This process's rank in its group; it fetches from the same rank of a peer.
        name: The name of this replica group, for the log of its peers.

    Attributes:
        serve: ``Donor.serve``.
        downloaded: The newest global state of a peer, until it is given to a heal.
    """

    def __init__(
        self,
        server: PeerServer,
        timeout: float,
        lighthouse_addr: str,
        rank: int,
        name: str,
    ) -> None:
        self._client = PeerClient(server.tokens, name, timeout)
        self._donor = Donor(timeout)
        self.serve = self._donor.serve
        self.server = server
        server.answers |= self._donor.answers
        self._timeout = timeout
        self._lighthouse_addr = lighthouse_addr
        self._rank = rank
        self.downloaded: Download | None = None
        # The last download before a quorum: from whom, the donor's manager step, and its beginning.
        self._address = ""
        self._step = 0
        self._began = 0.0
        self._had_most_time = False
        """Whether ``newest`` begins, or has begun, a download right after a commit: none has more
        time."""

    # ---- the donor ---------------------------------------------------------------------------

    def metadata(self) -> str:
        """The address of the server, which torchft passes on to joiners."""
        return self.server.address

    def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: dict[str, Any],
        timeout: timedelta,
    ) -> None:
        """Offer the state of a manager step until ``disallow_checkpoint``; it sends nothing yet."""
        del dst_ranks, timeout
        user = dict(state_dict["user"])
        state = user.pop(HEAL_STATE)
        self._donor.open(step, state, state_dict | {"user": user})

    def disallow_checkpoint(self) -> None:
        """End the offer; torchft calls it at every vote, before the state changes."""
        self._donor.close()

    # ---- a joiner, before its first quorum -----------------------------------------------------

    def fetch(self) -> None:
        """Download the global state of the groups in training, if there are any.

        Raises:
            PeerError: There are donors, and none of them could send the state, or none fast enough:
                a download that peers overtake again and again may take a quarter of ``timeout``.
                This group would only delay the others.
        """
        reasons: list[str] = []
        for donor in self._donors():
            try:
                return self._fetch_from(donor)
            except PeerError as error:
                log.warning("No global state from %s: %s", donor, error)
                # Otherwise it has just left or died, and is no donor any more.
                if not isinstance(error, NothingThere) and does_answer(donor):
                    reasons.append(str(error))
        if reasons:
            raise PeerError(
                f"{len(reasons)} replica groups have the global state, and it could not be fetched "
                f"from any. The last error: {reasons[-1]}"
            )

    def _donors(self) -> Iterator[str]:
        """The servers of the living groups of the last quorum, the highest step first.

        The first of them is the one that a quorum makes the donor of this rank if no other group
        joins (``restrict_quorum``): it then knows the state's name already.
        """
        members = read_status(self._lighthouse_addr).members
        turn = self._rank % max(1, len(members))
        limit = timedelta(seconds=CONNECT_TIMEOUT_S)
        for member in sorted(members[turn:] + members[:turn], key=lambda member: -member.step):
            if not does_answer(member.manager_addr):
                continue  # it has died; torchft's client would wait for the limit
            try:
                manager = ManagerClient(member.manager_addr, connect_timeout=limit)
                address = manager._checkpoint_metadata(self._rank, timeout=limit)
                latest = self.ask(address, "latest", limit_s=CONNECT_TIMEOUT_S)
            except (RuntimeError, OSError, ValueError) as error:
                # It has died, or is no donor. If the quorum makes it one, the heal there says why
                # not.
                reason = str(error) or repr(error)
                log.info("%s is no donor: %s", member.replica_id, reason.splitlines()[0])
                continue
            if latest.step > 0:
                yield address

    def _fetch_from(self, donor: str) -> None:
        follows_commit = self._had_most_time
        while True:
            self._began = time.monotonic()
            latest = self.ask(donor, "latest")
            if self.downloaded is not None and latest.step == self._step:
                self._address = donor  # the one before may have left
                return  # they have not committed since: it is the state that this group has
            limit_s = answer_limit_s(self._timeout, latest.num_bytes)
            offer = self.ask(donor, "copy", limit_s=limit_s)
            size = offer.state.num_bytes
            log.info("Fetching the global state, %.1f MB, from %s", size / 1e6, donor)
            deadline = time.monotonic() + download_limit_s(self._timeout, size)
            with suppress(NothingThere):
                self.download(donor, offer.state, deadline)
            if self.downloaded is None:
                # Another joiner has asked after an outer step, and the donor keeps one copy. Not in
                # an ``except``: the error holds the memory of the first attempt.
                offer = self.ask(donor, "copy", limit_s=limit_s)
                self.download(donor, offer.state, deadline)
            self._address = donor
            self._step = offer.step
            seconds = time.monotonic() - self._began
            if not self._is_overtaken():
                return
            if follows_commit:
                break
            follows_commit = True
            self._wait_for_commit(seconds)
        if seconds < self._timeout / 4:
            return
        raise PeerError(
            f"the global state, {size / 1e6:.1f} MB, takes {seconds:.1f} s to arrive "
            f"({size / 1e6 / seconds:.2f} MB/s), which is longer than the others take from one "
            f"sync to the next, and too much of timeout={self._timeout:g} for them to wait: this "
            "group leaves. Use a faster link, a larger sync_every, or "
            f"timeout={4.5 * seconds:.0f} in all groups"
        )

    def newest(self) -> dict[str, Any] | None:
        """Return the state that was downloaded, or another one if the peers have committed since.

        Call it right before the quorum, and prepare what it returns; that takes time, so call it
        again until it returns a state of the same name. None if nothing was downloaded. Once it has
        waited for a commit and downloaded right after that, it asks no more: if the peers have
        committed again, ``recv_checkpoint`` downloads in the quorum.

        Raises:
            PeerError: See ``fetch``.
        """
        if self.downloaded is not None and not self._had_most_time and self._is_overtaken():
            log.info("The others have synced since the download of their global state")
            self._had_most_time = self._wait_for_commit(time.monotonic() - self._began)
            self.fetch()
        return None if self.downloaded is None else self.downloaded.state

    def _is_overtaken(self) -> bool:
        """Whether the peers will have another state in their next quorum."""
        try:
            latest = self.ask(self._address, "latest")
        except PeerError:
            return True  # the donor is gone: another one may have the same state
        return latest.step != self._step or latest.is_syncing

    def _wait_for_commit(self, download_s: float) -> bool:
        """Wait for the donor's next commit. Returns whether there was one in time."""
        try:
            before = self.ask(self._address, "latest").step
            deadline = time.monotonic() + WAIT_FOR_COMMIT * download_s
            while time.monotonic() < deadline:
                latest = self.ask(self._address, "latest")
                if latest.step != before and not latest.is_syncing:
                    return True
                time.sleep(POLL_S)
        except PeerError as error:
            log.info("%s does not answer any more: %s", self._address, error)
        return False

    def ask(self, address: str, *request: str, limit_s: float | None = None) -> Offer:
        """Ask a donor for an offer; see ``Donor.answers`` and ``PeerClient.ask``.

        Raises:
            PeerError: It does not answer in time, or cannot be trusted.
        """
        return Offer.read(self._client.ask(address, *request, limit_s=limit_s), address)

    def download(self, address: str, state: Part, deadline: float) -> dict[str, Any]:
        """Return a global state, which is downloaded unless the last download has its name.

        It replaces the one before, in the same memory if it fits.

        Args:
            address: The address of the donor's server.
            state: The state that the donor has offered.
            deadline: When it must have arrived, by ``time.monotonic``.

        Raises:
            PeerError: The state does not arrive in time, has another hash, or is no state.
        """
        into = None
        if self.downloaded is not None:
            if self.downloaded.state[STATE_NAME] == state.name:
                return self.downloaded.state
            if len(self.downloaded.body) == state.num_bytes:
                into = self.downloaded.body
        self.downloaded = None  # two states at a time may not fit into memory
        body = self._fetch_part(address, state, deadline, into)
        content = state_bytes.load(body)
        if not isinstance(content, dict):
            raise PeerError(f"{address} sent no state, but a {type(content).__name__}")
        self.downloaded = Download(body, content | {STATE_NAME: state.name})
        return self.downloaded.state

    def _fetch_part(
        self,
        address: str,
        part: Part,
        deadline: float,
        into: memoryview | None = None,
    ) -> memoryview:
        if into is None:
            into = state_bytes.memory(part.num_bytes)  # expensive for a large state
        self._client.fetch(address, "state", part.name, deadline=deadline, into=into)
        if state_bytes.digest_of_bytes([into]) != part.name:
            raise PeerError(f"{address} sent a state that is damaged: {len(into)} bytes")
        return into

    # ---- a joiner, in the quorum ---------------------------------------------------------------

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: timedelta,
    ) -> dict[str, Any]:
        """Fetch the donor's state of a manager step.

        Of a global state that has been downloaded before it asks for the name alone.

        Args:
            src_rank: torchft's; not used.
            metadata: The address of the donor's server.
            step: The manager step of the quorum.
            timeout: Limit of each answer, to which the time for the state's bytes is added.

        Raises:
            PeerError: The state did not arrive in time, or cannot be trusted.
        """
        del src_rank
        limit_s = timeout.total_seconds()
        if self.downloaded is None:
            num_bytes = self.ask(metadata, "latest", limit_s=limit_s).num_bytes
        else:
            num_bytes = len(self.downloaded.body)
        answer_s = answer_limit_s(limit_s, num_bytes)
        offer = self.ask(metadata, "offer", str(step), limit_s=answer_s)
        num_bytes = offer.state.num_bytes + offer.rest.num_bytes
        deadline = time.monotonic() + download_limit_s(limit_s, num_bytes)
        rest = state_bytes.load(self._fetch_part(metadata, offer.rest, deadline))
        # Copies: each tensor is a view of the whole body, and pickling one for the other ranks of
        # the group would pickle all of it.
        rest = tree_map_only(Tensor, Tensor.clone, rest)
        # If the peers have committed since the download: once more, into the same memory.
        rest["user"][HEAL_STATE] = self.download(metadata, offer.state, deadline)
        self.downloaded = None
        log.info(
            "Took the global state of manager step %d from %s: %d bytes, sha256 %s",
            step,
            metadata,
            offer.state.num_bytes,
            offer.state.name,
        )
        return rest

    def shutdown(self, wait: bool = True) -> None:
        """End all offers. Transfers that have begun are completed."""
        del wait
        for kind in self._donor.answers:
            self.server.answers.pop(kind, None)
        self._donor.stop()
        self.downloaded = None
