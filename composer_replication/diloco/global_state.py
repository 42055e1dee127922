"""The state that is bitwise identical in all groups: parameters, outer optimizer, settings."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from composer_replication.diloco.equal_samples import as_number
from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.sample_ledger import Ledger, SyncedSamples
from composer_replication.diloco.torchft_api import STATE_NAME
from composer_replication.settings import DiLoCoSettings, adopt_changes, compare_fingerprints

log = logging.getLogger(__name__)


Numbers = tuple[Tensor, Tensor] | None
"""A fragment's global parameters and outer momentum from another group, each like
``GlobalParameters.flat``, in memory that the fragment can continue in. None on an accelerator,
whose memory may not have room for them twice: there the copy is quick."""


class Staged(NamedTuple):
    """Another group's state, copied before the quorum in which it is taken over.

    Attributes:
        name: Its name, see ``STATE_NAME``: the quorum's donor has the same state if it names it so.
        numbers: Those of each fragment.
        digests: Those of each fragment, see ``GlobalState.fragment_digests``.
    """

    name: str = ""
    numbers: Sequence[Numbers] = ()
    digests: Sequence[str] = ()


class GlobalState:
    """The state that a group sends to a joiner and writes into a checkpoint.

    It contains nothing local: torchft picks a donor for each *rank*, so anything that differs
    between donors would make the ranks of the healed group differ from each other.

    Args:
        fragments: The global parameters of each fragment.
        fingerprint: The settings and the model, as plain containers, compared with other groups'.
        settings: The run's settings.

    Attributes:
        fragments: The same, in the order of their syncs.
        settings: The same.
        lock: While a thread holds it no other one changes this state; an outer step waits for it.
    """

    def __init__(
        self,
        fragments: Sequence[GlobalParameters],
        fingerprint: dict[str, Any],
        settings: DiLoCoSettings,
    ) -> None:
        self.fragments = fragments
        self.settings = settings
        self.lock = threading.RLock()
        self._is_in_outer_step = False
        self._num_changes = 0
        self._digests: tuple[int, Sequence[str]] = -1, ()
        self._staged = Staged()
        self.fingerprint = fingerprint
        self.outer_step = 0
        self.ledger = Ledger(len(fragments))
        self.compare_next = False
        """Whether the next sync compares digests."""
        self.was_healed = False
        """Whether a heal has replaced this state since this group last reported a sync."""

    def parameters(self) -> Mapping[str, Tensor]:
        """The global parameters and buffers by name; the tensors themselves, not copies.

        Where each rank holds a share, a look-up gathers the tensor: a collective of the ranks.
        """
        homes = GlobalTensors()
        for fragment in self.fragments:
            homes.update(dict.fromkeys(fragment.tensors, fragment))
        return homes

    def digest(self) -> str:
        """SHA-256, in hex, over the bytes of ``parameters`` in the order of their names.

        With shares or shards it is a collective of the ranks. With shards it is the SHA-256 over
        the digests of the ranks' shards, in the order of the ranks.
        """
        return self.fragments[0].theta_division.digest(digest_of_tensors(self.parameters()))

    def digest_is_due(self, every: int) -> bool:
        """Whether digests are compared at this outer step: at every ``every``-th one; 0: never."""
        return every > 0 and self.outer_step % every == 0

    def digests_to_compare(self, every: int) -> tuple[int, ...]:
        """``fragment_digests`` as numbers, if the next sync compares them; else zeros.

        Args:
            every: See ``digest_is_due``. They are also compared after a heal and after a resume.
        """
        if self.digest_is_due(every) or self.compare_next or self.was_healed:
            digests = self.fragment_digests()
            return tuple(map(as_number, digests))
        return (0,) * len(self.fragments)

    def fragment_digests(self) -> Sequence[str]:
        """SHA-256, in hex, of what this rank holds of each fragment. It is no collective.

        They are computed once for each version of the state: a donor computes them when a joiner
        downloads the state, and sends them in the joiner's quorum. After a heal from a staged state
        they are those of the bytes that were received.
        """
        version = self.version
        known_of, digests = self._digests
        if known_of == version:
            return digests
        digests = [digest_of_tensors(fragment.tensors) for fragment in self.fragments]
        # If not, this is a thread that serves joiners, and an outer step has come between.
        if self.version == version:
            self._digests = version, digests
        return digests

    # ---- for the threads that serve joiners ---------------------------------------------------

    @property
    def version(self) -> int:
        """It changes with what ``state_dict`` returns. Reading it waits for the end of a change."""
        with self.lock:
            return self._num_changes

    @property
    def num_bytes(self) -> int:
        """About the size of what ``state_dict`` returns, with as much momentum as parameters.

        It never waits.
        """
        return sum(2 * fragment.flat.nbytes for fragment in self.fragments)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A context for a change of this state: no joiner gets it half done."""
        with self.lock:
            try:
                yield
            finally:
                self._num_changes += 1

    def for_joiner(self) -> dict[str, Any]:
        """What ``state_dict`` returns.

        It also computes the digests that this group sends in the joiner's quorum, where all groups
        would wait for them.
        """
        self.fragment_digests()
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """All that this rank holds, in tensors and plain containers; never from half an outer step.

        The tensors are no copies. Of each fragment it has the global tensors by name and the outer
        optimizer's state; with shares, those of this rank.

        Runs on the threads that serve joiners, so it calls no collective. A joiner's rank takes it
        from the same rank of its donor.

        Raises:
            RuntimeError: An outer step was interrupted half way, by Ctrl-C or an error.
        """
        with self.lock:
            if self._is_in_outer_step:
                raise RuntimeError(
                    f"outer step {self.outer_step + 1} was broken off half way, so part of the "
                    "global parameters have moved and part have not: build a new Trainer, which "
                    "takes over what the other groups have, or load a checkpoint in it"
                )
            fragments = []
            for fragment in self.fragments:
                optimizer = fragment.optimizer.state_dict()
                own = {"theta": fragment.tensors, "optimizer": optimizer}
                fragments.append(tree_map_only(Tensor, Tensor.detach, own))
            return {
                "outer_step": self.outer_step,
                "settings": self.fingerprint,
                "ledger": self.ledger.rows(),
                "fragments": fragments,
            }

    def whole_state_dict(self) -> dict[str, Any]:
        """``state_dict`` of all ranks. With shares it is a collective of them."""
        state = self.state_dict()
        pairs = zip(self.fragments, state["fragments"], strict=True)
        whole = [_each_tensor(fragment, own, fragment.gathered) for fragment, own in pairs]
        return state | {"fragments": whole}

    @contextmanager
    def outer_step_of(self, synced_samples: Iterable[SyncedSamples]) -> Iterator[None]:
        """A context for an outer step, which is counted at its end.

        Args:
            synced_samples: What the groups of its sync have read, for the ledger.
        """
        # Without the lock a joiner could get parameters of which only a part has moved.
        with self.changing():
            self._is_in_outer_step = True
            if self.settings.changes_outer_numbers:
                self._follow_schedule()
            yield
            self.outer_step += 1
            self.ledger.commit(synced_samples)
            self._is_in_outer_step = False  # after an error it stays: see ``state_dict``

    def _follow_schedule(self) -> None:
        before = self.fragments[0].optimizer.param_groups[0]
        step = self.outer_step + 1
        lr, momentum, nesterov = self.settings.outer_numbers_at(step)
        has_changed = lr != before["lr"] or momentum != before["momentum"]
        if has_changed:
            log.info("From outer step %d on: outer_lr %g, outer_momentum %g", step, lr, momentum)
        for fragment in self.fragments:
            fragment.follow(lr, momentum, nesterov)

    def stage(self, state_dict: dict[str, Any]) -> None:
        """Copy and hash another group's state now, so that ``take_over`` need not (``Numbers``).

        A joiner does this before its quorum, in which all groups wait for it. The state itself does
        not change: there may be no quorum, or one that heals from a later state, of another name. A
        state that does not fit is ignored here: the quorum or ``take_over`` says why.

        Args:
            state_dict: As for ``take_over``, with a name (``STATE_NAME``).
        """
        self.forget_staged()  # frees its memory before the next one is allocated
        saved = state_dict["fragments"]
        try:
            pairs = zip(self.fragments, saved, strict=True)
            numbers = [copy_numbers(fragment, state) for fragment, state in pairs]
        except ValueError:
            return
        digests = [digest_of_tensors(each["theta"]) for each in saved]
        self._staged = Staged(state_dict[STATE_NAME], numbers, digests)

    def forget_staged(self) -> None:
        """Drop what ``stage`` has prepared, and free its memory."""
        self._staged = Staged()

    def take_over(
        self,
        state_dict: dict[str, Any],
        whose: str,
    ) -> None:
        """Load what ``state_dict`` returned in another group.

        Of a state that was staged under the same name, the copies are taken.

        Raises:
            SettingsMismatch: That group has other settings, or another model.
            ValueError: A tensor is missing or has another shape or dtype.
        """
        staged = self._staged
        if staged.name != state_dict.get(STATE_NAME):
            staged = Staged()  # the others have committed since
        with self.changing():
            theirs = dict(state_dict["settings"])
            compare_fingerprints(self.fingerprint, theirs, whose)
            self._load(state_dict, staged.numbers)
            self.fingerprint = theirs
            self.was_healed = True
        if staged.digests:
            self._digests = self.version, staged.digests
        self.forget_staged()

    def resume(self, state_dict: dict[str, Any]) -> None:
        """Continue from what ``whole_state_dict`` gave in this group, perhaps under new settings.

        Raises:
            SettingsMismatch: A setting has changed that the saved state does not allow to change.
        """
        with self.changing():
            saved = state_dict["settings"]
            for change in adopt_changes(self.fingerprint, saved):
                log.warning("Resuming with changed settings: %s", change)
            has_other_outer = any(
                self.fingerprint.get(key) != saved.get(key)
                for key in ("outer_optimizer", "schedule")
            )
            pairs = zip(self.fragments, state_dict["fragments"], strict=True)
            fragments = []
            for fragment, whole in pairs:
                own = _each_tensor(fragment, whole, fragment.part_of)
                if has_other_outer:  # keeps its own learning rate, momentum, ...
                    numbers = own["optimizer"]["state"]
                    own["optimizer"] = fragment.optimizer.state_dict() | {"state": numbers}
                fragments.append(own)
            self._load(state_dict | {"fragments": fragments})
            # Peers that also resume may have another checkpoint of the same outer step: compare
            # digests.
            self.compare_next = True

    def _load(
        self,
        state_dict: dict[str, Any],
        copied: Sequence[Numbers] = (),
    ) -> None:
        copied = copied or [None] * len(self.fragments)
        parts = zip(
            self.fragments,
            state_dict["fragments"],
            copied,
            strict=True,
        )
        for fragment, saved, numbers in parts:
            if numbers is None:
                _copy(saved, fragment, fragment.theta.values(), fragment.momenta)
            else:  # the fragment continues in this memory
                fragment.move_to(*numbers)
            for name, value in fragment.copied.values.items():
                value.copy_(saved["theta"][name])
            fragment.load_optimizer(saved["optimizer"])
        self.outer_step = state_dict["outer_step"]
        self.ledger.load_rows(state_dict["ledger"])


