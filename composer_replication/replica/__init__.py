"""One replica group's connection to the others: a torchft Manager that waits, recovers and leaves.

``make_manager`` builds it. Read ``manager.py`` first, then ``quorum_watch.py``; ``heal`` has the
way in which a joiner gets the global state. This package may import ``diloco``, and no Composer.
"""

from typing import TYPE_CHECKING

from composer_replication import lazily

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
