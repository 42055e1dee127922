"""All checks of one call of ``doctor``, in their order, with what each of them needs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.doctor.accelerators import (
    Gpus,
    check_device,
    check_gpus,
    check_nccl,
)
from composer_replication.launch.doctor.composer_traps import (
    check_algorithms,
    check_foreign,
    check_fsdp,
)
from composer_replication.launch.doctor.config_file import ConfigFile, read_file
from composer_replication.launch.doctor.coordinator import Found, Member, check_coordinator
from composer_replication.launch.doctor.folders import check_folder
from composer_replication.launch.doctor.machine import (
    SHM,
    check_memory,
    check_open_files,
    check_shared_memory,
    check_token,
    check_variables,
    free_memory,
    open_files,
)
from composer_replication.launch.doctor.network import (
    check_interfaces,
    check_lighthouse_port,
    check_name,
    check_peers,
    way_to,
)
from composer_replication.launch.doctor.options import DoctorOptions
from composer_replication.launch.doctor.results import (
    Result,
    failure,
    from_error,
    ok,
    skipped,
)
from composer_replication.launch.doctor.rounds import (
    check_round,
    check_step_times,
    check_transfer_times,
    planned,
)
from composer_replication.launch.doctor.settings import (
    check_duration,
    check_outer,
    check_overlap,
    check_saving,
    read_settings,
)
from composer_replication.launch.doctor.versions import (
    Installed,
    check_composer,
    check_llmfoundry,
    check_torchvision,
    check_versions,
)
from composer_replication.plan import PlannedRun
from composer_replication.replica.addresses import interface_of, is_loopback
from composer_replication.replica.lighthouse import read_status
from composer_replication.replica.options import ReplicaEnv, ReplicaOptions
from composer_replication.training.config import ConfigError, check_config
from composer_replication.training.preflight import save_folder_of

CHECKPOINT_BYTES = 20
"""Of a checkpoint for each parameter: the model, two moments of Adam, and DiLoCo's two, in fp32."""


