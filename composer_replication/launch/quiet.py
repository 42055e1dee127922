"""What a command logs: this package's lines, and warnings of all others."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_others() -> None:
    """Log from INFO on in this package and from WARNING on elsewhere; show only our warnings."""
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    ours = logging.getLogger("composer_replication")
    ours.setLevel(logging.INFO if is_first else logging.WARNING)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"composer_replication(\.|$)")
