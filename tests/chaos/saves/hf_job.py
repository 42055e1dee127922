"""A Hugging Face Trainer that saves: FOLDER STEPS SAVE_STEPS. Its script asks for the newest
checkpoint, as transformers' examples do."""

import os
import sys
import time

import torch
from dying import wait_for_the_dead
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from composer_replication.hf import DiLoCoTrainerCallback, replica_shard

FOLDER, STEPS, SAVE_STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
OUT = f"{FOLDER}/out/{os.environ['REPLICA_GROUP_ID']}"


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x, labels=None):
        out = self.net(x)
        return {"loss": nn.functional.mse_loss(out[:, 0], labels), "logits": out}


class Pace(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.02)
        if state.global_step == 3 * SAVE_STEPS:
            wait_for_the_dead(f"{FOLDER}/run")


torch.manual_seed(0)
samples = [{"x": torch.randn(32), "labels": torch.randn(())} for _ in range(512)]
os.makedirs(OUT, exist_ok=True)
trainer = Trainer(
    WithLoss(),
    TrainingArguments(
        OUT,
        max_steps=STEPS,
        save_steps=SAVE_STEPS,
        save_total_limit=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=replica_shard(samples),
    callbacks=[DiLoCoTrainerCallback(), Pace()],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT))
