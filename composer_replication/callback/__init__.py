"""A Composer ``Trainer`` as one replica group of a DiLoCo run.

``DiLoCoCallback`` is all that a training job needs. Read ``callback.py`` first: it follows
Composer's events in their order. This package may import ``group`` and what that may import.
"""

from typing import TYPE_CHECKING

from composer_replication.util.lazy import lazily

if TYPE_CHECKING:
    from composer_replication.callback.callback import DiLoCoCallback

__all__ = ["DiLoCoCallback"]

__getattr__ = lazily(__name__, {"DiLoCoCallback": "composer_replication.callback.callback"})
