"""A run's folder as three groups leave it: a kill, a late join, retries, an evaluation."""

import json

from recorded_groups import sync_line, write_group
from run_events import write_events

BEGAN = 1_795_443_800.0
GROUPS = 3
SYNCS = 40
STEPS = 10
"""Inner steps between two syncs."""
KILLED_AFTER, BACK_AT = 12, 16
"""The last outer step of group 1's first process, and the first of its second."""
JOINED_S = 20.0
STEP_S = 2.0
"""Seconds of a round."""


def sync_time(step):
    return BEGAN + JOINED_S + STEP_S * step


def sync(group, step):
    """A sync of ``events.jsonl``."""
    number = GROUPS - (KILLED_AFTER < step < BACK_AT)
    own = {
        "steps_lost": 0,
        "retries": 2 if (group, step) == (0, KILLED_AFTER + 1) else 0,
        "healed": int(group == 1 and step == BACK_AT),
        **({"global_digest": f"{step:02x}" * 32} if step % 10 == 0 else {}),
    }
    place = {"batch": STEPS * step, "time": sync_time(step)}
    # A joiner's first sync has no steps before it.
    place |= {"loss": None if own["healed"] else 5.2 - 0.05 * step + 0.02 * group}
    return sync_line(step, digest=None, participants=number, **place) | {
        f"diloco/{name}": value for name, value in own.items()
    }


def start(began, joined, trained_at=None):
    return {"time": joined, "started": began, "joined": joined, "trained_at": trained_at}


def write_run(run_dir):
    """Write the folder and return it."""
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"callbacks: {{diloco: {{sync_every: {STEPS}}}}}\n")
    for group in range(GROUPS):
        folder = run_dir / f"replica_{group}"
        died = sync_time(KILLED_AFTER) + 0.5
        write_events(folder, "start", start(BEGAN, BEGAN + JOINED_S))
        steps = range(1, SYNCS + 1)
        if group == 1:
            write_events(folder, "sync", *(sync(1, step) for step in range(1, KILLED_AFTER + 1)))
            write_events(folder, "error", {"time": died, "error": "OSError: the link is down"})
            write_events(folder, "start", start(died + 1.0, sync_time(BACK_AT), died))
            steps = range(BACK_AT, SYNCS + 1)
        write_events(folder, "sync", *(sync(group, step) for step in steps))
        evaluation = {"time": sync_time(SYNCS), "batch": STEPS * SYNCS, "eval": {"ppl": 24.5}}
        write_events(folder, "evaluation", evaluation)
        result = {"replica_id": str(group), "inner_steps": STEPS * SYNCS, "outer_steps": SYNCS}
        result |= {"global_digest": "28" * 32, "final_loss": 3.2, "eval": {}}
        write_events(folder, "end", result | {"time": sync_time(SYNCS)})
        place = {"batch": STEPS * SYNCS, "max_batches": STEPS * SYNCS, "outer_step": SYNCS}
        write_group(run_dir, group, inner_steps=STEPS * SYNCS, **place)
    page = {
        "version": "0.1.0",
        "settings": {"outer_lr": 0.35},
        "defaults": {"wire_format": "float32"},
        "settings_source": "tiny.yaml",
        "replicas": [{"replica_id": "0", "host": "<b>here</b>", "world_size": 2}],
        "datasets": [
            {
                "dataset_id": "c4",
                "length": 2000,
                "epochs": [{"epoch": 0, "length": 2000, "done": 500, "leased": 64}],
            }
        ],
        "events": [{"time": BEGAN, "text": "<img src=x onerror=alert(1)> has connected"}],
    }
    (run_dir / "page.json").write_text(json.dumps(page))
    return run_dir
