"""Makes a replica group fail on request: Python imports a module of this name at its start.

Every Python process of the group imports it, also of interpreters without this package. So it does
nothing until somebody imports what builds managers.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

BUILDS_MANAGERS = "composer_replication.replica.factory"


class FaultsFinder:
    """Finds the module that builds managers, and makes them unreliable after its import."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != BUILDS_MANAGERS:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_listen(module):
            run(module)
            from fault_injection import listen

            listen()

        spec.loader.exec_module = run_and_listen
        return spec


def import_the_next():
    """Import the ``sitecustomize`` that this one hides: a machine's or an environment's own."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec(
        "sitecustomize", [p for p in sys.path if os.path.abspath(p) != here]
    )
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.insert(0, FaultsFinder)
import_the_next()
