"""A loop with accelerate in two replica groups.

composer-replication launch --replicas 2 -- python examples/train_accelerate.py

With several ranks in each: accelerate launch --num_processes 8 --main_process_port 0 after the --.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_replication import DiLoCo, make_manager, replica_shard

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
GROUP = os.environ["REPLICA_GROUP_ID"]
SAVED = Path(f"out/accelerate_{GROUP}")  # each group has its own

torch.manual_seed(0)  # all groups start from the same weights
images = torch.randn(4096, 64)
labels = (images[:, :8].sum(1) > 0).long() + 2 * (images[:, 8:16].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
loader = DataLoader(replica_shard(TensorDataset(images, labels)), batch_size=16, shuffle=True)

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
manager = make_manager()
diloco = DiLoCo(manager, model, optimizer, sync_every=20, digest_every=1)
accelerator.register_for_checkpointing(diloco)
if whole := [int(path.name) for path in SAVED.glob("*[0-9]")]:  # this group was killed
    accelerator.load_state(str(SAVED / str(max(whole))))
with diloco:  # waits for the other groups, or takes over their state if they train already
    while diloco.inner_steps < STEPS:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                diloco.note_loss(loss)  # for the page
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # every 20th real one syncs with the other groups
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and diloco.inner_steps % 50 == 0:
                folder = SAVED / str(diloco.inner_steps)
                accelerator.save_state(f"{folder}.part")  # killed at any time, it leaves whole ones
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    os.replace(f"{folder}.part", folder)
            if diloco.inner_steps >= STEPS:
                break
    diloco.final_sync()  # the model now holds the global parameters
    accelerator.print(f"global parameters: {diloco.global_digest()}")
accelerator.save_model(model, SAVED / "final")
manager.shutdown()
