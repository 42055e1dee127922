"""A component of torchx: one app is one replica group (docs/machines.md).

torchx run deploy/torchx_component.py:group --replica_id 0 ... -- COMMAND
"""

from typing import Dict, Optional  # noqa: UP035  the forms that torchx reads

import torchx.specs as specs


def group(
    *command: str,
    replica_id: str,
    coordinator: str,
    run_dir: str,
    restarts: int = 100,
    image: str = "",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 8192,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """One replica group on one node, started again when it dies.

    The run's token is not part of the app: it is in the environment, COMPOSER_REPLICATION_TOKEN.

    Args:
        command: The command that trains; its script has the callback.
        replica_id: Name of the group, different in each.
        coordinator: Address of the coordinator, http://host:port.
        run_dir: The run's folder.
        restarts: Most restarts in a row without a sync.
        image: What the scheduler takes the program from: a folder or an image.
        cpu: Processors of the node.
        gpu: GPUs of the node.
        memMB: Memory of the node, in MB.
        env: Further environment variables.
    """
    role = specs.Role(
        name=f"group-{replica_id}",
        image=image,
        entrypoint="composer-replication",
        args=["run", "--restarts", str(restarts), "--", *command],
        env={
            "REPLICA_GROUP_ID": replica_id,
            "COMPOSER_REPLICATION_COORDINATOR": coordinator,
            "COMPOSER_REPLICATION_RUN_DIR": run_dir,
            **(env or {}),
        },
        # One app with a role a group would be one job, which ends and begins as a whole.
        num_replicas=1,
        # `run` starts a group again within seconds; torchx's own retries take longer.
        max_retries=0,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memMB),
    )
    return specs.AppDef(name=f"group-{replica_id}", roles=[role])
