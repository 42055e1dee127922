"""The weighted mean over the quorum, in one flat buffer that is sent in buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.diloco.averaging.flat_buffer import FlatMemory
from composer_replication.diloco.flat_chunks import Chunk, Layout, Squares
from composer_replication.diloco.outer_health import UNSEEN, GroupMetrics, GroupsMetrics
from composer_replication.diloco.torchft_api import DiLoCoManager, Then

Write = Callable[[Chunk, Tensor], object]
"""Writes this group's values of a chunk into its place of a flat buffer, 1-D fp32. What follows
that place may be overwritten: it is written later."""


class WeightedMean:
    """Computes ``sum(c_i * v_i) / sum(c_i)`` over the groups i of a quorum.

    ``c_i`` is summed beside the values, in the same quorum. A group with c_i = 0 sends zeros,
    whatever its values are: a joiner without training, or a group whose values are not finite,
    takes part and changes nothing.

    The sum is an allreduce of fp32 numbers; ``QuantizedMean`` has the other wire formats. What has
    arrived is checked against the groups' metrics (``doubt``). After a doubt the groups gather each
    other's messages, and sum those that are sound (``find_unsound``).

    Another rule of the mean is a subclass with its own ``send``, ``doubt`` and ``sum_sound``: after
    a doubt the last one alone computes the mean. ``make_mean`` chooses it; quantized, a
    ``QuantizedBucket`` computes the mean, and ``group_cosine`` takes it for a weighted one.

    Args:
        layout: The order of what this rank sends of the tensors. It is the same in all groups.

    Attributes:
        device: Where the messages live, and the model.
        messages: This group's values, in buckets of ``Division.bucket`` elements, and its weight:
            1-D fp32 where the model is, which ``send`` sums in place. How they leave an accelerator
            is in ``InterruptibleManager._carried``.
        flat: The memory of all ranks' shares, of which this rank's has what is sent.
        sums: ``divisor`` times the mean, 1-D fp32: this rank's share of each tensor. ``divisor`` is
            the sum of all weights, or 1 where the messages have the mean itself.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.device = layout.device
        self.division = layout.division
        self._memory = FlatMemory(self.device)
        self.abandon()
        self.num_bytes_float32 = 4 * (self.division.share + 1)
        self.num_bytes = self.num_bytes_float32
        """Bytes of this rank's messages, as they travel and as they would in fp32. Each of k groups
        sends 2 (k - 1) / k of that to the others: with two groups, all of it."""
        self.norm = 0.0
        self.sent_norm = 0.0
        self.moved = 0.0
        self.moved_each = 0.0
        self.contribution = 0.0
        self.divisor = 0.0

    @torch.no_grad()
    def pack(
        self,
        write: Write,
        contribution: float,
        *,
        asks_ranks: bool = True,
    ) -> None:
        """Build ``messages``.

        ``norm`` is then the L2 norm of the values, not finite if one of them is not, and
        ``sent_norm`` that of what is sent for them, without the weight. ``moved`` is ``norm`` over
        parameters alone, and ``moved_each`` the root mean square over their elements, except for
        those of parameters that have not moved.

        It waits for an accelerator once.

        Args:
            write: Called with each chunk, in their order, and the buffer of all.
            contribution: c_i of this group. Becomes 0 if a value is not finite.
            asks_ranks: Whether ``norm`` is over the values of all ranks of the group. Then every
                rank of the group calls this, or none. Else it is over those that this rank sends.
        """
        self.abandon()
        division = self.division
        self.flat = self._memory.take(division.padded)
        to_send = self.flat[division.place]
        self.sums = to_send[: self.layout.num_elements]
        sums = self._write(write, contribution)
        if asks_ranks:
            sums = division.sum(sums)
        norms = sums.sqrt().tolist()
        self.norm, self.sent_norm, self.moved, elements = norms
        self.moved_each = self.moved / (elements or 1.0)
        self.contribution = contribution if self.is_finite else 0.0
        if not self.contribution:
            # Not multiplied by 0: 0 * nan is nan, and would reach all groups.
            self.sums.zero_()
        if self.sums.numel() < to_send.numel():
            # Padding: what an earlier sync has left there would be summed.
            to_send[self.sums.numel() :] = 0.0
        weight = torch.full((1,), self.contribution, device=self.device)
        self.messages = [*to_send.split(division.bucket), weight]

    def _write(
        self,
        write: Write,
        contribution: float,
    ) -> Tensor:
        """Write all values, and sum squares.

        Returns:
            The sums over all values, over all that is sent, and over all parameters, and the number
            of elements of the parameters that have moved.
        """
        count = len(self.division.sizes)
        squares = Squares(count if self._is_weighted else 2 * count)  # of values, of what is sent
        for chunk in self.layout.chunks_to_pack:
            write(chunk, self.sums)
            values = self.sums[chunk.place]
            parts = values.split(chunk.sizes)
            squares.add(parts, chunk.indices)
            self._prepare(chunk.place, values, contribution)
            if not self._is_weighted:
                sent = [count + index for index in chunk.indices]
                squares.add(parts, sent)
        copies = torch.tensor(self.division.copies, dtype=torch.float64)
        of_values = squares.by_tensor[:count] / copies
        of_sent = squares.by_tensor[-count:] / copies
        moved = of_values[: self.layout.num_parameters]
        sizes = torch.tensor(self.division.sizes) / copies
        sizes_moved = sizes[: len(moved)][moved > 0]
        sums = map(torch.sum, (of_values, of_sent, moved, sizes_moved))
        return torch.stack([*sums])

    def _prepare(
        self,
        place: slice,
        values: Tensor,
        contribution: float,
    ) -> None:
        """Weight values that are at this place of the rank's share."""
        del place
        if contribution not in (0.0, 1.0):
            values *= contribution

    def send(self, manager: DiLoCoManager) -> list[Any]:
        """Start the allreduce of all messages, and return its Works. Wait for each of them."""
        works: list[Any] = []
        for message in self.messages:
            work = manager.allreduce(message, reduce_op=ReduceOp.SUM)  # pyright: ignore[reportArgumentType]
            works.append(work)
        squares = Squares(len(self.division.sizes))
        self._squares = squares
        bucket = self.division.bucket
        for index, work in enumerate(works[:-1]):
            start = index * bucket
            # While later messages are on their way.
            note_arrived = partial(
                self._add_squares,
                squares,
                start,
                start + bucket,
            )
            works[index] = Then(work, note_arrived)
        return works

    def _add_squares(
        self,
        squares: Squares,
        start: int,
        stop: int,
    ) -> None:
        chunk = self.layout.chunk(start, stop)
        values = self.sums[chunk.place]
        parts = values.split(chunk.sizes)
        squares.add(parts, chunk.indices)

    # What has arrived, before the vote.

    SLACK = 1.05
    """A mean may be so many times as long as its parts, because norms are rounded."""
    _is_weighted = True
    """Whether the contribution is in the values that are sent, or beside them."""

    def squares(self) -> Tensor:
        """The squared norm of the sums of each tensor, before they are overwritten.

        1-D float64 on the CPU, of what this rank has. It waits for an accelerator once.
        """
        if self._squares is None:  # the sums are not those that have arrived
            self._squares = Squares(len(self.division.sizes))
            self._add_squares(self._squares, 0, self.layout.num_elements)
        return self._squares.by_tensor

    def _arrived(self) -> tuple[float, float]:
        """Return the sum of the weights, and the norm of what this rank has of the mean."""
        total = float(self.messages[-1])
        if not total:
            return 0.0, 0.0
        square = float(self.squares().sum())
        return total, math.sqrt(square) / total

    def doubt(self, metrics: Collection[GroupMetrics]) -> str:
        """Return what is wrong with the mean that has arrived; empty if nothing is.

        A mean is at most as long as the weighted mean of the norms that its groups have sent. All
        groups have received the same, so they come to the same conclusion.

        Args:
            metrics: The metrics of the groups in the sync.
        """
        expected = sum(group.contribution for group in metrics)
        total, norm = self._arrived()
        if not math.isclose(total, expected, rel_tol=1e-3):
            return f"the weights sum to {total:g}, and those of the groups to {expected:g}"
        weighted = sum(group.contribution * group.sent_norm for group in metrics)
        sent = weighted / (expected or 1.0)
        if not norm <= self.SLACK * sent + UNSEEN:
            return f"the mean has norm {norm:g}, and what the groups sent has {sent:g}"
        return ""

    def find_unsound(
        self,
        manager: DiLoCoManager,
        metrics: GroupsMetrics,
    ) -> set[int]:
        """Gather the messages of all groups, and find those that are not what their group says.

        It gathers one message at a time, so it needs memory for one of each group.

        Args:
            manager: The torchft manager, or its simulated double.
            metrics: Of the groups whose rows are valid.

        Returns:
            The ranks whose messages are not finite, too long, or of another weight.
        """
        *of_values, of_weight = self.messages
        parts = []
        for message in of_values:
            gathered = self._gather_message(manager, message)
            parts.append(gathered.norm(dim=1))
        norms = torch.stack(parts).norm(dim=0).tolist()
        gathered = self._gather_message(manager, of_weight)
        weights = gathered.flatten().tolist()
        unsound = set(range(len(norms)))
        for rank, group in metrics.items():
            weight = group.contribution if self._is_weighted else 1.0
            longest = self.SLACK * (group.sent_norm + UNSEEN) * weight
            if norms[rank] <= longest and weights[rank] == group.contribution:
                unsound.remove(rank)
        return unsound

    def sum_sound(
        self,
        manager: DiLoCoManager,
        metrics: GroupsMetrics,
    ) -> None:
        """Gather the messages again, and sum those of these ranks."""
        *of_values, of_weight = self.messages
        for message in of_values:
            parts = self._gather_message(manager, message)
            message.zero_()
            for rank, group in metrics.items():
                if group.contribution:
                    weight = 1.0 if self._is_weighted else group.contribution
                    message.add_(parts[rank], alpha=weight)
        total = sum(group.contribution for group in metrics.values())
        of_weight.fill_(total)
        if manager.participating_rank() not in metrics:
            self.contribution = 0.0

    def _gather_message(
        self,
        manager: DiLoCoManager,
        message: Tensor,
    ) -> Tensor:
        """The message of each group: a row for each."""
        groups = manager.num_participants()
        gathered = message.new_zeros(groups, message.numel())
        if message.numel():
            work = manager.all_gather(gathered.view(-1), message)
            work.wait()
        return gathered

    @property
    def is_finite(self) -> bool:
        """Whether all values of the last ``pack`` were finite."""
        # The norm of finite values overflows only past 1e19: such a training has diverged anyhow.
        return math.isfinite(self.norm + self.sent_norm)

    def finish(self) -> float:
        """Return ``sum(c_i)``. At 0 no group has contributed, and there is no mean.

        Call it after all Works of ``send`` have ended without an error and the vote has passed. It
        may note what was rounded for the next sync, so this one is not to be repeated afterwards.
        """
        self.divisor = float(self.messages[-1])
        return self.divisor

    def unpack(self) -> Tensor:
        """Divide in place, and return the mean like ``sums``. Call it once."""
        return self.sums.div_(self.divisor)

    # The residual of the error feedback: none here, since fp32 numbers are not rounded.

    def gather_residual(self) -> Tensor | None:
        """Return the whole group's residual, 1-D in the order of the tensors.

        Every rank of the group calls it. A rank by itself gets the residual and not a copy.
        """

    def load_residual(self, tensors: Sequence[Tensor]) -> None:
        """Load what ``gather_residual`` returned, as 1-D tensors, on any number of ranks."""

    def forget_residual(self, tensors: Iterable[int]) -> None:
        """Reset the residual of these tensors, by index, to zero."""

    def touch_memory(self) -> None:
        """Write to the memory of the messages, so that the first ``pack`` has no page faults."""
        memory = self._memory.take(self.division.padded)
        self._memory.give_back(memory.zero_())

    def clear(self) -> None:
        """Allow the memory of the messages to be reclaimed, after all that was sent has ended."""
        self._memory.give_back(self.flat)
        self.abandon()

    def abandon(self) -> None:
        """Drop what was sent: connections that are about to close may still write to its memory."""
        self.messages: list[Tensor] = []
        self.flat = Tensor()
        self.sums = Tensor()
        self._squares: Squares | None = None
