"""Composer's callbacks, as rows of docs/composer.md."""

import itertools
from pathlib import Path

import torch
from composer import callbacks as composer_callbacks
from composer.loggers import LoggerDestination
from composer.optim import DecoupledAdamW, LinearScheduler
from composer_parts.fits import NOT_TESTED, WITH_NOTE, Part
from composer_parts.models import SIZE, image_data, prompting_text, steady, text_data, unmeasured
from harness.trainers import Exporting, read_checkpoint


def callback(name, *args, trainer=None, **part):
    """The row of a callback; its own arguments, then the ``Part``'s."""
    kwargs = part.pop("kwargs", {})

    def build():
        one = getattr(composer_callbacks, name)(*args, **kwargs)
        return {"callbacks": [one]} | (trainer() if trainer else {})

    return name, Part(build=build, **part)


def same_values(prefix):
    """It logs the same values as under Composer alone."""

    def did(fit, alone):
        keys = [key for key in fit.logged.data if key.startswith(prefix)]
        assert keys == [key for key in alone.logged.data if key.startswith(prefix)] != []
        for key in keys:
            ours, theirs = ([float(v) for _, v in f.logged.data[key]] for f in (fit, alone))
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, equal_nan=True)

    return did


def logs(prefix):
    def did(fit, alone):
        assert any(key.startswith(prefix) for key in fit.logged.data)

    return did


def saved(fit, alone):
    for batch in (5, 10):
        model = read_checkpoint(Path(f"group0/ba{batch}.pt"))["state"]["model"]
        assert model.keys() == dict(fit.trainer.state.model.state_dict()).keys()


numbers = itertools.count()


def exporting():
    """Ends in the middle of a round; a file for each, as groups share a folder here."""
    path = f"model{next(numbers)}.pt"
    one = Exporting("torchscript", path)
    return {"callbacks": [one], "max_duration": "10ba"}


def exported(fit, alone):
    """The weights after the final sync, which are those that the fit leaves."""
    model = dict(torch.jit.load(fit.callback.save_path).named_parameters())
    assert model.keys() == fit.parameters.keys()
    assert all(torch.equal(model[name], p.cpu()) for name, p in fit.parameters.items())


class Shown(LoggerDestination):
    """Counts the images and the rows of tables that it gets."""

    def __init__(self):
        self.counts = []

    def log_images(self, images, name="Images", *args, **kwargs):
        self.counts.append((name, len(images)))

    def log_table(self, columns, rows, name="Table", step=None):
        self.counts.append((name, len(rows)))


def shows():
    return {"loggers": [Shown()]}


def showed(*counts):
    def did(fit, alone):
        [shown] = [one for one in fit.trainer.logger.destinations if isinstance(one, Shown)]
        assert shown.counts == list(counts)

    return did


def stopped_early(fit, alone):
    assert len(fit.losses) == len(alone.losses) < 12


def evaluating():
    return {"eval_dataloader": image_data(99), "eval_interval": "2ba"}


NEEDS_A_GPU = {"needs_gpu": True, "error": "only works on CUDA devices"}
# An evaluation draws random numbers under Composer alone, and under DiLoCo puts them back.
STOPS = {"status": WITH_NOTE, "trainer": evaluating, "model": steady}

CALLBACKS = dict(
    [
        callback("ActivationMonitor", "10ba", None, False, did=same_values("activations/")),
        callback(
            "CheckpointSaver",
            "{run_name}",
            "ba{batch}.pt",
            kwargs={"save_interval": "5ba", "overwrite": True},
            did=saved,
        ),
        callback(
            "EarlyStopper",
            "CrossEntropy",
            "eval",
            torch.less,
            100.0,
            "3ba",
            did=stopped_early,
            **STOPS,
        ),
        (
            "ExportForInferenceCallback",
            Part(build=exporting, status=WITH_NOTE, did=exported),
        ),
        callback("FreeOutputs", model=unmeasured),
        callback(
            "Generate",
            ["w1 w2"],
            "5ba",
            kwargs={"max_new_tokens": 2},
            model=prompting_text,
            data=text_data,
            needs=["transformers", "pandas"],
            trainer=shows,
            did=showed(*[("generations", 1)] * 3),
            status=WITH_NOTE,
        ),
        callback(
            "ImageVisualizer",
            "5ba",
            kwargs={"num_images": SIZE},
            trainer=shows,
            did=showed(*[("Images/Train", SIZE)] * 3),
        ),
        callback(
            "LRMonitor", trainer=lambda: {"schedulers": LinearScheduler()}, did=same_values("lr-")
        ),
        callback("LoadCheckpoint", "ba5.pt", status=WITH_NOTE, model=steady),
        callback("MLPerfCallback", ".", 0, status=NOT_TESTED, error="mlperf"),
        callback("MemoryMonitor", did=logs("memory/"), **NEEDS_A_GPU),
        callback("MemorySnapshot", **NEEDS_A_GPU),
        callback("NaNMonitor"),
        callback("OOMObserver", **NEEDS_A_GPU),
        callback(
            "OptimizerMonitor",
            trainer=lambda: {"optimizers": lambda ps: DecoupledAdamW(ps, lr=1e-3)},
            did=same_values("l2_norm/"),
        ),
        callback("RuntimeEstimator", did=logs("time/remaining_estimate")),
        callback("SpeedMonitor", 3, did=logs("throughput/batches_per_sec")),
        callback("SystemMetricsMonitor", did=logs("cpu_percentage")),
        callback(
            "ThresholdStopper",
            "CrossEntropy",
            "eval",
            10.0,
            kwargs={"comp": torch.less},
            did=stopped_early,
            **STOPS,
        ),
    ]
)
