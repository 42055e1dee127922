"""Chunks of a flat buffer: together they are all of it, and each knows its parts of the tensors."""

from types import SimpleNamespace

import pytest
import torch

from composer_replication.diloco import flat_chunks
from composer_replication.diloco.division import Division
from composer_replication.diloco.flat_chunks import Layout, Squares

LIMIT = 50


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(flat_chunks, "CHUNK", LIMIT)


def tensors():
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=draw) for shape in [(7, 3), (), (0, 4), (160,), (12, 5)]]
    made.append(torch.randn(6, 15, generator=draw).t())  # scattered
    made += [torch.randn(size, generator=draw).bfloat16() for size in (30, 45)]
    return [*made, torch.randn(70, generator=draw), torch.randn(5, generator=draw)]


def flat_of(layout, values):
    flat = torch.full((layout.num_elements,), torch.nan)
    for chunk in layout.chunks:
        chunk.read(values, flat[chunk.place])
    return flat


def test_they_make_up_the_buffer_and_end_where_a_kind_ends():
    values = tensors()
    layout = Layout(Division(values), values, num_parameters=8)
    assert torch.equal(flat_of(layout, values), torch.cat([t.reshape(-1).float() for t in values]))
    places = [chunk.place for chunk in layout.chunks]
    assert [place.start for place in places[1:]] == [place.stop for place in places[:-1]]
    for chunk in layout.chunks:
        assert len({(values[index].dtype, index < 8) for index in chunk.indices}) == 1
        size = chunk.place.stop - chunk.place.start
        assert size == sum(chunk.sizes) <= LIMIT


def test_on_an_accelerator_what_is_rounded_has_room_behind_its_chunk(monkeypatch):
    monkeypatch.setattr(flat_chunks, "LAST_SCRATCH", 64)
    values = [tensor.to("meta") for tensor in tensors() if tensor.is_contiguous()]
    layout = Layout(Division(values), values)
    assert len(layout.chunks) == 3 < len(layout.chunks_to_pack)  # they end where a dtype does
    places = [chunk.place for chunk in layout.chunks_to_pack]
    assert [0, *(place.stop for place in places)] == [
        *(place.start for place in places),
        layout.num_elements,
    ]
    for place in places:
        size = place.stop - place.start
        assert size <= 32 or 2 * size <= 4 * (layout.num_elements - place.stop)


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_what_is_written_is_what_was_read(alpha):
    values, into = tensors(), [torch.ones_like(t) for t in tensors()]
    layout = Layout(Division(values), values)
    flat = flat_of(layout, values)
    for chunk in layout.chunks:
        chunk.write(flat[chunk.place], into, alpha, unmixed={0, 6})
    for index, (t, own) in enumerate(zip(values, into, strict=True)):
        kept = 0.0 if index in (0, 6) else alpha
        assert torch.allclose(own.float(), (1 - kept) * t.float() + kept, atol=1e-2)
        assert kept or torch.equal(own, t)
        assert own.stride() == t.stride()


def test_a_tensor_that_becomes_scattered_is_written():
    values = [torch.randn(40, 3), torch.randn(9)]
    layout = Layout(Division(values), values)
    assert len(layout.chunks) == 3
    values[0] = values[0].t().contiguous().t()
    flat = flat_of(layout, values)
    assert torch.equal(flat, torch.cat([t.reshape(-1) for t in values]))
    for chunk in layout.chunks:
        chunk.write(torch.zeros_like(flat[chunk.place]), values)
    assert not any(t.any() for t in values)


def test_the_shares_of_all_ranks_make_up_the_buffer():
    values = tensors()  # of which one is scattered, and divided within its rows
    read = []
    for rank in range(4):
        ranks = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 4)
        layout = Layout(Division(values, ranks), values)
        assert all(chunk.place.stop - chunk.place.start <= LIMIT for chunk in layout.chunks)
        read.append(flat_of(layout, values))
    assert torch.equal(torch.cat(read), torch.cat([t.reshape(-1).float() for t in values]))


def test_a_row_is_never_cut():
    values = [torch.randn(3), torch.randn(4, 70).t().contiguous().t(), torch.randn(7)]
    layout = Layout(Division(values), values)
    assert [c.place.stop for c in layout.chunks] == [3, 73, 143, 213, 283, 290]
    assert torch.equal(flat_of(layout, values), torch.cat([t.reshape(-1) for t in values]))


def test_squares_add_up_by_tensor_however_the_buffer_is_cut():
    values = [t.float() for t in tensors()]
    layout = Layout(Division(values), values)
    flat = flat_of(layout, values)
    for step in (13, 64, 1000):
        squares = Squares(len(values))
        for start in range(0, flat.numel() + 7, step):  # as with padding behind it
            chunk = layout.chunk(start, start + step)
            squares.add(flat[chunk.place].split(chunk.sizes), chunk.indices)
        expected = torch.stack([t.double().square().sum() for t in values])
        assert torch.allclose(squares.by_tensor, expected, rtol=1e-6)
