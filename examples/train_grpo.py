"""Reinforcement learning with TRL's GRPO in two replica groups.

composer-replication launch --replicas 2 --set sync_every=5 -- python examples/train_grpo.py

Each group generates with its own local weights and computes the advantages within its own batch;
the groups average what the steps have changed, as with every other loss.
"""

import os
import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_models import tiny_llama, tokenizer_of_bytes

from composer_replication.hf import DiLoCoTrainerCallback, replica_shard

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
GROUP = os.environ.get("REPLICA_GROUP_ID", "0")


def letters_a(completions: list[str], **_: object) -> list[float]:
    """The reward: how many letters a a completion has."""
    return [float(text.count("a")) for text in completions]


tokenizer = tokenizer_of_bytes()
prompts = Dataset.from_list([{"prompt": f"say {i}"} for i in range(400)])
trainer = GRPOTrainer(
    model=tiny_llama(tokenizer),
    reward_funcs=letters_a,
    args=GRPOConfig(
        output_dir=f"out/grpo_{GROUP}",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        bf16=False,
    ),
    train_dataset=replica_shard(prompts),
    processing_class=tokenizer,
    callbacks=[DiLoCoTrainerCallback()],
)
trainer.train()