# ---- The outer state of a fragment in plain containers, for a joiner and for a checkpoint. That of
# a rank has this rank's share of the tensors. A checkpoint has all of them, so that the number of
# ranks may change until a resume.


def copy_numbers(globals_: GlobalParameters, state: Mapping[str, Any]) -> Numbers:
    """Copy what ``GlobalState.state_dict`` had of this fragment in another group.

    Raises:
        ValueError: A tensor is missing or has another shape or dtype.
    """
    if globals_.flat.device.type != "cpu":
        return None
    is_pinned = globals_.flat.is_pinned()
    flat = torch.empty_like(globals_.flat, pin_memory=is_pinned)
    momentum = torch.empty_like(globals_.flat, pin_memory=is_pinned)
    _copy(
        state,
        globals_,
        globals_.views(flat),
        globals_.views(momentum),
    )
    return flat, momentum


@torch.no_grad()
def _copy(
    state: Mapping[str, Any],
    globals_: GlobalParameters,
    theta: Iterable[Tensor],
    momenta: Sequence[Tensor],
) -> None:
    _check(state, globals_.tensors)
    for name, own in zip(globals_.theta, theta, strict=True):
        own.copy_(state["theta"][name])
    saved = state["optimizer"]["state"]
    for index, own in enumerate(momenta):
        momentum = saved.get(index, {}).get("momentum_buffer")
        if momentum is None:
            own.zero_()
        else:
            own.copy_(momentum)


