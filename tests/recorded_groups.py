"""Folders of replica groups as their callbacks would write them, for tests of what is shown."""

import json
import time

from run_events import write_events

from composer_replication.launch.display import LiveRun
from composer_replication.launch.group import Group


def sync_line(outer_step, *, digest="ab", participants=2, **changes):
    """A sync of ``events.jsonl``. ``digest``: two characters, repeated; None for none."""
    values = {"outer_step": outer_step, "fragment": 0, "num_participants": participants}
    values |= {"sync_seconds": 0.25, "compute_fraction": 0.9, "bytes_sent": 4000}
    values |= {"bytes_float32": 4000} | ({"global_digest": digest * 32} if digest else {})
    line = {f"diloco/{name}": value for name, value in values.items()}
    return line | {"inner_steps": 10 * outer_step, "loss": 4.0} | changes


def write_group(run_dir, replica_id, *, syncs=(), **status):
    """Write what a group of 200 batches says at batch 25, with these changes and further syncs."""
    folder = run_dir / f"replica_{replica_id}"
    folder.mkdir(parents=True, exist_ok=True)
    position = {"phase": "training", "batch": 25, "max_batches": 200, "inner_steps": 25}
    position |= {"sync_every": 10}
    position |= {"outer_step": 2, "loss": 3.14159, "seconds_left": 75.0}
    position |= {"trained_at": time.time()}
    (folder / "status.json").write_text(json.dumps(position | status))
    write_events(folder, "sync", *syncs)
    return folder


def group_of(folder):
    """A group as the display reads it."""
    group = Group(folder)
    group.read()
    return group


def run_of(run_dir, count):
    """A run as the display reads it."""
    run = LiveRun(run_dir, range(count))
    run.update()
    return run


def recorded(run_dir, count, **status):
    """A run of groups that have taken two outer steps."""
    syncs = [sync_line(step, participants=count) for step in (1, 2)]
    for i in range(count):
        write_group(run_dir, i, syncs=syncs, **status)
    return run_of(run_dir, count)
