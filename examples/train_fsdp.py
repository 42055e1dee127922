"""A Composer script whose groups shard their model with FSDP2, here on two CPU ranks each.

export FSDP_VERSION=2
composer-replication launch --replicas 2 --nproc 2 -- python examples/train_fsdp.py
"""

import os
import sys

import torch
from composer import Trainer
from composer.models import ComposerClassifier
from torch import nn

from composer_replication import DiLoCoCallback, ReplicaDataLoader

BATCHES = sys.argv[1] if len(sys.argv) > 1 else "300ba"

torch.manual_seed(0)  # all groups start from the same weights
images = torch.randn(2048, 64)
labels = (images[:, :8].sum(1) > 0).long() + 2 * (images[:, 8:16].sum(1) > 0).long()
dataset = torch.utils.data.TensorDataset(images, labels)
network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
network.fsdp_wrap_fn = lambda module: isinstance(module, nn.Linear)  # each by itself

trainer = Trainer(
    model=ComposerClassifier(network, num_classes=4),
    optimizers=torch.optim.AdamW(network.parameters(), lr=1e-3),
    # 8 samples for each rank. Each sample goes to one group.
    train_dataloader=ReplicaDataLoader(dataset, 8, unit_size=64),
    max_duration=BATCHES,
    device="gpu" if torch.cuda.is_available() else "cpu",
    parallelism_config={"fsdp": {"state_dict_type": "sharded"}},  # each rank saves its own shards
    save_folder=f"runs/fsdp/group_{os.environ['REPLICA_GROUP_ID']}",
    callbacks=[DiLoCoCallback()],  # the settings come from the coordinator
)
trainer.fit()
trainer.close()
