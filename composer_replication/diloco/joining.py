"""The cold start: what groups do together before any of them has trained."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.settings import compare_fingerprints
from composer_replication.diloco.torchft_boundary import DiLoCoManager

log = logging.getLogger(__name__)

FINGERPRINT_BYTES = 8192
"""Room for one group's fingerprint as JSON."""


class StartBarrier:
    """Holds a cold start until enough groups are there.

    A lone group would otherwise train by itself, and so would the next one, without a word.

    Args:
        num_replicas: Groups to wait for.
        timeout_s: How long, in seconds.
    """

    POLL_S = 0.5
    SAY_EVERY_S = 30.0

    def __init__(self, num_replicas: int, timeout_s: float) -> None:
        self._num_replicas = num_replicas
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._said = self._began - self.SAY_EVERY_S + 2.0

    def is_open(self, num_present: int) -> bool:
        """Whether the groups in this quorum are enough; waits a moment if not.

        Raises:
            TimeoutError: Too few came within ``timeout_s``.
        """
        if num_present >= self._num_replicas:
            return True
        self._wait(f"{num_present} of {self._num_replicas} replica groups are there")
        return False

    def failed(self, cause: str) -> None:
        """A start that did not commit, for example since a group left again: wait a moment."""
        self._wait(f"the start did not commit: {cause}")

    def _wait(self, situation: str) -> None:
        now = time.monotonic()
        if now - self._began > self._timeout_s:
            raise TimeoutError(
                f"no start within start_timeout_s={self._timeout_s:g}: {situation}. Start the "
                "missing groups with the same lighthouse, or lower num_replicas"
            )
        if now - self._said > self.SAY_EVERY_S:
            self._said = now
            log.warning("Waiting to start: %s", situation)
        time.sleep(self.POLL_S)


def agree_on_settings(
    manager: DiLoCoManager, fingerprint: Mapping[str, Any], device: torch.device
) -> None:
    """Compare this group's fingerprint with that of the quorum's first group.

    Before any tensor is sent: other shapes or dtypes at the far end would abort the process inside
    gloo. The sum of a table, in which each group fills its own row, gathers the rows.

    Raises:
        SettingsMismatch: They differ; the message lists every differing key with both values.
    """
    text = json.dumps(fingerprint, sort_keys=True).encode()
    if len(text) > FINGERPRINT_BYTES:
        raise ValueError(
            f"the settings take {len(text)} bytes as JSON, more than {FINGERPRINT_BYTES}: "
            "use fewer or shorter fragment_patterns"
        )
    rank = manager.participating_rank()
    table = torch.zeros(manager.num_participants(), FINGERPRINT_BYTES, dtype=torch.uint8)
    assert rank is not None, "torchft gives every group of a synchronous quorum a rank"
    table[rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    table = table.to(device)
    manager.allreduce(table, reduce_op=ReduceOp.SUM).wait()  # pyright: ignore[reportArgumentType]
    first = bytes(table[0].cpu().numpy().tobytes()).rstrip(b"\0")
    if rank == 0 or manager.errored():
        return
    compare_fingerprints(
        json.loads(text), json.loads(first), "the first replica group of this quorum"
    )


def share_initial_parameters(manager: DiLoCoManager, fragments: Sequence[FragmentSync]) -> bool:
    """Give every group the initial parameters of the quorum's first group.

    The same weighted mean as in a sync, over the parameters themselves, in which only that group
    has weight. torchft's own way (``init_sync``) lets each *rank* copy from another group, after
    which the ranks inside a group differ for ever (research: docs/adrs/ADR-006).

    Returns:
        Whether it committed. If not, nothing has changed.
    """
    weight = 1.0 if manager.participating_rank() == 0 else 0.0
    works = []
    for fragment in fragments:
        fragment.mean.form(fragment.initial_values, weight, fragment.device)
        works += [
            manager.allreduce(message, reduce_op=ReduceOp.SUM)  # pyright: ignore
            for message in fragment.mean.messages
        ]
    for work in works:
        work.wait()
    if not manager.should_commit():
        return False
    for fragment in fragments:
        fragment.adopt_mean()
    return True
