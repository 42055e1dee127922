"""Where Composer jobs save, and which of their checkpoints they resume from after a kill.

Run: pytest tests/callback/test_checkpoint_savers.py. Real: Composer's Trainer, savers and
checkpoints. The network is the simulation's.
"""

import logging
import os
from types import SimpleNamespace

import pytest
from composer.callbacks import CheckpointSaver
from harness.trainers import fit_alone, fit_groups, saving, trainer_of
from run_events import events_of

from composer_replication.callback.checkpoint_savers import folders_of, pattern_of
from composer_replication.simulation import SimulationError

pytestmark = pytest.mark.slow

RESUMES = {"autoresume": True, "run_name": "job"}


def torn(folder):
    path = folder / "ba6.pt"
    os.truncate(path, path.stat().st_size // 2)


def without_latest(folder):
    (folder / "latest-rank0.pt").unlink()


def whole_before_latest(folder):
    without_latest(folder)
    (folder / "latest-rank0.pt").symlink_to("ba3.pt")


def torn_before_latest(folder):
    """Killed while it wrote ba6.pt: ``latest`` names the one before."""
    torn(folder)
    whole_before_latest(folder)


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize(
    ("damage", "batch"),
    [(torn, 3), (without_latest, 6), (torn_before_latest, 3), (whole_before_latest, 6)],
)
def test_a_group_killed_while_it_saved_resumes_from_what_is_whole(
    tmp_path, caplog, damage, batch, overwrites
):
    saves = saving(tmp_path, 0) | RESUMES | {"save_overwrite": overwrites}
    job = {"diloco": {"run_dir": str(tmp_path / "run")}}
    digest = fit_alone(max_duration="9ba", **job).result["global_digest"]
    fit_alone(max_duration="6ba", **saves)
    damage(tmp_path / "0")
    if damage is whole_before_latest and overwrites:
        batch = 3  # somebody may have gone back to it
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        job = {"diloco": {"run_dir": str(tmp_path / "run2")}}
        resumed = fit_alone(max_duration="9ba", **job, **saves)
    (resume,) = events_of(tmp_path / "run2/replica_0", "resume")
    assert resume["batch"] == batch
    assert resumed.result["global_digest"] == digest
    if damage in (torn, torn_before_latest):
        assert f"Not whole, since the group died while it saved: {tmp_path}" in caplog.text
        assert "ba6.pt (is cut off)" in caplog.text and "continues from ba3.pt" in caplog.text
        assert (tmp_path / "0" / "torn-ba6.pt").exists()
    elif batch == 6:
        assert "did not name the newest whole checkpoint" in caplog.text


def test_with_nothing_whole_it_takes_over_the_others_state_or_says_what_is_torn(tmp_path):
    run = {"run_dir": str(tmp_path / "run"), "sync_every": 3}
    saves = saving(tmp_path, 0, "6ba") | RESUMES
    fit_alone(max_duration="6ba", diloco=run, **saves)
    torn(tmp_path / "0")
    with pytest.raises(SimulationError, match="NothingToContinueFromError") as caught:
        fit_alone(max_duration="9ba", diloco=run, **saves)
    assert f"{tmp_path / '0' / 'ba6.pt'} (is cut off). It begins with torn- now" in str(
        caught.value
    )


def test_a_torn_checkpoint_that_was_asked_for_is_named_with_what_to_do(tmp_path):
    fit_alone(max_duration="6ba", **saving(tmp_path, 0))
    torn(tmp_path / "0")
    with pytest.raises(SimulationError, match=r"ba6.pt' is not whole \(is cut off\): load the"):
        fit_alone(max_duration="9ba", load_path=tmp_path / "0" / "ba6.pt")


def test_a_checkpoint_without_our_state_is_no_reason_to_stay_away_from_others(tmp_path):
    """It is one from before the job had the callback, and the run has begun."""
    plain = saving(tmp_path, 1)
    trainer = trainer_of(max_duration="3ba", replica_id=1, **plain)
    trainer.fit()
    trainer.close()
    run = {"run_dir": str(tmp_path / "run"), "sync_every": 3}
    fit_alone(max_duration="6ba", diloco=run, **saving(tmp_path, 0))

    def own(group):
        return {"load_path": tmp_path / f"{group}/ba{6 - 3 * group}.pt"}

    first, second = fit_groups(2, own=own, diloco=run, max_duration="12ba")
    assert first.result["global_digest"] == second.result["global_digest"]
    assert second.result["outer_steps"] == 4


def test_two_groups_with_one_save_folder_are_refused_before_they_train(tmp_path):
    with pytest.raises(SimulationError, match="in use by process") as caught:
        fit_groups(2, **saving(tmp_path, "both"))
    assert "give each replica group a save_folder of its own" in str(caught.value)
    assert not [*(tmp_path / "both").glob("*.pt")]


def test_folders_have_composers_placeholders_filled_in_and_remote_ones_their_place(tmp_path):
    saver = CheckpointSaver(str(tmp_path / "{run_name}" / "{rank}"), "ep{epoch}-ba{batch}.pt")
    state = SimpleNamespace(
        callbacks=[saver], run_name="a[b]", fsdp_sharded_state_dict_enabled=False
    )
    logger = SimpleNamespace(destinations=[])
    assert [*folders_of(state, logger)] == [f"{tmp_path}/a[b]/0"]
    assert pattern_of(saver, state) == f"{tmp_path}/a[[]b]/0/ep*-ba*.pt"
    saver.remote_uploader = SimpleNamespace(remote_backend_name="s3", remote_bucket_name="bucket")
    saver.remote_file_name.filename = "out/{run_name}/ep{epoch}-ba{batch}.pt"
    assert [*folders_of(state, logger)] == ["s3://bucket/out/a[b]"]
