"""A supervisor over groups whose lives are a script, for the tests."""

import json

from run_events import write_events

from composer_replication.launch import supervision
from composer_replication.launch.processes import Interrupts, ReplicaGroups
from composer_replication.launch.supervision import Supervisor


class Groups(ReplicaGroups):
    """Exit statuses by script: what each life of a group ends with, None while it goes on."""

    def __init__(self, folder, lives):
        super().__init__(folder, Interrupts())
        self.lives = {replica_id: list(each) for replica_id, each in lives.items()}
        self.started = []
        self.ended = []

    def exit_statuses(self):
        return {replica_id: each[0] for replica_id, each in self.lives.items()}

    def start(self, replica_id):
        self.started.append(replica_id)
        self.lives[replica_id].pop(0)

    def end(self, replica_id):
        self.ended.append(replica_id)


def write(run_dir, *replica_ids, phase="training", syncs=1):
    for replica_id in replica_ids:
        folder = run_dir / f"replica_{replica_id}"
        folder.mkdir(exist_ok=True)
        (folder / "status.json").write_text(json.dumps({"phase": phase}))
        (folder / "events.jsonl").unlink(missing_ok=True)
        write_events(folder, "sync", *({"time": float(number)} for number in range(1, syncs + 1)))


def supervise(folder, lives, max_restarts=3, on_look=lambda groups, looks: None, **more):
    groups, said = Groups(folder, lives), []
    looks = []
    more = {"first_pause_s": supervision.FIRST_PAUSE_S, "say": said.append} | more
    supervisor = Supervisor(groups, groups.start, list(lives), max_restarts, **more)

    def show(supervisor):
        looks.append({id: record.end or None for id, record in supervisor.records.items()})
        on_look(groups, looks)
        assert len(looks) < 5_000, "it does not end"

    supervisor.said = said
    return supervisor.watch(show), supervisor, groups
