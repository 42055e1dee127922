"""The outer optimizer owns the global parameters; the sign convention lives here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from composer_replication.diloco.averaging.weighted_mean import CHUNK, WeightedMean
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

    Args:
        parameters: The fragment's parameters in the model, of any floating dtype and device.
        outer_optimizer: Builds the optimizer over the global parameters.
        backup_device: Where they and the optimizer's state live.
        pin_memory: Whether to pin them for copies to an accelerator, if there is one.
        buffers: Buffers that are averaged with them; they simply become the mean.
        ranks: All ranks of the group, if they hold shards of the model.

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
        ranks: ProcessGroup | None = None,
    ) -> None:
        self.local: dict[str, Tensor] = {**parameters, **(buffers or {})}
        self.shards = Shards(self.local.values(), ranks)
        pin = pin_memory and backup_device.type == "cpu" and torch.accelerator.is_available()
        shards = {name: local_tensor(tensor) for name, tensor in self.local.items()}
        self._sizes = [shard.numel() for shard in shards.values()]
        self.flat = torch.empty(
            sum(self._sizes), dtype=torch.float32, device=backup_device, pin_memory=pin
        )
        """All of them, one after the other. ``theta`` has the views."""
        self._momentum: Tensor | None = None
        with torch.no_grad():
            self.theta = {
                name: nn.Parameter(view.copy_(shard))
                for (name, shard), view in zip(shards.items(), self._views(self.flat), strict=True)
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
        plain = {place for place, name in enumerate(self.theta) if name in self._buffers}
        plain |= rules.plain
        for place in plain | rules.held:
            self.optimizer.state.pop(theta[place], None)
        self.freezing.settle(rules)
        if mean.device.type == self.flat.device.type == "cpu" and is_plain_sgd(self.optimizer):
            self._descend(mean, plain, rules)
            return
        for place, (parameter, delta) in enumerate(zip(theta, mean.take(), strict=True)):
            if place in plain:
                parameter.sub_(delta.view(parameter.shape).to(parameter.device))
            elif place not in rules.held:
                parameter.grad = torch.empty_like(parameter).copy_(delta.view(parameter.shape))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._momentum_norm = None
        self._write_back(rules)

    def _descend(self, mean: WeightedMean, plain: Collection[int], rules: StepRules) -> None:
        """Torch's outer step, and the way back, while a chunk is in cache."""
        momentum = self._views(self._own_momentum())
        descent = ChunkedDescent(self.optimizer, momentum, mean.divisor)
        squares = [torch.zeros(())]
        for place, (theta, parameter, sums) in enumerate(
            zip(self.theta.values(), self.local.values(), mean.sums(), strict=True)
        ):
            local = local_tensor(parameter)
            # A tensor whose elements do not lie one after the other is written back at once.
            chunk = CHUNK if local.is_contiguous() else max(1, local.numel())
            parts = local.view(-1).split(chunk) if local.is_contiguous() else [local]
            if place in plain or place in rules.held:
                if place in plain:
                    theta.view(-1).sub_(sums.div_(mean.divisor))
                moved = ((each, each[:0]) for each in theta.detach().view(-1).split(chunk))
            else:
                moved = descent.steps(theta, place, sums, chunk)
            for part, (global_part, momentum) in zip(parts, moved, strict=True):
                squares.append(self.shards.own_part(torch.dot(momentum, momentum), place))
                _mix(part, global_part.view(part.shape), rules.alpha_of(place))
        self._momentum_norm = math.sqrt(float(torch.stack(squares).sum()))

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor's part of a flat buffer, in its shape."""
        parts = flat.split(self._sizes)
        shapes = [local_tensor(tensor).shape for tensor in self.local.values()]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @torch.no_grad()
    def write_back(self, alpha: float = 0.0) -> None:
        """``local = alpha * local + (1 - alpha) * global`` (2501.18512, alg. 2, line 12)."""
        self._write_back(StepRules(alpha))

    def _write_back(self, rules: StepRules) -> None:
        pairs = zip(self.local.values(), self.theta.values(), strict=True)
        for place, (parameter, theta) in enumerate(pairs):
            _mix(local_tensor(parameter), theta, rules.alpha_of(place))

    def copy_of_local(self) -> list[Tensor]:
        """Copies of the local parameters, in their own dtypes, beside the global ones."""
        return [
            local_tensor(parameter).to(theta.device, copy=True)
            for parameter, theta in zip(self.local.values(), self.theta.values(), strict=True)
        ]

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """The global parameters by name, and the outer optimizer's state.

        Args:
            copies: Whether of the tensors, or the tensors themselves.
        """
        state = {
            "theta": dict(self.theta),
            "optimizer": self.optimizer.state_dict(),
            "frozen": sorted(self.freezing.settled),
        }

        def take(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.detach().clone() if copies else x.detach()

        return tree_map(take, state)

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
        for name, theta in self.theta.items():
            given = state_dict["theta"].get(name)
            if given is None or given.shape != theta.shape or given.dtype != theta.dtype:
                what = "is missing" if given is None else f"is {given.dtype} {tuple(given.shape)}"
                raise ValueError(
                    f"global parameter {name} of a saved or received state {what}, and here it is "
                    f"{theta.dtype} {tuple(theta.shape)}: it is another model's state"
                )
        for name, theta in self.theta.items():
            theta.copy_(state_dict["theta"][name])
        self.freezing.settled = frozenset(state_dict.get("frozen", ()))
        self.freezing.freeze_settled()
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

        Over all shards of the group, if it has shards; then a collective of its ranks.
        """
        if self._momentum_norm is None:
            self._momentum_norm = self._compute_momentum_norm()
        return self.shards.norm(self._momentum_norm)

    def _compute_momentum_norm(self) -> float:
        squares = []
        for place, theta in enumerate(self.theta.values()):
            buffer = self.optimizer.state.get(theta, {}).get("momentum_buffer")
            if buffer is not None:
                squares.append(self.shards.own_part(buffer.norm().square(), place))
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _mix(local: Tensor, theta: Tensor, alpha: float) -> None:
    if alpha == 0.0:  # not lerp: 0 * nan is nan, and a sick replica would never recover
        local.copy_(theta)
    else:
        local.copy_(theta.to(local.device).lerp(local.float(), alpha))
