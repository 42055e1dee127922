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
from urllib.parse import urlsplit

from torchft.coordination import ManagerClient

from composer_replication.replica.heal.client import HealClient, HealError
from composer_replication.replica.heal.offer import Limits, Offer
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.lighthouse import can_connect, read_status

log = logging.getLogger(__name__)

POLL_S = 0.2
TRIES = 2


def prefetch(
    transport: HealTransport,
    *,
    lighthouse_addr: str,
    rank: int,
    timeout: float,
    connect_timeout: float,
) -> None:
    """Download the global state of the groups in training, if there are any.

    This group needs the state at its first quorum. If the peers commit nothing between the download
    and that quorum, it has the state already. Otherwise it fetches again in the quorum, which is
    acceptable if the download takes less than a quarter of ``timeout``.

    Args:
        transport: The transport of this rank, which takes over the download.
        lighthouse_addr: ``http://host:port``.
        rank: This process's rank in its group; it fetches from the same rank of a peer.
        timeout: How long peers wait for this group in a quorum, in seconds.
        connect_timeout: Limit of connecting to a peer, in seconds.

    Raises:
        HealError: There are donors, and none of them could send the state, or none fast enough.
            This group would only hold up the others.
    """
    reasons: list[str] = []
    for donor in _donors(lighthouse_addr, rank, transport.client, connect_timeout):
        try:
            _fetch_from(donor, transport, timeout)
            return
        except HealError as error:
            log.warning("No global state from %s: %s", donor, error)
            if _answers(donor, connect_timeout):
                reasons.append(str(error))  # otherwise it has just left or died: it is no donor
    if reasons:
        raise HealError(
            f"{len(reasons)} replica groups have the global state, and it could not be fetched "
            f"from any. The last error: {reasons[-1]}"
        )


def _fetch_from(donor: str, transport: HealTransport, timeout: float) -> None:
    client = transport.client
    limits = Limits(timeout)
    seconds = 0.0
    for _ in range(TRIES):
        if seconds > timeout / 4:  # right after a commit there is most time until the next one
            _wait_for_commit(donor, client, timeout)
        began = time.monotonic()
        num_bytes = _ask(donor, "/latest", client, timeout).num_bytes
        offer = _ask(donor, "/latest/offer", client, limits.of_answer(num_bytes))
        state = offer.parts.get("state")
        if state is None:
            raise HealError(f"{donor} offers {sorted(offer.parts)}, and no state")
        size = state.num_bytes
        log.info("Fetching the global state, %.1f MB, from %s", size / 1e6, donor)
        deadline = time.monotonic() + limits.of_download(size)
        into = next(iter(transport.downloads.values()), None)
        transport.downloads.clear()  # a download that breaks off spoils what is there
        transport.adopt_download(state.name, client.fetch(donor, state, deadline, into))
        seconds = time.monotonic() - began
        if _ask(donor, "/latest", client, timeout).step == offer.step:
            return
    if seconds < timeout / 4:
        return
    raise HealError(
        f"the global state, {size / 1e6:.1f} MB, takes {seconds:.1f} s to arrive "
        f"({size / 1e6 / seconds:.2f} MB/s), which is longer than the others take from one sync to "
        f"the next, and too much of timeout={timeout:g} for them to wait: this group leaves. Use a "
        f"faster link, a larger sync_every, or timeout={4.5 * seconds:.0f} in all groups"
    )


def _donors(
    lighthouse_addr: str, rank: int, client: HealClient, connect_timeout: float
) -> Iterator[str]:
    """The heal servers of the living groups of the last quorum, the highest step first.

    Of those the first is the one that a quorum makes the donor of this rank if nobody else joins
    (``restrict_quorum``): it then knows the state's name already.
    """
    members = read_status(lighthouse_addr, connect_timeout).members
    limit = timedelta(seconds=connect_timeout)
    members = sorted(members, key=lambda member: -member.step)
    num_newest = sum(member.step == members[0].step for member in members)
    turn = rank % max(1, num_newest)
    for member in (*members[turn:num_newest], *members[:turn], *members[num_newest:]):
        try:
            if not _answers(member.manager_addr, connect_timeout):
                continue  # it has died; torchft's client would wait for connect_timeout
            manager = ManagerClient(member.manager_addr, connect_timeout=limit)
            address = manager._checkpoint_metadata(rank, timeout=limit)
            is_donor = _ask(address, "/latest", client, connect_timeout).step > 0
        except (RuntimeError, OSError, ValueError) as error:
            # It has died, or is no donor. If the quorum makes it one, the heal there says why not.
            reason = (str(error).splitlines() or [repr(error)])[0]
            log.info("%s is no donor: %s", member.replica_id, reason)
            continue
        if is_donor:
            yield address


def _answers(address: str, connect_timeout: float) -> bool:
    try:
        server = urlsplit(address)
        return can_connect(server.hostname or "", server.port or 0, connect_timeout)
    except ValueError:  # not an address: a stranger has written it
        return False


def _ask(donor: str, path: str, client: HealClient, timeout: float) -> Offer:
    return client.ask(donor, path, time.monotonic() + timeout)


def _wait_for_commit(donor: str, client: HealClient, timeout: float) -> None:
    before = _ask(donor, "/latest", client, timeout).step
    deadline = time.monotonic() + 10 * timeout
    while time.monotonic() < deadline:
        if _ask(donor, "/latest", client, timeout).step != before:
            return
        time.sleep(POLL_S)
