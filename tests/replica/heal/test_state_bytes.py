"""A state as bytes, and back. Run: pytest tests/replica/heal/test_state_bytes.py"""

import struct

import numpy as np
import pytest
import torch

from composer_replication.replica.heal.state_bytes import (
    HASH_CHUNK,
    PeerError,
    digest_of_bytes,
    dump,
    load,
    memory,
)

CONTENT = {
    "outer_step": 3,
    "names": ["a", ("b", None)],
    "float32": torch.arange(5.0),
    "a number": torch.tensor(7),
    "nothing": torch.zeros(0, 4),
    "bfloat16, transposed": torch.arange(6.0, dtype=torch.bfloat16).reshape(3, 2).t(),
    "bool": torch.tensor([True, False, True]),
}


def joined(content):
    return memoryview(bytearray(b"".join(dump(content))))


def test_what_went_in_comes_out():
    found = load(joined(CONTENT))
    assert list(found) == list(CONTENT)
    for name, value in CONTENT.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value


def test_equal_states_have_equal_bytes_whichever_parts_of_them_are_the_same_object():
    key = "outer_step"
    other = "".join([*key])
    assert other == key and other is not key
    one, same = ({key: 3, "schedule": [{each: 1}]} for each in (key, other))
    assert joined(one) == joined(same)


def test_numbers_of_numpy_arrive_as_pythons():
    # As torch's schedulers hold them if a learning rate was computed with NumPy.
    sent = {"base_lrs": [np.float64(0.5)], "step": np.int64(3), "is_last": np.bool_(True)}
    found = load(joined(sent))
    assert found == {"base_lrs": [0.5], "step": 3, "is_last": True}
    assert [*map(type, (*found["base_lrs"], found["step"], found["is_last"]))] == [float, int, bool]


def test_the_digest_is_that_of_the_bytes_however_they_are_divided():
    body = memory(2 * HASH_CHUNK + 3)
    for sizes in ((1, HASH_CHUNK), (HASH_CHUNK, HASH_CHUNK), (HASH_CHUNK + 7, 0, 5)):
        parts, start = [], 0
        for size in sizes:
            parts.append(body[start : start + size])
            start += size
        assert digest_of_bytes([*parts, body[start:]]) == digest_of_bytes([body])


def test_what_is_dumped_is_no_copy():
    tensor = torch.zeros(1000)
    parts = dump({"w": tensor})
    tensor += 1
    assert load(memoryview(bytearray(b"".join(parts))))["w"].sum() == 1000


def test_each_byte_of_every_piece_counts():
    body = memory(2 * HASH_CHUNK + 3)
    before = digest_of_bytes([body])
    for place in (0, HASH_CHUNK - 1, HASH_CHUNK, 2 * HASH_CHUNK + 2):
        body[place] = 1
        assert digest_of_bytes([body]) != before
        body[place] = 0
    assert digest_of_bytes([body]) == before


def test_what_is_loaded_is_no_copy():
    body = joined(CONTENT)
    found = load(body)
    end = torch.frombuffer(body, dtype=torch.uint8).data_ptr() + len(body)
    assert found["bool"].data_ptr() + 3 == end


def _with_real_tensor():
    """A head that holds numbers itself, as no head of ours does."""
    import io

    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    return struct.pack("<Q", buffer.tell()) + buffer.getvalue()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"short",
        bytes(100),
        b"\xff" * 100,
        struct.pack("<Q", 4) + b"junk",
        bytes(joined(CONTENT)[:-1]),
        bytes(joined(CONTENT)) + b"!",
        _with_real_tensor(),
    ],
)
def test_other_bytes_are_refused(body):
    with pytest.raises(PeerError):
        load(memoryview(bytearray(body)))


def test_a_copy_has_the_same_bytes_in_memory_of_its_own():
    state = {"a": torch.arange(7.0), "b": [torch.ones(3, dtype=torch.bfloat16), torch.zeros(0)]}
    parts = dump(state)
    [body] = dump(state, copies=True)
    assert bytes(body) == b"".join(parts)
    assert digest_of_bytes([body]) == digest_of_bytes(parts)
    state["a"] += 1
    assert torch.equal(load(body)["a"], torch.arange(7.0))
