"""A job that trains for a tenth of the time, so that eight replica groups run on two cores.

    python -m tests.chaos --replicas 8 --duration 600 --faults-per-minute 4 \\
        --set sync_every=20 --set round_seconds=auto -- python benchmarks/paced_job.py

Each group stands for a machine of its own. An inner step is a pause of 0.1 s and about 0.01 s of
training of a byte-level GPT with one layer. It trains until chaos ends it, or for the number of
inner steps that is given: ``paced_job.py 500ba``.
"""

import sys
import time

import torch
from composer import Callback, Trainer

from composer_replication import DiLoCoCallback, ReplicaDataLoader
from examples.quickstart.byte_gpt import ByteGPT
from examples.quickstart.text import TextBytes

PAUSE_S = 0.1


class Pause(Callback):
    """Waits in each inner step, as if a GPU trained."""

    def batch_start(self, *_: object) -> None:
        time.sleep(PAUSE_S)


torch.manual_seed(0)  # all groups start from the same weights
model = ByteGPT(d_model=64, n_heads=2, n_layers=1, max_seq_len=64)
trainer = Trainer(
    model=model,
    optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
    train_dataloader=ReplicaDataLoader(
        TextBytes(max_seq_len=64), 4, dataset_id="standard-library", unit_size=512
    ),
    max_duration=sys.argv[1] if len(sys.argv) > 1 else "1000000ba",
    device="cpu",
    progress_bar=False,
    callbacks=[Pause(), DiLoCoCallback()],  # the settings come from the coordinator
)
trainer.fit()
trainer.close()
