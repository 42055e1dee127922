"""Ordinary training with Composer, then DiLoCo in two groups, then ordinary training again.

python examples/switch.py before
composer-replication launch --replicas 2 --set sync_every=20 -- python examples/switch.py diloco
python examples/switch.py after
"""

import os
import sys

import torch
from composer import Trainer
from composer.models import ComposerClassifier
from torch import nn

from composer_replication import DiLoCoCallback, ReplicaDataLoader

STAGE, BATCHES = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "100ba"

torch.manual_seed(0)
images = torch.randn(2048, 64)
labels = (images[:, :8].sum(1) > 0).long() + 2 * (images[:, 8:16].sum(1) > 0).long()
dataset = torch.utils.data.TensorDataset(images, labels)
network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
model = ComposerClassifier(network, num_classes=4)

if STAGE == "before":  # ends with an ordinary checkpoint
    own = {"save_folder": "runs/switch/before"}
elif STAGE == "diloco":  # each group starts from its weights, with a new inner optimizer
    own = {
        "train_dataloader": ReplicaDataLoader(dataset, 16, unit_size=64),
        "load_path": "runs/switch/before/latest-rank0.pt",
        "load_weights_only": True,
        "save_folder": f"runs/switch/group_{os.environ['REPLICA_GROUP_ID']}",
        "callbacks": [DiLoCoCallback()],
    }
else:  # the checkpoint of a group is an ordinary one, of the global weights
    own = {"load_path": "runs/switch/group_0/latest-rank0.pt", "load_weights_only": True}

trainer = Trainer(
    model=model,
    optimizers=torch.optim.AdamW(network.parameters(), lr=1e-3),
    eval_dataloader=torch.utils.data.DataLoader(dataset, 64),
    max_duration=BATCHES,
    device="gpu" if torch.cuda.is_available() else "cpu",
    progress_bar=False,
    **{"train_dataloader": torch.utils.data.DataLoader(dataset, 16)} | own,
)
trainer.eval()
print(f"{STAGE} begins with", trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute())
trainer.fit()
trainer.eval()
print(f"{STAGE} ends with", trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute())
trainer.close()
