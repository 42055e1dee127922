"""DiLoCo around a plain PyTorch loop, without Composer. Here with two groups on one machine:

torchft_lighthouse --min_replicas 1 --bind 127.0.0.1:29510 &
export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 NUM_REPLICA_GROUPS=2
REPLICA_GROUP_ID=0 python examples/plain_loop.py &
REPLICA_GROUP_ID=1 python examples/plain_loop.py
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from composer_replication import DiLoCo, make_manager

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
GROUP, GROUPS = (int(os.environ[name]) for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"))
CHECKPOINT = f"plain_{GROUP}.pt"

torch.manual_seed(0)  # all groups start from the same weights
images = torch.randn(2048, 64)
labels = (images[:, :8].sum(1) > 0).long() + 2 * (images[:, 8:16].sum(1) > 0).long()
dataset = TensorDataset(images, labels)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# Each group reads a share of its own.
sampler = DistributedSampler(dataset, num_replicas=GROUPS, rank=GROUP)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)

manager = make_manager()  # its id and the lighthouse's address come from the environment
diloco = DiLoCo(manager, model, optimizer, sync_every=20, digest_every=1)
trained = (model, optimizer, diloco)
if os.path.exists(CHECKPOINT):  # this group was killed
    for each, state in zip(trained, torch.load(CHECKPOINT, weights_only=True), strict=True):
        each.load_state_dict(state)
with diloco:  # waits for the other groups, or takes over their state if they train already
    while diloco.inner_steps < STEPS:
        sampler.set_epoch(diloco.inner_steps // len(loader))
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            diloco.note_loss(loss)  # for the page and the report
            optimizer.step()  # every 20th one syncs with the other groups
            for sync in diloco.pop_finished_syncs():
                print(f"step {sync.outer_step}: {sync.num_participants} groups, loss {loss:.3f}")
            if diloco.inner_steps % 50 == 0:  # killed at any time, it leaves a whole file
                with open(f"{CHECKPOINT}.part", "wb") as file:
                    torch.save([each.state_dict() for each in trained], file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(f"{CHECKPOINT}.part", CHECKPOINT)
            if diloco.inner_steps >= STEPS:
                break
    diloco.final_sync()  # the model now holds the global parameters
    print(f"global parameters: {diloco.global_digest()}")
manager.shutdown()
