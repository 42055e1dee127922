"""A run's folder as three groups leave it: a kill, a late join, retries, a change of the settings.

The numbers are those of a run of ``chaos``, rounded, and fewer of them.
"""

import json

from run_events import write_events

BEGAN = 1_795_443_800.0
GROUPS = 3
SYNCS = 40
STEPS = 10
"""Inner steps between two syncs."""
CHANGED_AT = 21
"""The outer step at which the settings' second version took effect."""
KILLED_AFTER, BACK_AT = 12, 16
"""The last outer step of group 1's first process, and the first of its second."""
JOINED_S = 20.0
STEP_S = 2.0
"""Seconds of a round."""


def sync_time(step):
    return BEGAN + JOINED_S + STEP_S * step


def sync(group, step):
    """A sync of ``events.jsonl``."""
    healed = group == 1 and step == BACK_AT
    own = {
        "outer_step": step,
        "fragment": 0,
        "num_participants": GROUPS - (KILLED_AFTER < step < BACK_AT),
        "contribution": 0.0 if healed else 1.0,
        "sync_seconds": 0.25,
        "wait_seconds": 0.1,
        "compute_fraction": 0.9,
        "bytes_sent": 86788,
        "bytes_float32": 86788,
        "group_cosine": 0.2 + 0.6 / step,
        "mean_norm_ratio": 0.8,
        "steps_lost": 0,
        "retries": 2 if (group, step) == (0, KILLED_AFTER + 1) else 0,
        "healed": int(healed),
        "outer_lr": 0.35 if step >= CHANGED_AT else 0.7,
        "settings_version": 1 + (step >= CHANGED_AT),
        **({"momentum_cosine": 0.4} if step > 1 else {}),
    }
    line = {f"diloco/{name}": value for name, value in own.items()}
    place = {"batch": STEPS * step, "inner_steps": STEPS * step, "time": sync_time(step)}
    return line | place | {"loss": 5.2 - 0.05 * step + 0.02 * group}


def start(began, joined, **before):
    return {"started": began, "joined": joined, "inner_steps": 0, "trained_at": None} | {
        "steps_before": 0,
        **before,
    }


def write_run(run_dir):
    """Write the folder and return it."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(f"callbacks: {{diloco: {{sync_every: {STEPS}}}}}\n")
    fault = {"at": STEP_S * KILLED_AFTER + 0.5, "kind": "kill", "victims": [1], "seconds": None}
    chaos = {"began_at": BEGAN + JOINED_S, "injected": [fault | {"ends_at": None}]}
    (run_dir / "chaos.json").write_text(json.dumps(chaos))
    for group in range(GROUPS):
        folder = run_dir / f"replica_{group}"
        folder.mkdir()
        starts = [start(BEGAN, BEGAN + JOINED_S)]
        if group == 1:
            died, steps = sync_time(KILLED_AFTER) + 0.5, STEPS * KILLED_AFTER
            again = start(died + 1.0, sync_time(BACK_AT), trained_at=died, steps_before=steps)
            starts.append(again | {"inner_steps": steps})
        steps = [s for s in range(1, SYNCS + 1) if group != 1 or not KILLED_AFTER < s < BACK_AT]
        status = {"phase": "training", "batch": STEPS * SYNCS, "max_batches": STEPS * SYNCS}
        status |= {"round": float(SYNCS), "inner_steps": STEPS * SYNCS, "outer_step": SYNCS}
        status |= {"loss": 3.2, "trained_at": sync_time(SYNCS)}
        result = {"replica_id": str(group), "inner_steps": STEPS * SYNCS, "outer_steps": SYNCS}
        result |= {"global_digest": "ab" * 32, "final_loss": 3.2, "eval": {}}
        write_events(folder, "start", *starts)
        write_events(folder, "sync", *(sync(group, step) for step in steps))
        write_events(folder, "end", result)
        (folder / "status.json").write_text(json.dumps(status))
    change = {"version": 2, "source": "tiny.yaml; outer_lr 0.7 -> 0.35", "outer_step": None}
    page = {"version": "0.1.0", "settings": {"outer_lr": 0.35}, "settings_version": 2}
    page |= {"settings_source": change["source"], "settings_changes": [change]}
    page |= {"events": [{"time": BEGAN, "text": "replica group 0 registered from here"}]}
    (run_dir / "page.json").write_text(json.dumps(page))
    return run_dir
