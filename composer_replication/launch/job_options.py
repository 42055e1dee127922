"""Finds out which job a command line asks for."""

from __future__ import annotations

from composer_replication.launch.command_options import JobOptions, command_after_dashes
from composer_replication.launch.job import Job, config_job
from composer_replication.launch.user_command import command_job, read_settings
from composer_replication.training.config import ConfigError, load_config


def job_of(options: JobOptions) -> Job:
    """Return the job that a command line asks for: a config, or the command after ``--``.

    Raises:
        ConfigError: It names both or neither, or one of them cannot be used.
    """
    command = command_after_dashes(options.context)
    for_commands = {
        "--settings": options.settings,
        "--set": options.set,
        "--run-dir": options.run_dir,
        "--resume": options.resume or None,
    }
    if command is None:
        given = [name for name, value in for_commands.items() if value]
        if given:
            raise ConfigError(
                f"{', '.join(given)} without a command after --: write key=value after CONFIG, or "
                "-- and the command that trains a group"
            )
        if options.config is None:
            raise ConfigError(
                "there is neither a config nor a command: give the path of a YAML file, or write "
                "-- and the command that trains a group, e.g. -- python train.py"
            )
        if not options.config.exists():
            raise ConfigError(
                f"there is no config at {options.config}: give the path of a YAML file, or write "
                "-- before a command of your own"
            )
        config = load_config(options.config, options.overrides or [])
        return config_job(config, options.config, options.nproc or 1)
    if options.config is not None:
        raise ConfigError(
            f"{options.config} and a command after --: give settings for a command with --settings "
            "FILE or --set key=value"
        )
    config, source = read_settings(options.settings, options.set or ())
    return command_job(
        command,
        config,
        source,
        nproc=options.nproc,
        run_dir=options.run_dir,
        resumes=options.resume,
    )
