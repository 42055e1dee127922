"""A Composer job with leased samples that saves: FOLDER BATCHES SAVE_INTERVAL."""

import sys

from composer import Callback
from dying import wait_for_the_dead
from integration.leased_group import train

RUN_DIR, BATCHES, SAVE_INTERVAL = f"{sys.argv[1]}/run", int(sys.argv[2]), int(sys.argv[3])


class Waits(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 3 * SAVE_INTERVAL:
            wait_for_the_dead(RUN_DIR)


train(
    {
        "run_dir": RUN_DIR,
        "length": 2 * 4 * BATCHES,  # of two groups
        "fragments": 1,
        "step_s": 0.02,
        "unit_size": 32,
        "diloco": {},  # all waits as they ship: under load groups take long
        "saves": {"save_interval": f"{SAVE_INTERVAL}ba", "save_num_checkpoints_to_keep": 1},
    },
    Waits(),
)
