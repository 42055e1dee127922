"""What a fork server imports. See tests/forked.py."""

import gc
import multiprocessing
from importlib import import_module
from importlib.util import find_spec

MAIN_PROCESS = multiprocessing.current_process()
"""What a fork is that runs a command: see tests/forked_commands.py."""

gc.disable()  # the server makes no garbage, and the collector would look at all that it imports
ANY_HOST = (
    "pytest",
    "composer_replication.replica.factory",
    "composer_replication.launch.launcher",
    "composer_replication.coordinator.server",
    "torch._dynamo",  # building the first optimizer imports it
)
COMPOSER = (
    "composer.algorithms",
    "composer_replication.callback.callback",
    "composer_replication.training",
)
has_composer = find_spec("composer") is not None  # else Hugging Face's Trainer is tested
for name in (*ANY_HOST, *(COMPOSER if has_composer else ("composer_replication.hf",))):
    import_module(name)

if has_composer:
    # Every Trainer asks for it. The answer takes a process and a second, and is then kept.
    import_module("composer.utils.collect_env").get_cpu_model()
