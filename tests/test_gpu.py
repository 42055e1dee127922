"""DiLoCo over accelerator memory and streams. Needs a CUDA device: pytest -m gpu.

Where there is none, ``test_stand_in_device.py`` runs all but NCCL on what stands in for one.
"""

import itertools
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty

import pytest
import stand_in_device  # noqa: F401 - in a process of its own, where it stands in
import torch
from common import Constant, TinyMLP, batch, mse, muon_by_shape, plain_sgd
from harness.groups import STREAMING, Group, adamw, run, sgd, traces

from composer_replication import simulate
from composer_replication.diloco import flat_chunks
from composer_replication.diloco.averaging.wire_formats import make_wire_format
from composer_replication.replica.factory import make_manager
from composer_replication.replica.lighthouse import start_lighthouse
from composer_replication.simulation.simulation import Fault, SimulatedReplica
from examples.quickstart.muon import orthogonalize

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
device_module = torch.get_device_module(DEVICE)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not device_module.is_available(), reason="no CUDA device"),
]

LEARNING = {"model": lambda: TinyMLP().to(DEVICE), "inner": adamw, "digest_every": 1}
IN_FLIGHT = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5, "sync_every": 6}
of_backups = pytest.mark.parametrize("backup_device", ["cpu", DEVICE])
of_formats = pytest.mark.parametrize("wire_format", ["float32", "int8"])
FORMATS = ["float32", "bfloat16", "int8", "fp4"]


def train(sim, **settings):
    """What a group has learnt: digests, whether its global parameters are pinned, its model."""
    with Group(sim, **LEARNING | settings) as group:
        group.learn(0, 24)
        pinned = all(theta.is_pinned() for theta in group.diloco.global_parameters().values())
        return [*group.digests.values()], pinned, group.model


def take_steps(model, inner, steps):
    device = next(model.parameters()).device
    for step in steps:
        inner.zero_grad()
        mse(model, *(part.to(device) for part in batch(0, step))).backward()
        inner.step()


@of_backups
def test_streaming_with_a_delay_keeps_replicas_equal_on_a_side_stream(backup_device):
    settings = {"backup_device": backup_device, **STREAMING}
    replica = partial(train, sync_every=6, num_fragments=3, **settings)
    one, other = simulate(replica, num_replicas=2)
    assert one[0] == other[0] and len(set(one[0])) == 12
    assert one[1] == (backup_device == "cpu")


def test_muon_is_that_of_the_cpu_but_for_its_bfloat16():
    matrix = torch.randn(24, 72, generator=torch.Generator().manual_seed(0))
    update = orthogonalize(matrix.to(DEVICE)).cpu()
    assert (update - orthogonalize(matrix)).norm() < 0.02 * update.norm()
    assert torch.equal(update, update.bfloat16().float())
    singular = torch.linalg.svdvals(update)
    assert 0.65 < singular.min() and singular.max() < 1.25
    models = here, there = TinyMLP(), TinyMLP().to(DEVICE)
    for model in models:
        take_steps(model, muon_by_shape(model.parameters(), lr=1e-3), range(5))
    for p, q, begin in zip(
        here.parameters(), there.parameters(), TinyMLP().parameters(), strict=True
    ):
        assert q.device.type == torch.device(DEVICE).type
        assert (p - q.cpu()).norm() < 0.1 * (p - begin).norm()


@of_backups
def test_a_sync_takes_a_message_and_little_more_of_the_device(backup_device):
    def replica(group):
        group.step(-1.0)  # what the inner optimizer takes is taken
        device_module.reset_peak_memory_stats()
        before = device_module.memory_allocated()
        group.inner.step()
        taken = device_module.max_memory_allocated() - before
        local = dict(group.model.named_parameters())
        for name, theta in group.diloco.global_parameters().items():
            assert torch.equal(local[name].cpu(), theta.cpu())
        return taken

    model = partial(torch.nn.Linear, 2000, 2000, device=DEVICE)
    [taken] = run(1, replica, model=model, sync_every=1, backup_device=backup_device)
    # At rest on the host the state comes in parts, of which this model is one.
    parts = 4 if backup_device == DEVICE else 4 + 8
    assert taken < 1.02 * parts * 2000 * 2000


@of_backups
@pytest.mark.parametrize("wire_format", FORMATS)
def test_every_wire_format_keeps_replicas_equal(wire_format, backup_device):
    settings = {"sync_every": 4, "wire_format": wire_format, "backup_device": backup_device}
    one, other = simulate(partial(train, **settings), num_replicas=2)
    assert one[0] == other[0] and len(set(one[0])) == 6


