"""A trainer as one replica group of a DiLoCo run, whatever the trainer.

``ReplicaGroup`` is what a trainer calls, and ``Host`` what the group asks of it. Read
``replica_group.py`` first. This package may import ``data``, the coordinator's client, ``replica``
and ``diloco``, and knows no trainer.
"""

from typing import TYPE_CHECKING

from composer_replication import lazily

if TYPE_CHECKING:
    from composer_replication.group.host import Averages, GroupArguments, Host
    from composer_replication.group.replica_group import ReplicaGroup

__all__ = ["Averages", "GroupArguments", "Host", "ReplicaGroup"]

__getattr__ = lazily(
    __name__,
    {
        "Averages": "composer_replication.group.host",
        "GroupArguments": "composer_replication.group.host",
        "Host": "composer_replication.group.host",
        "ReplicaGroup": "composer_replication.group.replica_group",
    },
)
