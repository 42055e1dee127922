"""The private network of docs/security.md. Run: pytest tests/integration/test_private_network.py.

Real: the page's own lines, wireguard-go, two hosts with a router between them that passes no TCP,
the command `coordinator`, one group on each host, gloo, and packets captured on the wire and in the
tunnel. This file is also the program that runs on the hosts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from common import Constant, plain_sgd, take_step
from network_hosts import Hosts, why_not
from page_blocks import ROOT, block

from composer_replication import DiLoCo
from composer_replication.replica.factory import make_manager

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MOVES = -93 / 128, 37 / 128
"""By how much each group moves a parameter in a step: exact, so its bytes on the wire are known."""

SIZE, SYNCS = 300_000, 3


def why_no_tunnel() -> str | None:
    """Why this machine cannot have a WireGuard tunnel; None if it can."""
    if os.geteuid() != 0:
        return "a tunnel needs root"
    for program in ("wg", "wg-quick", "wireguard-go"):
        if shutil.which(program) is None:
            return f"there is no {program}: install wireguard-tools and wireguard-go"
    if not Path("/dev/net/tun").exists():
        return "there is no TUN device (/dev/net/tun)"
    return why_not()


# ---- on the hosts ----------------------------------------------------------------------------


def train(replica_id: int) -> None:
    """Take part in some syncs and print the digest of the global parameters."""
    model = Constant(weight=(SIZE,))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    manager = make_manager(
        replica_id=replica_id, lighthouse_addr="http://10.9.0.1:29513", timeout=30.0
    )
    with ExitStack() as opened:
        opened.callback(manager.shutdown)
        diloco = opened.enter_context(
            DiLoCo(manager, model, inner, plain_sgd(), sync_every=1, num_replicas=2)
        )
        for _ in range(SYNCS):
            take_step(inner, MOVES[replica_id])
        done = diloco.pop_finished_syncs()
        found = {
            "digest": diloco.global_digest(),
            "participants": [sync.num_participants for sync in done],
            "theta": float(diloco.global_parameters()["weight"][0]),
        }
    print(json.dumps(found))


# ---- the test --------------------------------------------------------------------------------


def host_script(host: int, address_of_other: str) -> str:
    """The page's lines on one host, and what begins with the tunnel."""
    other = 1 - host
    make_key = block("docs/security.md", "(umask 077; wg genkey")
    configure = block("docs/security.md", "own=10.9.0.1")
    values = {
        "own": f"10.9.0.{host + 1} other=10.9.0.{other + 1}",
        "other_key": f"$(cat key_of_{other})",
        "other_host": address_of_other,
    }
    for name, value in values.items():
        configure, changed = re.subn(rf"(?m)^{name}=.*$", f"{name}={value}", configure)
        assert changed == 1, name
    serve = block("docs/security.md", "composer-replication coordinator CONFIG --bind")
    capture = f"{sys.executable} {Path(__file__).with_name('capture.py')}"
    return "\n".join(
        [
            "set -euo pipefail",
            "mkdir -p /etc/wireguard /var/run/wireguard",  # of this host alone
            "mount -t tmpfs none /etc/wireguard; mount -t tmpfs none /var/run/wireguard",
            f"{{ {make_key} }} > new_{host}",
            f"mv new_{host} key_of_{host}; until [ -e key_of_{other} ]; do sleep 0.05; done",
            "trap 'kill $(jobs -p); wg-quick down wg0' EXIT",
            configure,
            f"{capture} wg0 {host}.tunnel & {capture} eth0 {host}.wire &",
            f"until [ -e {host}.tunnel -a -e {host}.wire ]; do sleep 0.05; done",
            f"{{ {serve} }} > coordinator.txt &" if host == 0 else "",
            "until grep -q settings: coordinator.txt 2>/dev/null; do sleep 0.05; done",
            f"{sys.executable} {__file__} {host} > {host}.json",
            f"touch done_{host}; until [ -e done_{other} ]; do sleep 0.05; done",
        ]
    )


def packets(path: Path) -> list[bytes]:
    """The IPv4 packets that ``capture`` wrote, from their headers on."""
    captured, found, place = path.read_bytes(), [], 0
    while place < len(captured):
        (size,) = struct.unpack_from("I", captured, place)
        found.append(captured[place + 4 : place + 4 + size])
        place += 4 + size
    return [packet for packet in found if packet[:1] and packet[0] >> 4 == 4]


def test_groups_sync_through_the_tunnel_of_the_page_and_nothing_of_it_is_readable_outside(tmp_path):
    if (reason := why_no_tunnel()) is not None:
        pytest.skip(reason)
    shutil.copy(ROOT / "configs" / "quickstart.yaml", tmp_path / "CONFIG")
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "COMPOSER_REPLICATION_TOKEN": "a-secret",
    }
    hosts = Hosts(2, "IPv4", tmp_path)
    with ExitStack() as opened:
        logs = [opened.enter_context((tmp_path / f"{host}.log").open("w")) for host in (0, 1)]
        opened.enter_context(hosts.connected())
        hosts.pass_no_tcp()
        running = [
            subprocess.Popen(
                hosts.command(host, ["bash", "-c", host_script(host, hosts.address(1 - host))]),
                cwd=tmp_path,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for host, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(240) for process in running]
        finally:
            hosts.end_processes()
    assert codes == [0, 0], [(tmp_path / f"{host}.log").read_text() for host in (0, 1)]
    first, second = (json.loads((tmp_path / f"{host}.json").read_text()) for host in (0, 1))
    assert first == second
    assert first["participants"] == [2] * SYNCS
    assert first["theta"] == 10.0 + SYNCS * sum(MOVES) / 2
    # Eight equal numbers in a row, of what each group has to say, and of their sum.
    needles = [struct.pack("f", x) * 8 for x in (*(-move for move in MOVES), -sum(MOVES))]
    inside, outside = packets(tmp_path / "0.tunnel"), packets(tmp_path / "0.wire")
    for needle in needles:
        assert sum(needle in packet for packet in inside) > 100
        assert not any(needle in packet for packet in outside)
    # Nothing but the tunnel left the host, and all that was in the tunnel left it.
    assert {(packet[9], *struct.unpack_from("!HH", packet, 20)) for packet in outside} == {
        (socket.IPPROTO_UDP, 51820, 51820)
    }
    assert sum(map(len, outside)) > sum(map(len, inside))


if __name__ == "__main__":
    train(int(sys.argv[1]))
