"""Replica groups as workers of Ray Train, with Ray's own lighthouse (docs/machines.md).

python deploy/ray/train.py [NUM_GROUPS [BATCHES [RUN_DIR]]]
"""

import os
import sys

import ray
import ray.train
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig

GROUPS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
BATCHES = sys.argv[2] if len(sys.argv) > 2 else "100ba"
TOKEN = "COMPOSER_REPLICATION_TOKEN"
RUN_DIR = os.path.abspath(sys.argv[3] if len(sys.argv) > 3 else "runs/ray")


def train_group(settings):
    """One worker, which is one replica group of one rank. Ray has set TORCHFT_LIGHTHOUSE."""
    group = ray.train.get_context().get_world_rank()
    os.environ |= {"REPLICA_GROUP_ID": str(group), "NUM_REPLICA_GROUPS": str(settings["groups"])}
    # Composer's world is the group, and Ray's has all groups.
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    import torch
    from composer import Trainer
    from composer.models import ComposerClassifier

    from composer_replication import DiLoCoCallback, ReplicaDataLoader

    torch.manual_seed(0)  # all groups start from the same weights
    images = torch.randn(2048, 64)
    labels = (images[:, :8].sum(1) > 0).long() + 2 * (images[:, 8:16].sum(1) > 0).long()
    dataset = torch.utils.data.TensorDataset(images, labels)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    trainer = Trainer(
        model=ComposerClassifier(network, num_classes=4),
        optimizers=torch.optim.AdamW(network.parameters(), lr=1e-3),
        train_dataloader=ReplicaDataLoader(dataset, 16, dataset_id="four-classes", unit_size=64),
        max_duration=settings["batches"],
        device="gpu" if torch.cuda.is_available() else "cpu",
        callbacks=[DiLoCoCallback(sync_every=20, run_dir=settings["run_dir"])],
    )
    trainer.fit()
    trainer.close()


ray.init(runtime_env={"env_vars": {TOKEN: os.environ.get(TOKEN, "")}})
TorchTrainer(
    train_group,
    train_loop_config={"groups": GROUPS, "batches": BATCHES, "run_dir": RUN_DIR},
    scaling_config=ray.train.ScalingConfig(num_workers=GROUPS, use_gpu=False),  # edit: use_gpu
    torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}),
    # A group that dies is started again; the others go on.
    run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=100)),
).fit()
