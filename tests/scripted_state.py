"""A donor's global state for the tests of heals: what it is and when it changes is a script."""

import threading


class ScriptedState:
    """Takes the place of ``GlobalState`` for ``HealTransport.serve``.

    Args:
        state: What joiners get; or a function that returns it, called for each copy.

    Attributes:
        state: The same.
        lock: While a thread holds it no other one changes the state.
        version: Another one after each change that a test makes.
        num_taken: How often somebody has asked for the tensors.
    """

    def __init__(self, state, num_bytes=1000):
        self.state = state
        self.version, self.num_bytes, self.num_taken = 0, num_bytes, 0
        self.lock = threading.RLock()

    def for_joiner(self):
        self.num_taken += 1
        return self.state() if callable(self.state) else self.state
