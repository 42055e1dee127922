"""How many samples a trainer has drawn from its sampler, and how many it has trained on.

Run: python spikes/011-leased-samplers/drawn.py, in the environment of make test-hf.
"""

import logging
import tempfile

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer, TrainingArguments

logging.disable(logging.WARNING)
drawn, trained = [], []
SILENT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "labels": torch.ones(1)}


class Leased(Sampler):
    """Its length is that of the dataset; leases end where other groups have the rest."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return 64

    def __iter__(self):
        for index in range(self.count):
            drawn.append(index)
            yield index
        print(f"  asked for more: {len(drawn)} drawn, {len(trained)} trained")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, labels):
        if self.training:
            trained.extend(x[:, 0].tolist())
        return {"loss": (self.linear(x) - labels).square().mean()}


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.validations, self.epochs = Net(), 0, 0

    def training_step(self, batch, index):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, index):
        self.validations += 1

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)]

    def rate(self, epoch):
        self.epochs = max(self.epochs, epoch)
        return 1.0


def begin(title):
    drawn.clear()
    trained.clear()
    print(title)


def hugging_face(title, folder, count, resume=None, **more):
    begin(f"Trainer, {title}")
    own = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    args = TrainingArguments(folder, per_device_train_batch_size=4, **own, **more)
    trainer = Trainer(Net(), args, train_dataset=Rows())
    trainer._get_train_sampler = lambda *_: Leased(count)
    trainer.train(resume_from_checkpoint=resume)
    step = trainer.state.global_step
    print(f"  {len(drawn)} drawn, {len(trained)} trained, {step} steps")


def lightning(title, count):
    begin(f"Lightning, {title}")
    own = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    trainer = LightningTrainer(max_epochs=2, **own, **dict.fromkeys(SILENT, False))
    module = Module()
    trainer.fit(module, DataLoader(Rows(), 4, sampler=Leased(count)), DataLoader(Rows(), 64))
    print(f"  {module.validations} validations, {module.epochs} epochs of the schedule")


with tempfile.TemporaryDirectory() as folder:
    hugging_face("leases end after 32 of 64", folder, 32, num_train_epochs=1, save_steps=4)
    newest = f"{folder}/checkpoint-4"
    hugging_face("resumed at step 4, to step 8", folder, 64, newest, max_steps=8)
    accumulated = {"gradient_accumulation_steps": 3, "num_train_epochs": 1}
    hugging_face("3 batches a step, leases end after 32 of 64", folder, 32, **accumulated)
    hugging_face("2 workers, 5 steps", folder, 64, max_steps=5, dataloader_num_workers=2)
lightning("leases have all 64 in each of 2 epochs", 64)
lightning("leases end after 32 of 64 in each of 2 epochs", 32)