class Examination:
    """All checks of one call, in their order: later ones use what earlier ones have found.

    Args:
        asked: The options of the command.
        environ: Environment variables.
    """

    def __init__(self, asked: DoctorOptions, environ: Mapping[str, str]) -> None:
        self._asked = asked
        self._environ = environ
        self._env = ReplicaEnv.from_env({})
        self._file = ConfigFile()
        self._settings = DiLoCoSettings()
        self._options = ReplicaOptions()
        self._installed = Installed.here()
        self._gpus = Gpus()
        self._found = Found()

    def results(self) -> Iterator[Result]:
        """Make all checks. What goes wrong within one part ends that part alone."""
        for name, part in (
            ("versions", self._check_versions),
            ("environment", self._read_environment),
            ("config", self._check_config),
            ("options", self._complete_options),
            ("machine", self._check_machine),
            ("network", self._check_network),
            ("plan", self._check_plan),
        ):
            yield from guarded(name, part)

    def _check_versions(self) -> Iterator[Result]:
        yield from check_versions(self._installed)
        yield from check_composer(self._installed)
        yield from check_torchvision(self._installed)
        yield from check_llmfoundry(self._installed)
        self._gpus = Gpus.here()
        yield from check_gpus(self._gpus)
        yield from check_nccl(self._gpus)

    def _read_environment(self) -> Iterator[Result]:
        yield from check_variables(self._environ)
        try:
            self._env = ReplicaEnv.from_env(self._environ)
        except ValueError:
            self._environ = {}  # what cannot be read is reported once
            raise

    def _check_config(self) -> Iterator[Result]:
        asked = self._asked
        if asked.config is None:
            return
        self._file = file = read_file(asked.config, asked.overrides or [])
        settings, options, failures = read_settings(file.section)
        yield from failures
        self._settings, self._options = settings or self._settings, options or self._options
        if file.is_ours and not failures:
            try:
                check_config(file.values)
            except ConfigError as error:
                yield from_error("config", error)
        if settings is not None:
            yield from self._check_settings(settings)
        yield from self._check_job()

    def _complete_options(self) -> Iterator[Result]:
        given = {"coordinator_addr": self._asked.coordinator, "hostname": self._asked.hostname}
        own = replace(self._options, **{name: value for name, value in given.items() if value})
        self._options = own.with_environment(self._environ)
        yield from ()

    def _check_settings(self, settings: DiLoCoSettings) -> Iterator[Result]:
        groups = self._asked.replicas or self._options.num_replicas or self._env.num_replicas
        yield from check_overlap(settings)
        yield from check_outer(settings, groups)
        if self._file.values:
            yield from check_duration(self._file.values.get("max_duration"), settings)

    def _check_job(self) -> Iterator[Result]:
        """What the config says beside its DiLoCo section."""
        config, torch = self._file.values, self._installed.versions.get("torch")
        yield from check_device(self._file.section, config.get("device"), self._gpus)
        yield from check_fsdp(config, torch, self._environ.get("FSDP_VERSION"))
        yield from check_algorithms(config, torch)
        yield from check_saving(config, has_default_folder=self._file.is_ours)
        if config and not self._file.is_ours:
            yield from check_foreign(self._file.written)

    def _check_machine(self) -> Iterator[Result]:
        yield from check_open_files(open_files())
        yield from check_shared_memory(SHM)
        yield from check_token(self._env, self._reaches_others())
        yield from self._check_folders()

    def _check_folders(self) -> Iterator[Result]:
        config = self._file.values
        run_dir, folder = self._options.run_dir or config.get("run_dir"), config.get("save_folder")
        if self._file.is_ours:
            run_dir = run_dir or "runs"  # where `launch` makes a folder for the run
            folder = save_folder_of(config, run_dir, self._options.replica_id or 0)
        yield from check_folder("run folder", run_dir, "run_dir")
        if folder is not None:
            size = round(CHECKPOINT_BYTES * (self._asked.params or 0))
            yield from check_folder("checkpoints", folder, "save_folder", size)

    def _check_network(self) -> Iterator[Result]:
        options = self._options
        if options.is_alone:
            yield ok("network", "none is needed: num_replicas is 1, and no lighthouse is named")
            return
        hostname, is_given = options.hostname or socket.gethostname(), options.hostname is not None
        yield from check_name(hostname, is_given, self._reaches_others())
        address = options.coordinator_addr or options.lighthouse_addr
        if address is None:
            yield skipped(
                "coordinator", "give --coordinator or set COMPOSER_REPLICATION_COORDINATOR"
            )
            return
        own = guarded_value(lambda: interface_of(hostname))
        yield from check_interfaces(own, way_to(address), self._environ)
        if options.coordinator_addr is None:
            yield from check_lighthouse_port(address)
            yield from check_peers(read_status(address))
            return
        model = self._file.values.get("model") if self._file.is_ours else None
        member = Member(
            options=options,
            token=self._env.token,
            named=self._file.section,
            model=model or {},
            hostname=hostname,
            name_is_given=is_given,
        )
        yield from check_coordinator(member, self._found)

    def _check_plan(self) -> Iterator[Result]:
        """Memory, timeouts and time of the run, with its settings and the measured link."""
        if self._found.info is not None:
            self._settings = self._found.info.settings
        run = self._planned(ranks=self._asked.nproc)
        yield from check_memory(free_memory(), run, self._asked.nproc)
        settings, step_s, link = self._settings, self._asked.step_time, self._found.link
        yield from check_step_times(self._options, settings.sync_every, step_s)
        run = None
        if link is not None and step_s is not None:
            run = self._planned(
                link_bits_per_s=link.up, step_s=step_s, round_trip_s=link.round_trip_s
            )
        yield from check_round(run)
        yield from check_transfer_times(self._options, settings, run)

    def _planned(self, **known: float) -> PlannedRun | None:
        info = self._found.info
        groups = self._asked.replicas or (info.num_replicas if info else self._options.num_awaited)
        return planned(self._settings, self._asked.params, groups, **known)

    def _reaches_others(self) -> bool | None:
        address = self._options.coordinator_addr or self._options.lighthouse_addr
        return None if address is None else not is_loopback(urlsplit(address).hostname or "")


def guarded(name: str, part: Callable[[], Iterable[Result]]) -> Iterator[Result]:
    """The results of a part; an error within it is a result too."""
    try:
        yield from part()
    except (ConfigError, ConnectionError, ValueError) as error:
        yield from_error(name, error)
    except Exception as error:
        yield failure(
            name,
            f"the check itself failed ({type(error).__name__}: {error})",
            "report it, with the output of `composer-replication env`",
        )


def guarded_value(call: Callable[[], str | None]) -> str | None:
    """What a call returns; None if it raises ``ValueError``, which another check has reported."""
    try:
        return call()
    except ValueError:
        return None
