"""The mean in a wire format, over simulated groups.

What is exact is held exactly: the same bits in every group, and that with error feedback nothing is
lost, only late: the sum of all means is that of the true ones but for what is still kept back.
"""

import pkgutil
import re
from functools import partial

import pytest
import torch
from common import Constant, TinyMLP, written
from harness.groups import run
from torch.distributed import ReduceOp

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.averaging.quantized_mean import QuantizedMean
from composer_replication.diloco.averaging.wire_sizes import PART
from composer_replication.diloco.division import Division
from composer_replication.diloco.flat_chunks import Layout
from composer_replication.settings import WIRE_FORMATS
from composer_replication.simulation.simulation import Fault

ENCODED = WIRE_FORMATS[1:]
SIZES = [3, 700, 1, 2049]
ROUNDS = 12


def values_of(group, step):
    generator = torch.Generator().manual_seed(100 * group + step)
    return [
        torch.randn(size, generator=generator) * 10.0 ** -(i % 3) for i, size in enumerate(SIZES)
    ]


def exact_mean(groups, step):
    return sum(torch.cat(values_of(group, step)).double() for group in range(groups)) / groups


def attempt(manager, mean, values, weight):
    """One sync up to its vote, which is returned."""
    manager.start_quorum()
    mean.pack(written(values), weight)
    for work in mean.send(manager):
        work.wait()
    return manager.should_commit()


def average(sim, mean, step):
    """One sync that commits: what the group takes over."""
    assert attempt(sim.manager, mean, values_of(sim.replica_id, step), 1.0)
    mean.finish()
    taken = mean.unpack().clone()
    mean.clear()
    return taken


def make_mean(wire_format, bucket=512):
    division = Division(map(torch.empty, SIZES))
    division.bucket = bucket
    return QuantizedMean(Layout(division, [*map(torch.empty, SIZES)]), wire_format=wire_format)


@pytest.mark.parametrize("wire_format", ENCODED)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_sum_of_all_means_is_the_true_one_but_for_what_is_kept_back(wire_format, groups):
    def replica(sim):
        mean = make_mean(wire_format)
        taken = sum(average(sim, mean, step).double() for step in range(ROUNDS))
        return taken, mean.gather_residual().double()

    seen = simulate(replica, num_replicas=groups)
    kept = sum(residual for _, residual in seen) / groups
    true = sum(exact_mean(groups, step) for step in range(ROUNDS))
    assert float(kept.norm()) > 0
    assert torch.allclose(seen[0][0] + kept, true, rtol=0, atol=2e-5)
    assert float((seen[0][0] - true).norm()) > 100 * float((seen[0][0] + kept - true).norm())


@pytest.mark.parametrize("wire_format", ENCODED)
@pytest.mark.parametrize("groups", [2, 3])
def test_what_is_kept_back_with_one_weight_brings_no_more_to_the_sum_with_another(
    wire_format, groups
):
    def weight(group, step):
        return 1.0 if group == groups - 1 and step % 4 == 1 else 1000.0

    def replica(sim):
        mean, sums, worst = make_mean(wire_format), 0.0, []
        for step in range(ROUNDS):
            number = sim.replica_id
            assert attempt(sim.manager, mean, values_of(number, step), weight(number, step))
            total = mean.finish()
            taken = mean.unpack().double()
            mean.clear()
            sums += total * taken
            true = true_sum(step) / total
            worst.append(float((taken - true).norm() / true.norm()))
        return sums, mean.gather_residual().double(), worst

    def true_sum(step):
        return sum(
            weight(group, step) * torch.cat(values_of(group, step)).double()
            for group in range(groups)
        )

    seen = simulate(replica, num_replicas=groups)
    kept = sum(residual for _, residual, _ in seen)
    true = sum(map(true_sum, range(ROUNDS)))
    assert torch.allclose(seen[0][0] + kept, true, rtol=0, atol=1000 * 2e-5)
    for _, _, errors in seen:
        assert max(errors) < 3 * errors[0]


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("wire_format", ENCODED)
def test_where_a_frame_ends_changes_no_bit(wire_format, groups, monkeypatch):
    # A mean of buckets that end in mid-frame, with frames of one part and of several.
    def replica(sim):
        mean = make_mean(wire_format, bucket=2097)
        return average(sim, mean, 1), average(sim, mean, 2), mean.gather_residual()

    expected = simulate(replica, num_replicas=groups)[0]
    monkeypatch.setattr("composer_replication.diloco.averaging.quantized_buckets.FRAME", PART)
    for found, whole in zip(simulate(replica, num_replicas=groups)[0], expected, strict=True):
        assert torch.equal(found, whole) and found.any()


