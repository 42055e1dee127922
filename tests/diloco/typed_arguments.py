"""What a type checker, and so an editor's completion, knows of the arguments. Pyright reads it.

It fails where an error that is expected here is none: then the arguments have lost their types.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import Any, assert_type

from composer_replication import DiLoCo, DiLoCoCallback
from composer_replication.replica import make_manager
from composer_replication.replica.manager import ReplicaManager
from composer_replication.replica.single_group import SingleGroupManager


def typed(manager: ReplicaManager, model: Any, optimizer: Any) -> None:
    made = make_manager(replica_id=0, lighthouse_addr="http://head:29510")
    assert_type(made, ReplicaManager | SingleGroupManager)
    DiLoCo(made, model, optimizer)
    make_manager(replica=0)  # pyright: ignore[reportCallIssue]
    DiLoCo(manager, model, optimizer, None, sync_every=100, num_fragments=2, start_refusal=None)
    DiLoCo(manager, model, optimizer, sync_evry=100)  # pyright: ignore[reportCallIssue]
    DiLoCo(manager, model, optimizer, num_fragments="2")  # pyright: ignore[reportArgumentType]
    DiLoCoCallback(sync_every=100, replica_id="a", manager=manager)
    DiLoCoCallback(sync_every="often")  # pyright: ignore[reportArgumentType]
    DiLoCoCallback(wire_format="int8", weight_by="steps", sync_buffers="none", backend="gloo")
    DiLoCoCallback(wire_format="int9")  # pyright: ignore[reportArgumentType]
    DiLoCoCallback(on_start_timeout="go")  # pyright: ignore[reportArgumentType]
    DiLoCoCallback(eval_weights="both")  # pyright: ignore[reportArgumentType]
    DiLoCoCallback(sync_evry=100)  # pyright: ignore[reportCallIssue]
