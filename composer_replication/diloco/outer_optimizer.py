"""The outer optimizer owns the global parameters; the sign convention lives here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from composer_replication.diloco.averaging.rank_shares import RankShare
from composer_replication.diloco.averaging.weighted_mean import CHUNK, WeightedMean, chunks_of
from composer_replication.diloco.fragments import Buffers, Parameters
from composer_replication.diloco.freezing import Freezing, StepRules
from composer_replication.diloco.outer_step import ChunkedDescent, is_plain_sgd
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.shards import Shards

OuterOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""Takes a fragment's global parameters, returns the optimizer that moves them."""


def nesterov_sgd(
    lr: float = DiLoCoSettings.outer_lr,
    momentum: float = DiLoCoSettings.outer_momentum,
    nesterov: bool = DiLoCoSettings.outer_nesterov,
) -> OuterOptimizer:
    """The outer optimizer of DiLoCo (arXiv 2311.08105, section 3.1): SGD with Nesterov momentum.

    Without momentum Nesterov's rule is plain SGD, so ``nesterov`` then has no effect.
    """
    return lambda parameters: torch.optim.SGD(
        parameters, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0
    )


def pseudo_gradient(
    global_parameter: Tensor, local_parameter: Tensor, into: Tensor | None = None
) -> Tensor:
    """Global minus local, in the dtype of ``global_parameter``. The only place that knows the sign.

    Inner training took the parameters from ``global`` to ``local`` because that lowers the loss.
    A torch optimizer *descends*: it moves its parameter along minus the gradient it is given. So
    that one plain outer step with learning rate 1 lands where training went,

        global - 1.0 * pseudo_gradient  ==  local      =>      pseudo_gradient = global - local

    The reverse, local minus global, is what one would write down as "the update"; fed to the same
    optimizer it walks back uphill with a learning rate of 0.7, loses more each round the more the
    groups have learnt, and still commits every sync with equal digests everywhere: nothing but the
    loss tells. torchft had it reversed (its pull request 233), and code written then compensates
    with ``SGD(maximize=True)``. Both together ascend, so ``check_sign`` refuses the latter.
    """
    return torch.sub(global_parameter, local_parameter.to(global_parameter.dtype), out=into)


