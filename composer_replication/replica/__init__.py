"""The connection of one replica group to the others: a torchft Manager that waits and recovers.

``make_manager`` builds it. Read ``manager.py`` first, then ``quorum_member.py``. ``heal`` gives a
joiner the global state. A group that trains alone has the manager of ``single_group.py`` and uses
nothing else here. This package may import ``diloco``, and not Composer.
"""

from typing import TYPE_CHECKING

from composer_replication.util.lazy import lazily

if TYPE_CHECKING:
    from composer_replication.replica.factory import backend_for, make_manager
    from composer_replication.replica.process_group import host_store

__all__ = ["backend_for", "host_store", "make_manager"]

__getattr__ = lazily(
    __name__,
    {
        "backend_for": "composer_replication.replica.factory",
        "host_store": "composer_replication.replica.process_group",
        "make_manager": "composer_replication.replica.factory",
    },
)
