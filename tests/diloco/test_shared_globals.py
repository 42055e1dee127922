"""Under DDP each rank holds a share of the global parameters; together they are those of one rank.

Run: pytest tests/diloco/test_shared_globals.py. Four real processes of a group over gloo; of the
other groups there are none.
"""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from integration.replicas import run_groups
from promises.groups import STREAMING, Group, run
from torch import nn

from composer_replication.diloco import hang_watch, shards
from composer_replication.simulation.simulation import simulate

pytestmark = pytest.mark.integration

RANKS = 4
CASES = {
    "vanilla": {"sync_every": 2},
    "streaming": {"sync_every": 4, "num_fragments": 2, **STREAMING},
}


class Model(nn.Module):
    """Tensors that no number of ranks divides, of one element too, and one that is scattered."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.blocks = nn.Sequential(
            nn.Linear(301, 203), nn.BatchNorm1d(203), nn.Linear(203, 1), nn.Conv2d(3, 8, 3)
        )
        self.blocks[3].to(memory_format=torch.channels_last)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))


def train(ranks, settings, outer=None, state=None, steps=9):
    """What a group of one process, or this rank of several, holds in the end."""

    def replica(group):
        group.step(*(0.01 * (step + 1) for step in range(steps)))
        local = {name: t.clone() for name, t in group.model.state_dict().items()}
        saved, at_rest = group.save(), bytes_held(group.diloco)
        digest = group.diloco.global_digest()
        group.end()
        globals_ = {name: t.clone() for name, t in group.diloco.global_parameters().items()}
        return saved, local, digest, globals_, at_rest

    buffers = "mean" if settings["sync_every"] == 2 else "none"
    settings = {"model": Model, "outer": outer, "ranks": ranks, "sync_buffers": buffers} | settings
    return run(1, replica, saved=state, **settings)[0]


def adam(parameters):
    """An outer optimizer for which every rank holds all of the global parameters."""
    return torch.optim.Adam(parameters, lr=0.1)


def bytes_held(diloco):
    """Memory of global parameters and outer state, each storage counted once."""
    tensors = [theta for f in diloco._outer.fragments for theta in f.globals.theta.values()]
    for fragment in diloco._outer.fragments:
        for state in fragment.globals.optimizer.state.values():
            tensors += [t for t in state.values() if isinstance(t, torch.Tensor) and t.ndim]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def are_equal(one, other):
    """Of containers too, to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return one == other


def one_rank(process, folder):
    process.of_rank(folder, RANKS)
    rank, world = dist.get_rank(), dist.group.WORLD
    num_parameters = sum(p.numel() for p in Model().parameters())
    for name, settings in CASES.items():
        (of_one, *alone, held), (of_four, *shared, share) = (
            train(ranks, settings) for ranks in (None, world)
        )
        assert are_equal(shared, alone), name
        assert held >= 8 * num_parameters
        assert share <= 1.02 * 8 / RANKS * num_parameters + 1000, name
        # In mid-round, from the state of one rank to four, and from that of four to one.
        ends = [
            train(world, settings, None, of_one, 7)[1:4],
            train(None, settings, None, of_four, 7)[1:4],
        ]
        assert are_equal(*ends), name
    # What may look at a whole tensor is given whole ones, on every rank.
    of_one, of_four = (train(ranks, CASES["vanilla"], adam)[1:] for ranks in (None, world))
    assert are_equal(of_one, of_four)
    keep_step(rank, world)
    heal_together(rank, world)
    ask_alone(rank, world)


def keep_step(rank, world):
    """Ranks that measure different times choose the same number of inner steps."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    hang_watch.time, real = clock, hang_watch.time

    def replica(group):
        while len(group.reports) < 3:
            clock.now += 1.0 + 0.2 * rank  # 1.3 s in the mean: 5.4 steps in 7 s
            group.step(0.1)
        return group.of_reports("sync_every")

    settings = {"model": Model, "sync_every": 10, "round_seconds": 7.0, "ranks": world}
    assert run(1, replica, **settings) == [[5, 5, 5]]
    hang_watch.time = real


def heal_together(rank, world):
    """A group that is left behind heals as one of a single rank does, once all ranks have."""

    def healed(ranks, outer=None, fails=None):
        def replica(sim):
            register, functions = sim.manager.register_state_dict_fn, []

            def registering(key, load, save):
                functions.extend((load, save))
                register(key, load, save)

            sim.manager.register_state_dict_fn = registering
            with Group(sim, Model, outer, sync_every=2, ranks=ranks) as group:
                group.step(0.01, 0.02, 0.03)  # a round, and one inner step of the next
                heal, save = functions
                theirs = copy.deepcopy(save())
                theirs["outer_step"] += 2
                for fragment in theirs["fragments"]:
                    for theta in fragment["theta"].values():
                        theta.detach().add_(0.5 if theta.is_floating_point() else 3)
                start_quorum, quorums = sim.manager.start_quorum, []

                def start_and_heal():
                    start_quorum()
                    quorums.append(1)
                    if fails is None or (rank == fails) == (len(quorums) == 2):
                        heal(theirs)
                    if fails is not None and len(quorums) == 1:  # so the group votes no
                        sim.manager.report_error(ConnectionError("a rank has not healed"))

                sim.manager.start_quorum = start_and_heal
                group.step(0.04)
                counts = group.of_reports("outer_step", "contribution", "steps_lost")
                return counts, group.diloco.global_digest()

        return simulate(replica, num_replicas=1)[0]

    for outer in (None, adam):
        found = healed(world, outer)
        assert found == healed(None, outer) and found[0] == [(1, 1, 0), (3, 0, 2)]
        assert healed(world, outer, fails=2) == found, "one rank heals a quorum later"


def ask_alone(rank, world):
    """A rank that asks for global parameters alone is told so, and the others go on."""
    shards.TIMEOUT = timedelta(seconds=1)

    def replica(group):
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"rank 0 .* asked .* on all ranks"):
                group.diloco.global_digest()
        group.step(*[0.1] * 4)
        return group.diloco.outer_step

    assert run(1, replica, model=Model, sync_every=2, ranks=world) == [2]


def test_shares_of_four_ranks_are_together_what_one_rank_holds(tmp_path):
    run_groups(one_rank, RANKS, folder=str(tmp_path))
