"""The global parameters of a fragment, which only the outer optimizer moves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress, islice
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.copied_buffers import CopiedBuffers, has_mean
from composer_replication.diloco.division import Division, held_tensor
from composer_replication.diloco.flat_chunks import Chunk, Layout, Squares
from composer_replication.diloco.outer_optimizer import (
    OuterOptimizer,
    is_plain_sgd,
    pseudo_gradient,
    take_sgd_step,
)


class GlobalParameters:
    """The global parameters of one fragment (theta, fp32) and the outer optimizer that owns them.

    The optimizer is built over *these* tensors and never over the model's, so it cannot step
    another fragment, decay a frozen weight, round to bf16, or clear the model's ``p.grad``
    (ADR-005).

    Under DDP each rank holds and steps only its share of them, if the outer optimizer is DiLoCo's
    SGD, which treats each element by itself. Any other optimizer gets whole tensors on all ranks
    (ADR-026).

    They are flat buffers. The outer step of an SGD is computed where the model is, and that of
    another optimizer where they rest: there too, or in host memory, for a model that leaves no room
    on its accelerator.

    Args:
        tensors: The fragment's parameters in the model, of any floating dtype but float64, on any
            device, and after them the buffers that are synchronised with them. Of these, those that
            have a mean are averaged, the others are the first group's (``copied``).
        outer_optimizer: Builds the optimizer over the global parameters.
        backup_device: Where they and the optimizer's state rest between syncs. None: on the model's
            device.
        division_of: Returns the ``Division`` of tensors: what this rank has of them.

    Attributes:
        num_parameters: How many parameters there are: the first tensors in ``theta``.
        averaged_buffers: The indices of the buffers in ``theta``.
        device: Where the model is.
        division: What this rank averages with other groups.
        layout: The order of that in flat buffers.
        theta_division: What it holds of the global parameters: the same, or whole tensors.
        flat: All that it holds, 1-D fp32, one tensor after the other. ``theta`` has the views.

    Raises:
        ValueError: ``outer_optimizer`` gave no optimizer over exactly these parameters, or see
            ``Division``.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        outer_optimizer: OuterOptimizer,
        backup_device: torch.device | str | None = None,
        division_of: Callable[[Iterable[Tensor]], Division] = Division,
    ) -> None:
        self.averaged: dict[str, Tensor] = {}
        copied: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            kind = self.averaged if has_mean(tensor) else copied
            kind[name] = tensor
        count = sum(isinstance(tensor, nn.Parameter) for tensor in tensors.values())
        self.num_parameters = count
        self.averaged_buffers = range(count, len(self.averaged))
        held = [*map(held_tensor, self.averaged.values())]
        self.copied = CopiedBuffers(copied, held[count:])
        self.shapes = [tensor.shape for tensor in held]
        self.device = held[0].device
        resting = torch.device(backup_device or self.device)
        rests_elsewhere = resting.type != self.device.type
        self.division = division_of(self.averaged.values())
        self.theta_division = self.division
        self.layout = Layout(
            self.division,
            held,
            count,
            rests_elsewhere,
        )
        self._whole_layout = self.layout
        if self.division.num_shares > 1:
            alone = Division(held)
            self._whole_layout = Layout(alone, held, count, True)
            like = [nn.Parameter(tensor.to("meta")) for tensor in held[:count]]
            # One that reads whole tensors, such as LAMB, would take other steps on shares.
            if not is_plain_sgd(outer_optimizer(like)):
                self.theta_division = alone
        # fp32, whatever the model's dtype is: an outer step may be smaller than bf16's rounding.
        # Pinned, copies run beside the accelerator's kernels; torch takes the next power of two.
        size = sum(self.theta_division.sizes)
        self.flat = torch.zeros(
            size,
            device=resting,
            pin_memory=rests_elsewhere,
        )
        self.theta: dict[str, nn.Parameter] = {}
        views = self.views(self.flat)
        for index, name in enumerate(self.averaged):
            part = self.theta_division.part_of(index, held[index])
            view = views[index]
            view.copy_(part.view(view.shape))
            self.theta[name] = nn.Parameter(view)
        self._step_norms = 0.0, 0.0
        """This rank's part of ``step_norms``."""
        owned = [*self.theta.values()][:count]
        self.optimizer = outer_optimizer(owned)
        _check_is_over(self.optimizer, owned)
        self._can_forget = not self.optimizer.state
        """Whether the optimizer makes a tensor's state when it steps: Adagrad has it from now on,
        and would not make it again."""
        if is_plain_sgd(self.optimizer):
            (group,) = self.optimizer.param_groups
            if group["momentum"]:
                self._keep_momentum()  # now: what does not fit into memory is to fail at the start

    # ---- the outer step --------------------------------------------------------------------------

    @torch.no_grad()
    def take_outer_step(
        self,
        mean: WeightedMean,
        alpha: float = 0.0,
    ) -> None:
        """Move the global parameters by the mean pseudo-gradient, and write them into the model.

        Buffers become the mean of the local ones: global minus the mean of (global minus local). A
        buffer that is constant stays bitwise identical. A tensor whose mean pseudo-gradient is
        exactly 0 is not moved and forgets its momentum: all groups have frozen it (ADR-022).

        Args:
            mean: The mean after ``finish``, over the tensors in the order of ``theta``. Its memory
                is overwritten.
            alpha: See ``write_back``.
        """
        if is_plain_sgd(self.optimizer):
            self._descend(mean, alpha)
        else:
            self._step(mean)
            self._write(self.flat, alpha)
        if self.is_shared:
            # All of each tensor, in the memory of a mean that is no longer needed.
            mean.sums.copy_(self.flat)
            self.division.gather(mean.flat)
            self._write(mean.flat, alpha)

    def _descend(
        self,
        mean: WeightedMean,
        alpha: float,
    ) -> None:
        """Take the outer step of torch's SGD in chunks, and write back each that is whole."""
        sums = mean.sums
        squares = mean.squares()  # before the step overwrites the sums
        unmoved = self._unmoved(squares, sums)
        (group,) = self.optimizer.param_groups
        decay = group["momentum"]
        if decay:
            if len(self.optimizer.state) < self.num_parameters:  # as after plain averages
                self._keep_momentum()
            momenta = self.momenta if unmoved else []
            for index in unmoved:
                momenta[index].zero_()
        divisor = torch.full((), mean.divisor, device=self.device)
        local = self.local()
        unmixed = self._unmixed(alpha)
        of_momentum = Squares(len(self.theta))
        for chunk in self.layout.chunks:
            part = sums[chunk.place]
            theta = self._lent(self.flat, chunk.place)
            first = chunk.indices[0]
            is_buffer = first in self.averaged_buffers
            if is_buffer or not decay:
                rate = 1.0 if is_buffer else float(group["lr"])
                theta.sub_(part.div_(divisor), alpha=rate)
            else:
                momentum = self._lent(self.momentum, chunk.place)
                take_sgd_step(group, divisor, theta, part, momentum)
                # While it is in cache. As many ranks hold all of the chunk as its first tensor.
                of_momentum.add([momentum], [first])
                self._give_back(momentum, self.momentum, chunk.place)
            self._give_back(theta, self.flat, chunk.place)
            if not self.is_shared:
                # Now, while theta is in cache. The sums have been used: their memory is free.
                chunk.write(
                    theta,
                    local,
                    alpha,
                    unmixed,
                    scratch=part,
                )
        self._await_rest()
        self._step_norms = self._norm(squares) / mean.divisor, self._norm(of_momentum.by_tensor)

    def _step(self, mean: WeightedMean) -> None:
        """Give the mean to another outer optimizer as gradients, and let it step."""
        deltas = self.unpack(mean)
        squares = Squares(len(self.theta))
        parts = deltas.split(self.theta_division.sizes)
        indices = [*range(len(parts))]
        squares.add(parts, indices)
        unmoved = self._unmoved(squares.by_tensor, deltas)
        parameters = [*self.theta.values()]
        resting = deltas.to(self.flat.device)
        views = self.views(resting)
        for index in range(self.num_parameters):
            parameters[index].grad = views[index]
        for index in self.averaged_buffers:
            parameters[index].sub_(views[index])
        for index in unmoved:  # it would be moved by weight decay, or by old momentum
            parameters[index].grad = None
            if self._can_forget:
                self.optimizer.state.pop(parameters[index], None)
        self.optimizer.step()
        self.optimizer.zero_grad()
        of_momentum = Squares(len(parameters))
        for index, theta in enumerate(parameters):
            state = self.optimizer.state.get(theta, {})
            momentum = state.get("momentum_buffer")
            if momentum is not None:
                flat = momentum.view(-1)
                of_momentum.add([flat], [index])
        self._step_norms = self._norm(squares.by_tensor), self._norm(of_momentum.by_tensor)

    def _unmoved(
        self,
        squares: Tensor,
        sums: Tensor,
    ) -> list[int]:
        """The parameters whose mean pseudo-gradient is exactly 0, in the parts of all ranks."""
        has_moved = squares.bool().double()
        parts = sums.split(self.theta_division.sizes)
        zeros = has_moved.logical_not().nonzero()
        for index in zeros.flatten().tolist():
            is_moved = parts[index].any()  # fp32 has no squares of 1e-30
            has_moved[index] = float(is_moved)
        ranks = self.theta_division.sum(has_moved)
        unmoved = ranks[: self.num_parameters].logical_not().nonzero()
        return unmoved.flatten().tolist()

    def _norm(self, squares: Tensor) -> float:
        """This rank's part of a norm: other ranks may hold the same tensors."""
        copies = torch.tensor(self.theta_division.copies)
        own = squares / copies
        return math.sqrt(own.sum())

    def frozen(self) -> list[int]:
        """The tensors that this group has frozen since the run began (``requires_grad``)."""
        parameters = islice(self.averaged.values(), self.num_parameters)
        return [index for index, tensor in enumerate(parameters) if not tensor.requires_grad]

    # Global parameters that rest in host memory are computed with on the model's device.

    def _lent(
        self,
        flat: Tensor,
        place: slice,
    ) -> Tensor:
        """A part of what rests: a view if it rests there, else a copy, to be given back."""
        return flat[place].to(self.device, non_blocking=True)

    def _give_back(
        self,
        lent: Tensor,
        flat: Tensor,
        place: slice,
    ) -> None:
        if lent.device != flat.device:
            flat[place].copy_(lent, non_blocking=True)

    def _await_rest(self) -> None:
        if self.flat.device != self.device:
            torch.accelerator.current_stream(self.device).synchronize()

    # ---- between the model and flat buffers ------------------------------------------------------

    def pack(
        self,
        mean: WeightedMean,
        local: Sequence[Tensor],
        odd: Collection[int],
        weight: float,
    ) -> None:
        """Pack the pseudo-gradient: the global parameters, minus what the model has now.

        The model may have a smaller dtype than these: they are rounded to it first. What was
        rounded when they were written into it is no training, and would take back what other groups
        have learnt.

        Args:
            mean: Packs it.
            local: The local tensors in the order of ``tensors``.
            odd: Tensors that have no pseudo-gradient in this sync, by index.
            weight: This group's contribution.
        """
        own = self.flat
        if not self.is_shared:  # theta has all, and the message may be a share
            own = own[self.division.place]

        def write(chunk: Chunk, into: Tensor) -> None:
            values = into[chunk.place]
            theta = self._lent(own, chunk.place)
            dtype = local[chunk.indices[0]].dtype
            if dtype != torch.float32:
                theta = _rounded(theta, dtype, into[chunk.place.stop :])
            views, parts = chunk.pairs(local, values)
            if values.device.type == "cpu" and dtype == torch.float32:
                # A pass over memory less than where they are gathered first.
                of_theta = theta.split(chunk.sizes)
                for own_part, part, view in zip(of_theta, parts, views, strict=True):
                    if view.dim() > 1:
                        own_part = own_part.view(view.shape)
                    pseudo_gradient(own_part, part, view)
            else:
                chunk.read(local, values)
                pseudo_gradient(theta, values, values)
            for index, view in zip(chunk.indices, views, strict=True):
                if index in odd:
                    view.zero_()

        mean.pack(write, weight)

    def write_back(self, alpha: float = 0.0) -> None:
        """Set ``local = alpha * local + (1 - alpha) * global`` (2501.18512, alg. 2, line 12).

        With shares it is a collective of the ranks.
        """
        flat = self.theta_division.gathered(self.flat)
        self._write(flat, alpha)
        self.copied.write_back()

    def _write(
        self,
        flat: Tensor,
        alpha: float,
    ) -> None:
        """Write all tensors, in the order of ``theta``, into the model."""
        local = self.local()
        unmixed = self._unmixed(alpha)
        for chunk in self._whole_layout.chunks:
            values = self._lent(flat, chunk.place)
            chunk.write(values, local, alpha, unmixed)
        self._await_rest()

    def _unmixed(self, alpha: float) -> set[int]:
        """The tensors that become global whatever ``alpha`` is: frozen ones, and odd buffers."""
        if not alpha:
            return set()
        odd_globally, odd_here = self.not_finite(self.local())
        return odd_globally.union(odd_here, self.frozen())

    def unpack(self, mean: WeightedMean) -> Tensor:
        """Return a mean like ``flat``, in its own memory. Call it once, on all ranks."""
        own = mean.unpack()
        if self.is_shared:
            return own
        self.division.gather(mean.flat)
        return mean.flat[: self.flat.numel()]

    def has_moved(self) -> bool:
        """Whether local parameters are not the global ones, in what this rank holds of these."""
        local = self.local()
        parameters = islice(self.theta.values(), self.num_parameters)
        for index, theta in enumerate(parameters):
            own = self.theta_division.part_of(index, local[index])
            rounded = theta.view(-1).to(own)
            if not torch.equal(own, rounded):
                return True
        return False

    # ---- by name, and by rank --------------------------------------------------------------------

    @property
    def is_shared(self) -> bool:
        """Whether ``theta`` has this rank's part of each tensor, 1-D, and not all of it."""
        return self.theta_division.num_shares > 1

    @property
    def live(self) -> dict[str, Tensor]:
        """The model's tensors that are synchronised, in the order of ``tensors``."""
        return {**self.averaged, **self.copied.live}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is global, by name: this rank's part of ``theta``, and the copied buffers."""
        return {**self.theta, **self.copied.values}

    def local(self) -> list[Tensor]:
        """What this rank holds of the local parameters and buffers; not copies."""
        return [*map(held_tensor, self.live.values())]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor's part of a buffer like ``flat``, in its shape if it is whole."""
        if self.is_shared:
            return [*flat.split(self.theta_division.sizes)]
        return self.whole_views(flat)

    def whole_views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor in a buffer that has all of them, in its shape."""
        parts = flat.split(self.division.whole_sizes)
        views = map(Tensor.view, parts, self.shapes)
        return [*views]

    def whole(self, name: str) -> Tensor:
        """Return all of a global parameter or buffer. If ranks share it, this is a collective."""
        if name in self.copied.values:
            return self.copied.values[name]
        index = [*self.theta].index(name)
        return self.gathered(index, self.theta[name].detach())

    def gathered(
        self,
        index: int,
        part: Tensor,
    ) -> Tensor:
        """All of a tensor like the global one of this index, given what this rank has of it.

        If ranks share it, this is a collective.
        """
        if not self.is_shared:
            return part
        whole = self.theta_division.whole(index, part)
        return whole.view(self.shapes[index])

    def part_of(
        self,
        index: int,
        whole: Tensor,
    ) -> Tensor:
        """What this rank has of such a tensor: its part, 1-D, if ranks share it, else all."""
        return self.theta_division.part_of(index, whole) if self.is_shared else whole

    def not_finite(
        self,
        local: Sequence[Tensor] = (),
    ) -> tuple[set[int], set[int]]:
        """The averaged buffers, by index, that are not finite and so have no mean.

        It is the same on all ranks of the group: a collective, if there are such buffers.

        Args:
            local: The local tensors in the order of ``tensors``.

        Returns:
            Those that are not finite globally, and those that are not in ``local``.
        """
        buffers = self.averaged_buffers
        if not buffers:
            return set(), set()
        odd = torch.zeros(2, len(buffers), dtype=torch.float64)
        theta = [*self.theta.values()]
        for row, tensors in zip(odd, (theta, local), strict=True):
            if tensors:
                finite = [tensors[index].isfinite().all() for index in buffers]
                is_odd = torch.stack(finite).logical_not()
                row.copy_(is_odd)
        globally, locally = self.division.sum(odd).tolist()
        odd_globally = set(compress(buffers, globally))
        odd_here = set(compress(buffers, locally))
        return odd_globally, odd_here

    @torch.no_grad()
    def take_buffers(self, averaged: Iterable[int]) -> None:
        """After the vote: take over the first group's buffers, those without a mean.

        Args:
            averaged: Of the buffers that are averaged, those to take over too, by index.
        """
        received = self.copied.take()
        parameters = [*self.theta.values()]
        for index in averaged:
            theta = parameters[index]
            buffer = received[index - self.num_parameters]
            own = self.theta_division.part_of(index, buffer)
            theta.copy_(own.view(theta.shape))

    def mean_over_ranks(self, *values: float) -> list[float]:
        """The means of numbers over the ranks of the group: a collective, if there are several."""
        own = torch.tensor(values, dtype=torch.float64)
        means = self.division.sum(own) / self.division.num_ranks
        return means.tolist()

    # ---- the outer optimizer's state -------------------------------------------------------------

    @functools.cached_property
    def momentum(self) -> Tensor:
        """The outer momentum of all tensors, like ``flat``."""
        return torch.zeros_like(self.flat, pin_memory=self.flat.is_pinned())

    @property
    def momenta(self) -> list[Tensor]:
        """The momentum of each tensor: views of one buffer, like ``theta``. Other optimizers than
        SGD have none."""
        if not isinstance(self.optimizer, torch.optim.SGD):
            return []
        return self.views(self.momentum)

    def _keep_momentum(self) -> None:
        """Have the optimizer hold the views of one buffer as its momentum."""
        momenta = self.momenta
        for index, theta in enumerate(self.theta.values()):
            if index < self.num_parameters:
                self.optimizer.state[theta]["momentum_buffer"] = momenta[index]

    def move_to(
        self,
        flat: Tensor,
        momentum: Tensor,
    ) -> None:
        """Continue in other memory, with the numbers that are in it.

        Args:
            flat: Becomes ``flat``.
            momentum: The same for the outer momentum.
        """
        self.flat = flat
        self.momentum = momentum
        views = self.views(flat)
        for parameter, view in zip(self.theta.values(), views, strict=True):
            # The optimizer holds these Parameters, so their memory is replaced, and not they.
            parameter.data = view

    def load_optimizer(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another group's outer optimizer. Its tensors are copied.

        The momentum has been copied to ``momenta`` before. What a peer has sent may be in memory
        that is written again.
        """
        self.optimizer.load_state_dict(state_dict)
        momenta = self.momenta
        for index, theta in enumerate(self.theta.values()):
            state = self.optimizer.state.get(theta, {})
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                if momenta and key == "momentum_buffer":
                    state[key] = momenta[index]
                else:
                    state[key] = value.clone()

    def follow(
        self,
        lr: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Take the next outer steps with these numbers, as a row of the schedule says.

        The momentum buffers stay. Momentum 0 drops them: no outer step would change them until
        momentum comes back, and groups that resume from a checkpoint would lack them.
        """
        for group in self.optimizer.param_groups:
            group.update(lr=lr, momentum=momentum, nesterov=nesterov)
        if not momentum and self.optimizer.state:
            self.optimizer.state.clear()
            self.momentum.zero_()

    def step_norms(self) -> list[float]:
        """The L2 norms of the mean pseudo-gradient and of the momentum in the last outer step.

        They are of the step that this process has taken last; 0 before the first one. They are over
        all shards or shares of the group, if it has any: then it is a collective of its ranks.
        """
        squares = torch.tensor(self._step_norms, dtype=torch.float64).square()
        return self.theta_division.sum(squares).sqrt().tolist()


def _rounded(
    values: Tensor,
    dtype: torch.dtype,
    memory: Tensor,
) -> Tensor:
    """Round values to another dtype, in this memory if it is large enough."""
    room = memory.view(dtype)[: values.numel()]
    if room.numel() < values.numel():
        return values.to(dtype)
    return room.copy_(values)


def _check_is_over(optimizer: Any, owned: Sequence[nn.Parameter]) -> None:
    """Check that the outer optimizer moves the global parameters, and nothing else."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"outer_optimizer returned {type(optimizer).__name__}: return a torch.optim.Optimizer "
            "over the parameters it is given"
        )
    stepped: set[int] = set()
    for group in optimizer.param_groups:
        stepped.update(map(id, group["params"]))
    if stepped != set(map(id, owned)):
        raise ValueError(
            "outer_optimizer built an optimizer over other parameters than the global ones it was "
            "given: write e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
        )