def check_sign(outer_optimizer: OuterOptimizer) -> None:
    """Check on a one-parameter problem that an outer step goes where training went.

    The parameter starts at 0, where weight decay cannot hide a wrong sign.

    Raises:
        ValueError: The outer step moved away from the local parameter.
    """
    theta = nn.Parameter(torch.zeros(1))
    local = torch.full((1,), -0.5)
    optimizer = outer_optimizer([theta])
    theta.grad = pseudo_gradient(theta.detach(), local)
    optimizer.step()
    if theta.item() > 0:
        raise ValueError(
            f"the outer optimizer {describe(optimizer)} moved the global parameter from 0 to "
            f"{theta.item():g} although training moved it to -0.5. The pseudo-gradient is global "
            "minus local and is to be descended: use maximize=False and a learning rate >= 0"
        )


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Name and settings of an optimizer, equal for equal ones: part of the fingerprint."""
    settings = ", ".join(f"{name}={value}" for name, value in sorted(optimizer.defaults.items()))
    return f"{type(optimizer).__name__}({settings})"


def local_tensor(parameter: Tensor) -> Tensor:
    """The storage of a parameter on this rank: its shard where FSDP2 made it a DTensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


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
        pin_memory: Whether to pin them for copies to an accelerator, if there is one.
        buffers: Buffers that are averaged with them; they simply become the mean.
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
        pin_memory: bool,
        buffers: Buffers | None = None,
        shards: Shards | None = None,
        share: Callable[[list[int]], RankShare] = RankShare,
    ) -> None:
        self.local: dict[str, Tensor] = {**parameters, **(buffers or {})}
        self.shards = shards or Shards()
        pin = pin_memory and backup_device.type == "cpu" and torch.accelerator.is_available()
        held = {name: local_tensor(tensor) for name, tensor in self.local.items()}
        self.shapes = {name: tensor.shape for name, tensor in held.items()}
        self.share = share([tensor.numel() for tensor in held.values()])
        self.is_shared = self.share.num_ranks > 1 and _is_elementwise(outer_optimizer, parameters)
        """Whether ``theta`` has this rank's part of each tensor, 1-D, and not all of it."""
        self.flat = torch.empty(
            sum(self._sizes), dtype=torch.float32, device=backup_device, pin_memory=pin
        )
        """All of them, one after the other. ``theta`` has the views."""
        self._momentum: Tensor | None = None
        with torch.no_grad():
            own = self.share.own(held.values()) if self.is_shared else held.values()
            self.theta = {
                name: nn.Parameter(view.copy_(part))
                for name, part, view in zip(held, own, self._views(self.flat), strict=True)
            }
        owned = [self.theta[name] for name in parameters]
        self._momentum_norm: float | None = None
        """Of this rank's buffers, as of the last outer step; None if it was not computed in it."""
        self._buffers = frozenset(buffers or {})
        self.freezing = Freezing(parameters)
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
    def take_outer_step(self, mean: WeightedMean, rules: StepRules) -> None:
        """Move the global parameters by the mean pseudo-gradient, and ``write_back``.

        Buffers take theirs at once: global minus the mean of (global minus local) is the mean, and
        a buffer that is a constant stays what it is to the bit.

        Args:
            mean: Received, over the tensors in the order of ``theta``. It is used up.
            rules: Which of them the outer optimizer does not move, and what of the local ones
                stays.
        """
        theta = list(self.theta.values())
        plain = {index for index, name in enumerate(self.theta) if name in self._buffers}
        plain |= rules.plain
        for index in plain | rules.held:
            self.optimizer.state.pop(theta[index], None)
        self.freezing.record_frozen(rules)
        if mean.device.type == self.flat.device.type == "cpu" and is_plain_sgd(self.optimizer):
            self._descend(mean, plain, rules)
            if not self.is_shared:
                return  # each chunk has been written back
        else:
            self._step(mean, plain, rules)
        self._write_back(rules, self._gather(mean) if self.is_shared else self.theta.values())

    def _step(self, mean: WeightedMean, plain: Collection[int], rules: StepRules) -> None:
        """The outer optimizer's own."""
        for index, (parameter, delta) in enumerate(
            zip(self.theta.values(), mean.take(), strict=True)
        ):
            if index in plain:
                parameter.sub_(delta.view(parameter.shape).to(parameter.device))
            elif index not in rules.held:
                parameter.grad = torch.empty_like(parameter).copy_(delta.view(parameter.shape))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._momentum_norm = None

    def _gather(self, mean: WeightedMean) -> Iterator[Tensor]:
        """All of each tensor, in the memory of a mean that is used up."""
        mean.flat[self.share.start :][: self.flat.numel()] = self.flat
        self.share.gather(mean.flat)
        sizes = self.share.whole_sizes
        parts = mean.flat[: sum(sizes)].split(sizes)
        return (part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=True))

    def _descend(self, mean: WeightedMean, plain: Collection[int], rules: StepRules) -> None:
        """Torch's outer step; and the way back of what is whole, while a chunk is in cache."""
        momentum = self._views(self._own_momentum())
        descent = ChunkedDescent(self.optimizer, momentum, mean.divisor)
        squares = [torch.zeros(())]
        for index, (theta, parameter, sums) in enumerate(
            zip(self.theta.values(), self.local.values(), mean.sums(), strict=True)
        ):
            local = None if self.is_shared else local_tensor(parameter)
            # A tensor whose elements do not lie one after the other is written back at once.
            is_cut = local is None or local.is_contiguous()
            chunk = CHUNK if is_cut else max(1, theta.numel())
            if index in plain or index in rules.held:
                if index in plain:
                    theta.view(-1).sub_(sums.div_(mean.divisor))
                moved = ((each, each[:0]) for each in chunks_of(theta.detach().view(-1), chunk))
            else:
                moved = descent.steps(theta, index, sums, chunk)
            if local is None:
                parts = ()
            else:
                parts = chunks_of(local.view(-1), chunk) if is_cut else (local,)
            for part, (global_part, momentum) in itertools.zip_longest(parts, moved):
                squares.append(self.shards.own_part(torch.dot(momentum, momentum), index))
                if part is not None:
                    _mix(part, global_part.view(part.shape), rules.alpha_of(index))
        self._momentum_norm = math.sqrt(float(torch.stack(squares).sum()))

    @property
    def _sizes(self) -> list[int]:
        return self.share.sizes if self.is_shared else self.share.whole_sizes

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor's part of a flat buffer, in its shape if it is whole."""
        parts = flat.split(self._sizes)
        if self.is_shared:
            return list(parts)
        return [part.view(s) for part, s in zip(parts, self.shapes.values(), strict=True)]

    def own_parts(self) -> Iterator[Tensor]:
        """This rank's part of each global parameter, 1-D."""
        theta = [parameter.detach() for parameter in self.theta.values()]
        return iter(theta) if self.is_shared else self.share.own(theta)

    def whole(self, name: str) -> Tensor:
        """All of a global parameter: itself, or gathered by a collective if it is shared."""
        return self._whole(name, self.theta[name].detach())

    def _whole(self, name: str, part: Tensor) -> Tensor:
        if not self.is_shared:
            return part
        shape = self.shapes[name]
        return self.share.whole(list(self.theta).index(name), part).view(shape)

    @torch.no_grad()
    def write_back(self, alpha: float = 0.0) -> None:
        """``local = alpha * local + (1 - alpha) * global`` (2501.18512, alg. 2, line 12).

        A collective of the ranks, if they share.
        """
        self._write_back(StepRules(alpha), map(self.whole, self.theta))

    def _write_back(self, rules: StepRules, whole: Iterable[Tensor]) -> None:
        pairs = zip(self.local.values(), whole, strict=True)
        for index, (parameter, theta) in enumerate(pairs):
            _mix(local_tensor(parameter), theta, rules.alpha_of(index))

    def copy_of_local(self) -> list[Tensor]:
        """Copies of the local parameters, in their own dtypes, beside the global ones."""
        return [
            local_tensor(parameter).to(theta.device, copy=True)
            for parameter, theta in zip(self.local.values(), self.theta.values(), strict=True)
        ]

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """The global parameters by name, and the outer optimizer's state; of its share, if any.

        Args:
            copies: Whether of the tensors, or the tensors themselves.
        """
        state = {
            "theta": dict(self.theta),
            "optimizer": self.optimizer.state_dict(),
            "frozen": sorted(self.freezing.frozen_by_all),
        }

        def take(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.detach().clone() if copies else x.detach()

        return tree_map(take, state)

    def gathered(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What ``state_dict`` gives without copies, of all shares. A collective, if there are."""
        return self._each_tensor(state_dict, self._whole)

    def cut(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's share of what ``gathered`` gave, on whatever number of ranks.

        Raises:
            ValueError: A tensor is missing or has another shape or dtype.
        """
        if not self.is_shared:
            return state_dict
        self._check(state_dict, self.shapes)
        return self._each_tensor(
            state_dict, lambda name, whole: self.share.part_of(list(self.theta).index(name), whole)
        )

    def _each_tensor(
        self, state_dict: dict[str, Any], change: Callable[[str, Tensor], Tensor]
    ) -> dict[str, Any]:
        if not self.is_shared:
            return state_dict
        optimizer, names = state_dict["optimizer"], list(self.theta)
        return state_dict | {
            "theta": {name: change(name, t) for name, t in state_dict["theta"].items()},
            "optimizer": optimizer
            | {
                "state": {
                    index: {
                        key: change(names[index], value) if isinstance(value, Tensor) else value
                        for key, value in state.items()
                    }
                    for index, state in optimizer["state"].items()
                }
            },
        }

    def _check(self, state_dict: dict[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        for name, shape in shapes.items():
            received = state_dict["theta"].get(name)
            if received is None or received.shape != shape or received.dtype != torch.float32:
                what = (
                    "is missing"
                    if received is None
                    else f"is {received.dtype} {tuple(received.shape)}"
                )
                raise ValueError(
                    f"global parameter {name} of a saved or received state {what}, and here it is "
                    f"{torch.float32} {tuple(shape)}: it is another model's state"
                )

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: dict[str, Any], *, keeps_hyperparameters: bool = False
    ) -> None:
        """Take over what ``state_dict`` gave, here or in another group.

        Args:
            state_dict: What it gave.
            keeps_hyperparameters: Keep this optimizer's own learning rate, momentum, ...

        Raises:
            ValueError: A tensor is missing or has another shape or dtype; nothing has changed then.
        """
        self._check(state_dict, {name: theta.shape for name, theta in self.theta.items()})
        for name, theta in self.theta.items():
            theta.copy_(state_dict["theta"][name])
        self.freezing.frozen_by_all = frozenset(state_dict.get("frozen", ()))
        self.freezing.freeze_like_global()
        self._momentum_norm = None
        groups = self.optimizer.state_dict() if keeps_hyperparameters else state_dict["optimizer"]
        state = state_dict["optimizer"]["state"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups["param_groups"]})
        self._keep_own_state()

    def _keep_own_state(self) -> None:
        """Copy the outer optimizer's state: what it was given may be a part of all a peer sent."""
        states = [self.optimizer.state.get(theta, {}) for theta in self.theta.values()]
        has_momentum = any(state.get("momentum_buffer") is not None for state in states)
        views = self._views(self._own_momentum()) if has_momentum else states
        for view, state in zip(views, states, strict=True):
            for key, value in state.items():
                if isinstance(value, Tensor):
                    is_momentum = key == "momentum_buffer"
                    state[key] = view.copy_(value) if is_momentum else value.clone()

    def _own_momentum(self) -> Tensor:
        if self._momentum is None:
            self._momentum = torch.empty_like(self.flat, pin_memory=False)
        return self._momentum

    def set_hyperparameters(self, settings: DiLoCoSettings) -> None:
        """Go on with other numbers, and the same momentum buffers.

        Raises:
            ValueError: The outer optimizer has no such numbers.
        """
        changed = {"lr": settings.outer_lr, "momentum": settings.outer_momentum}
        unknown = sorted(changed.keys() - self.optimizer.defaults.keys())
        if unknown:
            raise ValueError(
                f"{type(self.optimizer).__name__} has no {', '.join(unknown)}: only an outer SGD "
                "changes its settings in mid-run"
            )
        # Without momentum torch refuses Nesterov's, and needs no reminder of it when it is back.
        changed["nesterov"] = settings.outer_nesterov and settings.outer_momentum > 0
        self.optimizer.defaults.update(changed)
        for group in self.optimizer.param_groups:
            group.update(changed)

    def momentum_norm(self) -> float:
        """L2 norm over the optimizer's momentum buffers; 0.0 before the first outer step.

        Over all shards or shares of the group, if it has such; then a collective of its ranks.
        """
        if self._momentum_norm is None:
            self._momentum_norm = self._compute_momentum_norm()
        if self.is_shared:
            return self.share.norm(self._momentum_norm)
        return self.shards.norm(self._momentum_norm)

    def _compute_momentum_norm(self) -> float:
        squares = []
        for index, theta in enumerate(self.theta.values()):
            buffer = self.optimizer.state.get(theta, {}).get("momentum_buffer")
            if buffer is not None:
                squares.append(self.shards.own_part(buffer.norm().square(), index))
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


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
