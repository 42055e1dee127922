"""A tokenizer of bytes and a tiny model, made on the spot: the examples download nothing."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<eos>"]
    tokens = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


def tiny_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two layers; all groups start from the same weights."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)
