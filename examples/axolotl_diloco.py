"""A plugin for Axolotl; the YAML is yours, with output_dir, max_steps and this plugin.

cd examples  # its YAML has: plugins: [axolotl_diloco.DiLoCoPlugin]
composer-replication launch --replicas 2 -- python -m axolotl.cli.train sft.yaml
"""

import os

from axolotl.integrations.base import BasePlugin

from composer_replication.hf import DiLoCoTrainerCallback, replica_shard


class DiLoCoPlugin(BasePlugin):
    def register(self, cfg):
        cfg["output_dir"] += f"/{os.environ['REPLICA_GROUP_ID']}"

    def add_callbacks_pre_trainer(self, cfg, model):
        return [DiLoCoTrainerCallback()]

    def post_trainer_create(self, cfg, trainer):
        trainer.train_dataset = replica_shard(trainer.train_dataset)