def _each_tensor(
    globals_: GlobalParameters,
    state: dict[str, Any],
    change: Callable[[int, Tensor], Tensor],
) -> dict[str, Any]:
    """Gather each tensor that the ranks share, or take this rank's part of each."""
    theta = {**state["theta"]}
    for index, name in enumerate(globals_.theta):
        theta[name] = change(index, theta[name])
    changed = {}
    for index, own in state["optimizer"]["state"].items():
        changed[index] = tree_map_only(Tensor, functools.partial(change, index), own)
    optimizer = state["optimizer"] | {"state": changed}
    return {"theta": theta, "optimizer": optimizer}


def _check(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        received = state["theta"].get(name)
        expected = f"{tensor.dtype} {tuple(tensor.shape)}"
        found = None if received is None else f"{received.dtype} {tuple(received.shape)}"
        if found != expected:
            what = "is missing" if found is None else f"is {found}"
            raise ValueError(
                f"global parameter {name} of a saved or received state {what}, and here it is "
                f"{expected}: it is another model's state, or has other fragments"
            )


# ---- by name


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, over the bytes of tensors in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        here = tensors[name].detach().cpu()
        flat = here.contiguous().view(-1)
        content = flat.view(torch.uint8).numpy()
        digest.update(content.data)
    return digest.hexdigest()


class GlobalTensors(UserDict[str, Any]):
    """Global parameters by name, each gathered when it is asked for if the ranks share it.

    ``data`` has the global parameters of the fragment that each name belongs to.
    """

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name].whole(name)
