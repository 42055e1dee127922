"""The weighted mean over the quorum in a wire format: numbers travel in fewer bytes."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchft.utils import get_stream_context

from composer_replication.diloco.averaging.flat_buffer import FlatMemory
from composer_replication.diloco.averaging.quantized_buckets import QuantizedBucket
from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.averaging.wire_formats import make_wire_format
from composer_replication.diloco.averaging.wire_sizes import PART
from composer_replication.diloco.flat_chunks import Layout, Squares
from composer_replication.diloco.torchft_api import DiLoCoManager, StockManager
from composer_replication.settings import WIRE_FORMATS

LEAST_MESSAGES = 4
"""The least number of messages in a sync. gloo does not receive while it sends an all-gather or
all-to-all: over 100 Mbit/s a single one takes 1.5 or 1.8 times as long as an allreduce that sends
as much, four at a time 1.1 or 1.2 (``benchmarks/slow_links/messages.py``)."""


def check_can_quantize(manager: DiLoCoManager, wire_format: str) -> None:
    """Check that a manager has what a wire format needs.

    Raises:
        ValueError: It lacks it; torchft's own manager has only an allreduce.
    """
    if wire_format != WIRE_FORMATS[0] and isinstance(manager, StockManager):
        raise ValueError(
            f"wire_format={wire_format!r} needs all_to_all and all_gather, which "
            f"{type(manager.stock).__name__} has not: build it with "
            "composer_replication.replica.factory.make_manager, "
            "or use wire_format='float32'"
        )


class QuantizedMean(WeightedMean):
    """A ``WeightedMean`` in a wire format: a reduce-scatter and an all-gather of encoded parts.

    Each bucket has as many parts as there are groups. A group decodes its part from all others and
    encodes the mean of it, taken in fp32; all groups use these bytes, so they have the same bits,
    and the traffic does not grow with the number of groups. Two groups use an all-gather
    (``QuantizedBucket``).

    With error feedback (Seide et al. 2014; arXiv 1901.09847, alg. 2) a group keeps what rounding
    has taken from what it sent, its *residual*, and adds it to its next pseudo-gradient. A residual
    is a part of the sum: it is divided by the group's weight in the sync that sends it. What is
    rounded on the way back is the residual of the group that rounded it. Residuals change only at a
    commit, except that those of frozen tensors and of what is not finite are forgotten before.

    Args:
        layout: See ``WeightedMean``.
        wire_format: ``bfloat16``, ``int8`` or ``fp4``.
    """

    def __init__(
        self,
        layout: Layout,
        wire_format: str,
    ) -> None:
        super().__init__(layout)
        self._format = make_wire_format(wire_format)
        self._message_memory = FlatMemory(self.device)
        self.residual = torch.zeros(self.division.share, device=self.device)
        """The residual of this rank's share, 1-D fp32: what rounding has taken from the sum."""

    SLACK = 2.5
    """See ``WeightedMean.SLACK``. fp4 rounds twice, on the way to the mean and back, and may add
    half of the norm each time."""
    _is_weighted = False

    def _prepare(
        self,
        place: slice,
        values: Tensor,
        contribution: float,
    ) -> None:
        # Error feedback: what rounding has taken from earlier sums is sent now. It adds as much to
        # this sum, whatever this group weighed then and weighs now.
        if contribution:
            values.add_(self.residual[place], alpha=1 / contribution)

    def send(self, manager: DiLoCoManager) -> list[Any]:
        groups = manager.num_participants()
        rank = manager.participating_rank()
        assert rank is not None, "torchft gives every group of a synchronous quorum a rank"
        own = self.flat[self.division.place]
        parts_each = math.ceil(own.numel() / (LEAST_MESSAGES * PART))
        size = min(self.division.bucket, parts_each * PART)
        parts = own.split(size)
        buckets = [QuantizedBucket(part, groups, rank, self._format) for part in parts]
        self.num_bytes = sum(bucket.num_bytes for bucket in buckets)
        memory_bytes = sum(bucket.memory_bytes for bucket in buckets)
        memory = self._message_memory.take(memory_bytes // 4)
        self._exchange = Exchange(
            manager,
            buckets,
            self.contribution,
            memory,
        )
        return [self._exchange]

    def _arrived(self) -> tuple[float, float]:
        assert self._exchange is not None, "it has been sent"
        return self._exchange.total, self._exchange.norm

    @torch.no_grad()
    def finish(self) -> float:
        if self._exchange is None:  # gathered messages are fp32, so nothing was rounded
            if self.contribution:
                self.residual.zero_()
            return super().finish()
        self.divisor = 1.0
        if self._exchange.total:
            buckets = self._exchange.buckets
            sizes = [bucket.values.numel() for bucket in buckets]
            errors = self.residual.split(sizes)
            for bucket, error in zip(buckets, errors, strict=True):
                bucket.finish(error if self.contribution else None)
        return self._exchange.total

    def clear(self) -> None:
        if self._exchange is not None:
            self._message_memory.give_back(self._exchange.memory)
        super().clear()

    def abandon(self) -> None:
        super().abandon()
        self._exchange: Exchange | None = None

    def gather_residual(self) -> Tensor:
        return self.division.gathered(self.residual)

    def load_residual(self, tensors: Sequence[Tensor]) -> None:
        whole = torch.cat([*tensors])
        own = whole[self.division.place]
        self.residual[: own.numel()] = own  # what pads it is zeros

    def forget_residual(self, tensors: Iterable[int]) -> None:
        sizes = self.division.sizes
        parts = self.residual[: sum(sizes)].split(sizes)
        for index in tensors:
            parts[index].zero_()


class Exchange:
    """Sends the buckets of one sync. It is a Work: ``wait`` returns after the last message.

    Each bucket takes two messages. A thread computes what goes into the second one, so that
    training continues meanwhile. All groups must start their collectives in the same order,
    therefore the caller starts no other collective before ``wait`` has returned.

    Args:
        manager: The torchft manager, or its simulated double.
        buckets: The buckets, in the same order in all groups.
        contribution: This group's weight. With 0 its values are zeros.
        memory: fp32, of the ``memory_bytes`` of all buckets together.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        buckets: Sequence[QuantizedBucket],
        contribution: float,
        memory: Tensor,
    ) -> None:
        self.buckets = buckets
        self.memory = memory
        self._manager = manager
        on_host = memory.device.type == "cpu"
        self._stream = None if on_host else torch.accelerator.current_stream()
        self.total = 0.0
        """The sum of all contributions; not a number if not all buckets have the same ones."""
        self.norm = math.nan
        """A norm of which the mean is no longer, without this group's own part."""
        works = []
        sizes = [bucket.memory_bytes for bucket in buckets]
        parts = memory.view(torch.uint8).split(sizes)
        with torch.no_grad():
            for bucket, part in zip(buckets, parts, strict=True):
                work = bucket.start_first(manager, contribution, part)
                works.append(work)
        # Without a thread the second messages would start only when training next waits, and the
        # sync would not overlap with it.
        self._thread = threading.Thread(
            target=self._run,
            args=(works,),
            name="exchange",
            daemon=True,
        )
        self._thread.start()

    def _run(self, works: list[Any]) -> None:
        second: list[Any] = []
        weights: list[float] = []
        with self._reporting():
            for bucket in self.buckets:
                works.pop(0).wait()
                if self._manager.errored():
                    break
                # All buckets have the same: one wait for an accelerator.
                weights = weights or bucket.received_weights.tolist()
                second.append(bucket.start_second(self._manager, weights))
        # A gloo connection stays open while one of its Works exists. If this group has given up,
        # its peers would wait for its messages until their timeout.
        works.clear()
        with self._reporting():
            for work in filter(None, second):
                work.wait()
            if not self._manager.errored():
                self._measure(weights)
        second.clear()

    def _measure(self, weights: Sequence[float]) -> None:
        received = torch.cat([bucket.received_weights for bucket in self.buckets])
        expected = [*weights] * len(self.buckets)
        is_equal = received.tolist() == expected
        self.total = sum(weights) if is_equal else math.nan
        squares = Squares(len(weights))
        for bucket in self.buckets:
            bucket.add_squares(squares)
        norms = squares.by_tensor.sqrt()
        if self.buckets[0].has_means:
            self.norm = float(norms.norm())
        else:
            weighted = norms @ torch.tensor(weights, dtype=torch.float64)
            self.norm = float(weighted) / (self.total or 1.0)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """A context on this sync's stream, whose errors are reported to the manager."""
        try:
            with torch.no_grad(), get_stream_context(self._stream):
                yield
        except Exception as error:
            self._manager.report_error(error)

    def wait(self) -> None:
        """Wait for the last message. Errors are reported to the manager, not raised."""
        self._thread.join()  # the manager's timeout bounds each message


def make_mean(layout: Layout, wire_format: str) -> WeightedMean:
    """Return the mean for a wire format."""
    if wire_format == WIRE_FORMATS[0]:
        return WeightedMean(layout)
    return QuantizedMean(layout, wire_format)
