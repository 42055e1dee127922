"""What a sync does on an accelerator, counted: operations, copies, waits, and fresh memory.

``python tests/counted_sync.py '[{"tensors": 147}]'`` with the stand-in device (``LIBRARY``) prints
it as JSON, of the first of two simulated groups. Their network is not counted, nor are the two
waits for a stream in a sync. Sizes are a hundredth of those that ship, and so is the model, of 100
million parameters: the counts are the same.
"""

from __future__ import annotations

import collections
import json
import sys
from typing import Any

import stand_in_device
import torch
from still import Still, build_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from composer_replication import DiLoCo, simulate
from composer_replication.diloco import division, flat_chunks
from composer_replication.diloco.averaging import quantized_buckets, quantized_mean

SCALE = 100
PARAMETERS = 100_000_000 // SCALE

NO_WORK = {
    "view", "_unsafe_view", "reshape", "split", "split_with_sizes", "slice", "select", "detach",
    "as_strided", "alias", "expand", "t", "transpose", "unsqueeze", "squeeze", "chunk", "permute",
    "_reshape_alias", "narrow", "is_pinned", "unbind", "lift_fresh", "record_stream", "view_as",
}  # fmt: skip
FRESH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


def scale_down() -> None:
    """Divide what is counted in elements, but for what has to be a multiple of something."""
    flat_chunks.CHUNK = flat_chunks.CHUNK // SCALE // 16 * 16
    flat_chunks.SCRATCH = flat_chunks.SCRATCH // SCALE
    flat_chunks.LAST_SCRATCH = flat_chunks.LAST_SCRATCH // SCALE
    division.BUCKET = division.BUCKET // SCALE // 512 * 512
    quantized_buckets.FRAME = quantized_buckets.FRAME // SCALE // 512 * 512


def is_there(tensor: torch.Tensor) -> bool:
    return tensor.device.type == stand_in_device.NAME


