"""Two network namespaces on this machine, and links of a given rate and delay between them.

Rates are by ``tc``'s token bucket (tbf) on a pair of veth devices; links with a delay go through
``relay.py`` and a pair of TUN devices, since some kernels come without netem. It needs root and
iproute2, and leaves nothing behind, unless it is killed with SIGKILL.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .relay import QUEUE_S

NEEDS = (
    "needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN, iproute2 (ip and tc), and a kernel with "
    "network namespaces, veth, tbf and /dev/net/tun"
)

SETTINGS = {
    "tcp_no_metrics_save": "1",  # else a connection inherits what the one before it has learnt
    "tcp_rmem": "4096 131072 33554432",
    "tcp_wmem": "4096 131072 33554432",
}
"""Of both namespaces, so that the window is never what limits a link. The congestion control is the
machine's own: a namespace may not have one that the machine keeps for itself."""

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD = 0x01 | 0x02  # checksums, and segments of TCP over IPv4


CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class LinkError(RuntimeError):
    """This machine does not let us make such a link."""


@dataclass(frozen=True)
class Link:
    """A link between the two namespaces.

    Attributes:
        name: As it was written, e.g. ``100Mbit+50ms``.
        bits_per_s: Each way.
        delay_s: One way, in seconds.
    """

    name: str
    bits_per_s: float
    delay_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        """From a rate, and a delay one way if there is one: ``1Gbit``, ``100Mbit+50ms``."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(M|G)bit(?:\+(\d+(?:\.\d+)?)ms)?", text)
        if found is None or not float(found[1]):
            raise ValueError(
                f"link={text!r}: write a rate such as 1Gbit or 100Mbit, and with a delay one way "
                "100Mbit+50ms"
            )
        rate = float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]]
        return cls(text, rate, float(found[3] or 0) / 1000)

    @property
    def round_trip_s(self) -> float:
        """What the link adds to a round trip, in seconds."""
        return 2 * self.delay_s


@dataclass(frozen=True)
class Endpoint:
    """One end of a link: its address, that of end 0, the other one's, and its device."""

    address: str
    first_address: str
    peer_address: str
    device: str

    @property
    def bytes_sent(self) -> int:
        """As the kernel counts them; to be asked inside the namespace."""
        return int(Path(f"/sys/class/net/{self.device}/statistics/tx_bytes").read_text())


def call(*command: str) -> None:
    """Run a command of iproute2.

    Raises:
        LinkError: It is not there, or it did not work.
    """
    try:  # in a session of its own, so that Ctrl-C does not end it half way
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    except OSError as error:
        raise LinkError(f"{command[0]!r} cannot be run ({error}); a shaped link {NEEDS}") from error
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise LinkError(f"`{' '.join(command)}`: {said}; a shaped link {NEEDS}")


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stop(number: int, frame: object) -> None:
    """End, but remove the namespaces first, without being stopped in that."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)


class Network:
    """Two namespaces, and between them one veth link and one through the relay.

    A context manager, which signals end too. Names have the process's id in them, so that several
    can run.
    """

    def __init__(self) -> None:
        self.namespaces = [f"cr{os.getpid()}{side}" for side in "ab"]
        self._stack = ExitStack()
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        for each in SIGNALS:
            signal.signal(each, _stop)
        try:
            for namespace in self.namespaces:
                self._stack.callback(_remove, namespace)
                call("ip", "netns", "add", namespace)
                self._inside(namespace, "ip", "link", "set", "lo", "up")
                for name, value in SETTINGS.items():
                    self._inside(namespace, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")
            self._connect_veth()
            self._connect_relay()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _inside(self, namespace: str, *command: str) -> None:
        call("ip", "netns", "exec", namespace, *command)

    def _connect_veth(self) -> None:
        first, second = self.namespaces
        veth = ["ip", "link", "add", "veth0", "netns", first, "type", "veth"]
        call(*veth, "peer", "name", "veth0", "netns", second)
        self._bring_up("veth0", "10.77.0")

    def _connect_relay(self) -> None:
        tuns = []
        for side, namespace in enumerate(self.namespaces):
            name = f"cr{os.getpid()}t{side}"
            tuns.append(tun := _open_tun(name))
            self._stack.callback(os.close, tun)
            call("ip", "link", "set", name, "netns", namespace, "name", "tun0")
        self._bring_up("tun0", "10.78.0")
        command = [sys.executable, str(Path(__file__).with_name("relay.py")), *map(str, tuns)]
        self._relay = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=tuns, text=True, start_new_session=True
        )
        self._stack.callback(self._relay.wait)
        self._stack.callback(self._relay.kill)

    def _bring_up(self, device: str, prefix: str) -> None:
        for side, namespace in enumerate(self.namespaces):
            address = f"{prefix}.{side + 1}/30"
            self._inside(namespace, "ip", "addr", "add", address, "dev", device)
            self._inside(namespace, "ip", "link", "set", device, "up")

    def endpoint(self, link: Link, side: int) -> Endpoint:
        """Where a link ends in namespace 0 or 1."""
        prefix, device = ("10.78.0", "tun0") if link.delay_s else ("10.77.0", "veth0")
        return Endpoint(f"{prefix}.{side + 1}", f"{prefix}.1", f"{prefix}.{2 - side}", device)

    def shape(self, link: Link, *, limited: bool = True) -> None:
        """Make a link what it is, from now on.

        Args:
            link: Which; the other kind, with or without a delay, is left as it is.
            limited: Without, it has its delay but any rate.
        """
        if link.delay_s:
            assert self._relay is not None and self._relay.stdin is not None, "entered"
            rate = link.bits_per_s if limited else 1e12
            self._relay.stdin.write(f"{rate} {link.delay_s}\n")
            self._relay.stdin.flush()
            return
        for namespace in self.namespaces:
            qdisc = ["tc", "qdisc", "replace", "dev", "veth0", "root"]
            # The bucket has room for a packet that the card would cut, and for a late timer.
            burst = max(80_000, round(link.bits_per_s / 8 * 0.001))
            tbf = ["tbf", "rate", f"{link.bits_per_s:.0f}bit", "burst", f"{burst}b"]
            tbf += ["latency", f"{1000 * QUEUE_S:.0f}ms"]
            self._inside(namespace, *qdisc, *(tbf if limited else ["pfifo"]))

    def start(self, side: int, command: list[str], fd: int, log: IO[str]) -> subprocess.Popen[str]:
        """Start a command in a namespace that inherits one descriptor; both outputs go to a log."""
        inside = ["ip", "netns", "exec", self.namespaces[side], *command]
        return subprocess.Popen(
            inside, pass_fds=[fd], stdout=log, stderr=log, text=True, start_new_session=True
        )


def _remove(namespace: str) -> None:
    with suppress(LinkError):  # it may not be there yet
        call("ip", "netns", "del", namespace)


def _open_tun(name: str) -> int:
    """A new TUN device that takes and gives packets as a card does that cuts them itself."""
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(tun, _TUNSETOFFLOAD, _OFFLOAD)
    except OSError as error:
        raise LinkError(f"no TUN device can be made ({error}); a delayed link {NEEDS}") from error
    return tun
