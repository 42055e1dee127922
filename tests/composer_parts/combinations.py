"""What else users combine with DiLoCo, as rows of docs/composer.md."""

from pathlib import Path

import torch
from common import muon_by_shape
from composer import Trainer
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    DecoupledSGDW,
)
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from composer_parts.fits import NOT_TESTED, REJECTED, WITH_NOTE, WORKS, Part
from composer_parts.models import image_data, small, steady


def part(arguments=dict, **more):
    return Part(build=arguments if callable(arguments) else lambda: arguments, **more)


def optimizer(build):
    return part({"optimizers": build})


def halves(parameters):
    parameters = list(parameters)
    return [torch.optim.SGD(some, lr=0.05) for some in (parameters[:3], parameters[3:])]


def profiling():
    every_batch = cyclic_schedule(skip_first=1, wait=0, warmup=1, active=2, repeat=1)
    to_file = JSONTraceHandler(folder="{run_name}/traces", overwrite=True)
    profiler = Profiler(
        every_batch, [to_file], torch_prof_folder="{run_name}/torch", torch_prof_overwrite=True
    )
    return {"profiler": profiler}


def traced(fit, alone):
    assert list(Path("group0/traces").iterdir()) and list(Path("group0/torch").iterdir())


def needs_a_gpu(error, status=WORKS, **arguments):
    return part(arguments, status=status, needs_gpu=True, error=error)


def fits(trainer: Trainer):
    for duration in ("4ba", "5ba", "3ba"):
        trainer.fit(duration=duration)


def another_loader(trainer: Trainer):
    trainer.fit(duration="1ep")
    trainer.fit(train_dataloader=image_data(7, batches=5), duration="1ep")


def in_between(trainer: Trainer):
    trainer.fit(duration="4ba")
    trainer.eval(eval_dataloader=image_data(8))
    trainer.predict(image_data(9))
    trainer.save_checkpoint("between.pt")
    trainer.fit(duration="5ba")


def time_anew(trainer: Trainer):
    trainer.fit(duration="4ba")
    trainer.fit(duration="5ba", reset_time=True)


BY_BATCH = {"max_duration": None}

COMBINATIONS = {
    "several optimizers": part(
        {"optimizers": halves}, status=REJECTED, error="Only one optimizer is supported"
    ),
    "`DecoupledAdamW`": optimizer(lambda ps: DecoupledAdamW(ps, lr=1e-3, weight_decay=1e-4)),
    "`DecoupledSGDW`": optimizer(lambda ps: DecoupledSGDW(ps, lr=0.05, weight_decay=1e-4)),
    "`Muon` of the quickstart": optimizer(lambda ps: muon_by_shape(ps, lr=1e-2)),
    "Composer's schedulers": part(
        lambda: {"schedulers": CosineAnnealingWithWarmupScheduler(t_warmup="2ba")}
    ),
    "torch's schedulers": part(
        {"torch_scheduler": lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)},
        status=WITH_NOTE,
    ),
    "gradient accumulation (`device_train_microbatch_size`)": part(
        {"device_train_microbatch_size": 4}
    ),
    "`device_train_microbatch_size: auto`": needs_a_gpu(
        "Can only use adaptive device_train_microbatch_size on GPU",
        device_train_microbatch_size="auto",
    ),
    "`precision: amp_bf16`": needs_a_gpu("not supported for CPU training", precision="amp_bf16"),
    "`precision: amp_fp16`": needs_a_gpu(
        "not supported for CPU training", WITH_NOTE, precision="amp_fp16"
    ),
    "`precision: amp_fp8`": needs_a_gpu(
        "not supported for CPU training", NOT_TESTED, precision="amp_fp8"
    ),
    "torch.compile (`compile_config`)": part(
        {"compile_config": {"backend": "aot_eager"}}, model=small
    ),
    "`Profiler`": part(profiling, did=traced, model=small),
    "`max_duration` in epochs": part({"max_duration": "3ep"}, status=WITH_NOTE),
    "fits in a row": part(BY_BATCH, steps=fits),
    "fits with `reset_time`": part(BY_BATCH, steps=time_anew),
    "another loader in the next fit": part(BY_BATCH, steps=another_loader),
    "`Trainer.eval`, `predict`, `save_checkpoint` between fits": part(
        BY_BATCH, steps=in_between, status=WITH_NOTE, model=steady
    ),
    "`load_weights_only`": part(),
    "`autoresume`": part(model=steady),
}
