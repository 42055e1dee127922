"""Lightning's Trainer in two replica groups.

composer-replication launch --replicas 2 --set sync_every=20 -- python examples/train_lightning.py
"""

import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from composer_replication.lightning import DiLoCoLightningCallback, replica_shard

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
GROUP = os.environ.get("REPLICA_GROUP_ID", "0")


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


torch.manual_seed(0)  # all groups start from the same weights, and split the same samples
images = torch.randn(4096, 64)
labels = (images[:, :8].sum(1) > 0).long() + 2 * (images[:, 8:16].sum(1) > 0).long()
training, held_out = random_split(TensorDataset(images, labels), [3584, 512])
trainer = Trainer(
    max_steps=STEPS,
    accelerator="auto",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),  # --nproc: ranks of this group
    val_check_interval=50,
    check_val_every_n_epoch=None,
    default_root_dir=f"out/lightning_{GROUP}",  # each group has its own checkpoints
    callbacks=[
        DiLoCoLightningCallback(),  # the settings come from the coordinator
        ModelCheckpoint(f"out/lightning_{GROUP}", every_n_train_steps=50, save_last=True),
    ],
)
# Each sample goes to one group; without replica_shard all groups would train on the same ones.
loader = DataLoader(replica_shard(training), batch_size=16, shuffle=True)
trainer.fit(Classifier(), loader, DataLoader(held_out, batch_size=512), ckpt_path="last")
