"""``merge: rda`` in training: the outer step keeps its size when groups die and join.

Run: pytest tests/diloco/test_merge.py. Real torchft schedule, simulated network.
"""

import logging

import pytest
import torch
from common import TinyMLP, batch, mse, plain_sgd
from torch import nn

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.averaging.wire_sizes import WIRE_FORMATS
from composer_replication.diloco.fingerprints import SettingsMismatch
from composer_replication.diloco.outer_optimizer import nesterov_sgd
from composer_replication.simulation.simulation import Fault, SimulationError

STREAMING = {
    "sync_every": 4,
    "num_fragments": 2,
    "fragment_sync_delay": 1,
    "fragment_update_alpha": 0.5,
}


class Words(nn.Module):
    """An embedding whose weight is the head's too, and a matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2, 2)
        self.matrix = nn.Linear(2, 1, bias=False)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(2))
        nn.init.zeros_(self.embedding.weight)
        nn.init.zeros_(self.matrix.weight)


def test_by_hand_matrices_are_merged_radially_embeddings_and_buffers_averaged():
    """The groups go to (-3, -4) and (8, -6): pseudo-gradients (3, 4) and (-8, 6).

    Their norms are 5 and 10, their directions (.6, .8) and (-.8, .6), whose mean (-.1, .7) has the
    norm sqrt(.5). So theta becomes 0 - 7.5 / sqrt(.5) (-.1, .7) = (1.06066, -7.42462). The tied
    weight and the buffer become the mean (2.5, -5) of what the groups have.
    """

    def replica(sim):
        model = Words()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        to = torch.tensor([[-3.0, -4.0], [8.0, -6.0]][sim.replica_id])
        settings = {"sync_buffers": "mean", "merge": "rda"}
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 1, **settings) as diloco:
            model.matrix.weight.grad = -to.view(1, 2)
            model.embedding.weight.grad = -torch.stack([to, torch.zeros(2)])
            model.seen.copy_(to)
            inner.step()
            return {name: t.flatten().tolist() for name, t in diloco.global_parameters().items()}

    for theta in simulate(replica, num_replicas=2):
        assert theta["matrix.weight"] == pytest.approx([1.06066, -7.42462], abs=1e-5)
        assert theta["embedding.weight"] == [2.5, -5.0, 0.0, 0.0]
        assert theta["seen"] == [2.5, -5.0]
        assert theta.keys() == {"matrix.weight", "embedding.weight", "seen"}


def test_an_embedding_in_a_fragment_of_its_own_is_averaged_too():
    def replica(sim):
        model = Words()
        fragments = [model.embedding, nn.ModuleList([model.matrix, model.head])]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = DiLoCo(sim.manager, fragments, inner, plain_sgd(), 2, merge="rda")
        return [fragment.globals.merged_radially for fragment in diloco._outer.fragments]

    assert simulate(replica, num_replicas=1) == [[[], [0]]]


def train(sim, steps=16, *, settings, outer=None):
    """A small model on data of each group's own: how it ends."""
    model = TinyMLP()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = outer or nesterov_sgd(0.7, 0.9)
    retries = 0
    with DiLoCo(sim.manager, model, inner, outer, digest_every=1, **settings) as diloco:
        for step in range(steps):
            inner.zero_grad()
            mse(model, *batch(sim.replica_id, step)).backward()
            inner.step()
        retries += sum(report.retries for report in diloco.pop_finished_syncs())
        diloco.final_sync()
        return diloco.global_digest(), retries


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("schedule", [{"sync_every": 4, "weight_by": "steps"}, STREAMING])
def test_one_group_alone_trains_as_with_the_mean_to_the_bit(schedule, wire_format):
    digests = {
        simulate(
            lambda sim, merge=merge: train(
                sim, settings={**schedule, "wire_format": wire_format, "merge": merge}
            )[0],
            num_replicas=1,
        )[0]
        for merge in ("mean", "rda")
    }
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("schedule", [{"sync_every": 4}, STREAMING], ids=["vanilla", "streaming"])
def test_a_sync_that_is_tried_again_changes_no_bit(schedule, wire_format):
    settings = {**schedule, "wire_format": wire_format, "merge": "rda", "num_replicas": 3}
    faults = [Fault("fail_allreduce", 1, 2), Fault("fail_allreduce", 0, 3)]
    whole = simulate(lambda sim: train(sim, settings=settings), num_replicas=3)
    again = simulate(lambda sim: train(sim, settings=settings), num_replicas=3, faults=faults)
    mean = simulate(lambda sim: train(sim, settings=settings | {"merge": "mean"}), num_replicas=3)
    assert len({digest for digest, _ in whole}) == len({digest for digest, _ in again}) == 1
    if schedule != STREAMING:  # with a delay the next attempt has an inner step more
        assert again[0][0] == whole[0][0]
    assert mean[0][0] != whole[0][0]
    assert all(retries == 0 for _, retries in whole)
    assert all(retries > 0 for _, retries in again)


