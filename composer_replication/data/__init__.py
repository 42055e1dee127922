"""Which samples of a shared dataset a replica group trains on.

``ReplicaDataLoader`` reads them; read ``loader.py`` first, then ``group_data.py``. This package may
import the coordinator's client, ``replica`` and ``diloco``.
"""

from typing import TYPE_CHECKING

from composer_replication.util.lazy import lazily

if TYPE_CHECKING:
    from composer_replication.data.loader import ReplicaDataLoader

__all__ = ["ReplicaDataLoader"]

__getattr__ = lazily(__name__, {"ReplicaDataLoader": "composer_replication.data.loader"})
