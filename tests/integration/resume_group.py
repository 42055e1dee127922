"""One rank of a replica group that trains, is saved in mid-round, and is resumed.

python resume_group.py PLAN, a JSON file: which cases, from which checkpoints. Each case is a run of
its own, one after the other in this process. See test_resume.py.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

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

from composer_replication import DiLoCoCallback

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
        whole = {
            f"{part}.{name}": tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for part in ("local", "momentum")
            for name, tensor in packed[part].items()
        }
        model = state.get_model_state_dict()
        whole |= {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.items()}
        self.at_start = digest_of(whole.items())

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


def train(case, out, *, lighthouse_addr, load_path=None, max_duration=None):
    group, rank = int(os.environ["REPLICA_GROUP_ID"]), dist.get_global_rank()
    x, y = batch(0, 0, size=2 * 5 * 8)  # an epoch of five batches for each of two groups
    dataset = TensorDataset(x, y, torch.arange(len(x)))
    sampler = DistributedSampler(
        dataset,
        replica_rank=group,
        num_replica_groups=2,
        group_rank=rank,
        num_replicas=dist.get_world_size(),
    )
    model = TinyModel(seed=3, dtype=getattr(torch, case.get("dtype", "float32")))
    diloco = DiLoCoCallback(
        lighthouse_addr=lighthouse_addr, timeout=30.0, start_timeout_s=90.0, **case["diloco"]
    )
    record = Record(diloco)
    trainer = Trainer(
        model=model,
        optimizers=OPTIMIZERS[case["optimizer"]](model.parameters()),
        schedulers=CosineAnnealingScheduler(t_max="20ba"),
        train_dataloader=DataLoader(dataset, 8 // dist.get_world_size(), sampler=sampler),
        # The run that is resumed evaluates too, which must make no difference.
        eval_dataloader=DataLoader(dataset, 8, sampler=dist.get_sampler(dataset)),
        eval_interval="2ba" if load_path else "100ba",
        max_duration=max_duration or case["max_duration"],
        callbacks=[diloco, record],
        algorithms=[EMA(half_life=case["ema"])] if "ema" in case else None,
        device="cpu",
        device_train_microbatch_size=2,  # gradients are accumulated
        parallelism_config={"fsdp": {"state_dict_type": case["fsdp"]}} if case["fsdp"] else None,
        save_folder=f"{out}/{case['name']}/{group}",
        save_filename="ba{batch}.pt",
        save_interval=f"{case['stop']}ba",
        save_overwrite=True,
        load_path=load_path,
        progress_bar=False,
        auto_log_hparams=False,
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


def main(plan_path):
    os.environ["FSDP_VERSION"] = "2"
    dist.initialize_dist("cpu")
    plan = json.loads(Path(plan_path).read_text())
    group, rank = os.environ["REPLICA_GROUP_ID"], dist.get_global_rank()
    for case, addr in zip(plan["cases"], plan["lighthouses"], strict=True):
        load_path = None
        if plan["resumes"]:
            name = f"ba{case['stop']}.pt"
            if case["fsdp"] == "sharded":
                name = f"ep{(case['stop'] - 1) // 5}-ba{case['stop']}"
            load_path = f"{plan['out']}/{case['name']}/{group}/{name}"
        torch.manual_seed(0)
        found = train(case, plan["out"], lighthouse_addr=addr, load_path=load_path)
        path = Path(plan["out"]) / f"{case['name']}.{plan['resumes']}.{group}.{rank}.json"
        path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
