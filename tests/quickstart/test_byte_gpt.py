"""The small model of the main job. Run: pytest tests/quickstart/test_byte_gpt.py."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from examples.quickstart.byte_gpt import BitsPerByte, ByteGPT


def small_model(**changes: Any):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 16}
    return ByteGPT(**(sizes | changes))


def random_batch(length=16):
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 256, (4, length + 1), generator=generator)
    return {"input_ids": text[:, :-1], "labels": text[:, 1:]}


def test_a_byte_changes_nothing_before_itself():
    model, batch = small_model(), random_batch()
    before = model(batch)
    batch["input_ids"][:, 9] += 1
    batch["input_ids"] %= 256
    after = model(batch)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_an_untrained_model_spends_about_eight_bits_on_a_byte():
    model, batch = small_model(), random_batch()
    assert model.loss(model(batch), batch).item() / math.log(2) == pytest.approx(8, abs=0.2)


@pytest.mark.parametrize(("tied", "num_embeddings"), [(True, 1), (False, 2)])
def test_the_size_is_the_one_worked_out_by_hand(tied, num_embeddings):
    d = 32
    blocks = 2 * (4 * d * d + 2 * 4 * d * d + 2 * 2 * d)
    expected = num_embeddings * 256 * d + 16 * d + blocks + 2 * d
    model = small_model(tie_word_embeddings=tied)
    assert sum(p.numel() for p in model.parameters()) == expected


def test_a_shorter_sequence_is_fine_and_a_longer_one_is_refused():
    model = small_model()
    assert model(random_batch(length=5)).shape == (4, 5, 256)
    with pytest.raises(ValueError, match="17 bytes is longer than the model's max_seq_len=16"):
        model(random_batch(length=17))


def test_a_width_that_the_heads_cannot_share_is_refused():
    with pytest.raises(ValueError, match="d_model=30 .* n_heads=4. Use d_model=32"):
        small_model(d_model=30)


def test_bits_per_byte_weighs_bytes_and_not_batches():
    metric = BitsPerByte()
    # 4 bytes at 1/2 each cost 1 bit, 2 bytes at 1/16 each cost 4: (4 * 1 + 2 * 4) / 6 = 2 bits.
    metric.update(torch.zeros(2, 2, 2), torch.tensor([[0, 1], [1, 0]]))
    metric.update(torch.zeros(1, 2, 16), torch.tensor([[3, 9]]))
    assert metric.compute().item() == pytest.approx(2)
    # Both sums are added between ranks, so that two of them weigh bytes as well.
    ranks = BitsPerByte(), BitsPerByte()
    ranks[0].update(torch.zeros(2, 2, 2), torch.tensor([[0, 1], [1, 0]]))
    ranks[1].update(torch.zeros(1, 2, 16), torch.tensor([[3, 9]]))
    ranks[0].merge_state(ranks[1])
    assert ranks[0].compute().item() == pytest.approx(2)


def test_only_evaluation_has_a_metric_and_the_model_updates_it():
    model, batch = small_model(), random_batch()
    assert model.get_metrics(is_train=True) == {}
    metric = model.get_metrics(is_train=False)["BitsPerByte"]
    outputs = model.eval_forward(batch)
    model.update_metric(batch, outputs, metric)
    expected = F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()) / math.log(2)
    assert metric.compute().item() == pytest.approx(expected.item())
    assert model.eval_forward(batch, outputs) is outputs