@pytest.mark.parametrize("name", ["bfloat16", "int8", "fp4"])
def test_the_device_encodes_and_decodes_to_the_bits_of_the_cpu(name):
    wire_format = make_wire_format(name)
    values = torch.randn(512 * 300, generator=torch.Generator().manual_seed(0))
    encoded = torch.empty(wire_format.num_bytes(values.numel()), dtype=torch.uint8)
    wire_format.encode(values, encoded)
    on_device, decoded = torch.empty_like(encoded, device=DEVICE), torch.empty_like(values)
    wire_format.encode(values.to(DEVICE), on_device)
    assert torch.equal(on_device.cpu(), encoded)
    wire_format.decode(encoded, decoded)
    decoded_there = torch.empty_like(decoded, device=DEVICE)
    wire_format.decode(on_device, decoded_there)
    assert torch.equal(decoded_there.cpu(), decoded)


def test_a_model_on_the_device_follows_the_trace_of_the_cpu():
    settings = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
    (seen,) = traces(1, (-1.0,), 8, model=lambda: Constant().to(DEVICE), sync_every=4, **settings)
    assert seen[-1] == (4, 5)


@of_backups
def test_the_outer_loops_metrics_are_those_of_the_cpu(backup_device):
    def metrics(device, **settings):
        def replica(group):
            group.learn(0, 4)
            rows = group.of_reports("outer_momentum_norm", "group_cosine")
            return [number for row in rows for number in row]

        settings |= {"model": lambda: TinyMLP().to(device), "inner": partial(sgd, lr=0.1)}
        return run(2, replica, sync_every=1, **settings)

    there = metrics(DEVICE, backup_device=backup_device)
    one, other = metrics("cpu")
    assert there[0] == there[1] and one == other
    assert there[0] == pytest.approx(one, abs=1e-5)


@of_backups
def test_a_group_that_restarts_takes_over_what_the_others_hold(backup_device):
    def replica(group):
        group.learn(0, 24)
        group.end()
        return group.diloco.global_digest(), any(group.of_reports("healed"))

    settings = LEARNING | {"sync_every": 4, "backup_device": backup_device}
    one, back = run(2, replica, Fault("restart", replica_id=1, step=2), **settings)
    assert one[0] == back[0] and (one[1], back[1]) == (False, True)


@of_backups
@of_formats
def test_a_run_goes_on_with_a_sync_in_flight(backup_device, wire_format):
    def replica(group, first, last):
        group.learn(first, last)
        return group.diloco.global_digest(), group.save()

    settings = LEARNING | {"fragment_sync_delay": 3, "fragment_update_alpha": 0.5, "sync_every": 8}
    settings |= {"wire_format": wire_format, "backup_device": backup_device}
    [(whole, _)] = run(1, partial(replica, first=0, last=24), **settings)
    [(_, saved)] = run(1, partial(replica, first=0, last=14), **settings)
    [(resumed, _)] = run(1, partial(replica, first=14, last=24), saved=saved, **settings)
    assert resumed == whole


@of_backups
@of_formats
def test_a_group_that_trains_alone_has_the_bits_of_a_simulated_one(backup_device, wire_format):
    settings = IN_FLIGHT | {"wire_format": wire_format, "backup_device": backup_device}
    [simulated] = simulate(partial(train, **settings), num_replicas=1)
    alone = train(SimulatedReplica(0, 1, make_manager(num_replicas=1)), **settings)
    assert alone[0] == simulated[0] and len(set(alone[0])) == 4


@pytest.mark.skipif(DEVICE != "cuda", reason="NCCL is for CUDA devices")
def test_one_group_over_nccl_is_its_inner_optimizer_alone():
    lighthouse = start_lighthouse()
    manager = make_manager(
        replica_id=0,
        lighthouse_addr=lighthouse.address(),
        backend="nccl",
    )
    try:
        sim = SimulatedReplica(0, 1, manager)
        _, _, model = train(sim, outer=plain_sgd(), sync_every=4)
    finally:
        manager.shutdown()
        lighthouse.shutdown()
    plain = TinyMLP().to(DEVICE)
    take_steps(plain, adamw(plain.parameters()), range(24))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine - theirs).abs().max() < 1e-6


# A process that has looked for CUDA cannot be forked. Elsewhere forks need not import.
context = multiprocessing.get_context("spawn" if DEVICE == "cuda" else "forkserver")
if DEVICE != "cuda":
    context.set_forkserver_preload(["pytest", "harness.groups", make_manager.__module__])

CASES = [*itertools.product(FORMATS, ["cpu", DEVICE])]
"""Wire formats, and where the global parameters rest."""


