"""torchft's checkpoint transport for heals: authenticated, checked by hash, and without pickles.

torchft's own ``HTTPTransport`` unpickles whatever the peer sends. It advertises the machine's host
name, whatever ``hostname`` is. And it serves only while the donor waits in a quorum, so that a slow
download stops all groups.

Here the state has a name, its SHA-256. A joiner may fetch it before it asks for a quorum. In the
quorum it then needs nothing but the name, and sees that it has this state already.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from torchft.checkpointing.transport import CheckpointTransport

from composer_replication.diloco.torchft_api import HEAL_STATE
from composer_replication.replica.addresses import bracketed, listen
from composer_replication.replica.heal.client import HealClient, HealError, load
from composer_replication.replica.heal.donor import Donor
from composer_replication.replica.heal.protocol import Limits
from composer_replication.replica.heal.server import HealServer

log = logging.getLogger(__name__)


class HealTransport(CheckpointTransport[dict[str, Any]]):
    """Serves this rank's state to joiners, and fetches the state of a donor.

    A donor has two offers, see ``Donor``. While it waits in a quorum with a joiner, torchft has it
    offer the state of that quorum's step (``send_checkpoint`` to ``disallow_checkpoint``). The
    global state can also be asked for at any other time (``serve``).

    Args:
        tokens: The run's accepted tokens; the first one signs. Both sides of a heal prove that they
            know one of them.
        hostname: How peers reach this machine; the server listens on that address. None: its host
            name, and every interface.
        timeout: How long a peer may be silent, in seconds.
        name: The name of this replica group, for the log of its peers.

    Attributes:
        client: Asks the heal servers of peers.
        port: The port on which peers reach the server.
        serve: ``Donor.serve``.
        downloads: The states that have been fetched and not loaded yet, by name.
    """

    def __init__(
        self, tokens: Sequence[str], hostname: str | None, timeout: float, name: str = ""
    ) -> None:
        self.client = HealClient(tokens, name, timeout)
        self._donor = Donor(self.client.limits)
        self.serve = self._donor.serve
        self.downloads: dict[str, memoryview] = {}
        self._loaded: Any = None
        listener = listen(hostname)
        self.port = listener.getsockname()[1]
        address = f"http://{bracketed(hostname or socket.gethostname())}:{self.port}"
        self._server = HealServer(listener, address, tokens, self._donor.answer)
        self._server.start()

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

    def adopt_download(self, name: str, body: memoryview) -> None:
        """Take over a state that was fetched before the quorum, in the place of any other.

        Args:
            name: Its SHA-256 (``state_bytes.digest``).
            body: Its bytes.
        """
        self.downloads, self._loaded = {name: body}, None

    def forget_download(self) -> memoryview | None:
        """Give up what has been downloaded, and return its memory for the next download."""
        bodies, self.downloads, self._loaded = list(self.downloads.values()), {}, None
        return bodies[0] if bodies else None

    def fetched_state(self) -> Any:
        """The global state that has been downloaded; None if there is none.

        If a quorum's state is the same, ``recv_checkpoint`` gives this very object.

        Raises:
            HealError: A peer has sent something else than a state.
        """
        if self._loaded is None:
            for body in self.downloads.values():
                self._loaded = load(body)
        return self._loaded

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
            HealError: The state could not be had in time, or is not to be trusted.
        """
        del src_rank
        limits = Limits(timeout.total_seconds())
        num_bytes = sum(map(len, self.downloads.values()))
        if not num_bytes:
            deadline = time.monotonic() + limits.timeout
            num_bytes = self.client.ask(metadata, "/latest", deadline).num_bytes
        deadline = time.monotonic() + limits.of_answer(num_bytes)
        parts = self.client.ask(metadata, f"/offer/{step}", deadline).parts
        if not {"state", "rest"} <= parts.keys():
            raise HealError(f"{metadata} offers {sorted(parts)}, and not the state and the rest")
        state = parts["state"]
        deadline = time.monotonic() + limits.of_download(sum(p.num_bytes for p in parts.values()))
        rest = load(self.client.fetch(metadata, parts["rest"], deadline))
        # Copies: each tensor is a view of the whole body, and pickling one for the other ranks of
        # the group would pickle all of it.
        rest = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, rest)
        if state.name not in self.downloads:
            # The peers have committed since the download: fetch again, into the same memory.
            body = self.client.fetch(metadata, state, deadline, self.forget_download())
            self.adopt_download(state.name, body)
        rest["user"][HEAL_STATE] = self.fetched_state()
        self.forget_download()
        log.info(
            "Took the global state of manager step %d from %s: %d bytes, sha256 %s",
            step,
            metadata,
            state.num_bytes,
            state.name,
        )
        return rest

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving. Answers that are being sent are sent to their end."""
        del wait
        self._server.stop()
        self._donor.stop()