@pytest.mark.parametrize(
    ("groups", "kinds"), [(2, ["all_gather"]), (3, ["all_gather", "all_to_all"])]
)
def test_a_sync_that_fits_into_one_bucket_is_four_messages(groups, kinds, monkeypatch):
    # gloo does not receive while it sends one of these: see ADR-017.
    monkeypatch.setattr(f"{__name__}.SIZES", [64 * PART, 5])

    def replica(sim):
        sizes = {"all_gather": [], "all_to_all": []}
        for name, found in sizes.items():
            send = getattr(sim.manager, name)

            def noting(received, sent, send=send, found=found):
                found.append(received.numel())
                return send(received, sent)

            setattr(sim.manager, name, noting)
        average(sim, make_mean("int8", bucket=2**18), 0)
        return sizes

    sizes = simulate(replica, num_replicas=groups)[0]
    assert [kind for kind, found in sizes.items() if found] == kinds
    for kind in kinds:
        assert len(sizes[kind]) == 4 and max(sizes[kind]) < 1.5 * min(sizes[kind])


@pytest.mark.parametrize("wire_format", ENCODED)
def test_an_attempt_that_does_not_commit_leaves_no_trace(wire_format):
    def replica(sim):
        mean = make_mean(wire_format)
        first = average(sim, mean, 1)
        kept = mean.gather_residual().clone()
        assert not attempt(sim.manager, mean, values_of(sim.replica_id, 2), 1.0)  # by the fault
        assert torch.equal(mean.gather_residual(), kept)
        return first, average(sim, mean, 2)

    def undisturbed(sim):
        mean = make_mean(wire_format)
        return average(sim, mean, 1), average(sim, mean, 2)

    faults = [Fault("fail_allreduce", replica_id=1, step=1)]
    disturbed = simulate(replica, num_replicas=2, faults=faults)
    for ones, others in zip(disturbed, simulate(undisturbed, num_replicas=2), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def test_a_group_whose_values_are_not_finite_changes_nothing_and_keeps_its_residual():
    def replica(sim):
        mean = make_mean("int8")
        average(sim, mean, 1)
        kept = mean.gather_residual().clone()
        value = float("nan") if sim.replica_id == 0 else 2.0
        attempt(sim.manager, mean, [torch.full((size,), value) for size in SIZES], 1.0)
        return mean.finish(), mean.sums[: SIZES[0]].clone(), kept, mean.gather_residual()

    sick, healthy = simulate(replica, num_replicas=2)
    assert sick[0] == healthy[0] == 1.0
    assert torch.equal(sick[1], healthy[1]) and torch.allclose(sick[1], torch.full((3,), 2.0), 0.05)
    assert torch.equal(sick[2], sick[3])
    assert not torch.equal(healthy[2], healthy[3])


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize(
    ("wire_format", "ratio", "allowed"),
    [("float32", 1, 1.0), ("bfloat16", 1 / 2, 1.01), ("int8", 1 / 4, 1.02), ("fp4", 1 / 8, 1.07)],
)
@pytest.mark.slow
def test_reported_bytes_are_those_of_the_format_whatever_the_number_of_groups(
    wire_format, ratio, allowed, groups
):
    def replica(group):
        group.step(-1.0)
        return group.reports[0]

    model = partial(Constant, weight=(1000, 1000), odd=(77,))
    settings = {"model": model, "wire_format": wire_format, "sync_every": 1}
    for report in run(groups, replica, num_replicas=groups, **settings):
        assert report.bytes_float32 == 4 * (1_000_077 + 1)
        assert ratio <= report.bytes_sent / report.bytes_float32 <= ratio * allowed


# ---- under DiLoCo -----------------------------------------------------------------------------


def test_a_manager_that_can_only_sum_is_refused_before_anybody_waits():
    class Summing:
        _use_async_quorum = False

        def allreduce(self, tensor, should_quantize=False, reduce_op=ReduceOp.AVG):
            raise AssertionError("nothing is to be sent")

    model = TinyMLP()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    message = r"wire_format='int8' needs all_to_all .* Summing has not: build it with (\S+), or"
    with pytest.raises(ValueError, match=message) as error:
        DiLoCo(Summing(), model, inner, wire_format="int8")
    named = re.search(message, str(error.value))
    assert named is not None and callable(pkgutil.resolve_name(named[1]))


@pytest.mark.parametrize("wire_format", ENCODED)
@pytest.mark.parametrize("groups", [2, 3])
def test_where_no_group_contributes_nothing_arrives(wire_format, groups):
    def replica(sim):
        mean = make_mean(wire_format)
        average(sim, mean, 1)  # leaves numbers in its memory
        assert attempt(sim.manager, mean, values_of(sim.replica_id, 2), 0.0)
        return (mean.finish(), *mean._arrived())

    assert simulate(replica, num_replicas=groups) == groups * [(0.0, 0.0, 0.0)]
