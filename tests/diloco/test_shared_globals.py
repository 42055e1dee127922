"""Under DDP each rank holds a share of the global parameters; together they are those of one rank.

Run: pytest tests/diloco/test_shared_globals.py. Real processes of a group over gloo. Other groups
are simulated, if there are any: as threads in each process that have a process group of their own.
"""

import copy
import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from common import Buffered, TinyMLP, are_equal
from harness.groups import STREAMING, Group, run
from harness.processes import run_groups
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from composer_replication.diloco import construction, division, hang_watch
from composer_replication.diloco.outer_optimizer import nesterov_sgd
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
        self.register_buffer("mask", torch.full((7, 7), float("-inf")).triu(1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))


def train(ranks, settings, outer=None, state=None, steps=9):
    """What a group of one process, or this rank of several, holds in the end."""
    built = []

    def outer_and_noted(parameters):
        built.append((outer or nesterov_sgd(0.7, 0.9))(parameters))
        return built[-1]

    def replica(group):
        group.step(*(0.01 * (step + 1) for step in range(steps)))
        local = {name: t.clone() for name, t in group.model.state_dict().items()}
        saved, at_rest = group.save(), (bytes_held(built), group.reports[-1].bytes_sent)
        digest = group.diloco.global_digest()
        group.end()
        globals_ = {name: t.clone() for name, t in group.diloco.global_parameters().items()}
        return saved, local, digest, globals_, at_rest

    buffers = "mean" if settings["sync_every"] == 2 else "none"
    settings = {"model": Model, "ranks": ranks, "sync_buffers": buffers} | settings
    settings["outer"] = outer_and_noted
    return run(1, replica, saved=state, **settings)[0]


def adam(parameters):
    """An outer optimizer for which every rank holds all of the global parameters."""
    return torch.optim.Adam(parameters, lr=0.1)


def bytes_held(optimizers):
    """Memory of global parameters and outer state, each storage counted once."""
    tensors = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    for state in (state for each in optimizers for state in each.state.values()):
        tensors += [t for t in state.values() if isinstance(t, torch.Tensor) and t.ndim]
    storages = (t.untyped_storage() for t in tensors if not t.is_meta)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def one_rank(process, folder):
    process.of_rank(folder, RANKS)
    rank, world = dist.get_rank(), dist.group.WORLD
    num_parameters = sum(p.numel() for p in Model().parameters())
    for name, settings in CASES.items():
        (of_one, *alone, (held, sent)), (of_four, *shared, (share, part)) = (
            train(ranks, settings) for ranks in (None, world)
        )
        assert are_equal(shared, alone), name
        assert held >= 8 * num_parameters
        assert share <= 1.02 * 8 / RANKS * num_parameters + 1000, name
        assert part < sent / RANKS + 4 * 17, name
        # In mid-round, from the state of one rank to four, and from that of four to one.
        ends = [
            train(world, settings, None, of_one, 7)[1:4],
            train(None, settings, None, of_four, 7)[1:4],
        ]
        assert are_equal(*ends), name
    # What may look at a whole tensor is given whole ones, on every rank.
    of_one, of_four = (train(ranks, CASES["vanilla"], adam)[1:4] for ranks in (None, world))
    assert are_equal(of_one, of_four)
    keep_copies(world)
    keep_step(rank, world)
    heal_together(rank, world)
    ask_alone(rank, world)


def keep_copies(world):
    """A state of copies stays as it is while training goes on, with a sync in flight too."""

    def replica(group):
        group.step(0.1)
        state = group.diloco.state_dict()
        before = copy.deepcopy(state)
        group.model.blocks[1].num_batches_tracked += 1
        group.step(*[0.1] * 4)
        return are_equal(state, before)

    for name, settings in CASES.items():
        assert run(1, replica, model=Model, ranks=world, **settings) == [True], name


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

    def healed(ranks, outer=None, fails=None, model=Model, **settings):
        def replica(sim):
            register, functions = sim.manager.register_state_dict_fn, []

            def registering(key, load, save):
                functions.extend((load, save))
                register(key, load, save)

            sim.manager.register_state_dict_fn = registering
            settings.setdefault("sync_every", 2)
            with Group(sim, model, outer, ranks=ranks, **settings) as group:
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
    # Until then the ranks are at unlike fragments, of which the first alone has buffers.
    streaming = {"model": Buffered, "sync_every": 6, "num_fragments": 3}
    assert healed(world, fails=2, **streaming) == healed(None, **streaming)


def ask_alone(rank, world):
    """A rank that asks for global parameters alone gets an error, and the others go on."""
    division.TIMEOUT = timedelta(seconds=1)

    def replica(group):
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"rank 0 .* asked .* on all ranks"):
                group.diloco.global_digest()
        group.step(*[0.1] * 4)
        return group.diloco.outer_step

    assert run(1, replica, model=Model, sync_every=2, ranks=world) == [2]


def test_shares_of_four_ranks_are_together_what_one_rank_holds(tmp_path):
    run_groups(one_rank, RANKS, folder=str(tmp_path))


# ---- metrics of the outer loop -----------------------------------------------------------------

METRICS = ("outer_momentum_norm", "group_cosine")
MEASURED = {
    "vanilla": {"sync_every": 4},
    "streaming": {"sync_every": 8, "num_fragments": 2, **STREAMING},
    "int8": {"sync_every": 4, "wire_format": "int8"},  # its blocks lie otherwise in shares
    "another optimizer": {"sync_every": 4, "outer": torch.optim.Adam},
}


def metrics(settings, groups_of_ranks=None, meshes=None):
    """Metrics of all syncs of one of two groups, whose ranks all have the same batches."""

    def replica(sim):
        model = TinyMLP(width=15)  # its tensors are not divisible by the ranks
        ranks = None if groups_of_ranks is None else groups_of_ranks[sim.replica_id]
        if meshes is not None:
            for layer in (*model.layers[::2], model):
                fully_shard(layer, mesh=meshes[sim.replica_id])
        inner = partial(torch.optim.AdamW, lr=1e-2, foreach=False)
        with Group(sim, model, inner=inner, ranks=ranks, **settings) as group:
            group.learn(0, 16)
            return group.of_reports(*METRICS)

    one, other = simulate(replica, num_replicas=2)
    assert one == other
    return one


def measure_two_groups(process, folder):
    process.of_rank(folder, 2)
    groups = [dist.new_group(range(2)) for _ in range(2)]
    # Torch cannot connect two of these at a time in one process, of which real groups have one.
    host = {f"replica_{i}": dist.new_group(range(2)) for i in range(2)}
    construction.connect_hosts = lambda ranks: host[threading.current_thread().name]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    for name, of_all in MEASURED.items():
        settings = {"schedule": [], **of_all}
        alone, tolerance = metrics(settings), 1e-2 if name == "int8" else 1e-5
        assert len(alone) == 4
        assert all(alone[-1]) or "outer" in settings
        for ranks in (metrics(settings, groups), metrics(settings, groups, meshes)):
            for mine, theirs in zip(alone, ranks, strict=True):
                assert mine == pytest.approx(theirs, abs=tolerance), name


def test_metrics_of_groups_of_ranks_are_those_of_groups_of_one_process(tmp_path):
    run_groups(measure_two_groups, 2, folder=str(tmp_path))
