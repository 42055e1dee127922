"""What a fork server imports for what the import does. See tests/forked.py."""

from composer.utils.collect_env import get_cpu_model

# Every Trainer asks for it. The answer takes a process and a second, and is then kept.
get_cpu_model()
