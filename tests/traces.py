"""Events of a group whose times are worked out by hand, for the tests of what benchmarks compute.

A round has ten inner steps of 0.1 s, and a sync blocks for 0.2 s, of which it waits 0.05 s.
"""

import json

from run_events import write_events


def start(joined, *, started=0.0, steps=0, trained_at=None, before=0):
    line = {"started": started, "joined": joined, "inner_steps": steps}
    return line | {"trained_at": trained_at, "steps_before": before}


def sync(at, outer_step, steps, *, blocked=0.2, waited=0.05, lost=0):
    line = {"time": at, "diloco/outer_step": outer_step, "inner_steps": steps, "loss": 1.0}
    line |= {"diloco/sync_seconds": blocked, "diloco/wait_seconds": waited}
    line |= {"diloco/bytes_sent": 0, "diloco/bytes_float32": 0, "diloco/fragment": 0}
    line |= {"diloco/compute_fraction": 0.8, "diloco/num_participants": 2}
    return line | {"diloco/steps_lost": lost}


def rounds(began, number, *, outer_step=0, steps=0, step_s=0.1, **more):
    ends = [began + (10 * step_s + 0.2) * i for i in range(1, number + 1)]
    return [sync(at, outer_step + i, steps + 10 * i, **more) for i, at in enumerate(ends, 1)]


def write_group(run_dir, replica_id, starts, syncs, status=None, *, is_finished=True):
    folder = run_dir / f"replica_{replica_id}"
    folder.mkdir()
    write_events(folder, "start", *starts)
    write_events(folder, "sync", *syncs)
    (folder / "status.json").write_text(json.dumps(status or {}))
    if is_finished:
        result = {"inner_steps": 40, "outer_steps": 4, "global_digest": "ab" * 32}
        write_events(folder, "end", result | {"final_loss": 1.0})
