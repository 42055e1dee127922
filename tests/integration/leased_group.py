"""A replica group whose model records which samples it has been trained on.

Of test_leases.py, and of chaos/saves/composer_job.py.

python leased_group.py PLAN, as JSON.

Sample ``i`` moves coordinate ``i`` of seven vectors, by 1, t, t^2, u, u^2, v and v^2, where t, u
and v are new numbers in every batch. In the end the first says whether the sample is in the model,
and the others whether it was trained on once: only then is the square of the second the product of
the first and the third, and so on. Two batches look like one where they draw all three numbers
alike: less than once in 10^8.
"""

import json
import os
import random
import sys
import time

import torch
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist

from composer_replication import DiLoCoCallback, ReplicaDataLoader

NUMBERS = 3


class Memory(ComposerModel):
    def __init__(self, length, fragments, step_s):
        super().__init__()
        self.step_s = step_s
        self.moments = torch.nn.ModuleList(
            torch.nn.Linear(length, 1 + 2 * NUMBERS, bias=False) for _ in range(fragments)
        )
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
        self.draw = random.SystemRandom()

    def forward(self, batch):
        time.sleep(self.step_s)
        drawn = [2 ** self.draw.uniform(-8, 8) for _ in range(NUMBERS)]
        weights = torch.tensor([1.0] + [power for t in drawn for power in (t, t * t)])
        return sum((weights @ moment.weight[:, batch]).sum() for moment in self.moments)

    def loss(self, outputs, batch):
        return outputs


def train(plan, *others):
    """The process of a rank of a group. It ends with the epoch.

    Args:
        plan: ``length``, ``fragments``, ``step_s`` and ``run_dir``. With ``saves``, arguments of
            the Trainer, it saves, and goes on from what it has saved. ``diloco``: arguments of our
            callback, in place of those here.
        *others: Callbacks beside ours.
    """
    model = Memory(plan["length"], plan["fragments"], plan["step_s"])
    waits = plan.get("diloco", {"timeout": 10.0, "start_timeout_s": 60.0})
    diloco = DiLoCoCallback(run_dir=plan["run_dir"], **waits)
    folder = f"{plan['run_dir']}/replica_{os.environ['REPLICA_GROUP_ID']}"
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        train_dataloader=ReplicaDataLoader(
            range(plan["length"]),
            batch_size=4,
            dataset_id="ids",
            unit_size=plan.get("unit_size", 64),
        ),
        max_duration="1ep",
        callbacks=[diloco, *others],
        device="cpu",
        seed=1,
        progress_bar=False,
        auto_log_hparams=False,
        **(
            {
                "run_name": "leased",
                "autoresume": True,
                "save_folder": f"{folder}/checkpoints",
                **plan["saves"],
            }
            if "saves" in plan
            else {}
        ),
    )
    trainer.fit()
    weights = [moment.weight.detach().clone() for moment in model.moments]
    if dist.get_global_rank() == 0:
        trained = {"digest": diloco.result["global_digest"], "moments": weights}
        torch.save(trained, f"{folder}/trained.pt")
    trainer.close()


def what_is_in(moments):
    """By fragment: which samples are in the model, and which of these more than once."""
    for fragment in moments:
        ones, *powers = fragment.double()
        is_in = ones != 0
        spread = sum(
            (ones * squared - t * t).abs() / (ones * squared).abs()
            for t, squared in zip(powers[::2], powers[1::2], strict=True)
        )
        yield is_in, is_in & (spread > 1e-5)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
