"""LoRA under DiLoCo: adapters train and travel, the frozen base does not. Run: make test-llmfoundry

Real: transformers, PEFT, Composer's HuggingFaceModel and its checkpoints; the network is simulated.
"""

import importlib.util

import pytest
import torch

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


def fit(sim, folder, load_path=None, max_duration="9ba", **diloco):
    from composer import Trainer
    from composer_jobs import building

    from composer_replication.callback import DiLoCoCallback

    with building:
        model = build_model(seed=sim.replica_id)
        generator = torch.Generator().manual_seed(sim.replica_id)
        tokens = torch.randint(0, 32, (64, SEQUENCE), generator=generator)
        dataset = [{"input_ids": row, "labels": row} for row in tokens]
        callback = DiLoCoCallback(
            manager=sim.manager,
            replica_id=sim.replica_id,
            num_replicas=sim.num_replicas,
            sync_every=4,
            **diloco,
        )
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad], lr=0.01
            ),
            train_dataloader=torch.utils.data.DataLoader(dataset, 4),
            callbacks=[callback],
            max_duration=max_duration,
            device="cpu",
            save_folder=f"{folder}/{sim.replica_id}",
            save_filename="ba{batch}.pt",
            save_interval="3ba",
            save_overwrite=True,
            load_path=load_path,
            load_strict_model_weights=False,  # as llm-foundry does: the base is not in the file
            progress_bar=False,
            auto_log_hparams=False,
        )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.fit()
    trainer.close()
    return callback, before, dict(model.named_parameters())


def test_adapters_are_averaged_saved_and_resumed_and_the_base_is_left_alone(tmp_path):
    from composer_jobs import read_checkpoint

    from composer_replication.simulation.simulation import simulate

    whole = simulate(lambda sim: fit(sim, tmp_path), num_replicas=2)
    (one, before, after), (other, _, theirs) = whole
    assert one.result["global_digest"] == other.result["global_digest"]
    adapters = {name for name in after if "lora_" in name}
    assert all(torch.equal(after[name], before[name]) for name in after.keys() - adapters)
    assert not any(torch.equal(after[name], before[name]) for name in adapters)
    assert all(torch.equal(after[name], theirs[name]) for name in adapters)

    saved = read_checkpoint(tmp_path / "0" / "ba6.pt")["state"]
    ours = saved["callbacks"]["DiLoCoCallback"]
    assert set(saved["model"]) == set(ours["local"]) == set(ours["momentum"]) == adapters
    digests = [read_checkpoint(tmp_path / i / "ba6.pt")["state"]["model"] for i in ("0", "1")]
    assert all(torch.equal(digests[0][name], digests[1][name]) for name in adapters)

    def resume(sim):
        return fit(sim, tmp_path, load_path=str(tmp_path / str(sim.replica_id) / "ba6.pt"))

    for (callback, _, model), (its, _, resumed) in zip(
        whole, simulate(resume, num_replicas=2), strict=True
    ):
        assert its.result["global_digest"] == callback.result["global_digest"]
        assert all(torch.equal(resumed[name], tensor) for name, tensor in model.items())


def test_fragments_may_be_given_as_peft_names_the_adapters(tmp_path):
    from composer_replication.simulation.simulation import simulate

    patterns = ["*.lora_A.weight", "*.lora_B.weight"]
    [(callback, _, _)] = simulate(
        lambda sim: fit(sim, tmp_path, fragment_patterns=patterns), num_replicas=1
    )
    sizes = [len(fragment["theta"]) for fragment in callback._group.continuation.ended["fragments"]]
    assert sizes == [2, 2]
