"""DiLoCo over accelerator memory and streams. Needs a CUDA device: pytest -m gpu.

Where there is none, ``test_stand_in_device.py`` runs all but NCCL on what stands in for one.
"""

import io
import os

import pytest
import torch
from common import TinyMLP, batch, mse, muon_by_shape, plain_sgd, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.averaging.wire_formats import make_wire_format
from composer_replication.replica.factory import backend_for, make_manager
from composer_replication.replica.lighthouse import start_lighthouse
from composer_replication.simulation.simulation import Fault
from composer_replication.training.muon import orthogonalize

DEVICE = os.environ.get("COMPOSER_REPLICATION_TEST_DEVICE", "cuda")
device_module = torch.get_device_module(DEVICE)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not device_module.is_available(), reason="no CUDA device"),
]


def take_steps(model, inner, steps):
    for step in steps:
        inner.zero_grad()
        mse(model, *(tensor.to(DEVICE) for tensor in batch(0, step))).backward()
        inner.step()


def train(manager, **settings):
    model = TinyMLP().to(DEVICE)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with DiLoCo(manager, model, inner, digest_every=1, **settings) as diloco:
        take_steps(model, inner, range(24))
        pinned = all(theta.is_pinned() for theta in diloco.global_parameters().values())
        return [r.global_digest for r in diloco.pop_finished_syncs()], pinned, model.cpu()


@pytest.mark.parametrize("message_device", ["cpu", DEVICE])
@pytest.mark.parametrize("backup_device", ["cpu", DEVICE])
def test_streaming_with_a_delay_keeps_replicas_equal_on_a_side_stream(
    backup_device, message_device
):
    settings = {
        "sync_every": 6,
        "num_fragments": 3,
        "fragment_sync_delay": 1,
        "fragment_update_alpha": 0.5,
        "backup_device": backup_device,
        "message_device": message_device,
    }
    one, other = simulate(lambda sim: train(sim.manager, **settings), num_replicas=2)
    assert one[0] == other[0] and len(set(one[0])) == 12
    assert one[1] == (backup_device == "cpu")


def test_muon_is_that_of_the_cpu_but_for_its_bfloat16():
    matrix = torch.randn(24, 72, generator=torch.Generator().manual_seed(0))
    update = orthogonalize(matrix.to(DEVICE)).cpu()
    assert (update - orthogonalize(matrix)).norm() < 0.02 * update.norm()
    assert torch.equal(update, update.bfloat16().float())
    singular = torch.linalg.svdvals(update)
    assert 0.65 < singular.min() and singular.max() < 1.25
    here, there = TinyMLP(), TinyMLP().to(DEVICE)
    inner, other = (muon_by_shape(model.parameters(), lr=1e-3) for model in (here, there))
    take_steps(there, other, range(5))
    for step in range(5):
        inner.zero_grad()
        mse(here, *batch(0, step)).backward()
        inner.step()
    for p, q, begin in zip(
        here.parameters(), there.parameters(), TinyMLP().parameters(), strict=True
    ):
        assert q.device.type == torch.device(DEVICE).type
        assert (p - q.cpu()).norm() < 0.1 * (p - begin).norm()


def test_messages_in_host_memory_take_none_of_the_device():
    def replica(sim):
        model = torch.nn.Linear(2000, 2000, device=DEVICE)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, sync_every=1, message_device="cpu") as diloco:
            take_step(inner, -1.0)  # what the inner optimizer takes is taken
            device_module.reset_peak_memory_stats()
            before = device_module.memory_allocated()
            inner.step()
            taken = device_module.max_memory_allocated() - before
            local = dict(model.named_parameters())
            for name, theta in diloco.global_parameters().items():
                assert torch.equal(local[name].cpu(), theta)
            return taken

    [taken] = simulate(replica, num_replicas=1)
    assert taken < 0.05 * 4 * 2000 * 2000


@pytest.mark.parametrize("wire_format", ["float32", "bfloat16", "int8", "fp4"])
@pytest.mark.parametrize("message_device", ["cpu", DEVICE])
def test_every_wire_format_keeps_replicas_equal(wire_format, message_device):
    settings = {"sync_every": 4, "wire_format": wire_format, "message_device": message_device}
    one, other = simulate(lambda sim: train(sim.manager, **settings), num_replicas=2)
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
    def replica(sim):
        model = torch.nn.Linear(1, 1, bias=False, device=DEVICE)
        torch.nn.init.constant_(model.weight, 10.0)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 4, **settings):
            for _ in range(8):
                take_step(inner, -1.0)
            return model.weight.item()

    assert simulate(replica, num_replicas=1) == [4.0]


