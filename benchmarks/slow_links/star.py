"""Several network namespaces on this machine, each with a network card of a given rate.

All are connected by a bridge, which this process is at too. It needs what ``links.py`` needs.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from .links import Link, LinkError, call
from .relay import QUEUE_S

_CLONE_NEWNET = 0x40000000


class Star:
    """A context manager that has the namespaces, and removes them.

    Args:
        link: The rate of each card, the same in both directions. It has no delay.
        num_ends: How many namespaces.

    Raises:
        LinkError: This machine does not let us make them, or the link has a delay.
    """

    ADDRESS = "10.79.0.254"
    """That of this process, whose rate is not limited."""

    def __init__(self, link: Link, num_ends: int) -> None:
        if link.delay_s:
            raise LinkError(f"link={link.name!r}: groups on a bridge have no delay, write 1Gbit")
        self._link, self._num_ends = link, num_ends
        self._name = f"cr{os.getpid()}"
        self._stack = ExitStack()

    def namespace(self, end: int) -> str:
        """The name of a namespace, for ``enter``."""
        return f"{self._name}n{end}"

    def address(self, end: int) -> str:
        """The address of its card."""
        return f"10.79.0.{end + 1}"

    def __enter__(self) -> Star:
        try:
            self._stack.callback(_remove, "link", self._name)
            call("ip", "link", "add", self._name, "type", "bridge")
            call("ip", "addr", "add", f"{self.ADDRESS}/24", "dev", self._name)
            call("ip", "link", "set", self._name, "up")
            for end in range(self._num_ends):
                self._add(end)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _add(self, end: int) -> None:
        namespace, port = self.namespace(end), f"{self._name}v{end}"
        self._stack.callback(_remove, "netns", namespace)
        call("ip", "netns", "add", namespace)
        inside = ["ip", "netns", "exec", namespace]
        veth = ["ip", "link", "add", port, "type", "veth"]
        call(*veth, "peer", "name", "veth0", "netns", namespace)
        call("ip", "link", "set", port, "master", self._name, "up")
        call(*inside, "ip", "link", "set", "lo", "up")
        call(*inside, "ip", "addr", "add", f"{self.address(end)}/24", "dev", "veth0")
        call(*inside, "ip", "link", "set", "veth0", "up")
        rate = self._link.bits_per_s
        tbf = ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{max(80_000, round(rate / 8000))}b"]
        tbf += ["latency", f"{1000 * QUEUE_S:.0f}ms"]
        call(*inside, "tc", "qdisc", "replace", "dev", "veth0", "root", *tbf)
        call("tc", "qdisc", "replace", "dev", port, "root", *tbf)


def enter(namespace: str) -> None:
    """Have this thread, and those that it starts from now on, use a namespace's network."""
    path = Path("/run/netns") / namespace
    with path.open() as opened:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(opened.fileno(), _CLONE_NEWNET):
            raise LinkError(f"{path} cannot be entered: {os.strerror(ctypes.get_errno())}")


def _remove(kind: str, name: str) -> None:
    with suppress(LinkError):  # it may not be there yet
        call("ip", kind, "del", name)
