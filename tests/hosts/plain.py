"""A training loop of one's own, with ``DiLoCo`` around it."""

from __future__ import annotations

import torch
from common import mse

from composer_replication import DiLoCo, simulate
from composer_replication.simulation.simulation import SimulatedReplica
from hosts.host import Job, Outcome, held_out, weights_of

name = "plain loop"


def train(job: Job, num_replicas: int = 2) -> list[Outcome]:
    return simulate(lambda sim: _train(job, sim), num_replicas=num_replicas)


def _train(job: Job, sim: SimulatedReplica) -> Outcome:
    model = job.model(sim.replica_id)
    inner = job.optimizer(model)
    arguments = job.arguments(sim.replica_id, sim.num_replicas)
    del arguments["replica_id"]  # the manager's
    diloco = DiLoCo(sim.manager, model, inner, **arguments)
    batches = job.batches(sim.replica_id, job.steps * job.accumulate)
    first = 1
    if job.resumes:
        newest = max(job.own_folder(sim.replica_id).iterdir(), key=lambda path: int(path.stem))
        saved = torch.load(newest, weights_only=True)
        model.load_state_dict(saved["local"])
        inner.load_state_dict(saved["inner"])
        diloco.load_state_dict(saved["diloco"])
        first = int(newest.stem) + 1
    evaluations, reports = {}, []
    with diloco:
        for step in range(first, (job.stops_at or job.steps) + 1):
            inner.zero_grad()
            for x, y in batches[(step - 1) * job.accumulate : step * job.accumulate]:
                diloco.note_batch((x, y))
                diloco.count_samples(len(x))
                (mse(model, x, y) / job.accumulate).backward()
            if step == job.steps:
                diloco.expect_last_step()
            inner.step()
            reports += diloco.pop_finished_syncs()
            job.after_step(sim.replica_id, step, model)
            if job.evaluate_every and step % job.evaluate_every == 0:
                evaluations[step] = _evaluate(job, sim.replica_id, diloco)
            if job.save_every and step % job.save_every == 0:
                folder = job.own_folder(sim.replica_id)
                folder.mkdir(parents=True, exist_ok=True)
                saved = {
                    "model": {k: v.clone() for k, v in diloco.global_parameters().items()},
                    "local": model.state_dict(),
                    "inner": inner.state_dict(),
                    "diloco": diloco.state_dict(),
                }
                torch.save(saved, folder / f"{step}.pt")
        diloco.final_sync()
        reports += diloco.pop_finished_syncs()
        return Outcome(
            digest=diloco.global_digest(),
            weights=weights_of(model),
            evaluations=evaluations,
            inner_steps=diloco.inner_steps,
            outer_steps=diloco.outer_step,
            contributions=[report.contribution for report in reports],
            warns_of_samples=any(report.equal_samples for report in reports),
        )


def _evaluate(job: Job, replica_id: int, diloco: DiLoCo) -> float:
    shown = job.model(replica_id)
    shown.load_state_dict(dict(diloco.global_parameters()))
    with torch.no_grad():
        return float(mse(shown, *held_out()))


def saved_weights(job: Job, replica_id: int, step: int) -> dict[str, torch.Tensor]:
    path = job.own_folder(replica_id) / f"{step}.pt"
    return torch.load(path, weights_only=True)["model"]
