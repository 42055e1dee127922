"""The global parameters of a fragment: what the outer optimizer moves, and only it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from composer_replication.diloco.averaging.rank_shares import RankShare
from composer_replication.diloco.averaging.weighted_mean import CHUNK, WeightedMean, chunks_of
from composer_replication.diloco.copied_buffers import CopiedBuffers, has_mean
from composer_replication.diloco.fragments import Buffers, Parameters
from composer_replication.diloco.outer_health import StepNorms
from composer_replication.diloco.outer_optimizer import OuterOptimizer
from composer_replication.diloco.outer_step import ChunkedDescent, is_plain_sgd
from composer_replication.diloco.shards import Shards, local_tensor


class GlobalParameters:
    """The global parameters of one fragment (theta, fp32) and the outer optimizer that owns them.

    The optimizer is built over *these* tensors and never over the model's, so it cannot step
    another fragment, decay a frozen weight, round to bf16, or clear the model's ``p.grad``.

    Under DDP each rank holds and steps only its share of them, if the outer optimizer is DiLoCo's:
    what SGD does to an element depends on no other. Any other one gets whole tensors on all ranks.

    Args:
        parameters: The fragment's parameters in the model, of any floating dtype and device.
        outer_optimizer: Builds the optimizer over the global parameters.
        backup_device: Where they and the optimizer's state live.
        buffers: Buffers that are synchronised with them: those that have a mean become the mean,
            the others are ``copied``.
        shards: Of the model, if the ranks of the group hold such.
        share: Gives this rank's share of the tensors, from their sizes. None: it holds all.

    Raises:
        ValueError: ``outer_optimizer`` gave no optimizer over exactly these parameters, or see
            ``Shards``.
    """

    def __init__(
        self,
        parameters: Parameters,
        outer_optimizer: OuterOptimizer,
        backup_device: torch.device,
        buffers: Buffers | None = None,
        shards: Shards | None = None,
        share: Callable[[list[int]], RankShare] = RankShare,
    ) -> None:
        averaged = {name: t for name, t in (buffers or {}).items() if has_mean(t)}
        self.local: dict[str, Tensor] = {**parameters, **averaged}
        others = {name: t for name, t in (buffers or {}).items() if name not in averaged}
        self.copied = CopiedBuffers(others)
        self.shards = shards or Shards()
        # Pinned, copies to an accelerator run beside its kernels.
        pin = backup_device.type == "cpu" and torch.accelerator.is_available()
        held = {name: local_tensor(tensor) for name, tensor in self.local.items()}
        self.shapes = {name: tensor.shape for name, tensor in held.items()}
        self.share = share([tensor.numel() for tensor in held.values()])
        self.is_shared = self.share.num_ranks > 1 and _is_elementwise(outer_optimizer, parameters)
        """Whether ``theta`` has this rank's part of each tensor, 1-D, and not all of it."""
        self.flat = torch.empty(
            sum(self._sizes), dtype=torch.float32, device=backup_device, pin_memory=pin
        )
        """All of them, one after the other. ``theta`` has the views."""
        with torch.no_grad():
            own = self.share.own(held.values()) if self.is_shared else held.values()
            self.theta = {
                name: nn.Parameter(view.copy_(part))
                for name, part, view in zip(held, own, self.views(self.flat), strict=True)
            }
        owned = [self.theta[name] for name in parameters]
        self._momentum_norm: float | None = None
        """Of this rank's buffers, as of the last outer step; None if it was not computed in it."""
        self._step_norms = StepNorms()
        """Of this rank, in the last outer step; ``momentum`` is in ``_momentum_norm``."""
        self._buffers = frozenset(averaged)
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

    @torch.no_grad()
    def take_outer_step(
        self, mean: WeightedMean, alpha: float = 0.0, *, replaces: bool = False
    ) -> None:
        """Move the global parameters by the mean pseudo-gradient, and ``write_back``.

        Buffers take theirs at once: global minus the mean of (global minus local) is the mean, and
        a buffer that is a constant stays bitwise identical. A tensor whose mean is exactly 0 is not
        moved and forgets its momentum: that is one which all groups have frozen, since a frozen
        tensor becomes the global one in each sync, whatever alpha is.

        Args:
            mean: After ``finish``, over the tensors in the order of ``theta``. It is used up.
            alpha: See ``write_back``.
            replaces: Whether all tensors take theirs at once, since an average is to be global.
        """
        theta = list(self.theta.values())
        taken = self.theta if replaces else self._buffers
        plain = {index for index, name in enumerate(self.theta) if name in taken}
        held = self._unmoved(mean) - plain
        for index in plain | held:
            if self.optimizer.state.pop(theta[index], None):
                self._momentum_norm = None
        is_plain = is_plain_sgd(self.optimizer)
        decay = float(self.optimizer.param_groups[0]["momentum"]) if is_plain else 0.0
        before = (self._momentum_norm or self._compute_momentum_norm()) if decay else 0.0
        if mean.device.type == self.flat.device.type == "cpu" and is_plain:
            norms = self._descend(mean, plain, held, alpha)
            is_written_back = not self.is_shared  # each chunk at once
        else:
            norms = self._step(mean, plain, held)
            is_written_back = False
        self._step_norms = norms._replace(momentum_before=before, decay=decay)
        if not is_written_back:
            self._write_back(alpha, self._gather(mean) if self.is_shared else self.theta.values())

    def _unmoved(self, mean: WeightedMean) -> set[int]:
        """The tensors whose mean pseudo-gradient is exactly 0, in the parts of all ranks."""
        if mean.device.type == "cpu":  # nearly always the first numbers tell
            moved = [bool(each[:64].any() or each.any()) for each in mean.sums()]
            parts = torch.tensor(moved, dtype=torch.float64)
        else:  # asked once for all tensors, since an accelerator is waited for
            parts = torch.stack([each.any() for each in mean.sums()]).double()
        if self.is_shared:
            parts = self.share.sum(parts)
        parts = self.shards.sum(parts)
        return {index for index, part in enumerate(parts.tolist()) if not part}

    def frozen(self) -> list[int]:
        """The tensors that this group has frozen since the run began (``requires_grad``)."""
        parameters = enumerate(self.local.items())
        return [i for i, (name, t) in parameters if not (t.requires_grad or name in self._buffers)]

    def _step(self, mean: WeightedMean, plain: Collection[int], held: Collection[int]) -> StepNorms:
        """Give the mean to the outer optimizer as gradients, and let it step.

        For outer optimizers and devices that ``_descend`` does not handle.
        """
        stepped, still = [torch.zeros((), device=mean.device)], []
        for index, (parameter, delta) in enumerate(
            zip(self.theta.values(), mean.unpack(), strict=True)
        ):
            square = self.shards.own_part(torch.dot(delta, delta), index)
            (still if index in plain or index in held else stepped).append(square)
            if index in plain:
                parameter.sub_(delta.view(parameter.shape).to(parameter.device))
            elif index not in held:
                parameter.grad = torch.empty_like(parameter).copy_(delta.view(parameter.shape))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._momentum_norm = None
        return StepNorms.of_parts(_root(stepped), _root(still))

    def _gather(self, mean: WeightedMean) -> Iterator[Tensor]:
        """All of each tensor, in the memory of a mean that is used up."""
        mean.flat[self.share.start :][: self.flat.numel()] = self.flat
        self.share.gather(mean.flat)
        sizes = self.share.whole_sizes
        parts = mean.flat[: sum(sizes)].split(sizes)
        return (part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=True))

    def _descend(
        self, mean: WeightedMean, plain: Collection[int], held: Collection[int], alpha: float
    ) -> StepNorms:
        """Torch's outer step; and the way back of what is whole, while a chunk is in cache."""
        descent, divisor = ChunkedDescent(self.optimizer, self._momentum), mean.divisor
        nothing, frozen = torch.zeros(()), set(self.frozen())
        squares, stepped, still = [nothing], [nothing], [nothing]
        for index, (theta, parameter, sums) in enumerate(
            zip(self.theta.values(), self.local.values(), mean.sums(), strict=True)
        ):
            local = None if self.is_shared else local_tensor(parameter)
            # A tensor whose elements do not lie one after the other is written back at once.
            is_cut = local is None or local.is_contiguous()
            chunk = CHUNK if is_cut else max(1, theta.numel())
            kept = 0.0 if index in frozen else alpha
            if index in plain or index in held:
                square = torch.dot(sums, sums) / divisor**2
                still.append(self.shards.own_part(square, index))
                if index in plain:
                    theta.view(-1).sub_(sums.div_(divisor))
                chunks = chunks_of(theta.detach().view(-1), chunk)
                moved = ((each, each[:0], nothing) for each in chunks)
            else:
                moved = descent.steps(theta, index, sums, divisor, chunk)
            if local is None:
                parts = ()
            else:
                parts = chunks_of(local.view(-1), chunk) if is_cut else (local,)
            for part, (global_part, momentum, square) in itertools.zip_longest(parts, moved):
                squares.append(self.shards.own_part(torch.dot(momentum, momentum), index))
                stepped.append(self.shards.own_part(square / divisor**2, index))
                if part is not None:
                    _mix(part, global_part.view(part.shape), kept)
        self._momentum_norm = _root(squares)
        return StepNorms.of_parts(_root(stepped), _root(still))

    @property
    def _sizes(self) -> list[int]:
        return self.share.sizes if self.is_shared else self.share.whole_sizes

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor's part of a buffer like ``flat``, in its shape if it is whole."""
        parts = flat.split(self._sizes)
        if self.is_shared:
            return list(parts)
        return [part.view(s) for part, s in zip(parts, self.shapes.values(), strict=True)]

    def own_parts(self) -> Iterator[Tensor]:
        """This rank's part of each global parameter, 1-D."""
        theta = [parameter.detach() for parameter in self.theta.values()]
        return iter(theta) if self.is_shared else self.share.own(theta)

    def whole(self, name: str, part: Tensor | None = None) -> Tensor:
        """All of a global tensor: itself, or gathered by a collective if it is shared.

        Args:
            name: Of the parameter or buffer.
            part: What this rank has of another tensor like it, to be gathered instead.
        """
        if name in self.copied.values:
            return self.copied.values[name]
        own = self.theta[name].detach() if part is None else part
        if not self.is_shared:
            return own
        return self.share.whole(list(self.theta).index(name), own).view(self.shapes[name])

    def level_buffers(self) -> None:
        """Give all ranks of the group the same buffers."""
        names = self._buffers | self.copied.live.keys()
        ranks = self.share if self.share.num_ranks > 1 else self.shards
        ranks.level([t for name, t in self.local_tensors.items() if name in names])

    def divide(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Divide a list in the order of ``tensors`` into what is averaged, and what is copied."""
        return tensors[: len(self.theta)], tensors[len(self.theta) :]

    @property
    def local_tensors(self) -> dict[str, Tensor]:
        """The model's tensors that are synchronised, in the order of ``tensors``."""
        return {**self.local, **self.copied.live}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is global, by name: this rank's part of ``theta``, and the copied buffers."""
        return {**self.theta, **self.copied.values}

    @torch.no_grad()
    def write_back(self, alpha: float = 0.0) -> None:
        """``local = alpha * local + (1 - alpha) * global`` (2501.18512, alg. 2, line 12).

        A collective of the ranks, if they share.
        """
        self._write_back(alpha, map(self.whole, self.theta))
        self.copied.write_back()

    def _write_back(self, alpha: float, whole: Iterable[Tensor]) -> None:
        frozen = set(self.frozen())
        pairs = zip(self.local.values(), whole, strict=True)
        for index, (parameter, theta) in enumerate(pairs):
            _mix(local_tensor(parameter), theta, 0.0 if index in frozen else alpha)

    def keep_own_state(self) -> None:
        """Copy what the optimizer has loaded, which may be a part of all that a peer sent."""
        self._momentum_norm = None
        for index, theta in enumerate(self.theta.values()):
            state = self.optimizer.state.get(theta, {})
            for key, value in state.items():
                if key == "momentum_buffer" and value is not None:
                    state[key] = copy_into(self._momentum[index], value)
                elif isinstance(value, Tensor):
                    state[key] = value.clone()

    @functools.cached_property
    def _momentum(self) -> list[Tensor]:
        """Where the momentum of each tensor is kept: in one buffer, as the tensors are."""
        return self.views(torch.empty_like(self.flat, pin_memory=False))

    def move_to(self, flat: Tensor, momentum: Tensor | None) -> None:
        """Continue in other memory, with the numbers that are in it.

        Args:
            flat: Becomes ``flat``.
            momentum: The same for the outer momentum; None leaves that where it is.
        """
        self.flat = flat
        for parameter, view in zip(self.theta.values(), self.views(flat), strict=True):
            parameter.data = view
        if momentum is not None:
            self._momentum = self.views(momentum)

    def follow(self, lr: float, momentum: float, nesterov: bool) -> None:
        """Take the next outer steps with these numbers, as a row of the schedule says.

        The momentum buffers stay. Momentum 0 forgets them: no outer step would change them, and
        when momentum comes back they would be as old as that. A checkpoint does not have them.
        """
        for group in self.optimizer.param_groups:
            group.update(lr=lr, momentum=momentum, nesterov=nesterov)
        if not momentum:
            self.optimizer.state.clear()

    def step_norms(self) -> StepNorms:
        """The norms of the last outer step; the momentum's is 0 before the first one.

        Over all shards or shares of the group, if it has such; then a collective of its ranks.
        """
        if self._momentum_norm is None:
            self._momentum_norm = self._compute_momentum_norm()
        *own, decay = self._step_norms._replace(momentum=self._momentum_norm)
        norms = self.share.norms(own) if self.is_shared else self.shards.norms(own)
        return StepNorms._make([*norms, decay])

    @property
    def has_ranks(self) -> bool:
        """Whether the group has several ranks, which share or shard the model or hold copies."""
        return self.share.num_ranks > 1 or self.shards.are_held

    def mean_over_ranks(self, *values: float) -> list[float]:
        """The means of numbers over the ranks of the group: a collective, if there are several."""
        parts = self.share if self.share.num_ranks > 1 else self.shards
        *totals, count = parts.sum(torch.tensor([*values, 1.0], dtype=torch.float64)).tolist()
        return [total / count for total in totals]

    def _compute_momentum_norm(self) -> float:
        squares = []
        for index, theta in enumerate(self.theta.values()):
            buffer = self.optimizer.state.get(theta, {}).get("momentum_buffer")
            if buffer is not None:
                squares.append(self.shards.own_part(buffer.norm().square(), index))
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def copy_into(own: Tensor, value: Tensor) -> Tensor:
    """``own``, with the numbers of a tensor that may be in its memory already."""
    return own if value.data_ptr() == own.data_ptr() else own.copy_(value)


def _root(squares: list[Tensor]) -> float:
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def _mix(local: Tensor, theta: Tensor, alpha: float) -> None:
    if alpha == 0.0:  # not lerp: 0 * nan is nan, and a sick replica would never recover
        local.copy_(theta)
    else:
        local.copy_(theta.to(local.device).lerp(local.float(), alpha))


def _is_elementwise(outer_optimizer: OuterOptimizer, parameters: Parameters) -> bool:
    """Whether the outer optimizer treats each element by itself, as far as we know."""
    shapes = (local_tensor(parameter).shape for parameter in parameters.values())
    like = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    return is_plain_sgd(outer_optimizer(like))
