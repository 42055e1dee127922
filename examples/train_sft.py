"""Supervised fine-tuning with TRL in two replica groups.

composer-replication launch --replicas 2 --set sync_every=20 -- python examples/train_sft.py
"""

import os
import sys

from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl_models import tiny_llama, tokenizer_of_bytes

from composer_replication.hf import DiLoCoTrainerCallback, replica_shard

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
GROUP = os.environ.get("REPLICA_GROUP_ID", "0")

tokenizer = tokenizer_of_bytes()
texts = [{"text": f"the number {i} is followed by {i + 1}"} for i in range(2000)]
dataset = Dataset.from_list(texts).train_test_split(test_size=64, seed=0)
trainer = SFTTrainer(
    model=tiny_llama(tokenizer),
    args=SFTConfig(
        output_dir=f"out/sft_{GROUP}",  # each group has its own checkpoints
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        max_length=64,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        logging_steps=10,
        report_to=[],
        bf16=False,
    ),
    # Each sample goes to one group; without replica_shard all groups would train on the same ones.
    train_dataset=replica_shard(dataset["train"]),
    eval_dataset=dataset["test"],
    processing_class=tokenizer,
    callbacks=[DiLoCoTrainerCallback()],  # the settings come from the coordinator
)
trainer.train(resume_from_checkpoint="resume" in sys.argv)
trainer.save_model(f"out/sft_{GROUP}/final")  # the same weights in every group
