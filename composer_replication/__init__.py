"""DiLoCo for Composer, Hugging Face's Trainer, Lightning and plain loops, over torchft."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

# torchft's Rust half reads this when it is loaded and prints some 25 lines a sync at its default.
os.environ.setdefault("RUST_LOG", "warn")

if TYPE_CHECKING:
    from composer_replication.callback import DiLoCoCallback
    from composer_replication.data.loader import ReplicaDataLoader
    from composer_replication.data.sample_stream import replica_shard
    from composer_replication.diloco.peer_table import DivergenceError
    from composer_replication.diloco.retry import SyncError
    from composer_replication.diloco.sync_report import SyncReport
    from composer_replication.group.plain_loop import DiLoCo
    from composer_replication.launch.run_record import read_run
    from composer_replication.replica.factory import make_manager
    from composer_replication.settings import DiLoCoSettings
    from composer_replication.simulation.simulation import simulate

__all__ = [
    "DiLoCo",
    "DiLoCoCallback",
    "DiLoCoSettings",
    "DivergenceError",
    "ReplicaDataLoader",
    "SyncError",
    "SyncReport",
    "make_manager",
    "read_run",
    "replica_shard",
    "simulate",
]
__version__ = "0.1.0"

EXTRA_OF = {
    "composer": "composer",
    "httpx": "composer",
    "tenacity": "composer",
    "fastapi": "coordinator",
    "pydantic": "coordinator",
    "starlette": "coordinator",
    "uvicorn": "coordinator",
    "hydra": "launch",
    "lightning": "lightning",
    "omegaconf": "launch",
    "packaging": "launch",
    "pytorch_lightning": "lightning",
    "rich": "launch",
    "transformers": "transformers",
    "typer": "launch",
    "yaml": "launch",
}
"""The modules that this package can do without, and which extra of it brings each."""


class MissingExtraError(ModuleNotFoundError):
    """A module is missing that an extra of this package brings; the message has the line to run."""


def named_extra(who: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error that names the extra, if one brings the missing module; else the error as it is.

    Args:
        who: What needs the module.
        error: Python's.
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_OF:
        return error
    needed = "Composer" if module == "composer" else module
    line = f"run pip install '.[{EXTRA_OF[module]}]' in a clone of this package"
    return MissingExtraError(f"{who} needs {needed}: {line}", name=module)


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: a public name is imported when it is asked for.

    torch takes a second to import and Composer several, and the command rejects a bad config before
    that. Without an extra, the names that do not need it are there.

    Args:
        package: Its ``__name__``.
        modules: The module of each public name.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            raise named_extra(name, error) from None

    return __getattr__


__getattr__ = lazily(
    __name__,
    {
        "DiLoCo": "composer_replication.group.plain_loop",
        "DiLoCoCallback": "composer_replication.callback.callback",
        "DiLoCoSettings": "composer_replication.settings",
        "DivergenceError": "composer_replication.diloco.peer_table",
        "ReplicaDataLoader": "composer_replication.data.loader",
        "SyncError": "composer_replication.diloco.retry",
        "SyncReport": "composer_replication.diloco.sync_report",
        "make_manager": "composer_replication.replica.factory",
        "read_run": "composer_replication.launch.run_record",
        "replica_shard": "composer_replication.data.sample_stream",
        "simulate": "composer_replication.simulation.simulation",
    },
)
