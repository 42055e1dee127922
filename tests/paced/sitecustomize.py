"""Makes every optimizer step last some time, in the Python processes that ``pace.paced`` is for.

Python imports a module of this name at its start. Groups that only have to stay in training while
something else happens would otherwise keep the processors from all other tests.
"""

import os
import sys
import time
from importlib.machinery import PathFinder

SECONDS = float(os.environ["TEST_PACE_S"])


class Pacing:
    """Finds the module of torch's optimizers, and adds a hook as soon as it is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch.optim.optimizer":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def run_and_add_hook(module):
            run(module)
            module.register_optimizer_step_post_hook(lambda *step: time.sleep(SECONDS))

        spec.loader.exec_module = run_and_add_hook
        return spec


sys.meta_path.insert(0, Pacing)
