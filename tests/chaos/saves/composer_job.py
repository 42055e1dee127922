"""A Composer job with leased samples that saves: FOLDER BATCHES SAVE_INTERVAL."""

import os
import sys

import torch
from composer import Callback, Trainer
from dying import wait_for_the_dead
from integration.leased_group import Memory

from composer_replication import DiLoCoCallback, ReplicaDataLoader

FOLDER, BATCHES, SAVE_INTERVAL = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
GROUP = f"{FOLDER}/run/replica_{os.environ['REPLICA_GROUP_ID']}"
SAMPLES = 2 * 4 * BATCHES  # of two groups


class Waits(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 3 * SAVE_INTERVAL:
            wait_for_the_dead(f"{FOLDER}/run")


model = Memory(SAMPLES, fragments=1, step_s=0.02)
trainer = Trainer(
    model=model,
    optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
    train_dataloader=ReplicaDataLoader(range(SAMPLES), 4, dataset_id="ids", unit_size=32),
    max_duration="1ep",
    callbacks=[DiLoCoCallback(), Waits()],
    device="cpu",
    progress_bar=False,
    auto_log_hparams=False,
    run_name="saves",
    autoresume=True,
    save_folder=f"{GROUP}/checkpoints",
    save_interval=f"{SAVE_INTERVAL}ba",
    save_num_checkpoints_to_keep=1,
)
trainer.fit()
torch.save([moment.weight.detach().clone() for moment in model.moments], f"{GROUP}/trained.pt")
trainer.close()
