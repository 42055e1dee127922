"""A small GPT over bytes as a Composer model, which needs no tokenizer."""

import math

import torch
import torch.nn.functional as F
from composer.models import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric

Batch = dict[str, Tensor]


class BitsPerByte(Metric):
    """Mean cross entropy in bits per byte. Every byte of every batch and rank weighs the same."""

    full_state_update = False  # torchmetrics: one update per batch is enough

    nats: Tensor
    num_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64: a sum over millions of bytes should not depend on how they were batched.
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("nats", default=zero, dist_reduce_fx="sum")
        self.add_state("num_bytes", default=zero.clone(), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            logits: Shape (batch, length, vocab_size).
            labels: Shape (batch, length).
        """
        self.nats += F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
        )
        self.num_bytes += labels.numel()

    def compute(self) -> Tensor:
        """Return the bits per byte over all batches since the last reset."""
        return self.nats / self.num_bytes / math.log(2)


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a feed-forward layer, each with a residual.

    Args:
        d_model: Width of the residual stream.
        n_heads: Attention heads.
        expansion_ratio: Hidden width of the feed-forward layer, in units of ``d_model``.
    """

    def __init__(self, d_model: int, n_heads: int, expansion_ratio: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.attn_out = nn.Linear(d_model, d_model, bias=False)
        self.norm_2 = nn.LayerNorm(d_model)
        self.up_proj = nn.Linear(d_model, expansion_ratio * d_model, bias=False)
        self.down_proj = nn.Linear(expansion_ratio * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_1(x))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))

    def _attend(self, x: Tensor) -> Tensor:
        # (batch, length, 3 * d_model) -> three of (batch, n_heads, length, d_model / n_heads)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attn_out(heads.transpose(1, 2).flatten(2))


class ByteGPT(ComposerModel):
    """A decoder-only transformer that predicts the next byte. Its arguments are named as in MPT.

    A batch is what ``TextBytes`` in ``text.py`` yields: ``labels`` are already shifted. The loss is
    in nats, the evaluation metric ``BitsPerByte`` in bits.

    There is no dropout: simulated replicas are threads that share torch's generator, so random
    numbers drawn in training would make a run depend on which thread comes first. The initial
    weights come from that generator too: seed it alike in all replica groups.

    Args:
        d_model: Width of the residual stream, a multiple of ``n_heads``.
        n_heads: Attention heads per block.
        n_layers: Number of blocks, in ``self.blocks``.
        max_seq_len: Longest sequence in bytes. Positions are learned.
        expansion_ratio: Hidden width of the feed-forward layer, in units of ``d_model``.
        vocab_size: Number of byte values, 256.
        tie_word_embeddings: Whether the embedding is also the output layer.

    Raises:
        ValueError: ``d_model`` is not a multiple of ``n_heads``.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_layers: int,
        max_seq_len: int,
        expansion_ratio: int = 4,
        vocab_size: int = 256,
        tie_word_embeddings: bool = True,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(
                f"d_model={d_model} is not divisible by n_heads={n_heads}. "
                f"Use d_model={math.ceil(d_model / n_heads) * n_heads}, or change n_heads."
            )
        self.wte = nn.Embedding(vocab_size, d_model)
        self.wpe = nn.Embedding(max_seq_len, d_model)
        self.blocks = nn.ModuleList(
            Block(d_model, n_heads, expansion_ratio) for _ in range(n_layers)
        )
        self.norm_f = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self._init_weights()
        if tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def _init_weights(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_residual = name.endswith(("attn_out", "down_proj"))
                # GPT-2: the 2 * n_layers branches add up; together they should weigh as one.
                std = 0.02 / math.sqrt(2 * len(self.blocks)) if is_residual else 0.02
                nn.init.normal_(module.weight, std=std)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits of shape (batch, length, vocab_size).

        Raises:
            ValueError: The sequence is longer than ``max_seq_len``.
        """
        ids = batch["input_ids"]
        if ids.shape[1] > self.wpe.num_embeddings:
            raise ValueError(
                f"a sequence of {ids.shape[1]} bytes is longer than the model's max_seq_len="
                f"{self.wpe.num_embeddings}. Give the model and the data the same max_seq_len."
            )
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm_f(x))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross entropy in nats per byte."""
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def eval_forward(self, batch: Batch, outputs: Tensor | None = None) -> Tensor:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {} if is_train else {"BitsPerByte": BitsPerByte()}

    def update_metric(self, batch: Batch, outputs: Tensor, metric: Metric) -> None:
        metric.update(outputs, batch["labels"])
