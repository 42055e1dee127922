"""Trains LoRA on a tiny GPT-2 for docs/checkpoints.md, and writes what its lines begin with:

``base``, the model without LoRA; the checkpoint ``runs/lora/latest-rank0.pt``; and ``logits.pt`` of
the trained model for ``torch.arange(8)``.
"""

import peft
import tokenizers
import torch
import transformers
from composer import Trainer
from composer.models import HuggingFaceModel

from composer_replication import DiLoCoCallback

torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
base = transformers.GPT2LMHeadModel(config).eval()
base.save_pretrained("base")
base.name_or_path = "base"
words = tokenizers.models.WordLevel({str(i): i for i in range(32)}, unk_token="0")
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
lora = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
model = HuggingFaceModel(base, tokenizer=tokenizer, peft_config=lora)
trainer = Trainer(
    model=model,
    optimizers=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1),
    train_dataloader=torch.utils.data.DataLoader(
        [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))], 4
    ),
    max_duration="4ba",
    save_folder="runs/lora",
    device="cpu",
    callbacks=[DiLoCoCallback(num_replicas=1, sync_every=2)],
)
trainer.fit()
torch.save(model.model.eval()(torch.arange(8)[None]).logits, "logits.pt")
