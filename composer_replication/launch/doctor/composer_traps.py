"""Checks of a config for what fails, or goes wrong silently, in Composer and in llm-foundry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import Version

from composer_replication.launch.doctor.results import Result, failure, ok, warning

PAGE = "docs/newer-torch.md"
LAST_OF_COMPOSER = Version("2.7.1")
"""Composer 0.32 has what it patches in FSDP for a torch below this version only."""
NO_ANNEAL_FUNC = Version("2.13")
"""In this torch, and maybe before, the state of ``SWALR`` lacks a key that Composer removes."""


def uses_fsdp(config: Mapping[str, Any]) -> bool:
    """Whether a config has a section for FSDP, under Composer's name or llm-foundry's."""
    parallelism = config.get("parallelism_config") or {}
    return bool(config.get("fsdp_config") or parallelism.get("fsdp"))


def check_fsdp(
    config: Mapping[str, Any], torch: str | None, fsdp_version: str | None
) -> Iterator[Result]:
    """A job with FSDP uses FSDP2, and no microbatches that Composer cannot choose on this torch.

    Args:
        config: The config.
        torch: torch's version.
        fsdp_version: ``FSDP_VERSION`` of the environment.
    """
    if not uses_fsdp(config):
        return
    if fsdp_version != "2":
        yield failure(
            "fsdp",
            f"FSDP_VERSION={fsdp_version or ''}: Composer takes FSDP version 1, which DiLoCo "
            "rejects",
            "export FSDP_VERSION=2",
        )
    else:
        yield ok("fsdp", "FSDP2")
    is_auto = config.get("device_train_microbatch_size") == "auto"
    if is_auto and torch is not None and Version(torch) >= LAST_OF_COMPOSER:
        yield failure(
            "microbatches",
            f"device_train_microbatch_size=auto with FSDP on torch {torch}: NameError "
            "unshard_with_sync",
            f"give a number ({PAGE})",
        )


def check_algorithms(config: Mapping[str, Any], torch: str | None) -> Iterator[Result]:
    """The algorithms of a config work on this torch."""
    algorithms = config.get("algorithms")
    named = algorithms.values() if isinstance(algorithms, Mapping) else ()
    schedules = any(isinstance(each, Mapping) and each.get("schedule_swa_lr") for each in named)
    if schedules and torch is not None and Version(torch) >= NO_ANNEAL_FUNC:
        yield failure(
            "swa",
            f"schedule_swa_lr=true on torch {torch}: KeyError 'anneal_func' at a checkpoint",
            f"leave schedule_swa_lr out ({PAGE})",
        )


def check_foreign(written: Mapping[str, Any]) -> Iterator[Result]:
    """An llm-foundry YAML tells the groups apart, and uses what llm-foundry knows.

    Args:
        written: The config as the file has it, with ``${...}``.
    """
    if "${oc.env:" in str(written):
        yield failure(
            "${oc.env:...}",
            "llm-foundry has switched it off: UnsupportedInterpolationType",
            "a value below `variables:`, and llmfoundry train FILE variables.NAME=...",
        )
    dataset = (written.get("train_loader") or {}).get("dataset")
    if dataset and "${" not in str(dataset):
        where = dataset.get("local") or dataset.get("remote") or dataset.get("hf_name") or "..."
        yield warning(
            "data",
            f"every group that reads this file trains on the same samples, of {where}",
            "a folder for each group (dataset.local: data/group_${variables.group}), or leases "
            "(docs/data.md)",
        )
    folder = written.get("save_folder")
    if folder and not any(part in str(folder) for part in ("${", "{run_name}")):
        yield warning(
            "save_folder",
            f"{folder} is that of every group that reads this file: they overwrite each other",
            "save_folder: .../{run_name}, with a run_name of its own in each group",
        )