SIZE = 4096


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.zeros(64, SIZE // 64))
        self.other = nn.Parameter(torch.zeros(SIZE))


def outer_steps(merge, wire_format, weight_by="uniform"):
    """Groups of which each goes a step of its own length in a direction of its own: the size of
    each outer step, by the number of groups that took part."""

    def replica(sim):
        model = Matrix()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        draw = torch.Generator().manual_seed(1 + sim.replica_id)
        seen, before = [], None
        settings = {"merge": merge, "wire_format": wire_format, "weight_by": weight_by}
        outer = plain_sgd(lr=0.7)
        with DiLoCo(
            sim.manager, model, inner, outer, 1, num_replicas=8, digest_every=1, **settings
        ) as diloco:
            while diloco.outer_step < 10:
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=draw)
                inner.step()
                for report in diloco.pop_finished_syncs():
                    theta = torch.cat([t.flatten() for t in diloco.global_parameters().values()])
                    if before is not None:
                        contributing = report.total_contribution
                        seen.append((contributing, float((theta - before).norm())))
                    before = theta.clone()
        return seen, diloco.global_digest()

    faults = [Fault("kill", group, 4) for group in range(4, 8)]
    faults += [Fault("late", group, 7) for group in range(8, 12)]
    ended = [end for end in simulate(replica, num_replicas=12, faults=faults) if end is not None]
    assert len(ended) == 8 and len({digest for _, digest in ended}) == 1
    return max((seen for seen, _ in ended), key=len)


@pytest.mark.slow
@pytest.mark.parametrize("wire_format", ["float32", "fp4"])
def test_the_outer_step_keeps_its_size_when_groups_go_from_8_to_4_and_to_8_again(wire_format):
    radial, mean = (outer_steps(merge, wire_format) for merge in ("rda", "mean"))
    for steps in (radial, mean):
        numbers = [number for number, _ in steps]
        assert numbers[0] == 8 and 4 in numbers[1:-1] and numbers[-1] == 8
    sizes = {name: [s for _, s in steps] for name, steps in (("rda", radial), ("mean", mean))}
    assert max(sizes["rda"]) / min(sizes["rda"]) < 1.1
    # All the groups' steps are of the same length, and nearly orthogonal: sqrt(8 / 4).
    assert 1.35 < max(sizes["mean"]) / min(sizes["mean"]) < 1.5
    expected = 0.7 * (2 * SIZE) ** 0.5
    assert sizes["rda"] == pytest.approx([expected] * len(radial), rel=0.05)


# ---- what is averaged plainly in any case ------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))


TOWARDS = ([3.0, 4.0], [-8.0, 6.0])


def walk(sim, steps, *, freeze_at=None, replace_at=None, wire_format="float32"):
    """Each group walks in a direction of its own, at one inner step a sync."""
    model = Two()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    seen, retries = [], []
    settings = {"merge": "rda", "wire_format": wire_format, "num_replicas": 2}
    with DiLoCo(sim.manager, model, inner, plain_sgd(), 1, digest_every=1, **settings) as diloco:
        for step in range(steps):
            if step == freeze_at:
                model.a.requires_grad_(False)
                model.a.grad = None
                with torch.no_grad():
                    model.a += torch.tensor(TOWARDS[sim.replica_id])  # trained before, in the round
            if step == replace_at:
                with torch.no_grad():
                    model.a.copy_(torch.tensor(TOWARDS[sim.replica_id]))
                diloco.make_local_global()
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = -torch.tensor(TOWARDS[sim.replica_id])
            inner.step()
            theta = diloco.global_parameters()
            seen.append((theta["a"].tolist(), theta["b"].tolist()))
            retries += [report.retries for report in diloco.pop_finished_syncs()]
    return seen, retries, diloco.global_digest()


