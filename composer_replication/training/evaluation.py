"""What a group writes into its result of the last evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from composer import Trainer

from composer_replication.training.config import is_text
from composer_replication.training.text_files import check_text_folder, unigram_bits_per_byte

log = logging.getLogger(__name__)


def evaluation_of(
    metrics: Mapping[str, float], trainer: Trainer, config: Mapping[str, Any], num_replicas: int
) -> dict[str, float]:
    """Return what a config's result says about the last evaluation.

    Args:
        metrics: Of that evaluation, by name, as the callback reports them.
        trainer: After its fit.
        config: The config it was built from.
        num_replicas: How many replica groups have trained.

    Returns:
        The metrics by name. For a model of bytes on our text instead: its bits per byte, and beside
        them those of a model that knows byte frequencies alone, of one that knows nothing, and of
        data parallel, if the config's ``reference`` has it.
    """
    if "BitsPerByte" not in metrics or not is_text(config["train_loader"]):
        return dict(metrics)
    folder = check_text_folder(config["train_loader"].get("path"))
    return {
        "bits_per_byte": metrics["BitsPerByte"],
        **_reference(trainer, config.get("reference") or {}, num_replicas),
        "unigram_bits_per_byte": unigram_bits_per_byte(folder),
        "uniform_bits_per_byte": 8.0,
    }


def _reference(
    trainer: Trainer, reference: Mapping[str, Any], num_replicas: int
) -> dict[str, float]:
    """What data parallel reaches, if it is known for this text and for as many tokens as here."""
    key = "data_parallel_bits_per_byte"
    if key not in reference:
        return {}
    text = getattr(getattr(trainer.state.train_dataloader, "dataset", None), "name", None)
    here = {"text": text, "tokens": trainer.state.timestamp.token.value * num_replicas}
    different = [f"{name} {here[name]}" for name in here if reference.get(name) != here[name]]
    if different:
        log.info("No data parallel result is shown: none is known for %s", " and ".join(different))
        return {}
    return {key: float(reference[key])}