def in_flight(wire_format, backup_device):
    return IN_FLIGHT | {"wire_format": wire_format, "backup_device": backup_device}


def of_two(replica_id, address, backend, found):
    """One of two groups that share a GPU; NCCL takes each for a host of its own, as it has to.

    It trains once for each of CASES: the start of a process takes longer than all of them.
    """
    os.environ |= {"NCCL_HOSTID": f"group-{replica_id}", "NCCL_SOCKET_IFNAME": "lo"}
    for case in CASES:
        manager = make_manager(
            replica_id=replica_id, lighthouse_addr=address, min_replica_size=2, backend=backend
        )
        digests, *_ = train(SimulatedReplica(replica_id, 2, manager), **in_flight(*case))
        found.put(((case, replica_id), digests))
        manager.shutdown()


@contextmanager
def two_processes(target, *arguments):
    """Two groups as processes, each called with its rank, the lighthouse's address, these arguments
    and the queue; and that queue."""
    lighthouse = start_lighthouse(min_replicas=2)
    queue = context.Queue()
    groups = [
        context.Process(target=target, args=(i, lighthouse.address(), *arguments, queue))
        for i in range(2)
    ]
    for group in groups:
        group.start()
    try:
        yield groups, queue
    finally:
        for group in groups:
            group.join(5)
            group.kill()
        lighthouse.shutdown()


BACKENDS = [
    "gloo",
    pytest.param(
        "nccl", marks=pytest.mark.skipif(DEVICE != "cuda", reason="NCCL is for CUDA devices")
    ),
]


@pytest.fixture(scope="module", params=BACKENDS)
def of_groups(request):
    """The digests of two groups by case and replica id, as far as they came."""
    found = {}
    with two_processes(of_two, request.param) as (_, queue), suppress(Empty):
        for _ in range(2 * len(CASES)):
            case, digests = queue.get(timeout=60)
            found[case] = digests
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_groups_have_the_bits_of_simulated_ones(case, of_groups):
    simulated = simulate(partial(train, **in_flight(*case)), num_replicas=2)
    expected = [digests for digests, *_ in simulated]
    assert [of_groups[case, 0], of_groups[case, 1]] == expected and len(set(expected[0])) == 4


def that_hangs(replica_id, address, found):
    """Two groups, of which the second one stops in its first sync, before it sends anything."""
    manager = make_manager(replica_id=replica_id, lighthouse_addr=address, min_replica_size=2)

    def stop(manager):
        found.put("hangs")
        found.close()
        found.join_thread()  # it is in the queue
        os.kill(os.getpid(), signal.SIGSTOP)

    with Group(SimulatedReplica(replica_id, 2, manager), **LEARNING, sync_every=4) as group:
        if replica_id == 1:
            group.diloco._outer.fragments[0].mean.send = stop
        group.learn(0, 8)


def test_a_signal_ends_the_wait_for_a_message_on_the_device():
    with two_processes(that_hangs) as (groups, queue):
        assert queue.get(timeout=60) == "hangs"
        time.sleep(2.0)  # the other one has sent its own, and waits for up to a minute
        os.kill(groups[0].pid, signal.SIGINT)
        groups[0].join(20)
        assert groups[0].exitcode not in (None, 0)


@of_backups
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_outer_step_has_the_bits_of_the_cpu(dtype, backup_device, monkeypatch):
    monkeypatch.setattr(flat_chunks, "LAST_SCRATCH", 64)  # bfloat16 in several chunks

    # Where it has not, groups on a CPU and groups on this device could not train one model.
    def replica(group):
        for step in range(8):
            group.step(0.1 * (step - 2.3))
        return list(group.digests.values())

    settings = {"inner": sgd, "sync_every": 1, "digest_every": 1}
    digests = {
        device: run(1, replica, model=lambda d=device: TinyMLP().to(d, dtype), **settings, **own)
        for device, own in ((DEVICE, {"backup_device": backup_device}), ("cpu", {}))
    }
    assert digests[DEVICE] == digests["cpu"] and len({*digests["cpu"][0]}) == 8


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA alone can tell")
def test_a_step_that_does_not_sync_waits_for_nothing():
    def replica(group):
        data = [part.to(DEVICE) for part in batch(0, 0)]
        for step in range(21):
            if step == 1:
                torch.cuda.set_sync_debug_mode("error")
            group.inner.zero_grad()
            mse(group.model, *data).backward()
            group.inner.step()
        torch.cuda.set_sync_debug_mode("default")

    run(1, replica, **LEARNING, sync_every=50)
