"""One rank of a replica group that is a Composer job, and what it holds after every batch."""

import hashlib

import torch
from common import Buffered, batch, muon_by_shape
from composer import Callback, Trainer
from composer.algorithms import EMA
from composer.models import ComposerModel
from composer.optim import CosineAnnealingScheduler
from composer.utils import dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from torchft.data import DistributedSampler

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "muon": lambda parameters: muon_by_shape(parameters, lr=1e-2),
    # Without momentum it has no state, and torch steps it at every save.
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
}


class TinyModel(ComposerModel):
    def __init__(self, seed, dtype=torch.float32):
        super().__init__()
        self.mlp = Buffered(seed, width=15).to(dtype)  # two ranks cannot share 15 rows equally
        self.dropout = torch.nn.Dropout(0.1)
        for layer in self.mlp.layers:
            layer._fsdp_wrap = True

    def forward(self, batch):
        return self.dropout(self.mlp(batch[0].to(next(self.parameters()).dtype)))

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs.float(), batch[1])


class Record(Callback):
    """What this rank holds after every batch, and which samples it trained on."""

    def __init__(self, diloco):
        self._diloco = diloco
        self.batches = {}
        self.at_start = ""

    def fit_start(self, state, logger):
        """All of what is local, global and outer momentum, whatever the number of ranks."""
        packed = self._diloco.state_dict()
        parts = {part: packed[part] for part in ("local", "momentum")}
        parts["model"] = state.get_model_state_dict()
        self.at_start = digest_of(
            (f"{part}.{name}", tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
            for part, named in parts.items()
            for name, tensor in named.items()
        )

    def batch_end(self, state, logger):
        self.batches[state.timestamp.batch.value] = {
            "samples": state.batch[2].tolist(),
            "local": digest_of(state.model.named_parameters()),
            "global": self._diloco.diloco.global_digest(),
            "inner": digest_of(inner_state(state.optimizers[0])),
            "lr": state.optimizers[0].param_groups[0]["lr"],
            "ema": [digest_of(each.ema_model.named_parameters()) for each in state.algorithms],
        }


def inner_state(optimizer):
    for index, tensors in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(tensors.items()):
            yield f"{index}.{key}", torch.as_tensor(value)


def digest_of(named):
    digest = hashlib.sha256()
    for _, tensor in sorted(named):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(own.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(diloco, *others, optimizer="adamw", fsdp=None, ema=None, groups=1, model_seed=3, **more):
    """Train this rank; what it has held, and how it ended.

    Args:
        diloco: The callback of its group.
        *others: Callbacks beside it.
        optimizer: One of ``OPTIMIZERS``.
        fsdp: The type of FSDP's checkpoints; None under DDP.
        ema: The half-life of an average of the weights; None without it.
        groups: How many share the ten batches of an epoch.
        model_seed: Of the initial weights. The Trainer's ``seed`` is one of ``more``.
        **more: Of the Trainer; and ``dtype``, of the model.
    """
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    x, y = batch(0, 0, size=2 * 5 * 8)
    dataset = TensorDataset(x, y, torch.arange(len(x)))
    sampler = DistributedSampler(
        dataset,
        replica_rank=int(diloco.options.replica_id or 0),
        num_replica_groups=groups,
        group_rank=dist.get_global_rank(),
        num_replicas=ranks,
    )
    model = TinyModel(seed=model_seed, dtype=getattr(torch, more.pop("dtype", "float32")))
    record = Record(diloco)
    trainer = Trainer(
        model=model,
        optimizers=OPTIMIZERS[optimizer](model.parameters()),
        train_dataloader=DataLoader(dataset, 8 // ranks, sampler=sampler),
        eval_dataloader=DataLoader(dataset, 8, sampler=dist.get_sampler(dataset)),
        callbacks=[diloco, record, *others],
        algorithms=None if ema is None else EMA(half_life=ema),
        device="cpu",
        device_train_microbatch_size=2,  # gradients are accumulated
        parallelism_config={"fsdp": {"state_dict_type": fsdp}} if fsdp else None,
        progress_bar=False,
        auto_log_hparams=False,
        **{"eval_interval": "100ba", "schedulers": CosineAnnealingScheduler(t_max="20ba")} | more,
    )
    trainer.fit()
    trainer.close()
    return {
        "at_start": record.at_start,
        "batches": record.batches,
        "result": diloco.result,
        "model": digest_of(model.named_parameters()),
        "inner": digest_of(inner_state(trainer.state.optimizers[0])),
    }
