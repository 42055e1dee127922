"""A Composer script of one's own as a replica group.

composer-replication launch --replicas 2 --set sync_every=20 -- python examples/train.py
"""

import sys

import torch
from composer import Trainer
from composer.models import ComposerClassifier
from torch import nn

from composer_replication import DiLoCoCallback, ReplicaDataLoader

BATCHES = sys.argv[1] if len(sys.argv) > 1 else "100ba"

torch.manual_seed(0)  # all groups start from the same weights
images = torch.randn(2048, 64)
labels = (images[:, :8].sum(1) > 0).long() + 2 * (images[:, 8:16].sum(1) > 0).long()
dataset = torch.utils.data.TensorDataset(images, labels)
network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

trainer = Trainer(
    model=ComposerClassifier(network, num_classes=4),
    optimizers=torch.optim.AdamW(network.parameters(), lr=1e-3),
    # Each sample goes to one group; with a plain DataLoader all groups would read the same ones.
    train_dataloader=ReplicaDataLoader(dataset, 16, unit_size=64),
    max_duration=BATCHES,
    device="gpu" if torch.cuda.is_available() else "cpu",
    callbacks=[DiLoCoCallback()],  # the settings come from the coordinator
)
trainer.fit()
trainer.close()
