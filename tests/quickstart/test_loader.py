"""The samples each rank of each group reads. Run: pytest tests/quickstart/test_loader.py.

Real: files, torch's DataLoader, torchft's sampler, Composer's evaluation loop. Ranks are played
one after the other, by telling Composer's `dist` through the environment which one it is.
"""

import pytest
import torch

from examples.quickstart.text import TextBytes, text_loader


@pytest.fixture
def folder(tmp_path):
    """40 windows of 4 bytes to train on (and a last target), every one of them different."""
    (tmp_path / "a").write_text("".join(f"{i:03};" for i in range(40)) + ";")
    (tmp_path / "b").write_text("".join(f"{i:03}:" for i in range(7)) + ":")
    assert len(TextBytes(tmp_path, max_seq_len=4)) == 40
    return str(tmp_path)


def read(loader):
    return [bytes(ids.tolist()).decode() for batch in loader for ids in batch["input_ids"]]


def play_rank(monkeypatch, rank):
    """Have the environment say that this process is this rank of two."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")


def read_shares(monkeypatch, folder, *, epoch=0, seed=0):
    """What 2 groups of 2 ranks read in an epoch, as one list per rank."""
    shares = []
    for replica_rank in range(2):
        for rank in range(2):
            play_rank(monkeypatch, rank)
            loader = text_loader(
                path=folder,
                max_seq_len=4,
                batch_size=5,
                seed=seed,
                replica_rank=replica_rank,
                num_replica_groups=2,
            )
            loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            shares.append(read(loader))
    return shares


def test_a_sample_is_a_window_and_the_bytes_that_follow_also_in_the_next_file(tmp_path):
    for name, text in (("1", "abc"), ("2", "def"), ("3", "held out")):
        (tmp_path / name).write_text(text)
    dataset = TextBytes(tmp_path, max_seq_len=2)
    # 6 bytes hold two windows of 2 with their targets; the last byte is left over.
    samples = [{key: bytes(value.tolist()) for key, value in s.items()} for s in dataset]
    assert samples == [
        {"input_ids": b"ab", "labels": b"bc"},
        {"input_ids": b"cd", "labels": b"de"},
    ]
    assert dataset[0]["input_ids"].dtype == dataset[0]["labels"].dtype == torch.int64


def test_shares_of_two_groups_of_two_ranks_are_disjoint_and_cover_the_text(folder, monkeypatch):
    first, again, next_epoch, seed = (
        read_shares(monkeypatch, folder, **own) for own in ({}, {}, {"epoch": 1}, {"seed": 1})
    )
    for shares in (first, next_epoch, seed):
        assert [len(share) for share in shares] == [10, 10, 10, 10]
        assert len(set().union(*shares)) == 40
    assert first == again
    assert set(first[0]) != set(next_epoch[0]) and set(first[0]) != set(seed[0])


def test_the_order_does_not_touch_torchs_default_generator(folder):
    before = torch.get_rng_state()
    read(text_loader(path=folder, max_seq_len=4, batch_size=5))
    assert torch.equal(torch.get_rng_state(), before)


def test_every_group_evaluates_all_held_out_text_shared_among_its_ranks(folder, monkeypatch):
    def held_out(replica_rank):
        return read(
            text_loader(
                path=folder,
                max_seq_len=4,
                batch_size=2,
                split="eval",
                replica_rank=replica_rank,
                num_replica_groups=2,
            )
        )

    everything = held_out(0)
    assert sorted(everything) == [f"{i:03}:" for i in range(7)]
    assert everything != sorted(everything)  # scattered, so that the first batches are a sample
    assert held_out(1) == everything
    play_rank(monkeypatch, 1)
    assert held_out(0) == [*everything[1::2], everything[0]]  # 7 is odd: one comes twice


def test_evaluations_see_the_same_first_batches_at_every_step(folder):
    loader = text_loader(path=folder, max_seq_len=4, batch_size=2, split="eval")
    first = read(loader)
    loader.sampler.set_epoch(17)  # pyright: ignore[reportAttributeAccessIssue]  # as Composer does
    assert read(loader) == first


def test_a_batch_larger_than_a_ranks_share_is_refused(folder):
    with pytest.raises(ValueError, match="20 samples for each rank, less .* batch_size=21"):
        text_loader(path=folder, max_seq_len=4, batch_size=21, num_replica_groups=2)