RADIAL = torch.tensor([-1.06066, 7.42462])
"""What one step of both groups is merged to; their mean is (-2.5, 5)."""


@pytest.mark.parametrize("wire_format", ["float32", "int8"])
def test_what_all_groups_freeze_at_once_takes_one_plain_mean(wire_format):
    runs = simulate(lambda sim: walk(sim, 4, freeze_at=2, wire_format=wire_format), num_replicas=2)
    assert runs[0][2] == runs[1][2]
    seen, retries, _ = runs[0]
    exact = wire_format == "float32"
    a, b = (torch.tensor(column) for column in zip(*seen, strict=True))
    at_the_end = 2 * RADIAL + torch.tensor([-2.5, 5.0])
    assert torch.allclose(a[2], at_the_end, atol=1e-4 if exact else 0.1)
    assert torch.equal(a[2], a[3])
    assert torch.allclose(b[3], 4 * RADIAL, atol=1e-4 if exact else 0.2)
    assert retries == [0, 0, 0, 0]


@pytest.mark.parametrize(("wire_format", "tries"), [("float32", 1), ("int8", 0)])
def test_what_one_group_freezes_earlier_is_averaged_plainly_from_then_on(
    wire_format, tries, caplog
):
    caplog.set_level(logging.WARNING)

    def replica(sim):
        return walk(sim, 6, freeze_at=(2, 4)[sim.replica_id], wire_format=wire_format)

    runs = simulate(replica, num_replicas=2)
    assert runs[0][2] == runs[1][2]
    # In float32 the group that has not frozen it sends its direction once, and knows it then.
    assert runs[0][1] == runs[1][1] == [0, 0, tries, 0, 0, 0]
    seen = runs[0][0]
    moved = torch.tensor(seen[3][0]) - torch.tensor(seen[2][0])
    mean_of_one = torch.tensor(TOWARDS[1]) / 2  # the other one stays where it is
    assert torch.allclose(moved, mean_of_one, atol=0.1)
    assert seen[4][0] == seen[5][0]
    assert ("whether they are averaged plainly" in caplog.text) == bool(tries)


@pytest.mark.parametrize("callers", [(0, 1), (0,)])
def test_an_average_that_replaces_the_parameters_is_averaged_plainly(callers):
    def replica(sim):
        return walk(sim, 4, replace_at=2 if sim.replica_id in callers else None)

    runs = simulate(replica, num_replicas=2)
    assert runs[0][2] == runs[1][2]
    seen, retries, _ = runs[0]
    # It is replaced at the start of a round, whose step comes on top.
    ours, theirs = 2 * torch.tensor(TOWARDS[0]), 2 * torch.tensor(TOWARDS[1])
    if callers == (0,):
        theirs = 2 * RADIAL + torch.tensor(TOWARDS[1])
    assert torch.allclose(torch.tensor(seen[2][0]), (ours + theirs) / 2, atol=1e-4)
    # A group that has not called it learns of it, and at the next sync that it is over.
    assert retries == ([0, 0, 1, 1] if callers == (0,) else [0, 0, 0, 0])


def test_groups_that_merge_otherwise_are_refused():
    def replica(sim):
        settings = {"sync_every": 2, "merge": ("mean", "rda")[sim.replica_id], "num_replicas": 2}
        return train(sim, settings=settings)

    with pytest.raises(SimulationError, match="merge: 'rda' here, 'mean' there") as caught:
        simulate(replica, num_replicas=2)
    assert isinstance(caught.value.__cause__, SettingsMismatch)


def test_a_checkpoint_from_before_there_was_a_choice_is_one_of_means(caplog):
    def replica(sim):
        model = TinyMLP()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        saved = DiLoCo(sim.manager, model, inner, plain_sgd(), 2).state_dict()
        del saved["settings"]["merge"]
        return saved

    [saved] = simulate(replica, num_replicas=1)

    def resume(sim, merge):
        model = TinyMLP()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DiLoCo(sim.manager, model, inner, plain_sgd(), 2, merge=merge).load_state_dict(saved)

    simulate(lambda sim: resume(sim, "mean"), num_replicas=1)
    assert "changed settings" not in caplog.text
    with pytest.raises(SimulationError, match="merge: 'rda' here, 'mean' there"):
        simulate(lambda sim: resume(sim, "rda"), num_replicas=1)
