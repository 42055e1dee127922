"""Hosts of a network on this machine: network namespaces, with a router between them.

Each has a subnet of its own in IPv4 and in IPv6, a loopback device of its own, and its own
``/etc/hosts``. It needs root and iproute2; ``why_not`` says what is missing here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_number = count()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Hosts:
    """Hosts, each reachable from the others through a router only.

    Processes that ``enter`` one get a pickled copy of this object.

    Args:
        num_hosts: How many.
        family: ``IPv4`` or ``IPv6``: which addresses ``address`` returns, and names have.
        folder: For the file that all have as ``/etc/hosts``.
    """

    def __init__(self, num_hosts: int, family: str, folder: Path) -> None:
        run = f"cr{os.getpid()}n{next(_number)}"
        self._router, self._spaces = f"{run}r", [f"{run}h{host}" for host in range(num_hosts)]
        self._family = family
        self._names_file = folder / "hosts"

    @contextmanager
    def connected(self) -> Iterator[None]:
        """The context in which they exist.

        Raises:
            OSError: This machine does not allow that.
        """
        self.name({})
        with ExitStack() as opened:
            for space in (self._router, *self._spaces):
                _ip("netns", "add", space)
                opened.callback(_ip, "netns", "del", space)
                _ip("-n", space, "link", "set", "lo", "up")
            for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
                self._set_in_router(setting)
            for host in range(len(self._spaces)):
                self._connect(host)
            yield

    def _set_in_router(self, setting: str) -> None:
        _ip("netns", "exec", self._router, "sh", "-c", f"echo 1 > /proc/sys/net/{setting}")

    def _connect(self, host: int) -> None:
        space, port = self._spaces[host], f"host{host}"
        peer = ["peer", "name", port, "netns", self._router]
        _ip("link", "add", "eth0", "netns", space, "type", "veth", *peer)
        for prefix, length in ((f"10.91.{host}.", 24), (f"fd91:{host}::", 64)):
            nodad = ["nodad"] if ":" in prefix else []
            for where, device, end in ((space, "eth0", 2), (self._router, port, 1)):
                address = f"{prefix}{end}/{length}"
                _ip("-n", where, "addr", "add", address, "dev", device, *nodad)
                _ip("-n", where, "link", "set", device, "up")
            _ip("-n", space, "route", "add", "default", "via", f"{prefix}1")

    def address(self, host: int) -> str:
        return f"10.91.{host}.2" if self._family == "IPv4" else f"fd91:{host}::2"

    def name(self, names: dict[str, int]) -> None:
        """Give hosts names, which all hosts know from now on, and no others."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{self.address(host)} {name}" for name, host in names.items()]
        self._names_file.write_text("\n".join(lines) + "\n")  # the same file, not a new one

    def silence(self, host: int) -> None:
        """From now on packets from and to a host vanish, and nobody is told."""
        for family, address in (("-4", f"10.91.{host}.2/32"), ("-6", f"fd91:{host}::2/128")):
            _ip(family, "-n", self._router, "rule", "add", "from", address, "blackhole")
            _ip(family, "-n", self._router, "route", "add", "blackhole", address)

    def pass_no_tcp(self) -> None:
        """From now on hosts reach each other by other protocols alone."""
        _ip("-n", self._router, "rule", "add", "ipproto", "tcp", "blackhole")

    def end_processes(self) -> None:
        """End all processes that run on the hosts."""
        for space in self._spaces:
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in pids.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host."""
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        enter = ["ip", "netns", "exec", self._spaces[host], "sh", "-c", script]
        return [*enter, str(self._names_file), *command]

    def enter(self, host: int) -> None:
        """Move this process, which must have one thread, to a host for good."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._spaces[host]}") as space:
            _check(libc.setns(space.fileno(), _CLONE_NEWNET))
        _check(libc.unshare(_CLONE_NEWNS))
        _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None))
        names = str(self._names_file).encode()
        _check(libc.mount(names, b"/etc/hosts", None, _MS_BIND, None))


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def why_not() -> str | None:
    """Why this machine does not allow such hosts; None if it does."""
    space = f"cr{os.getpid()}try"
    try:
        _ip("netns", "add", space)
        try:
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
            _ip("-6", "-n", space, "rule", "add", "from", "fd91::2/128", "blackhole")
            _ip("netns", "exec", space, "mount", "--bind", "/etc/hosts", "/etc/hosts")
        finally:
            _ip("netns", "del", space)
    except OSError as error:
        return f"this machine does not allow network namespaces: {error}"
    return None
