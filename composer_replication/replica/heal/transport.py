"""How a joiner gets the global state from a peer: authenticated, checked, and without pickles.

torchft's own transport unpickles whatever the peer sends, tells the machine's host name whatever it
is told, and serves only while the donor waits in a quorum, so that a slow download stalls everyone.
Here the state is named by its SHA-256. A joiner may fetch it before it asks for a quorum, and then
needs nothing but that name when the quorum has formed.
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

from composer_replication.replica import audit
from composer_replication.replica.addresses import bracketed, listen
from composer_replication.replica.heal import state_bytes as heal_format
from composer_replication.replica.heal.client import HealClient, HealError, Offer, Part, load
from composer_replication.replica.heal.server import Body, HealServer
from composer_replication.replica.tls import client_context, server_context

log = logging.getLogger(__name__)

STATE = "diloco"
"""Key of the part of the heal state that is large, and that a joiner can fetch ahead."""

KEPT_S = 60.0
"""How long a copy of the state is kept for the joiner that has asked for its name."""


class HealTransport(CheckpointTransport[dict[str, Any]]):
    """Serves this group's state to joiners, and fetches a donor's; one in each rank.

    Args:
        tokens: The run's accepted tokens, of which the first one signs. Both sides of a heal prove
            that they know one.
        hostname: How peers reach this machine; the server listens on that address. None: its host
            name, and every interface.
        timeout: How long a peer may be silent, in seconds.
        name: Of this replica group, for the audit log of its peers.
        tls_dir: The folder of certificates for TLS. None: no TLS.
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
        self.source: tuple[Callable[[], int], Callable[[], Mapping[str, Any]]] | None = None
        """Gives the manager's step and the global state, at any time and from any thread."""
        self.fetched: dict[str, memoryview] = {}
        listener = listen(hostname)
        self.port = listener.getsockname()[1]
        scheme = "http" if tls_dir is None else "https"
        address = f"{scheme}://{bracketed(hostname or socket.gethostname())}:{self.port}"
        context = None if tls_dir is None else server_context(tls_dir)
        self._server = HealServer(listener, address, tokens, self.answer, context)
        self._server.start()

    # ---- the donor ---------------------------------------------------------------------------

    def metadata(self) -> str:
        return self._server.address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Offer the state of a manager step until ``disallow_checkpoint``."""
        del dst_ranks, timeout
        user = dict(state_dict["user"])
        state = self._keep(user.pop(STATE))
        # As bytes, now: with a delay the group trains on while a joiner is still to ask for it.
        parts = heal_format.dump({"user": user, "torchft": state_dict["torchft"]})
        body = [memoryview(b"".join(parts))]
        rest = Part(heal_format.digest(body), len(body[0]))
        with self._lock:
            self._rest = body
            self._current = Offer(step, {"state": state, "rest": rest})
            self._lock.notify_all()

    def disallow_checkpoint(self) -> None:
        """End the offer; torchft calls it at every vote. Copies that nobody fetched in time go."""
        with self._lock:
            self._current, self._rest = None, []
            oldest = time.monotonic() - KEPT_S
            self._bodies = {n: kept for n, kept in self._bodies.items() if kept[0] > oldest}

    def _keep(self, state: Mapping[str, Any]) -> Part:
        """Offer a state, of copies already."""
        body = heal_format.dump(state)
        part = Part(heal_format.digest(body), sum(map(len, body)))
        with self._lock:
            # A joiner may be about to fetch the one before; what is being sent stays alive anyway.
            while len(self._bodies) > 1:
                del self._bodies[next(iter(self._bodies))]
            self._bodies[part.name] = time.monotonic(), body
        return part

    def answer(self, path: str) -> Body:
        """What a request gets.

        Raises:
            KeyError: There is nothing at this path, now.
        """
        kind, _, which = path.strip("/").partition("/")
        if kind == "state":
            with self._lock:
                if self._current is not None and which == self._current.parts["rest"].name:
                    return self._rest
                return self._bodies[which][1]
        if kind == "latest" and self.source is not None:
            offer = self._latest_offer() if which == "offer" else Offer(self.source[0]())
            return [memoryview(offer.to_json())]
        if kind == "offer":
            with self._lock:  # a joiner may be quicker to ask than this group is to offer
                self._lock.wait_for(lambda: self._offers(which), self.client.timeout)
                if self._current is not None and self._offers(which):
                    return [memoryview(self._current.to_json())]
        raise KeyError(path)

    def _latest_offer(self) -> Offer:
        """An offer of the state as it is now. While the manager's step is the same all joiners get
        the same copy: making one costs this group a copy of its state and the digest of that."""
        assert self.source is not None
        step, snapshot = self.source
        with self._one_copy:
            now, latest = step(), self._latest
            with self._lock:
                is_kept = latest is not None and latest.parts["state"].name in self._bodies
            if latest is None or latest.step != now or not is_kept:
                latest = self._latest = Offer(now, {"state": self._keep(snapshot())})
            return latest

    def _offers(self, step: str) -> bool:
        return self._current is not None and str(self._current.step) == step

    # ---- the joiner --------------------------------------------------------------------------

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Fetch the donor's state of a manager step, or only its name if it is here already."""
        del src_rank
        deadline = time.monotonic() + timeout.total_seconds()
        parts = self.client.ask(metadata, f"/offer/{step}", deadline).parts
        if not {"state", "rest"} <= parts.keys():
            raise HealError(f"{metadata} offers {sorted(parts)}, and not the state and the rest")
        state = parts["state"]
        rest = load(self.client.fetch(metadata, parts["rest"], deadline))
        # Whoever pickles a part of the memory for its ranks would pickle all of it.
        rest = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, rest)
        body = self.fetched.pop(state.name, None)
        if body is None:
            into = next(iter(self.fetched.values()), None)  # it has been overtaken
            body = self.client.fetch(metadata, state, deadline, into)
        self.fetched.clear()
        rest["user"][STATE] = load(body)
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
        del wait
        self._server.stop()
