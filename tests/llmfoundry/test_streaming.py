"""A StreamingDataset whose samples replica groups share out. Run: make test-llmfoundry"""

import importlib.util

import pytest
import torch

from composer_replication import ReplicaDataLoader
from composer_replication.data.sample_stream import FixedShards, StreamPosition

pytestmark = [
    pytest.mark.llmfoundry,
    pytest.mark.skipif(
        importlib.util.find_spec("streaming") is None,
        reason="streaming is not installed; it has llm-foundry's environment: make test-llmfoundry",
    ),
]

LENGTH, GROUPS = 100, 3


@pytest.fixture
def folder(tmp_path):
    from streaming import MDSWriter

    with MDSWriter(out=str(tmp_path), columns={"id": "int"}, size_limit=128) as out:
        for index in range(LENGTH):
            out.write({"id": index})
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_groups_read_each_sample_of_every_epoch_once_between_them(folder, num_workers):
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(folder), batch_size=4, shuffle=True)
    assert len(list(folder.glob("shard*"))) > 3
    read = {epoch: [] for epoch in range(2)}
    for group in range(GROUPS):
        loader = ReplicaDataLoader(
            dataset, 4, dataset_id="mds", unit_size=8, num_workers=num_workers
        )
        assert loader.spec.length == LENGTH
        loader.read(FixedShards(loader.spec, group, GROUPS).lease, StreamPosition(), lambda: False)
        for epoch, ids in read.items():
            loader.begin(epoch, 0)
            ids += [int(i) for batch in loader for i in torch.as_tensor(batch["id"])]
    for ids in read.values():
        assert sorted(ids) == list(range(LENGTH))
    assert read[0] != read[1]
