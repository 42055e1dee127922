"""The small models and data that Composer's algorithms and callbacks are tried on."""

import torch
from composer.models import ComposerClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchvision.datasets import FakeData
from torchvision.models.resnet import Bottleneck
from torchvision.transforms import ToTensor

CLASSES = 4
BATCHES = 4  # in an epoch
SIZE = 8


def images(seed, dropout=0.1):
    """A convolutional net with every kind of layer that an algorithm of Composer replaces."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Bottleneck(16, 4),
        Bottleneck(16, 4),
        nn.Conv2d(16, 16, 3, stride=2, bias=False),
        nn.GroupNorm(4, 16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Dropout(dropout),
        nn.Linear(16, CLASSES),
    )
    return ComposerClassifier(net, num_classes=CLASSES)


def small(seed):
    """One that is compiled in a second."""
    torch.manual_seed(seed)
    layers = nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    return ComposerClassifier(nn.Sequential(*layers), num_classes=CLASSES)


def steady(seed):
    """One that draws no random numbers."""
    return images(seed, dropout=0.0)


def unmeasured(seed):
    """One without metrics of training."""
    model = images(seed)
    model.train_metrics = MetricCollection([])
    return model


def image_data(seed, batches=BATCHES, classes=CLASSES):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * SIZE, 3, 16, 16, generator=generator)
    y = torch.randint(classes, (batches * SIZE,), generator=generator)
    return DataLoader(TensorDataset(x, y), SIZE)


def binary_data(seed):
    """What ``NoOpModel`` has a metric for."""
    return image_data(seed, classes=2)


def picture_data(seed):
    """Pictures of PIL, which some algorithms ask for: they change the dataset's transform."""
    pictures = FakeData(BATCHES * SIZE, (3, 16, 16), CLASSES, ToTensor(), random_offset=seed)
    return DataLoader(pictures, SIZE)


WORDS = 32
LENGTH = 16


def text(seed, tied=True):
    """A tiny BERT, which is what Composer's algorithms for text know."""
    import transformers
    from composer.models import HuggingFaceModel

    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        attn_implementation="eager",  # Alibi replaces this one
        tie_word_embeddings=tied,
    )
    return HuggingFaceModel(transformers.BertForMaskedLM(config), use_logits=True)


def untied_text(seed):
    return text(seed, tied=False)


def prompting_text(seed):
    """A tiny GPT-2 with a tokenizer, to be prompted."""
    import tokenizers
    import transformers
    from composer.models import HuggingFaceModel

    words = {f"w{i}": i for i in range(WORDS)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, unk_token="w0", eos_token="w0"
    )
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2
    )
    model = transformers.GPT2LMHeadModel(config)
    return HuggingFaceModel(model, tokenizer=tokenizer, use_logits=True)


def text_data(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(WORDS, (BATCHES * SIZE, LENGTH), generator=generator)
    mask = torch.ones(LENGTH, dtype=torch.long)
    return DataLoader([{"input_ids": r, "attention_mask": mask, "labels": r} for r in rows], SIZE)
