"""LLaMA-Factory in two replica groups; the YAML is yours, with output_dir and max_steps.

composer-replication launch --replicas 2 -- python examples/train_llamafactory.py sft.yaml
"""

import os

from llamafactory.hparams.parser import read_args
from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp

from composer_replication.hf import DiLoCoTrainerCallback, replica_shard


def own_part(*args, **named):
    found = get_dataset(*args, **named)
    return {**found, "train_dataset": replica_shard(found["train_dataset"])}


get_dataset, workflow.get_dataset = workflow.get_dataset, own_part
args = read_args()  # the YAML that the command names
args["output_dir"] += f"/{os.environ['REPLICA_GROUP_ID']}"
run_exp(args, callbacks=[DiLoCoTrainerCallback()])
