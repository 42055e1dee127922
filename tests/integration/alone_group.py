"""One rank of a replica group that trains alone, or as the one group of a lighthouse.

python alone_group.py OUT FSDP LIGHTHOUSE: three jobs, one after the other. Writes OUT/<rank>.json:
for each job what this rank holds after every batch, and what its syncs report. See test_alone.py.
"""

import json
import os
import sys
from pathlib import Path

import torch
from common import batch
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from composer.utils import dist
from resume_group import TinyModel, digest_of
from torch.utils.data import DataLoader, TensorDataset

from composer_replication import DiLoCoCallback


class Record(Callback):
    """What this rank holds after every batch."""

    def __init__(self, diloco):
        self._diloco = diloco
        self.batches = []

    def batch_end(self, state, logger):
        held = digest_of(state.model.named_parameters())
        self.batches.append((held, self._diloco.diloco.global_digest()))


class Failing(Callback):
    """On rank 1 something fails in the sync that follows the fourth batch, once."""

    def __init__(self, diloco, fail):
        self._diloco, self._fail = diloco, fail

    def batch_start(self, state, logger):
        if state.timestamp.batch != 3 or dist.get_global_rank() != 1:
            return
        manager = self._diloco._group.manager
        begin = manager.start_quorum

        def begin_and_fail():
            begin()
            manager.start_quorum = begin
            self._fail(manager)

        manager.start_quorum = begin_and_fail


def report(manager):
    manager.report_error(RuntimeError("on this rank alone"))


def fail(manager):
    raise RuntimeError("on this rank alone")


def train(is_sharded, fault=None, **place):
    dataset = TensorDataset(*batch(0, 0, size=8 * 8))
    diloco = DiLoCoCallback(num_replicas=1, sync_every=2, digest_every=1, timeout=30.0, **place)
    record, logged = Record(diloco), InMemoryLogger()
    model = TinyModel(seed=3)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        train_dataloader=DataLoader(dataset, 4, sampler=dist.get_sampler(dataset)),
        max_duration="7ba",
        seed=1,
        callbacks=[diloco, record, *([Failing(diloco, fault)] if fault else [])],
        loggers=[logged],
        device="cpu",
        parallelism_config={"fsdp": {}} if is_sharded else None,
        progress_bar=False,
        auto_log_hparams=False,
    )
    trainer.fit()
    trainer.close()
    retries = [value for _, value in logged.data["diloco/retries"]]
    return {"batches": record.batches, "result": diloco.result, "retries": retries}


def main(out, is_sharded, lighthouse_addr):
    os.environ["FSDP_VERSION"] = "2"
    dist.initialize_dist("cpu")
    is_sharded = bool(int(is_sharded))
    one_group = {"replica_id": 0, "lighthouse_addr": lighthouse_addr, "hostname": "127.0.0.1"}
    found = {
        "alone": train(is_sharded),
        "with a fault": train(is_sharded, report),
        "lighthouse": train(is_sharded, **one_group),
    }
    try:
        train(is_sharded, fail)
    except Exception as error:
        found["error"] = str(error)
    Path(out, f"{dist.get_global_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
