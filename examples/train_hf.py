"""A Hugging Face causal LM in a Composer script of one's own as a replica group.

composer-replication launch --replicas 2 --set sync_every=20 -- python examples/train_hf.py
"""

import sys

import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from transformers import GPT2Config, GPT2LMHeadModel

from composer_replication import DiLoCoCallback, ReplicaDataLoader

BATCHES = sys.argv[1] if len(sys.argv) > 1 else "100ba"
TEXT = torch.tensor(list(open(__file__, "rb").read() * 50))  # bytes: no tokenizer to download
SAMPLES = [
    {"input_ids": sample, "labels": sample, "attention_mask": torch.ones_like(sample)}
    for sample in TEXT[: len(TEXT) // 64 * 64].reshape(-1, 64)
]

torch.manual_seed(0)  # all groups start from the same weights
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4)
model = HuggingFaceModel(GPT2LMHeadModel(config), use_logits=True)

trainer = Trainer(
    model=model,
    optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
    # Each sample goes to one group; with a plain DataLoader all groups would read the same ones.
    train_dataloader=ReplicaDataLoader(SAMPLES, 8, unit_size=64),
    max_duration=BATCHES,
    device="gpu" if torch.cuda.is_available() else "cpu",
    callbacks=[DiLoCoCallback()],  # the settings come from the coordinator
)
trainer.fit()
trainer.close()
