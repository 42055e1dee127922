"""The members of a quorum that do not prove that they know the run's token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from composer_replication.replica.quorum_reports import Report, read_handle

log = logging.getLogger(__name__)


class Strangers:
    """Reads the reports of a quorum's members, and names those that do not prove the run's token.

    Any process that reaches the lighthouse can be a member of a quorum. The others use the quorum
    without a member that does not prove the token, and the log names it once.

    Args:
        tokens: The run's accepted secrets.
        is_missing_rank: Whether a handle stands for a rank that the member's group does not have;
            it is no stranger's.
    """

    def __init__(self, tokens: Sequence[str], is_missing_rank: Callable[[str], bool]) -> None:
        self._tokens = tokens
        self._is_missing_rank = is_missing_rank
        self._names: frozenset[str] = frozenset()

    def read_reports(self, quorum: Any) -> dict[int, Report]:
        """Read the reports of the members that prove the token, by their index in the quorum.

        Args:
            quorum: torchft's ``QuorumResult``.
        """
        reports, strangers = {}, []
        members = zip(quorum.replica_ids, quorum.reconfigure_handles, strict=True)
        for index, (name, handle) in enumerate(members):
            report = read_handle(handle, name, self._tokens)
            if report is not None:
                reports[index] = report
            elif not self._is_missing_rank(handle):
                strangers.append(name)
        for name in sorted(set(strangers) - self._names):
            log.warning(
                "Left %r out of the quorum: it does not prove that it knows this run's token. It "
                "is a stranger, or COMPOSER_REPLICATION_TOKEN differs between the replica groups",
                name,
            )
        self._names = frozenset(strangers)
        return reports