@pytest.mark.parametrize("message_device", ["cpu", DEVICE])
@pytest.mark.parametrize("backup_device", ["cpu", DEVICE])
def test_the_outer_loops_cosines_are_those_of_the_cpu(backup_device, message_device):
    def metrics(device, **settings):
        def replica(sim):
            model = torch.nn.Linear(40, 30, device=device)
            torch.nn.init.constant_(model.weight, 1.0)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(sim.manager, model, inner, sync_every=1, **settings) as diloco:
                for step in range(4):
                    draw = torch.Generator().manual_seed(10 * step + sim.replica_id)
                    for parameter in model.parameters():
                        parameter.grad = torch.randn(parameter.shape, generator=draw).to(device)
                    inner.step()
                reports = diloco.pop_finished_syncs()
            names = ("momentum_cosine", "group_cosine", "mean_norm_ratio")
            return [getattr(report, name) for report in reports for name in names]

        return simulate(replica, num_replicas=2)

    there = metrics(DEVICE, backup_device=backup_device, message_device=message_device)
    (one, other) = metrics("cpu")
    assert there[0] == there[1] and one == other
    assert there[0][0] is None and there[0][1:] == pytest.approx(one[1:], abs=1e-5)


@pytest.mark.parametrize("backup_device", ["cpu", DEVICE])
def test_a_group_that_restarts_takes_over_what_the_others_hold(backup_device):
    def replica(sim):
        model = TinyMLP(sim.replica_id).to(DEVICE)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with DiLoCo(sim.manager, model, inner, sync_every=4, backup_device=backup_device) as diloco:
            take_steps(model, inner, range(24))
            healed = [report.healed for report in diloco.pop_finished_syncs()]
            diloco.final_sync()
            return diloco.global_digest(), any(healed)

    faults = [Fault("restart", replica_id=1, step=2)]
    one, back = simulate(replica, num_replicas=2, faults=faults)
    assert one[0] == back[0] and (one[1], back[1]) == (False, True)


@pytest.mark.parametrize("message_device", ["cpu", DEVICE])
@pytest.mark.parametrize("wire_format", ["float32", "int8"])
def test_a_run_goes_on_with_a_sync_in_flight(message_device, wire_format):
    settings = {"fragment_sync_delay": 3, "fragment_update_alpha": 0.5, "sync_every": 8}
    settings |= {"wire_format": wire_format, "message_device": message_device}

    def run(steps, saved=None):
        def replica(sim):
            model = TinyMLP().to(DEVICE)
            inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
            diloco = DiLoCo(sim.manager, model, inner, **settings)
            things = (model, inner, diloco)
            if saved is not None:
                for thing, state in zip(things, torch.load(io.BytesIO(saved)), strict=True):
                    thing.load_state_dict(state)
            with diloco:
                take_steps(model, inner, steps)
                file = io.BytesIO()
                torch.save([thing.state_dict() for thing in things], file)
            return diloco.global_digest(), file.getvalue()

        return simulate(replica, num_replicas=1)[0]

    whole, _ = run(range(24))
    _, saved = run(range(14))
    assert run(range(14, 24), saved)[0] == whole


@pytest.mark.parametrize("message_device", ["cpu", DEVICE])
@pytest.mark.parametrize("wire_format", ["float32", "int8"])
def test_a_group_that_trains_alone_has_the_bits_of_a_simulated_one(message_device, wire_format):
    settings = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5, "sync_every": 6}
    settings |= {"wire_format": wire_format, "message_device": message_device}
    [simulated] = simulate(lambda sim: train(sim.manager, **settings), num_replicas=1)
    alone = train(make_manager(num_replicas=1), **settings)
    assert alone[0] == simulated[0] and len(set(alone[0])) == 4


@pytest.mark.skipif(DEVICE != "cuda", reason="NCCL is for CUDA devices")
def test_one_group_over_nccl_is_its_inner_optimizer_alone():
    lighthouse = start_lighthouse()
    manager = make_manager(
        replica_id=0,
        lighthouse_addr=lighthouse.address(),
        backend=backend_for(torch.device(DEVICE)),
    )
    try:
        _, _, model = train(manager, outer_optimizer=plain_sgd(), sync_every=4)
    finally:
        manager.shutdown()
        lighthouse.shutdown()
    plain = TinyMLP().to(DEVICE)
    take_steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(24))
    for mine, theirs in zip(model.parameters(), plain.cpu().parameters(), strict=True):
        assert (mine - theirs).abs().max() < 1e-6
