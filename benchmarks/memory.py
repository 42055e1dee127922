"""Memory that DiLoCo takes beyond the model, in bytes per parameter.

    python benchmarks/memory.py [--quick] [--json OUT] [--params 50e6] [--device cuda]
                                [--backup-device cpu]

Of the host, and of the device that the model is on. A model of fp32 parameters, one replica group,
a process for each measurement; resting after two syncs, and the peak in the third. Not counted is
what the system may take back at once (``LazyFree``), our pseudo-gradient between two syncs; it is
shown by itself. Linux alone tells these numbers (/proc). torchft is its DiLoCo without buckets,
under the same manager.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from groups import context
from results import command_line, count, write
from rich.console import Console
from rich.table import Table
from still import Still, build_model

from composer_replication import DiLoCo
from composer_replication.replica.factory import make_manager
from composer_replication.replica.lighthouse import start_lighthouse

TENSORS = 50
FLOOR = {"resting": 8.0, "peak": 12.0, "given back": 0.0, "device, peak": 0.0}
"""Global parameters and momentum; and the pseudo-gradient."""


def measure(kind: str, params: int, device: str, backup_device: str | None, out: Any) -> None:
    """One process: bytes per parameter, resting and at the peak."""
    lighthouse = start_lighthouse()
    manager = make_manager(replica_id=0, lighthouse_addr=lighthouse.address(), token="local")
    model = build_model(params, TENSORS, device)
    inner = Still(model.parameters())
    before = _read("status", "VmRSS")
    if kind == "ours":
        given = {"sync_every": 1, "schedule": [], "backup_device": backup_device}
        diloco: Any = DiLoCo(manager, model, inner, **given)
    else:
        from torchft.local_sgd import DiLoCo as StockDiLoCo

        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = StockDiLoCo(manager, [model], inner, outer, sync_every=1)
    with diloco:
        for _ in range(2):
            inner.step()
        given_back = _read("smaps_rollup", "LazyFree")
        resting = _read("status", "VmRSS") - given_back
        Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
        on_device = DeviceMemory(device)
        inner.step()
        peak = _read("status", "VmHWM")
    found = {"resting": resting - before, "peak": peak - before, "given back": given_back}
    found["device, peak"] = on_device.peak()
    out.put({name: value / params for name, value in found.items()})
    manager.shutdown()
    lighthouse.shutdown()


class DeviceMemory:
    """What is taken of a CUDA device's memory from now on; nothing of any other."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Bytes at the peak, beyond those at first."""
        return torch.cuda.max_memory_allocated() - self._before if self._is_cuda else 0


def _read(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="20 million parameters")
    parser.add_argument("--params", type=count, default=50_000_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backup-device")
    arguments = parser.parse_args()
    params = 20_000_000 if arguments.quick else arguments.params
    found = {"floor": FLOOR}
    for kind in ("ours", "torchft"):
        out = context.Queue()
        of_kind = (kind, params, arguments.device, arguments.backup_device, out)
        process = context.Process(target=measure, args=of_kind)
        process.start()
        found[kind] = out.get(timeout=300)
        process.join()
    table = Table("bytes per parameter", *FLOOR, title=f"{params:,} parameters")
    for kind, value in found.items():
        table.add_row(kind, *(f"{value[name]:.2f}" for name in FLOOR))
    Console().print(table)
    write({"bytes_per_parameter": found}, arguments)


if __name__ == "__main__":
    main()
