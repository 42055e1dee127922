"""The global parameters of a fragment, which only the outer optimizer moves."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.diloco.averaging.weighted_mean import CHUNK, WeightedMean, chunks_of
from composer_replication.diloco.copied_buffers import CopiedBuffers, has_mean
from composer_replication.diloco.outer_health import StepNorms
from composer_replication.diloco.outer_optimizer import OuterOptimizer, SGDStep, is_plain_sgd
from composer_replication.diloco.shards import Shards, local_tensor


class GlobalParameters:
    """The global parameters of one fragment (theta, fp32) and the outer optimizer that owns them.

    The optimizer is built over *these* tensors and never over the model's, so it cannot step
    another fragment, decay a frozen weight, round to bf16, or clear the model's ``p.grad``
    (ADR-005).

    Under DDP each rank holds and steps only its share of them, if the outer optimizer is DiLoCo's
    SGD, which treats each element by itself. Any other optimizer gets whole tensors on all ranks
    (ADR-026).

    Args:
        tensors: The fragment's parameters in the model, of any floating dtype and device, and the
            buffers that are synchronised with them. Of these, those that have a mean are averaged,
            the others are the first group's (``copied``).
        outer_optimizer: Builds the optimizer over the global parameters.
        backup_device: Where they and the optimizer's state live.
        shards_of: Returns the ``Shards`` of tensors: what this rank has of them.

    Attributes:
        averaged_buffers: The indices of the buffers in ``theta``.
        share: What this rank averages with other groups.
        shards: What it holds of the global parameters.
        flat: All that it holds, 1-D fp32, one tensor after the other. ``theta`` has the views.

    Raises:
        ValueError: ``outer_optimizer`` gave no optimizer over exactly these parameters, or see
            ``Shards``.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        outer_optimizer: OuterOptimizer,
        backup_device: torch.device,
        shards_of: Callable[[Iterable[Tensor]], Shards] = Shards,
    ) -> None:
        parameters = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
        buffers = {name: t for name, t in tensors.items() if name not in parameters}
        averaged = {name: t for name, t in buffers.items() if has_mean(t)}
        self.local = parameters | averaged
        self.copied = CopiedBuffers(averaged | buffers)
        held = {name: local_tensor(tensor) for name, tensor in self.local.items()}
        self.shapes = {name: tensor.shape for name, tensor in held.items()}
        self.share = self.shards = shards_of(self.local.values())
        # An optimizer that reads whole tensors, such as LAMB, would take other steps on shares.
        if self.share.num_shares > 1 and not _is_elementwise(outer_optimizer, parameters):
            self.shards = Shards(held.values())
        # Pinned, copies to an accelerator run beside its kernels.
        pin = backup_device.type == "cpu" and torch.accelerator.is_available()
        # fp32, whatever the model's dtype is: an outer step may be smaller than bf16's rounding.
        self.flat = torch.empty(
            sum(self.shards.sizes), dtype=torch.float32, device=backup_device, pin_memory=pin
        )
        with torch.no_grad():
            pairs = zip(self.views(self.flat), self.shards.own(held.values()), strict=True)
            views = [nn.Parameter(view.copy_(part.view(view.shape))) for view, part in pairs]
        self.theta = dict(zip(held, views, strict=True))
        owned = [self.theta[name] for name in parameters]
        self._momentum_norm: float | None = None
        """L2 norm of this rank's momentum after the last outer step; None if it is not known."""
        self._step_norms = StepNorms()
        """Norms of this rank in the last outer step; its momentum is in ``_momentum_norm``."""
        self._buffers = frozenset(averaged)
        self.averaged_buffers = range(len(parameters), len(self.local))
        self.optimizer = outer_optimizer(owned)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"outer_optimizer returned {type(self.optimizer).__name__}: return a "
                "torch.optim.Optimizer over the parameters it is given"
            )
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        if {id(p) for p in stepped} != {id(p) for p in owned}:
            raise ValueError(
                "outer_optimizer built an optimizer over other parameters than the global ones it "
                "was given: write e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
            )

    # ---- the outer step --------------------------------------------------------------------------

    @torch.no_grad()
    def take_outer_step(self, mean: WeightedMean, alpha: float = 0.0) -> None:
        """Move the global parameters by the mean pseudo-gradient, and write them into the model.

        Buffers become the mean of the local ones: global minus the mean of (global minus local). A
        buffer that is constant stays bitwise identical. A tensor whose mean pseudo-gradient is
        exactly 0 is not moved and forgets its momentum: all groups have frozen it (ADR-022).

        Args:
            mean: The mean after ``finish``, over the tensors in the order of ``theta``. Its memory
                is overwritten.
            alpha: See ``write_back``.
        """
        plain = {index for index, name in enumerate(self.theta) if name in self._buffers}
        unmoved = self._unmoved(mean) - plain
        for index, theta in enumerate(self.theta.values()):
            # Old momentum would move the tensor once its pseudo-gradient is not 0 any more.
            if index in plain | unmoved and self.optimizer.state.pop(theta, None):
                self._momentum_norm = None
        is_plain = is_plain_sgd(self.optimizer)
        decay = float(self.optimizer.param_groups[0]["momentum"]) if is_plain else 0.0
        # The momentum's norm before the step gives momentum_cosine without a pass over memory.
        before = self._own_momentum_norm() if decay else 0.0
        if mean.device.type == self.flat.device.type == "cpu" and is_plain:
            norms = self._descend(mean, plain, unmoved, alpha)
            is_written_back = not self.is_shared  # each chunk at once
        else:
            norms = self._step(mean, plain, unmoved)
            is_written_back = False
        self._step_norms = norms._replace(momentum_before=before, decay=decay)
        if not is_written_back:
            self._write_back(alpha, self._gather(mean) if self.is_shared else self.theta.values())

    def _unmoved(self, mean: WeightedMean) -> set[int]:
        """The tensors whose mean pseudo-gradient is exactly 0, in the parts of all ranks."""
        if mean.device.type == "cpu":  # in nearly all tensors one of the first numbers is not 0
            moved = [bool(each[:64].any() or each.any()) for each in mean.sums()]
            parts = torch.tensor(moved, dtype=torch.float64)
        else:  # one question for all tensors: each waits for the accelerator
            parts = torch.stack([each.any() for each in mean.sums()]).double()
        parts = self.shards.sum(parts).tolist()
        return {index for index, part in enumerate(parts) if not part}

    def frozen(self) -> list[int]:
        """The tensors that this group has frozen since the run began (``requires_grad``)."""
        parameters = enumerate(self.local.items())
        return [i for i, (name, t) in parameters if not (t.requires_grad or name in self._buffers)]

    def _descend(
        self, mean: WeightedMean, plain: Collection[int], unmoved: Collection[int], alpha: float
    ) -> StepNorms:
        """Take torch's outer step in chunks, and write each chunk back while it is in cache."""
        step, unmixed = SGDStep(self.optimizer, mean.divisor), self._unmixed(alpha)
        momenta, stepped, still = ([torch.zeros(())] for _ in range(3))  # squares of norms
        for index, (theta, parameter, sums) in enumerate(
            zip(self.theta.values(), self.local.values(), mean.sums(), strict=True)
        ):
            is_stepped = index not in plain and index not in unmoved
            chunk, into, local = CHUNK, (), local_tensor(parameter)
            if not self.is_shared and local.is_contiguous():
                into = chunks_of(local.view(-1), chunk)
            elif not self.is_shared:  # scattered in memory: written back as a whole
                chunk, into = max(1, theta.numel()), (local,)
            flats = [theta.detach().view(-1), sums]
            if is_stepped and step.momentum:
                flats.append(self._momentum_of(index, theta).view(-1))
            parts = zip(*(chunks_of(each, chunk) for each in flats), strict=True)
            for own, (part, total, *momentum) in itertools.zip_longest(into, parts):
                # Before the step, which overwrites the sums.
                square = self.shards.own_part(torch.dot(total, total), index)
                (stepped if is_stepped else still).append(square)
                if is_stepped:
                    step.move(part, total, *momentum)
                elif index in plain:
                    part.sub_(total.div_(mean.divisor))
                momenta += (self.shards.own_part(torch.dot(m, m), index) for m in momentum)
                if own is not None:
                    _mix(own, part.view(own.shape), 0.0 if index in unmixed else alpha)
        self._await_copies()
        self._momentum_norm = _root(momenta) if step.momentum else None
        return StepNorms.of_parts(_root(stepped) / mean.divisor, _root(still) / mean.divisor)

    def _step(
        self, mean: WeightedMean, plain: Collection[int], unmoved: Collection[int]
    ) -> StepNorms:
        """Give the mean to the outer optimizer as gradients, and let it step.

        For outer optimizers and devices that ``_descend`` does not handle.
        """
        stepped, still = ([torch.zeros((), device=mean.device)] for _ in range(2))
        for index, (theta, delta) in enumerate(
            zip(self.theta.values(), mean.unpack(), strict=True)
        ):
            square = self.shards.own_part(torch.dot(delta, delta), index)
            (still if index in plain or index in unmoved else stepped).append(square)
            if index in plain:
                theta.sub_(delta.view(theta.shape).to(theta.device))
            elif index not in unmoved:
                theta.grad = torch.empty_like(theta).copy_(delta.view(theta.shape))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._momentum_norm = None
        return StepNorms.of_parts(_root(stepped), _root(still))

    # ---- the way back into the model -------------------------------------------------------------

    @torch.no_grad()
    def write_back(self, alpha: float = 0.0) -> None:
        """Set ``local = alpha * local + (1 - alpha) * global`` (2501.18512, alg. 2, line 12).

        With shares it is a collective of the ranks.
        """
        self._write_back(alpha, map(self.whole, self.theta))
        self.copied.write_back()

    def _write_back(self, alpha: float, whole: Iterable[Tensor]) -> None:
        unmixed = self._unmixed(alpha)
        pairs = zip(self.local.values(), whole, strict=True)
        for index, (parameter, theta) in enumerate(pairs):
            _mix(local_tensor(parameter), theta, 0.0 if index in unmixed else alpha)
        self._await_copies()

    def _unmixed(self, alpha: float) -> set[int]:
        """The tensors that become global whatever ``alpha`` is: frozen ones, and odd buffers."""
        local = [local_tensor(tensor) for tensor in self.local.values()]
        odd = self.not_finite(local) if alpha else ()
        return set(self.frozen()).union(*odd)

    def _await_copies(self) -> None:
        """Wait until an accelerator has read the global parameters, which may change after that."""
        if torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()

    def _gather(self, mean: WeightedMean) -> list[Tensor]:
        """Gather all of each tensor, in the memory of a mean that is no longer needed."""
        mean.flat[self.share.start :][: self.flat.numel()] = self.flat
        self.share.gather(mean.flat)
        return self.whole_views(mean.flat)

    @torch.no_grad()
    def has_moved(self) -> bool:
        """Whether local parameters are not the global ones, in what this rank averages."""
        local = self.share.own(map(local_tensor, self.local.values()))
        return any(
            name not in self._buffers and not torch.equal(own, theta.to(own.device, own.dtype))
            for name, theta, own in zip(self.theta, self.own_parts(), local, strict=True)
        )

    # ---- by name, and by rank --------------------------------------------------------------------

    @property
    def is_shared(self) -> bool:
        """Whether ``theta`` has this rank's part of each tensor, 1-D, and not all of it."""
        return self.shards.num_shares > 1

    @property
    def local_tensors(self) -> dict[str, Tensor]:
        """The model's tensors that are synchronised, in the order of ``tensors``."""
        return {**self.local, **self.copied.live}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is global, by name: this rank's part of ``theta``, and the copied buffers."""
        return {**self.theta, **self.copied.values}

    def divide(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """From a list in the order of ``tensors`` take what is averaged, and the buffers."""
        return tensors[: len(self.theta)], tensors[self.averaged_buffers.start :]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor's part of a buffer like ``flat``, in its shape if it is whole."""
        return list(flat.split(self.shards.sizes)) if self.is_shared else self.whole_views(flat)

    def whole_views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor in a buffer that has the shares of all ranks, in its shape."""
        sizes = self.share.whole_sizes
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(s) for part, s in zip(parts, self.shapes.values(), strict=True)]

    def own_parts(self) -> Iterator[Tensor]:
        """This rank's share of each global parameter, 1-D."""
        theta = (parameter.detach() for parameter in self.theta.values())
        return theta if self.is_shared else self.share.own(theta)

    def whole(self, name: str, part: Tensor | None = None) -> Tensor:
        """Return all of a global tensor. If ranks share it, this gathers it: a collective.

        Args:
            name: The name of the parameter or buffer.
            part: This rank's part of another tensor of that shape, to gather instead.
        """
        if name in self.copied.values:
            return self.copied.values[name]
        own = self.theta[name].detach() if part is None else part
        if not self.is_shared:
            return own
        return self.shards.whole(list(self.theta).index(name), own).view(self.shapes[name])

    def not_finite(self, local: Sequence[Tensor] = ()) -> tuple[set[int], set[int]]:
        """The averaged buffers, by index, that are not finite and so have no mean.

        It is the same on all ranks of the group: a collective, if there are such buffers.

        Args:
            local: The local tensors in the order of ``tensors``.

        Returns:
            Those that are not finite globally, and those that are not in ``local``.
        """
        buffers = self.averaged_buffers
        odd = torch.zeros(2, len(buffers), dtype=torch.float64)
        if not buffers:
            return set(), set()
        for row, tensors in zip(odd, ([*self.theta.values()], local), strict=True):
            if tensors:
                finite = torch.stack([tensors[index].isfinite().all() for index in buffers])
                row += finite.logical_not().cpu()
        globally, locally = (
            {index for index, count in zip(buffers, counts, strict=True) if count}
            for counts in self.share.sum(odd).tolist()
        )
        return globally, locally

    @torch.no_grad()
    def take_buffers(self, averaged: Iterable[int]) -> None:
        """After the vote: take over the first group's buffers, those without a mean.

        Args:
            averaged: Of the buffers that are averaged, those to take over too, by index.
        """
        received, theta = self.copied.take(), [*self.theta.values()]
        for index in averaged:
            own = self.shards.part_of(index, received[index - self.averaged_buffers.start])
            theta[index].copy_(own.view(theta[index].shape))

    def level_buffers(self) -> None:
        """Give all ranks of the group the same buffers."""
        names = self._buffers | self.copied.live.keys()
        self.share.level([t for name, t in self.local_tensors.items() if name in names])

    def mean_over_ranks(self, *values: float) -> list[float]:
        """The means of numbers over the ranks of the group: a collective, if there are several."""
        sums = self.share.sum(torch.tensor([*values, 1.0], dtype=torch.float64))
        *totals, count = sums.tolist()
        return [total / count for total in totals]

    # ---- the outer optimizer's state -------------------------------------------------------------

    @functools.cached_property
    def momenta(self) -> list[Tensor]:
        """The momentum of each tensor: views of one buffer, like ``theta``."""
        return self.views(torch.empty_like(self.flat, pin_memory=False))

    def _momentum_of(self, index: int, theta: nn.Parameter) -> Tensor:
        state = self.optimizer.state[theta]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = self.momenta[index].zero_()
        return state["momentum_buffer"]

    def move_to(self, flat: Tensor, momentum: Tensor) -> None:
        """Continue in other memory, with the numbers that are in it.

        Args:
            flat: Becomes ``flat``.
            momentum: The same for the outer momentum.
        """
        self.flat, self.momenta = flat, self.views(momentum)
        for parameter, view in zip(self.theta.values(), self.views(flat), strict=True):
            # The optimizer holds these Parameters, so their memory is replaced, and not they.
            parameter.data = view

    def load_optimizer(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another group's outer optimizer. Its tensors are copied.

        The momentum has been copied to ``momenta`` before. What a peer has sent may be in memory
        that is written again.
        """
        self.optimizer.load_state_dict(state_dict)
        self._momentum_norm = None
        for index, theta in enumerate(self.theta.values()):
            state = self.optimizer.state.get(theta, {})
            for key, value in state.items():
                if key == "momentum_buffer" and value is not None:
                    state[key] = self.momenta[index]
                elif isinstance(value, Tensor):
                    state[key] = value.clone()

    def follow(self, lr: float, momentum: float, nesterov: bool) -> None:
        """Take the next outer steps with these numbers, as a row of the schedule says.

        The momentum buffers stay. Momentum 0 drops them: no outer step would change them until
        momentum comes back, and groups that resume from a checkpoint would lack them.
        """
        for group in self.optimizer.param_groups:
            group.update(lr=lr, momentum=momentum, nesterov=nesterov)
        if not momentum:
            self.optimizer.state.clear()

    def step_norms(self) -> StepNorms:
        """The norms of the last outer step; the momentum's is 0 before the first one.

        They are over all shards or shares of the group, if it has any: then it is a collective of
        its ranks.
        """
        *own, decay = self._step_norms._replace(momentum=self._own_momentum_norm())
        return StepNorms._make([*self.shards.norms(own), decay])

    def _own_momentum_norm(self) -> float:
        if self._momentum_norm is None:
            squares = [torch.zeros((), device=self.flat.device)]
            for index, theta in enumerate(self.theta.values()):
                buffer = self.optimizer.state.get(theta, {}).get("momentum_buffer")
                if buffer is not None:
                    squares.append(self.shards.own_part(buffer.norm().square(), index))
            self._momentum_norm = _root(squares)
        return self._momentum_norm


def _root(squares: list[Tensor]) -> float:
    return math.sqrt(float(torch.stack(squares).sum()))


def _mix(local: Tensor, theta: Tensor, alpha: float) -> None:
    if alpha == 0.0:  # not lerp: 0 * nan is nan, so a replica with NaN would never recover
        # ``_await_copies`` waits. A non-blocking copy to a CPU could be read before it has arrived.
        local.copy_(theta, non_blocking=local.device.type != "cpu")
    else:
        local.copy_(theta.to(local.device).lerp(local.float(), alpha))


def _is_elementwise(outer_optimizer: OuterOptimizer, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the outer optimizer treats each element by itself, as far as we know."""
    shapes = (local_tensor(parameter).shape for parameter in parameters.values())
    like = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    return is_plain_sgd(outer_optimizer(like))
