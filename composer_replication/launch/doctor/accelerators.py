"""Checks of the accelerators: what torch was built for, NCCL, and what a config asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from typing import Any

from composer_replication.launch.doctor.results import Result, failure, ok, warning


@dataclass(frozen=True)
class Gpus:
    """What torch says of this machine's GPUs.

    Args:
        built_for: The version of CUDA that this torch is built for; None for a CPU build.
        architectures: ``torch.cuda.get_arch_list()``.
        capabilities: The name and the compute capability of each usable device.
        device_files: Whether the NVIDIA driver has made its device files.
        nccl: NCCL's version; None without it.
    """

    built_for: str | None = None
    architectures: tuple[str, ...] = ()
    capabilities: tuple[tuple[str, tuple[int, int]], ...] = ()
    device_files: bool = False
    nccl: tuple[int | str, ...] | None = None

    @classmethod
    def here(cls) -> Gpus:
        """Ask torch, which takes a second to import."""
        import torch
        import torch.distributed as dist
        from torch.cuda import nccl
        from torch.version import cuda

        found = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        has_nccl = dist.is_nccl_available() and len(found) > 0
        return cls(
            cuda,
            tuple(torch.cuda.get_arch_list()),
            tuple(
                (torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in found
            ),
            bool(glob("/dev/nvidia[0-9]*")),
            nccl.version() if has_nccl else None,
        )

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether this torch has code for a device.

        That is code for the same major version and a minor one that is not above the device's, or
        PTX for an earlier architecture, which the driver compiles.
        """
        major, minor = capability
        for name in self.architectures:
            kind, _, digits = name.partition("_")
            digits = "".join(filter(str.isdigit, digits))  # sm_90a
            its = int(digits[:-1] or 0), int(digits[-1:] or 0)
            if kind == "sm" and its[0] == major and its[1] <= minor:
                return True
            if kind == "compute" and its <= capability:
                return True
        return False


def check_gpus(gpus: Gpus) -> Iterator[Result]:
    """The devices are usable, and torch has code for them."""
    if not gpus.capabilities:
        if gpus.device_files and gpus.built_for is None:
            yield failure(
                "gpu",
                "this machine has an NVIDIA GPU, and torch is a build for CPUs",
                "install the build of torch for CUDA (https://pytorch.org/get-started)",
            )
        elif gpus.device_files:
            yield failure(
                "gpu",
                f"this machine has an NVIDIA GPU, and torch, built for CUDA {gpus.built_for}, "
                "cannot use it",
                "run nvidia-smi; a driver too old for this CUDA needs an update or another torch",
            )
        else:
            yield ok("gpu", "none: the model is on the CPU, and groups average over gloo")
        return
    for name, capability in dict(gpus.capabilities).items():
        sm = "sm_{}{}".format(*capability)
        if gpus.runs_on(capability):
            yield ok("gpu", f"{name} ({sm}), torch is built for CUDA {gpus.built_for}")
        else:
            yield failure(
                "gpu",
                f"{name} is {sm}, and torch has code for {', '.join(gpus.architectures)} only",
                f"install a torch that is built for {sm} (docs/newer-torch.md)",
            )


def check_nccl(gpus: Gpus) -> Iterator[Result]:
    """NCCL is there where groups on GPUs would average over it."""
    if not gpus.capabilities:
        return
    if gpus.nccl is None:
        yield warning(
            "nccl",
            "this torch has no NCCL, which groups with models on GPUs average over",
            "set callbacks.diloco.backend: gloo, or install a torch with NCCL",
        )
    else:
        yield ok("nccl", ".".join(map(str, gpus.nccl)))


def check_device(section: Mapping[str, Any], device: object, gpus: Gpus) -> Iterator[Result]:
    """The config's device and backend fit this machine.

    Args:
        section: ``callbacks.diloco``.
        device: The config's ``device``.
        gpus: Of this machine.
    """
    backend = section.get("backend")
    if device == "gpu" and not gpus.capabilities:
        yield failure("device", "gpu, and torch can use none here", "set device: cpu")
    if backend == "nccl" and (device == "cpu" or not gpus.capabilities):
        yield failure(
            "backend",
            "nccl, which only averages between GPUs",
            "set callbacks.diloco.backend: gloo",
        )
