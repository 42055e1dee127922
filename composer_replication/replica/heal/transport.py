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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from torchft.checkpointing.transport import CheckpointTransport

from composer_replication.diloco.torchft_api import HEAL_STATE
from composer_replication.replica import audit
from composer_replication.replica.addresses import bracketed, listen
from composer_replication.replica.heal import state_bytes
from composer_replication.replica.heal.client import HealClient, HealError, Offer, Part, load
from composer_replication.replica.heal.server import Body, HealServer
from composer_replication.replica.tls import client_context, server_context

log = logging.getLogger(__name__)

KEPT_S = 60.0
"""How long a copy of the state is kept for a joiner that has asked for its name, in seconds."""


class HealTransport(CheckpointTransport[dict[str, Any]]):
    """Serves this rank's state to joiners, and fetches the state of a donor.

    A donor has two offers. While it waits in a quorum with a joiner, torchft has it offer the state
    of that quorum's step (``send_checkpoint`` to ``disallow_checkpoint``). The global state can
    also be asked for at any other time (``serve``).

    Threads: torchft calls the donor's and the joiner's methods on the thread of the quorum. The
    server answers each connection on a thread of its own, so what both sides touch is guarded by
    ``_lock``. Copies are made outside of that lock: a copy of a large state takes seconds, and the
    thread of the quorum would wait for it, and all groups with it.

    Args:
        tokens: The run's accepted tokens; the first one signs. Both sides of a heal prove that they
            know one of them.
        hostname: How peers reach this machine; the server listens on that address. None: its host
            name, and every interface.
        timeout: How long a peer may be silent, in seconds.
        name: The name of this replica group, for the audit log of its peers.
        tls_dir: The folder of certificates for TLS. None: no TLS.

    Attributes:
        client: Asks the heal servers of peers.
        port: The port on which peers reach the server.
        downloads: The states that have been fetched and not loaded yet, by name.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        hostname: str | None,
        timeout: float,
        name: str = "",
        tls_dir: str | None = None,
    ) -> None:
        context = None if tls_dir is None else client_context(tls_dir)
        self.client = HealClient(tokens, name, timeout, context)
        self._lock = threading.Condition()
        self._one_copy = threading.Lock()
        self._bodies: dict[str, tuple[float, Body]] = {}
        self._latest: Offer | None = None
        self._current: Offer | None = None  # while the donor waits in a quorum
        self._rest: Body = []
        self._step: Callable[[], int] | None = None
        self._snapshot: Callable[[], Mapping[str, Any]] | None = None
        self.downloads: dict[str, memoryview] = {}
        listener = listen(hostname)
        self.port = listener.getsockname()[1]
        scheme = "http" if tls_dir is None else "https"
        address = f"{scheme}://{bracketed(hostname or socket.gethostname())}:{self.port}"
        context = None if tls_dir is None else server_context(tls_dir)
        self._server = HealServer(listener, address, tokens, self.answer, context)
        self._server.start()

    # ---- the donor ---------------------------------------------------------------------------

    def serve(self, step: Callable[[], int], snapshot: Callable[[], Mapping[str, Any]]) -> None:
        """Offer the global state outside of quorums too, from now on.

        Args:
            step: Gives the manager's step. It may be called at any time, from any thread.
            snapshot: Gives a copy of the global state, in the same way.
        """
        self._step, self._snapshot = step, snapshot

    def metadata(self) -> str:
        """The address of the server, which torchft passes on to joiners."""
        return self._server.address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Offer the state of a manager step until ``disallow_checkpoint``; it sends nothing yet."""
        del dst_ranks, timeout
        user = dict(state_dict["user"])
        state = self._keep(user.pop(HEAL_STATE))
        # As bytes, now: with a delay this group trains on while a joiner is still to ask for it.
        parts = state_bytes.dump({"user": user, "torchft": state_dict["torchft"]})
        body = [memoryview(b"".join(parts))]
        rest = Part(state_bytes.digest(body), len(body[0]))
        with self._lock:
            self._rest = body
            self._current = Offer(step, {"state": state, "rest": rest})
            self._lock.notify_all()

    def disallow_checkpoint(self) -> None:
        """End the offer, and drop copies that nobody fetched in time; called at every vote."""
        with self._lock:
            self._current, self._rest = None, []
            oldest = time.monotonic() - KEPT_S
            self._bodies = {n: kept for n, kept in self._bodies.items() if kept[0] > oldest}

    def _keep(self, state: Mapping[str, Any]) -> Part:
        """Keep a copy of the state for joiners, and give it its name."""
        body = state_bytes.dump(state)
        part = Part(state_bytes.digest(body), sum(map(len, body)))
        with self._lock:
            # Two copies: a joiner may be about to fetch the one before. A third would be memory of
            # the trainer. A copy that is being sent stays alive without this dict.
            while len(self._bodies) > 1:
                del self._bodies[next(iter(self._bodies))]
            self._bodies[part.name] = time.monotonic(), body
        return part

    def answer(self, path: str) -> Body:
        """The answer to a request; the server calls this on the thread of the connection.

        Args:
            path: ``/latest`` for the manager's step, ``/latest/offer`` for a state of that step,
                ``/offer/STEP`` for the offer in a quorum, ``/state/NAME`` for a part of either.

        Raises:
            KeyError: There is nothing at this path now.
        """
        kind, _, which = path.strip("/").partition("/")
        if kind == "state":
            with self._lock:
                if self._current is not None and which == self._current.parts["rest"].name:
                    return self._rest
                return self._bodies[which][1]
        if kind == "latest" and self._step is not None:
            offer = self._latest_offer() if which == "offer" else Offer(self._step())
            return [memoryview(offer.to_json())]
        if kind == "offer":
            # A joiner may ask before this group has made its offer. Without the wait it would get a
            # 404, and the sync would fail for all groups.
            with self._lock:
                self._lock.wait_for(lambda: self._offers(which), self.client.timeout)
                if self._current is not None and self._offers(which):
                    return [memoryview(self._current.to_json())]
        raise KeyError(path)

    def _latest_offer(self) -> Offer:
        """An offer of the global state as it is now.

        Joiners that ask at the same step get the same copy. Without ``_one_copy`` ten joiners that
        ask at once would cost this group ten copies of its state and ten digests.
        """
        assert self._step is not None and self._snapshot is not None
        with self._one_copy:
            now, latest = self._step(), self._latest
            with self._lock:
                is_kept = latest is not None and latest.parts["state"].name in self._bodies
            if latest is None or latest.step != now or not is_kept:
                latest = self._latest = Offer(now, {"state": self._keep(self._snapshot())})
            return latest

    def _offers(self, step: str) -> bool:
        return self._current is not None and str(self._current.step) == step

    # ---- the joiner --------------------------------------------------------------------------

    def adopt_download(self, name: str, body: memoryview) -> None:
        """Take over a state that was fetched before the quorum, in the place of any other.

        Args:
            name: Its SHA-256 (``state_bytes.digest``).
            body: Its bytes.
        """
        self.downloads = {name: body}

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Fetch the donor's state of a manager step, or its name alone if it has been downloaded.

        Args:
            src_rank: torchft's; not used.
            metadata: The address of the donor's server.
            step: The manager step of the quorum.
            timeout: Limit of the whole heal.

        Raises:
            HealError: The state could not be had in time, or is not to be trusted.
        """
        del src_rank
        deadline = time.monotonic() + timeout.total_seconds()
        parts = self.client.ask(metadata, f"/offer/{step}", deadline).parts
        if not {"state", "rest"} <= parts.keys():
            raise HealError(f"{metadata} offers {sorted(parts)}, and not the state and the rest")
        state = parts["state"]
        rest = load(self.client.fetch(metadata, parts["rest"], deadline))
        # Copies: each tensor is a view of the whole body, and pickling one for the other ranks of
        # the group would pickle all of it.
        rest = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, rest)
        body = self.downloads.pop(state.name, None)
        if body is None:
            # The peers have committed since the download: fetch again, into the same memory.
            into = next(iter(self.downloads.values()), None)
            body = self.client.fetch(metadata, state, deadline, into)
        self.downloads.clear()
        rest["user"][HEAL_STATE] = load(body)
        audit.record(
            "heal",
            self.client.name,
            metadata,
            outcome="taken",
            step=step,
            sha256=state.name,
            num_bytes=state.num_bytes,
        )
        return rest

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving. Answers that are being sent are sent to their end."""
        del wait
        self._server.stop()
