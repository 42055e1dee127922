"""LoRA with PEFT in a Composer script as a replica group. Only the adapters train and are sent.

composer-replication launch --replicas 2 --set sync_every=20 -- python examples/train_lora.py
"""

import sys

import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from composer_replication import DiLoCoCallback, ReplicaDataLoader

BATCHES = sys.argv[1] if len(sys.argv) > 1 else "100ba"
TEXT = torch.tensor(list(open(__file__, "rb").read() * 50))  # bytes: no tokenizer to download
SAMPLES = [
    {"input_ids": sample, "labels": sample, "attention_mask": torch.ones_like(sample)}
    for sample in TEXT[: len(TEXT) // 64 * 64].reshape(-1, 64)
]

torch.manual_seed(0)  # all groups start from the same weights
# A job of your own loads its base here: GPT2LMHeadModel.from_pretrained(...)
base = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
lora = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
model = HuggingFaceModel(base, use_logits=True, peft_config=lora, should_save_peft_only=True)

trainer = Trainer(
    model=model,
    optimizers=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
    # Each sample goes to one group; with a plain DataLoader all groups would read the same ones.
    train_dataloader=ReplicaDataLoader(SAMPLES, 8, unit_size=64),
    max_duration=BATCHES,
    device="gpu" if torch.cuda.is_available() else "cpu",
    callbacks=[DiLoCoCallback()],  # the settings come from the coordinator
)
trainer.fit()
trainer.close()