def tensors_in(arguments: Any) -> list[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    if isinstance(arguments, (list, tuple)):
        return [tensor for each in arguments for tensor in tensors_in(each)]
    return []


class Counts(TorchDispatchMode):
    """Counts what this thread does. A foreach call is one operation.

    Args:
        small: Copies up to this size in bytes count as small.
    """

    def __init__(self, small: int) -> None:
        super().__init__()
        self.small = small
        self.found = collections.Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        inputs = tensors_in(args) + tensors_in(list(kwargs.values()))
        outputs = tensors_in(result := func(*args, **kwargs))
        if name == "_local_scalar_dense":
            self.found["waits"] += is_there(inputs[0])
        elif name in FRESH:
            self._count_fresh(outputs)
        elif name not in NO_WORK and name.removesuffix("_") not in NO_WORK:
            self._count(name, args, kwargs, inputs, outputs)
        return result

    def _count(self, name: str, args: Any, kwargs: Any, inputs: Any, outputs: Any) -> None:
        if name in ("copy_", "_to_copy"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], outputs[0])
            is_async = kwargs.get("non_blocking", len(args) > 2 and args[2])
            pairs = [(source, target)]
        elif name == "_foreach_copy_":
            is_async = kwargs.get("non_blocking", len(args) > 2 and args[2])
            pairs = [*zip(args[1], args[0], strict=True)]
        else:
            pairs = []
        crossing = [(s, t) for s, t in pairs if is_there(s) != is_there(t)]
        for source, target in crossing:
            self._count_copy(source, target, is_async)
        if not crossing:
            if any(map(is_there, inputs + outputs)):
                self.found["device operations"] += 1
            else:
                self.found["host passes"] += sum(each.nbytes for each in outputs)
        if name != "copy_" and not name.endswith("_"):
            known = {each.untyped_storage().data_ptr() for each in inputs}
            fresh = [t for t in outputs if t.untyped_storage().data_ptr() not in known]
            self._count_fresh(fresh)

    def _count_copy(self, source: torch.Tensor, target: torch.Tensor, is_async: bool) -> None:
        way = "D2H" if is_there(source) else "H2D"
        host = target if is_there(source) else source
        size = source.nbytes
        self.found["waits"] += not is_async
        self.found[f"{way} bytes"] += size
        if size > self.small:
            self.found["pageable copies"] += not host.is_pinned()
            self.found["awaited copies"] += not is_async

    def _count_fresh(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            where = "device" if is_there(tensor) else "host"
            self.found[f"fresh {where} bytes"] += tensor.nbytes


class Quiet:
    """A Work of the simulated network, whose own copies are not counted."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: Any = None) -> Any:
        with _disable_current_modes():
            return self._work.wait() if timeout is None else self._work.wait(timeout)


def quiet(call: Any) -> Any:
    def start(*args: Any, **kwargs: Any) -> Quiet:
        with _disable_current_modes():
            return Quiet(call(*args, **kwargs))

    return start


def count(
    tensors: int = 147,
    groups: int = 2,
    dtype: str = "float32",
    backup_device: str | None = None,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    wire_format: str = "float32",
) -> dict[str, dict[str, int]]:
    """Count the third sync of the first group.

    Returns:
        What ``prepare_sync``, ``perform_sync`` and ``finish_sync`` do, the thread that exchanges
        quantized messages, and a step without a sync. Bytes are those of one parameter; ``peak`` is
        what a sync takes of the device, with one group.
    """
    counts, of_exchange = Counts(8 * tensors), Counts(8 * tensors)
    found: dict[str, collections.Counter[str]] = {}
    run, device, held = (
        quantized_mean.Exchange._run,
        torch.get_device_module(stand_in_device.NAME),
        list[int](),
    )

    def replica(sim: Any) -> None:
        model = build_model(PARAMETERS, tensors, stand_in_device.NAME, dtype)
        inner = Still(model.parameters())
        for name in ("allreduce", "all_gather", "all_to_all"):
            setattr(sim.manager, name, quiet(getattr(sim.manager, name)))
        sync_every = fragment_sync_delay + 2
        diloco = DiLoCo(
            sim.manager,
            model,
            inner,
            sync_every=sync_every,
            backup_device=backup_device,
            fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha,
            wire_format=wire_format,
            num_replicas=groups,
            schedule=[],
            same_samples=True,
        )
        with diloco:
            for step in range(3 * sync_every):
                if sim.replica_id == 0 and step == 2 * sync_every:
                    watch(diloco._outer)
                    watch_step(inner)
                inner.step()

    def watch(loop: Any) -> None:
        for name in ("prepare_sync", "perform_sync", "finish_sync"):
            setattr(loop, name, counted(name, getattr(loop, name)))

    def watch_step(inner: Any) -> None:
        hooks = inner._optimizer_step_post_hooks
        [key] = [key for key in hooks]
        hook, is_first = hooks[key], [True]

        def first(*args: Any) -> Any:
            if not is_first:
                return hook(*args)
            is_first.clear()
            return counted("step", hook)(*args)

        hooks[key] = first

    def counted(name: str, call: Any) -> Any:
        def counting(*args: Any) -> Any:
            before = counts.found.copy()
            if name == "prepare_sync" or not held:
                device.reset_peak_memory_stats()
                held.append(device.memory_allocated())
            with counts:
                result = call(*args)
            after = counts.found.copy()
            after.subtract(before)
            after["peak bytes"] = device.max_memory_allocated() - held[0] if groups == 1 else 0
            found[name] = collections.Counter({k: n for k, n in after.items() if n})
            return result

        return counting

    def run_counted(exchange: Any, works: Any) -> None:
        if exchange._manager.participating_rank():
            return run(exchange, works)
        of_exchange.found.clear()
        with of_exchange:
            run(exchange, works)

    quantized_mean.Exchange._run = run_counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        simulate(replica, num_replicas=groups)
    finally:
        quantized_mean.Exchange._run = run
    found["exchange"] = of_exchange.found
    return {
        name: {
            key: number / PARAMETERS if "bytes" in key or key == "host passes" else number
            for key, number in each.items()
        }
        for name, each in found.items()
    }


if __name__ == "__main__":
    scale_down()
    torch.set_num_threads(1)
    print(json.dumps([count(**settings) for settings in json.loads(sys.argv[1])], indent=1))
