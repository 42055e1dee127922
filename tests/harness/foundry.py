"""llm-foundry's command, and a tokenizer and data for it that are made here."""

import importlib.metadata
import os
import sys
import sysconfig
from pathlib import Path

NUM_GROUPS = 2
VOCAB_SIZE = 512
NUM_TRAIN_SAMPLES = 128
NUM_EVAL_SAMPLES = 8
SAMPLE_CHARACTERS = 200

NOT_INSTALLED = "llm-foundry is not installed; it has its own environment: make test-llmfoundry"


def is_installed(distribution="llm-foundry"):
    # Not find_spec: this folder has the name of the package, and would do as a namespace package.
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def foundry_command(*arguments):
    return [str(Path(sys.executable).with_name("llmfoundry")), *map(str, arguments)]


OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def offline_environ(**extra):
    return os.environ | OFFLINE | extra


def write_tokenizer(folder, texts):
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    pairs = ByteLevelBPETokenizer()
    pairs.train_from_iterator(texts, VOCAB_SIZE, special_tokens=[end], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pairs._tokenizer, bos_token=end, eos_token=end, pad_token=end
    )
    tokenizer.save_pretrained(folder)


def write_samples(folder, text):
    from streaming import MDSWriter

    for split, first, count in (
        ("train", 0, NUM_TRAIN_SAMPLES),
        ("val", NUM_TRAIN_SAMPLES, NUM_EVAL_SAMPLES),
    ):
        with MDSWriter(out=str(folder / split), columns={"text": "str"}) as writer:
            for start in range(first, first + count):
                sample = text[start * SAMPLE_CHARACTERS : (start + 1) * SAMPLE_CHARACTERS]
                assert sample, f"{folder} has too little text for {count} samples of {split}"
                writer.write({"text": sample})


def write_data(folder):
    """A tokenizer, and for each group its own samples, from the standard library's sources."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    write_tokenizer(folder / "tokenizer", texts)
    for group in range(NUM_GROUPS):
        write_samples(folder / f"group_{group}", "".join(texts[group::NUM_GROUPS]))
