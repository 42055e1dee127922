"""Checks of what is installed: the versions of torch, torchft, Composer and Python go together."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from composer_replication import EXTRA_OF
from composer_replication.launch.doctor.results import Result, failure, ok, warning

OURS, COMPOSER = "composer-replication", "mosaicml"
NEWER_TORCH = "2.13"
"""The torch, beyond Composer's pin, on which all tests of this package run."""
PAGE = "docs/newer-torch.md"
NAMES = ("torch", "torchvision", "torchft-nightly", COMPOSER, "llm-foundry")


@dataclass(frozen=True)
class Installed:
    """What is installed, as its metadata says.

    Args:
        versions: The version of each distribution, by its name.
        requirements: What each of them requires.
        python: Python's version.
    """

    versions: Mapping[str, str]
    requirements: Mapping[str, Sequence[str]] = field(default_factory=dict)
    python: str = platform.python_version()

    @classmethod
    def here(cls) -> Installed:
        """Read the metadata of this environment."""
        versions, requirements = {}, {}
        for name in (OURS, *NAMES):
            try:
                versions[name], requirements[name] = version(name), requires(name) or ()
            except PackageNotFoundError:
                continue
        for line in requirements.get(OURS, ()):
            name = Requirement(line).name
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        return cls(versions, requirements)

    def broken(self, name: str) -> Iterator[tuple[Requirement, str]]:
        """The requirements of a distribution that another version is installed of.

        Those of its extras do not count, but for Composer among ours.
        """
        for line in self.requirements.get(name, ()):
            requirement = Requirement(line)
            if requirement.marker is not None and requirement.name != COMPOSER:
                continue
            found = self.versions.get(canonicalize_name(requirement.name))
            if found is not None and not requirement.specifier.contains(found, prereleases=True):
                yield requirement, found


def check_versions(installed: Installed) -> Iterator[Result]:
    """The distributions, and what this package requires of them."""
    found = [f"{name} {installed.versions[name]}" for name in NAMES if name in installed.versions]
    broken = {requirement.name: requirement for requirement, _ in installed.broken(OURS)}
    for name, requirement in broken.items():
        yield failure(
            name,
            f"{installed.versions[canonicalize_name(name)]}, and composer-replication needs "
            f"{requirement.specifier}",
            f"pip install '{name}{requirement.specifier}'",
        )
    for name in ("torch", "torchft-nightly"):
        if name not in installed.versions:
            yield failure(name, "not installed", "pip install composer-replication")
    if not broken:
        yield ok("versions", f"Python {installed.python}, {', '.join(found)}")


def check_composer(installed: Installed) -> Iterator[Result]:
    """Composer is there, and beside this torch."""
    if COMPOSER not in installed.versions:
        yield warning(
            "composer",
            "not installed: DiLoCo, make_manager and simulate work, DiLoCoCallback does not",
            f"pip install 'composer-replication[{EXTRA_OF['composer']}]'",
        )
        return
    own = installed.versions[COMPOSER]
    broken = {
        requirement.name: (requirement, found) for requirement, found in installed.broken(COMPOSER)
    }
    for requirement, found in broken.values():
        if requirement.name not in ("torch", "torchvision"):
            yield warning(
                "composer",
                f"{own} requires {requirement.name}{requirement.specifier}, not {found}",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
    if "torch" in broken:
        requirement, found = broken["torch"]
        what = f"{own} requires torch{requirement.specifier}, not {found}"
        release = ".".join(map(str, Version(found).release[:2]))
        if release == NEWER_TORCH:
            yield ok("composer", f"{what}; it runs there all the same ({PAGE})")
        else:
            yield warning(
                "composer",
                f"{what}, and this package is tested on torch 2.7.0 and {NEWER_TORCH}",
                f"install one of these ({PAGE})",
            )
        return
    yield ok("composer", f"{own} beside the torch that it requires")


def check_torchvision(installed: Installed) -> Iterator[Result]:
    """torchvision, which Composer imports, is built for this torch."""
    if "torchvision" not in installed.versions:
        if COMPOSER in installed.versions:
            yield failure("torchvision", "not installed, and Composer imports it", f"see {PAGE}")
        return
    for requirement, found in installed.broken("torchvision"):
        if requirement.name == "torch":
            yield failure(
                "torchvision",
                f"{installed.versions['torchvision']} is built for torch{requirement.specifier}, "
                f"not {found}: `operator torchvision::nms does not exist`",
                f"install a torchvision of torch {found}, from the same index ({PAGE})",
            )
            return
    builds = {
        name: Version(installed.versions[name]).local or "PyPI" for name in ("torch", "torchvision")
    }
    if len(set(builds.values())) > 1:
        yield failure(
            "torchvision",
            f"a build of {builds['torchvision']} beside a torch of {builds['torch']}: `operator "
            "torchvision::nms does not exist`",
            f"install both from one index ({PAGE})",
        )
        return
    yield ok("torchvision", installed.versions["torchvision"])


def check_llmfoundry(installed: Installed) -> Iterator[Result]:
    """llm-foundry, if it is there, beside the torch that it requires."""
    for requirement, found in installed.broken("llm-foundry"):
        if requirement.name in ("torch", COMPOSER):
            yield warning(
                "llm-foundry",
                f"{installed.versions['llm-foundry']} requires {requirement.name}"
                f"{requirement.specifier}, not {found}",
                f"pip install '{requirement.name}{requirement.specifier}', in an environment of "
                "its own",
            )
            return
