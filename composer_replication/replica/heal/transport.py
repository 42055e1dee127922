"""Our transport for torchft's heals: authenticated, checked by hash, and without pickles.

torchft's own ``HTTPTransport`` unpickles whatever the peer sends. It advertises the machine's host
name, whatever ``hostname`` is. And it serves only while the donor waits in a quorum, so that a slow
download stops all groups.

Here the state has a name, its SHA-256. A joiner downloads the state before it asks for a quorum. In
the quorum it then needs only the name, and sees that it has this state already (ADR-011).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchft.checkpointing.transport import CheckpointTransport

from composer_replication.diloco.torchft_api import HEAL_STATE, STATE_NAME
from composer_replication.replica.heal import state_bytes
from composer_replication.replica.heal.donor import (
    Donor,
    Offer,
    Part,
    answer_limit_s,
    download_limit_s,
)
from composer_replication.replica.peer_client import PeerClient, PeerError
from composer_replication.replica.peer_server import PeerServer

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Download:
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

    Args:
        server: Gives the state to peers. Its tokens are the run's: both sides of a heal prove that
            they know one of them.
        timeout: How long a peer may be silent, in seconds.
        name: The name of this replica group, for the log of its peers.

    Attributes:
        serve: ``Donor.serve``.
        downloaded: The newest global state of a peer, until a heal has taken it over.
    """

    def __init__(self, server: PeerServer, timeout: float, name: str = "") -> None:
        self._client = PeerClient(server.tokens, name, timeout)
        self._donor = Donor(timeout)
        self.serve = self._donor.serve
        self.downloaded: Download | None = None
        self._server = server
        server.answers |= self._donor.answers

    # ---- the donor ---------------------------------------------------------------------------

    def metadata(self) -> str:
        """The address of the server, which torchft passes on to joiners."""
        return self._server.address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Offer the state of a manager step until ``disallow_checkpoint``; it sends nothing yet."""
        del dst_ranks, timeout
        user = dict(state_dict["user"])
        state = user.pop(HEAL_STATE)
        self._donor.open(step, state, {"user": user, "torchft": state_dict["torchft"]})

    def disallow_checkpoint(self) -> None:
        """End the offer; torchft calls it at every vote, before the state changes."""
        self._donor.close()

    # ---- the joiner --------------------------------------------------------------------------

    def ask(self, address: str, *request: str, limit_s: float) -> Offer:
        """Ask a donor for an offer; see ``Donor.answers``.

        Raises:
            PeerError: It does not answer in time, or cannot be trusted.
        """
        answer = self._client.ask(address, *request, deadline=time.monotonic() + limit_s)
        return Offer.read(answer, address)

    def download(self, address: str, state: Part, deadline: float) -> None:
        """Download a global state. It replaces the one before, in the same memory if it fits.

        Args:
            address: The address of the donor's server.
            state: The state that the donor has offered.
            deadline: When it must have arrived, by ``time.monotonic``.

        Raises:
            PeerError: The state does not arrive in time, has another hash, or is no state.
        """
        into = None
        if self.downloaded is not None and len(self.downloaded.body) == state.num_bytes:
            into = self.downloaded.body
        self.downloaded = None  # two states at a time may not fit into memory
        body = self._fetch(address, state, deadline, into)
        content = _load(body)
        if not isinstance(content, dict):
            raise PeerError(f"{address} sent no state, but a {type(content).__name__}")
        self.downloaded = Download(body, content | {STATE_NAME: state.name})

    def _fetch(
        self, address: str, part: Part, deadline: float, into: memoryview | None = None
    ) -> memoryview:
        if into is None:
            into = state_bytes.memory(part.num_bytes)  # expensive for a large state
        self._client.fetch(address, "state", part.name, deadline=deadline, into=into)
        if state_bytes.digest_of_bytes([into]) != part.name:
            raise PeerError(f"{address} sent a state that is damaged: {len(into)} bytes")
        return into

    @property
    def downloaded_state(self) -> dict[str, Any] | None:
        """The global state that has been downloaded; None if there is none."""
        return None if self.downloaded is None else self.downloaded.state

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Fetch the donor's state of a manager step, or its name alone if it has been downloaded.

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
        state = offer.state
        if state is None or offer.rest is None:
            raise PeerError(f"{metadata} offers not both the state and the rest: {offer}")
        num_bytes = state.num_bytes + offer.rest.num_bytes
        deadline = time.monotonic() + download_limit_s(limit_s, num_bytes)
        rest = _load(self._fetch(metadata, offer.rest, deadline))
        # Copies: each tensor is a view of the whole body, and pickling one for the other ranks of
        # the group would pickle all of it.
        rest = tree_map_only(Tensor, Tensor.clone, rest)
        held = None if self.downloaded is None else self.downloaded.state[STATE_NAME]
        if held != state.name:
            # The peers have committed since the download: once more, into the same memory.
            self.download(metadata, state, deadline)
        rest["user"][HEAL_STATE] = self.downloaded_state
        self.downloaded = None
        log.info(
            "Took the global state of manager step %d from %s: %d bytes, sha256 %s",
            step,
            metadata,
            state.num_bytes,
            state.name,
        )
        return rest

    def shutdown(self, wait: bool = True) -> None:
        """End all offers. Transfers that have begun are completed."""
        del wait
        for kind in self._donor.answers:
            self._server.answers.pop(kind, None)
        self._donor.stop()


def _load(body: memoryview) -> Any:
    """Read the bytes that a peer's ``state_bytes.dump`` made.

    Raises:
        PeerError: They are something else.
    """
    try:
        return state_bytes.load(body)
    except state_bytes.NotAState as error:
        raise PeerError(
            f"a peer's state is rejected, it is more than tensors and plain containers: {error}"
        ) from error
