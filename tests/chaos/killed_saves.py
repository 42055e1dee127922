"""Kills groups at each of twelve moments of a save, and looks whether the run goes on.

python tests/chaos/killed_saves.py composer|hf|plain [--both] [MOMENT ...], from the root of the
repository. The Trainer's moments need an environment with transformers.

One group of two is killed in its second save, as by ``kill -9``: it has to come back by itself.
With ``--both`` both are, and then the launcher: the same command with ``--resume`` has to go on
from a whole checkpoint. Each keeps one checkpoint only. Where samples are leased none is trained
twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
from chaos.saves.dying import Moment, num_died_of  # noqa: E402
from forked_commands import ForkedCommand  # noqa: E402
from waiting import wait_until  # noqa: E402

from composer_replication.replica.lighthouse import start_lighthouse  # noqa: E402

SAVES = Path(__file__).parent / "saves"
EVERY = 10
"""Steps between two saves."""
STEPS = {"composer": 80, "hf": 60, "plain": 200}
LIMIT_S = 600.0

_OF_HF = f"*/checkpoint-{2 * EVERY}"
_OF_COMPOSER = f"*/ep0-ba{2 * EVERY}-rank0.pt"
_OF_PLAIN = "*/plain_?.pt.part"


def _written(path: str, left: float | None = None, skip: int = 0) -> Moment:
    return Moment("written", path, left, skip)


_TORN = _written(_OF_COMPOSER, 0.5)
MOMENTS: Mapping[str, Mapping[str, Sequence[Moment]]] = {
    "hf": {
        "before anything": [Moment("os.mkdir", _OF_HF)],
        "in diloco.pt": [_written(f"{_OF_HF}/.diloco.pt.part", 0.5)],
        "before diloco.pt has its name": [Moment("os.rename", f"{_OF_HF}/.diloco.pt.part")],
        "at the model's first byte": [_written(f"{_OF_HF}/model.safetensors", 0.0)],
        "in the model": [_written(f"{_OF_HF}/model.safetensors", 0.5)],
        "after the model": [_written(f"{_OF_HF}/model.safetensors")],
        "in the optimizer": [_written(f"{_OF_HF}/optimizer.pt", 0.5)],
        "in the random states": [_written(f"{_OF_HF}/rng_state.pth", 0.9)],
        "in trainer_state.json": [_written(f"{_OF_HF}/trainer_state.json", 0.5)],
        "before the older one is removed": [Moment("shutil.rmtree", f"*/checkpoint-{EVERY}")],
        "while the older one is removed": [Moment("os.rmdir", f"*/checkpoint-{EVERY}")],
        "and again while it sets aside": [
            _written(f"{_OF_HF}/model.safetensors", 0.5),
            Moment("os.rename", _OF_HF),
        ],
    },
    "composer": {
        "before anything": [Moment("open", _OF_COMPOSER)],
        "at the first byte": [_written(_OF_COMPOSER, 0.0)],
        "at a tenth": [_written(_OF_COMPOSER, 0.1)],
        "in the middle": [_TORN],
        "at the last byte": [_written(_OF_COMPOSER, 1.0)],
        "before latest is removed": [Moment("os.remove", "*/latest-rank0.pt", skip=1)],
        "after latest is removed": [Moment("os.symlink", "*/latest-rank0.pt", skip=1)],
        "before the older one is removed": [Moment("os.remove", f"*/ep0-ba{EVERY}-rank0.pt")],
        "in the third save": [_written(f"*/ep0-ba{3 * EVERY}-rank0.pt", 0.5)],
        "and again while it sets aside": [_TORN, Moment("os.rename", _OF_COMPOSER)],
        "and again before latest": [
            Moment("os.symlink", "*/latest-rank0.pt", skip=1),
            Moment("os.symlink", "*/.latest-rank0.pt"),
        ],
        "and again while latest is made": [
            Moment("os.symlink", "*/latest-rank0.pt", skip=1),
            Moment("os.rename", "*/.latest-rank0.pt"),
        ],
    },
    "plain": {
        "before anything": [Moment("open", _OF_PLAIN, skip=1)],
        **{
            f"at {left:.0%}": [_written(_OF_PLAIN, left, skip=1)]
            for left in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
        },
        "before it has its name": [Moment("os.rename", _OF_PLAIN, skip=1)],
        "in the first save": [_written(_OF_PLAIN, 0.5)],
        "in the third save": [_written(_OF_PLAIN, 0.5, skip=2)],
    },
}


def die(host: str, name: str, folder: Path, *, both: bool = False) -> str:
    """Kill one group, or both, in a moment of a save.

    Returns:
        What is wrong; empty if the run went on.
    """
    moments = [asdict(moment) for moment in MOMENTS[host][name]]
    deaths = {group: moments for group in ("0", "1")[: 1 + both]}
    paths = os.pathsep.join([str(ROOT / "tests"), str(SAVES), str(ROOT)])
    environ = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    environ |= {"DIES": json.dumps(deaths), "DIES_MARKS": str(folder)}
    train = _train_plain if host == "plain" else _train
    wrong = train(host, folder, environ, both)
    missing = [g for g in deaths if num_died_of(folder / f"died_{g}") != len(moments)]
    return f"group {missing[0]} did not die in this moment" if missing and not wrong else wrong


def _train(host: str, folder: Path, environ: Mapping[str, str], both: bool) -> str:
    ours = [sys.executable, "-m", "composer_replication", "launch", "--replicas", "2"]
    ours += ["--set", "sync_every=5", "--run-dir", str(folder / "run")]
    job = [sys.executable, str(SAVES / "dying.py"), str(SAVES / f"{host}_job.py"), str(folder)]
    job += [str(STEPS[host]), str(EVERY)]
    with (folder / "said.txt").open("w") as said:
        start = {"stdout": said, "stderr": said, "env": environ, "start_new_session": True}
        process = ForkedCommand([*ours, "--", *job], **start)
        if both:
            deaths = json.loads(environ["DIES"])
            wait_until(
                lambda: all(num_died_of(folder / f"died_{g}") == len(deaths[g]) for g in deaths),
                LIMIT_S,
            )
            process.kill()
            process.wait()
            time.sleep(6.0)  # what it has started meanwhile ends by itself
            process = ForkedCommand([*ours, "--resume", "--", *job], **start)
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(30.0)
            status = f"none after {LIMIT_S:.0f} s"
    if status:
        return f"exit status {status}:\n{(folder / 'said.txt').read_text()[-3000:]}"
    for group in ("0", "1")[: 1 + both]:
        lines = (folder / "run" / f"replica_{group}" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        kinds = [each["event"] for each in events]
        if kinds.count("start") < 2:
            return f"group {group} was not back: {kinds}"
        if both and not any(e["event"] == "resume" and e["batch"] >= EVERY for e in events):
            return f"group {group} did not go on from a checkpoint"
    return _samples_twice(folder) if host == "composer" else ""


def _samples_twice(folder: Path) -> str:
    from integration.leased_group import what_is_in

    trained = torch.load(folder / "run" / "replica_1" / "trained.pt")
    ((is_in, is_in_twice),) = what_is_in(trained["moments"])
    if is_in.all() and not is_in_twice.any():
        return ""
    return f"{(~is_in).sum()} samples are missing, {is_in_twice.sum()} were trained twice"


def _train_plain(host: str, folder: Path, environ: Mapping[str, str], both: bool) -> str:
    lighthouse = start_lighthouse(bind="127.0.0.1:0")
    groups: dict[int, subprocess.Popen] = {}
    script = [str(SAVES / "dying.py"), str(ROOT / "examples" / "plain_loop.py"), str(STEPS[host])]

    def start(group: int) -> None:
        own = {"REPLICA_GROUP_ID": str(group), "NUM_REPLICA_GROUPS": "2"}
        own["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
        own["WAITS"] = json.dumps(asdict(Moment("open", _OF_PLAIN, skip=2)))
        with (folder / f"said_{group}.txt").open("a") as said:
            groups[group] = ForkedCommand(
                [sys.executable, *script],
                stdout=said,
                stderr=said,
                env={**environ, **own},
                cwd=folder,
            )

    try:
        for group in (0, 1):
            start(group)
        until = time.monotonic() + LIMIT_S
        while any(process.poll() != 0 for process in groups.values()):
            for group, process in [*groups.items()]:
                if process.poll() == -signal.SIGKILL:
                    start(group)
                elif process.poll() or time.monotonic() > until:
                    said = (folder / f"said_{group}.txt").read_text()[-2000:]
                    return f"group {group} has status {process.poll()}:\n{said}"
            time.sleep(0.05)
    finally:
        for process in groups.values():
            process.kill()
            process.wait()
        lighthouse.shutdown()
    ends = [(folder / f"said_{group}.txt").read_text().splitlines()[-1] for group in groups]
    return "" if len({*ends}) == 1 and ends[0].startswith("global parameters") else str(ends)


if __name__ == "__main__":
    import tempfile

    host, *named = [word for word in sys.argv[1:] if word != "--both"]
    failed = 0
    for name in named or MOMENTS[host]:
        folder = Path(tempfile.mkdtemp(prefix=f"killed-{host}-"))
        began = time.monotonic()
        wrong = die(host, name, folder, both="--both" in sys.argv)
        failed += bool(wrong)
        print(
            f"{host}, {name}: {wrong or 'it went on'} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    sys.exit(bool(failed))
