"""LoRA under DiLoCo: adapters train and travel, the frozen base does not. Run: make test-llmfoundry

Real: transformers, PEFT, Composer's HuggingFaceModel and its checkpoints; the network is simulated.
"""

import importlib.util

import pytest
import torch
from common import are_equal

pytestmark = [
    pytest.mark.llmfoundry,
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None,
        reason="PEFT is not installed; it has llm-foundry's environment: make test-llmfoundry",
    ),
]

SEQUENCE = 8


def build_model(seed):
    import peft
    import transformers
    from composer.models import HuggingFaceModel

    torch.manual_seed(0)
    # Without dropout: simulated replicas are threads, and share torch's generator.
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=SEQUENCE, n_embd=16, n_layer=2, n_head=2, use_cache=False, **none
    )
    base = transformers.GPT2LMHeadModel(config)
    torch.manual_seed(seed)
    lora = peft.LoraConfig(
        r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True, lora_dropout=0.0
    )
    return HuggingFaceModel(base, peft_config=lora)


def fit_groups(num_replicas, folder, *others, **arguments):
    """Train groups on tokens of their own; how each ends."""
    from harness import trainers

    def own(group):
        generator = torch.Generator().manual_seed(group)
        tokens = torch.randint(0, 32, (64, SEQUENCE), generator=generator)
        dataset = [{"input_ids": row, "labels": row} for row in tokens]
        with trainers.building:
            model = build_model(seed=group)
        loader = torch.utils.data.DataLoader(dataset, 4)
        return trainers.saving(folder, group) | {"model": model, "train_dataloader": loader}

    def adamw(parameters):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)

    return trainers.fit_groups(
        num_replicas,
        *others,
        own=own,
        optimizer=adamw,
        max_duration="9ba",
        save_overwrite=True,
        load_strict_model_weights=False,  # as llm-foundry does: the base is not in the file
        **{"diloco": {"sync_every": 4}} | arguments,
    )


def test_adapters_are_averaged_saved_and_resumed_and_the_base_is_left_alone(tmp_path):
    from harness.trainers import part_of

    before = [dict(build_model(seed=group).named_parameters()) for group in range(2)]
    whole = fit_groups(2, tmp_path)
    one, other = whole
    assert one.digest == other.digest
    adapters = {name for name in one.weights if "lora_" in name}
    for fit, its in zip(whole, before, strict=True):
        for name, tensor in fit.weights.items():
            assert torch.equal(tensor, its[name]) == (name not in adapters)
        assert are_equal(fit.weights, one.weights)

    (model, ours), (other, _) = (part_of(tmp_path / f"{group}/ba6.pt") for group in range(2))
    assert set(model) == set(ours["local"]) == set(ours["momentum"]) == adapters
    assert are_equal(model, other)

    resumed = fit_groups(2, tmp_path, load_path=tmp_path / "{group}" / "ba6.pt")
    for fit, its in zip(whole, resumed, strict=True):
        assert its.digest == fit.digest
        assert are_equal(its.weights, fit.weights)


def test_fragments_may_be_given_as_peft_names_the_adapters(tmp_path):
    from composer import Callback

    class Look(Callback):
        def __init__(self, diloco):
            self._diloco, self.sizes = diloco, []

        def batch_end(self, state, logger):
            fragments = self._diloco.diloco.state_dict()["fragments"]
            self.sizes = [len(fragment["theta"]) for fragment in fragments]

    diloco = {"fragment_patterns": ["*.lora_A.weight", "*.lora_B.weight"], "sync_every": 4}
    [fit] = fit_groups(1, tmp_path, Look, diloco=diloco)
    assert fit.others[0].sizes == [2, 2]
