"""Donors and joiners on loopback; the donor's global state is a script."""

import threading
import time
from datetime import timedelta

import torch
from scripted_state import ScriptedState

LIMIT = timedelta(seconds=10)
WAIT_S = 20.0


class Group:
    """A donor or a joiner. As a donor it has a state with a tensor that a test can change."""

    def __init__(self, transport):
        self.transport = transport
        self.theta = torch.arange(1000.0)
        self.state = ScriptedState(lambda: {"outer_step": self.step, "theta": self.theta})
        self.step = 4
        self.transport.serve(lambda: self.step, self.state)

    def commit(self):
        """Take an outer step: other values, the next step, the next version of the state."""
        self.theta += 1
        self.step += 1
        self.state.version += 1

    def step_on_another_thread(self):
        def step():
            with self.state.lock:
                self.commit()

        thread = threading.Thread(target=step)
        thread.start()
        return thread

    def enter_quorum(self):
        state = {"outer_step": self.step, "theta": self.theta}
        sent = {"user": {"diloco": state}, "torchft": {"step": self.step}}
        self.transport.send_checkpoint([1], self.step, sent, LIMIT)

    def ask(self, donor, *request):
        return self.transport.ask(donor.transport.metadata(), *request, limit_s=WAIT_S)

    def fetch(self, donor, offer):
        address, deadline = donor.transport.metadata(), time.monotonic() + WAIT_S
        self.transport.download(address, offer.state, deadline)
        return self.transport.downloaded.body

    def fetch_ahead(self, donor):
        self.fetch(donor, self.ask(donor, "copy"))

    def heal(self, donor, limit=LIMIT):
        address = donor.transport.metadata()
        return self.transport.recv_checkpoint(0, address, donor.step, limit)["user"]["diloco"]
