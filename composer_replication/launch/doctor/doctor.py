"""The command ``doctor``: checks this machine and a config, and says what to do."""

from __future__ import annotations

import json
import os

from rich.console import Console

from composer_replication.launch.doctor.examination import Examination
from composer_replication.launch.doctor.options import DoctorOptions
from composer_replication.launch.doctor.results import as_json, has_failed, print_results
from composer_replication.launch.errors import FAILED


def doctor(asked: DoctorOptions) -> int:
    """Check this machine, and a config if one is named, and print what was found.

    Returns:
        The exit status: 0, or 1 if a check has failed.
    """
    results = list(Examination(asked, os.environ).results())
    if asked.json_out:
        print(json.dumps(as_json(results), indent=2))
    else:
        print_results(results, Console(highlight=False))
    return FAILED if has_failed(results) else 0
