"""One rank of a replica group that is a Composer job, under any launcher.

python composer_group.py OUT. Writes OUT/<group>_<rank>.jsonl: at the start and after every sync,
what this rank holds. A file OUT/STOP ends training at the next sync. See
test_composer_launchers.py.
"""

import json
import sys
import time
from pathlib import Path

import torch
from composer import Callback
from composer.loggers import LoggerDestination
from composer.utils import dist
from integration.composer_ranks import digest_of, train

from composer_replication import DiLoCoCallback


class Record(Callback):
    """Writes down what this rank holds whenever the number of outer steps has changed."""

    def __init__(self, diloco, path):
        self._diloco, self._path, self._seen = diloco, path, None

    def batch_start(self, state, logger):
        self._look(state)
        time.sleep(0.25)

    def batch_end(self, state, logger):
        self._look(state)

    def _look(self, state):
        diloco = self._diloco.diloco
        if diloco.outer_step == self._seen:
            return
        self._seen = diloco.outer_step
        theta = diloco.global_parameters()
        local = {name: p.detach() for name, p in state.model.module.named_parameters()}
        [ema] = state.algorithms
        line = {
            "outer_step": diloco.outer_step,
            "batch": state.timestamp.batch.value,
            "inner_steps": diloco.inner_steps,
            "local": digest_of(local.items()),
            "ema": digest_of(ema.ema_model.named_parameters()) if ema.ema_started else None,
            "global": diloco.global_digest(),
            "is_level": all(torch.equal(p, theta[name].to(p.dtype)) for name, p in local.items()),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class BrokenOnOneRank(LoggerDestination):
    """A logger that fails on rank 1 alone, where the other rank must not wait for it."""

    def log_metrics(self, metrics, step=None):
        if "diloco/outer_step" in metrics and dist.get_global_rank() == 1:
            raise RuntimeError("the service is away")


def main(out):
    dist.initialize_dist("cpu")
    rank = dist.get_global_rank()
    assert dist.get_world_size() == 2
    diloco = DiLoCoCallback(sync_every=2, timeout=30.0, start_timeout_s=90.0, run_dir=out)
    group = int(diloco.options.replica_id or 0)
    found = train(
        diloco,
        Record(diloco, Path(out) / f"{group}_{rank}.jsonl"),
        ema="2ba",
        groups=3,
        # Other initial weights in each of the six ranks. DDP levels them inside a group; between
        # the groups the cold start has to.
        model_seed=10 * group + rank,
        max_duration="10000ba",
        eval_interval=0,
        schedulers=None,
        loggers=BrokenOnOneRank(),
    )
    (Path(out) / f"{group}_{rank}.result.json").write_text(json.dumps(found["result"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
