"""A job of each host, for ``launch``: it learns the sign of a sum.

Run by tests/hosts/test_launched.py as ``launched.py HOST LR SECONDS [SICK]``: with a pause of
SECONDS in each step, and in group 1 a batch that is not a number in step SICK.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

HOST, LR, PAUSE_S = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
SICK = int(sys.argv[4]) if len(sys.argv) > 4 else None
GROUP, GROUPS = (int(os.environ[name]) for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"))
STEPS, BATCH, EVERY = 40, 8, 10
FOLDER = f"saved_{GROUP}"

torch.manual_seed(0)
SAMPLES = torch.randn(STEPS * BATCH * GROUPS, 8)
TARGETS = (SAMPLES.sum(1) > 0).long()
NET = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
OPTIMIZER = torch.optim.SGD(NET.parameters(), lr=LR)


STEP = iter(range(1, 10**9))


@NET.register_forward_pre_hook
def spoil(net, inputs):
    time.sleep(PAUSE_S)
    is_sick = next(STEP) == SICK and GROUP == 1
    return tuple(each * float("nan") for each in inputs) if is_sick else inputs


class Samples(Dataset):
    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, index):
        return SAMPLES[index], TARGETS[index]


def composer():
    from composer import Trainer
    from composer.models import ComposerClassifier

    from composer_replication import DiLoCoCallback, ReplicaDataLoader

    Trainer(
        model=ComposerClassifier(NET, num_classes=2),
        optimizers=OPTIMIZER,
        # By the default of 512 samples a lease the first group may take all of the epoch.
        train_dataloader=ReplicaDataLoader(Samples(), batch_size=BATCH, unit_size=BATCH),
        max_duration=f"{STEPS}ba",
        callbacks=[DiLoCoCallback()],
        device="cpu",
        progress_bar=False,
        run_name=f"mine-{GROUP}",
        save_folder=FOLDER,
        save_interval=f"{EVERY}ba",
        save_overwrite=True,
        autoresume=True,
    ).fit()


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = NET

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


class Rows(Samples):
    def __getitem__(self, index):
        return {"x": SAMPLES[index], "labels": TARGETS[index]}


def hugging_face():
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from composer_replication.hf import DiLoCoTrainerCallback, replica_shard

    args = TrainingArguments(
        FOLDER,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_steps=EVERY,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
    )
    rate = torch.optim.lr_scheduler.LambdaLR(OPTIMIZER, lambda _: 1.0)
    trainer = Trainer(
        WithLoss(),
        args,
        train_dataset=replica_shard(Rows()),
        optimizers=(OPTIMIZER, rate),
        callbacks=[DiLoCoTrainerCallback()],
    )
    newest = get_last_checkpoint(FOLDER) if os.path.isdir(FOLDER) else None
    trainer.train(resume_from_checkpoint=newest)


def lightning():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from composer_replication.lightning import DiLoCoLightningCallback, replica_shard

    class Job(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = NET

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return OPTIMIZER

    saver = ModelCheckpoint(FOLDER, "{step}", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=[DiLoCoLightningCallback(), saver],
    )
    saved = sorted(os.listdir(FOLDER)) if os.path.isdir(FOLDER) else []
    newest = [f"{FOLDER}/{name}" for name in saved if name.endswith(".ckpt")][-1:]
    trainer.fit(Job(), DataLoader(replica_shard(Samples()), BATCH), ckpt_path=(newest or [None])[0])


def plain():
    from composer_replication import DiLoCo, make_manager

    sampler = DistributedSampler(Samples(), num_replicas=GROUPS, rank=GROUP)
    manager = make_manager()
    diloco = DiLoCo(manager, NET, OPTIMIZER, sync_every=EVERY, num_replicas=GROUPS, digest_every=1)
    path, trained = f"{FOLDER}.pt", (NET, OPTIMIZER, diloco)
    if os.path.exists(path):
        for each, state in zip(trained, torch.load(path, weights_only=True), strict=True):
            each.load_state_dict(state)
    with diloco:
        for number, (x, y) in enumerate(DataLoader(Samples(), BATCH, sampler=sampler)):
            if number < diloco.inner_steps:
                continue  # before the checkpoint
            OPTIMIZER.zero_grad()
            nn.functional.cross_entropy(NET(x), y).backward()
            OPTIMIZER.step()
            if diloco.inner_steps % EVERY == 0:
                torch.save([each.state_dict() for each in trained], f"{path}.part")
                os.replace(f"{path}.part", path)
        diloco.final_sync()
    manager.shutdown()


{
    "composer": composer,
    "transformers": hugging_face,
    "lightning": lightning,
    "plain": plain,
}[HOST]()
