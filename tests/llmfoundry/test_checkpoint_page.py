"""The lines of docs/checkpoints.md for Hugging Face and PEFT. Run: make test-llmfoundry

Real: transformers, PEFT, Composer's HuggingFaceModel and its checkpoints; the network is simulated.
"""

import importlib.util

import pytest
import torch
from page_blocks import block

pytestmark = [
    pytest.mark.llmfoundry,
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None,
        reason="PEFT is not installed; it has llm-foundry's environment: make test-llmfoundry",
    ),
]

SEQUENCE = 8
TOKENS = torch.arange(SEQUENCE).unsqueeze(0)


def train_and_save(peft_config=None):
    """One group, whose checkpoint is where the page has it; the model with the global weights."""
    import tokenizers
    import transformers
    from composer.models import HuggingFaceModel
    from composer_jobs import fit_alone

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=SEQUENCE, n_embd=16, n_layer=2, n_head=2
    )
    base = transformers.GPT2LMHeadModel(config).eval()
    base.save_pretrained("base")
    base.name_or_path = "base"
    words = tokenizers.models.WordLevel({str(i): i for i in range(32)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    model = HuggingFaceModel(base, tokenizer=tokenizer, peft_config=peft_config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, SEQUENCE))]
    fit_alone(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(rows, 4),
        save_folder="runs/mine/replica_0/checkpoints",
        save_interval="4ba",
    )
    return model.model.eval()


def test_hugging_face_loads_what_composer_writes(tmp_path, monkeypatch):
    import transformers

    monkeypatch.chdir(tmp_path)
    trained = train_and_save()
    exec(block("docs/checkpoints.md", "from composer.models"), {})
    loaded = transformers.AutoModelForCausalLM.from_pretrained("my-model").eval()
    assert torch.equal(loaded(TOKENS).logits, trained(TOKENS).logits)


def test_peft_puts_the_adapter_into_its_base(tmp_path, monkeypatch):
    import peft
    import transformers

    monkeypatch.chdir(tmp_path)
    lora = peft.LoraConfig(
        r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
    )
    trained = train_and_save(lora)
    exec(block("docs/checkpoints.md", "from composer.models"), {})
    names = {}
    exec(block("docs/checkpoints.md", "from peft"), names)
    base = transformers.AutoModelForCausalLM.from_pretrained("base").eval()
    logits = names["model"].eval()(TOKENS).logits
    torch.testing.assert_close(logits, trained(TOKENS).logits)
    assert not torch.allclose(logits, base(TOKENS).logits)
