"""The manager of a replica group that trains alone: its quorum is itself, without a network."""

from __future__ import annotations

from composer_replication.replica.ranks import do_all_ranks_agree
from composer_replication.simulation.manager import SimulatedManager
from composer_replication.simulation.shared_buffer import SharedBuffer


class SingleGroupManager(SimulatedManager):
    """Takes the place of torchft's ``Manager`` where a run has one replica group.

    It is the manager of a simulation with one group, which opens no socket and starts no thread and
    no process. A sum over the groups is the group's own tensor, there is nobody to heal or to be
    healed by, and the counters are those of torchft. So training, checkpoints and rounding in a
    quantized wire format are bitwise those of one group with a lighthouse.

    All ranks of the group vote on each sync, over torch.distributed's default process group: an
    error of one rank fails the sync on all. A vote waits for the other ranks at most as long as
    that process group waits for a collective.
    """

    def __init__(self) -> None:
        super().__init__(SharedBuffer(1, faults=(), timeout_s=None), replica_id=0)

    @property
    def members(self) -> tuple[str, ...]:
        """Nobody: the log says already that the group is alone."""
        return ()

    def should_commit(self) -> bool:
        """Vote with the other ranks of the group. Returns whether none of them has an error."""
        return do_all_ranks_agree(self.errored() is None) and super().should_commit()
