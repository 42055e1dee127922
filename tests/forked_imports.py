"""What a fork server imports. See tests/forked.py."""

import gc
import multiprocessing
from importlib import import_module

MAIN_PROCESS = multiprocessing.current_process()
"""What a fork is that runs a command: see tests/forked_commands.py."""

gc.disable()  # the server makes no garbage, and the collector would look at all that it imports
for name in (
    "pytest",
    "composer.algorithms",
    "composer_replication.callback.callback",
    "composer_replication.replica.factory",
    "composer_replication.launch.run_command",
    "composer_replication.training.trainer",
    "torch._dynamo",  # building the first optimizer imports it
):
    import_module(name)

# Every Trainer asks for it. The answer takes a process and a second, and is then kept.
import_module("composer.utils.collect_env").get_cpu_model()
