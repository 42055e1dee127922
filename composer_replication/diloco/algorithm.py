"""DiLoCo, exact where torchft's is not, on torchft's schedule, streams and commit votes."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torchft.local_sgd
from torch import Tensor, nn
from torchft.manager import Manager

from composer_replication.diloco.arguments import pick, takes
from composer_replication.diloco.averaging.quantized_mean import check_can_encode
from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.fragments import (
    check_none_thawed,
    check_trained_by,
    left_out,
    model_fingerprint,
    split_buffers,
    split_model,
)
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.hang_watch import HANG_TIMEOUT_S, HangWatch
from composer_replication.diloco.options import DiLoCoArguments
from composer_replication.diloco.outer_loop import OuterLoop, SyncError
from composer_replication.diloco.outer_optimizer import (
    GlobalParameters,
    OuterOptimizer,
    check_sign,
    describe,
    nesterov_sgd,
)
from composer_replication.diloco.peer_table import DivergenceError, RollCall
from composer_replication.diloco.sample_ledger import check_keeps_all_steps
from composer_replication.diloco.saved_state import load_saved_state, saved_state
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.shards import count_shards
from composer_replication.diloco.sync_report import SyncClock, SyncReport
from composer_replication.diloco.torchft_api import DiLoCoManager

__all__ = ["DiLoCo", "DivergenceError", "SyncError", "SyncReport"]


class DiLoCo(torchft.local_sgd.DiLoCo):
    """Train one model in several replica groups that average every ``sync_every`` inner steps.

    A round, for each fragment with global parameters theta, group i's local parameters phi_i and
    its contribution c_i:

    1. every group takes inner steps on phi_i                          (its own optimizer)
    2. delta_i = theta - phi_i, in fp32                                (``pseudo_gradient``)
    3. delta = sum(c_i delta_i) / sum(c_i) over the quorum             (``WeightedMean``)
    4. on commit, theta = OuterOptimizer(theta, delta)                 (``GlobalParameters``)
    5. phi_i = alpha phi_i + (1 - alpha) theta                         (``write_back``)

    DiLoCo: arXiv 2311.08105, alg. 1. Streaming: arXiv 2501.18512, alg. 2, where the fragments take
    turns within a round and 4-5 come ``fragment_sync_delay`` inner steps after 2-3. When to do
    which, and on which stream, is torchft's (``torchft/local_sgd.py``, ``_step_post_hook``). What
    torchft lacks is here: global parameters in fp32 that the outer optimizer owns, weights in the
    mean, a join before training, a retry that loses no inner step (ADR-005, ADR-006, ADR-008).

    Use it as a context manager around training: entering joins the other groups (blocks until they
    are there), leaving takes the hooks off the inner optimizer.

    Its arguments are those of :class:`DiLoCoArguments`: what to train, the run's settings
    (:class:`DiLoCoSettings`) and the group's options (:class:`DiLoCoOptions`).

    Raises:
        ValueError: An argument is out of range, the fragments and the inner optimizer hold
            different parameters, or the outer optimizer ascends. Before any network is touched.
        SettingsMismatch: On entering, if this group's settings differ from the others'.
        TimeoutError: On entering, if too few groups came.
        NothingToContinueFromError: On entering, if all came and ``must_not_start`` says why none
            may begin the run.
        SyncError: From the inner optimizer's ``step``, after ``max_sync_retries`` retries.
        DivergenceError: From there too, if this group's global parameters are not the others'.
    """

    @takes(DiLoCoArguments)
    def __init__(self, *trained: Any, **named: Any) -> None:
        self._arguments = arguments = DiLoCoArguments(*trained, **named)
        manager, inner_optimizer = arguments.manager, arguments.inner_optimizer
        model_fragments, ranks = arguments.model_fragments, arguments.ranks
        if not isinstance(model_fragments, nn.Module):
            model_fragments = list(model_fragments)
            named["num_fragments"] = len(model_fragments) or arguments.num_fragments
        self.settings = settings = pick(DiLoCoSettings, vars(arguments) | named)
        _check_use(settings, arguments.outer_optimizer, named)
        check_can_encode(manager, settings.wire_format)
        outer_optimizer = arguments.outer_optimizer or nesterov_sgd(
            settings.outer_lr, settings.outer_momentum, settings.outer_nesterov
        )
        check_sign(outer_optimizer)
        fragments = split_model(
            model_fragments,
            settings.num_fragments,
            settings.fragment_patterns,
            arguments.also_synced,
        )
        check_trained_by(fragments, inner_optimizer)
        self._left_out = left_out(model_fragments, fragments)
        buffers = split_buffers(model_fragments, len(fragments))
        if settings.sync_buffers == "none":
            buffers = [{} for _ in fragments]
        backup = torch.device(arguments.backup_device or "cpu")
        num_shards = max(count_shards(p) for fragment in fragments for p in fragment.values())
        sharded_over = None
        if num_shards > 1:
            sharded_over, ranks = ranks or torch.distributed.group.WORLD, None
        owned = [
            GlobalParameters(
                parameters, outer_optimizer, backup, arguments.pin_memory, own_buffers, sharded_over
            )
            for parameters, own_buffers in zip(fragments, buffers, strict=True)
        ]
        if hasattr(manager, "layout"):  # a ReplicaManager, which compares it with its peers'
            manager.layout.num_shards = num_shards  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(
            cast(Manager, manager),
            [nn.Module() for _ in owned],  # torchft's own fragments stay empty; ours replace them
            inner_optimizer,
            [global_parameters.optimizer for global_parameters in owned],
            settings.sync_every,
            fragment_sync_delay=settings.fragment_sync_delay,
            fragment_update_alpha=settings.fragment_update_alpha,
        )
        fingerprint = settings.fingerprint() | {
            "outer_optimizer": describe(owned[0].optimizer),
            "model": model_fingerprint([*fragments, *buffers]),
        }
        self._state = GlobalState(owned, fingerprint)
        self._clock = SyncClock()
        roll_call = RollCall(cast(DiLoCoManager, manager), self._state, arguments.digest_every)
        message_device = arguments.message_device
        self._fragments: list[FragmentSync] = [  # pyright: ignore[reportIncompatibleVariableOverride]
            FragmentSync(
                manager,
                index,
                globals_,
                inner_optimizer,
                settings,
                self._clock,
                self._state,
                roll_call,
                ranks,
                None if message_device is None else torch.device(message_device),
            )
            for index, globals_ in enumerate(owned)
        ]
        roll_call.fragments = self._fragments
        self._outer = OuterLoop(
            cast(DiLoCoManager, manager),
            self._fragments,
            self._state,
            settings,
            self._clock,
            roll_call,
            inner_optimizer,
            arguments.digest_every,
            arguments.give_up_after_s,
        )
        self.counts_steps = True
        self.has_joined_others = False
        self._samples = 0
        self._hang_watch: HangWatch | None = None

    # ---- the schedule is torchft's; behind it, the retry ------------------------------------

    def count_samples(self, num_samples: int) -> None:
        """Say how many samples, over all ranks of the group, the next inner step trains on."""
        self._samples += num_samples

    def expect_last_step(self) -> None:
        """Say that the next inner step ends training.

        Groups that all know it in their last sync need no further one to find out.
        """
        self._outer.ends_with_next_step = True

    def read_from(self, stream: int) -> None:
        """Say that the samples of the next inner steps come from a stream, from its beginning.

        The global state then records how much of it is in the model, see ``Ledger``.

        Args:
            stream: From 1, and below 2^44; no two lives of replica groups read the same.

        Raises:
            ValueError: Inner steps are thrown away, which no record could tell.
        """
        check_keeps_all_steps(self.settings)
        self._state.ledger.read_from(stream)

    def expect_position(self, position: int) -> None:
        """Say how many samples of the stream have been read once the next inner step is done."""
        self._state.ledger.position = position

    def make_local_global(self) -> None:
        """Say that an average has replaced the local parameters and is to be the global ones.

        For example Composer's SWA loads its average into the model. Call it in all groups. At the
        next sync of each fragment the global parameters become the plain mean of the local ones
        (outer learning rate 1, no momentum), and the outer momentum begins anew. If one group of a
        sync has called it, that holds for all of them.
        """
        self._outer.make_local_global()

    @property
    def replaces_global(self) -> bool:
        """Whether there is a fragment left that ``make_local_global`` has not reached yet."""
        return any(fragment.replaces_global for fragment in self._fragments)

    def offer_settings(self, versions: Mapping[int, DiLoCoSettings]) -> None:
        """Say which versions of the settings this group knows, from 1.

        The newest that all groups of a sync know is adopted by all of them after that sync. Only
        ``sync_every``, ``outer_lr`` and ``outer_momentum`` are looked at. At the first call the
        newest one is what this group has been built with.
        """
        if not versions:
            return
        self._outer.known_settings.update(versions)
        self._outer.offer(max(versions))
        if not self._state.settings_version:
            self._state.settings_version = max(versions)

    def _follow_schedule(self) -> None:
        """Rounds are as long as the settings in force say."""
        sync_every = self._state.fingerprint.get("sync_every", self.settings.sync_every)
        known = self._outer.known_settings.get(self._state.settings_version)
        if known is not None:
            sync_every = known.sync_every
        self.settings = replace(self.settings, sync_every=sync_every)
        self._sync_every = sync_every // self.settings.fragment_count

    def _step_pre_hook(self, *step: Any) -> None:
        if self.counts_steps:
            super()._step_pre_hook(*step)

    def _step_post_hook(self, *step: Any) -> None:
        if not self.counts_steps:
            return
        check_none_thawed(self._left_out, self._local_optimizer)
        self._outer.count_inner_step(self._samples)
        self._samples = 0
        counted = self._local_step
        with self._blocking():
            if counted + 1 == self._sync_every and self._is_to_be_sent_again:
                # torchft's hook has no place for it: its time to send has passed.
                self._manager.allow_state_dict_read()
                self._outer.send_again()
            super()._step_post_hook(*step)
            if self._local_step <= counted:  # back at 0: torchft has performed a sync
                self._outer.settle()
                self._follow_schedule()

    def _current_fragment(self) -> int:
        return self._outer.turn

    @property
    def _is_to_be_sent_again(self) -> bool:
        return any(fragment.is_to_be_sent_again for fragment in self._fragments)

    # ---- joining and ending -----------------------------------------------------------------

    def __enter__(self) -> DiLoCo:
        """Join the other groups, then count the inner optimizer's steps."""
        self._hang_watch = HangWatch(self._arguments.hang_timeout_s or HANG_TIMEOUT_S)
        try:
            self._join()
        except BaseException:
            self._hang_watch.stop()
            raise
        super().__enter__()
        return self

    def _join(self) -> None:
        with self._blocking():
            self.has_joined_others = self._outer.join(
                self._arguments, self._arguments.must_not_start
            )
            if self.has_joined_others:
                # As far from the next sync as the others, who apply this one after the delay.
                self._local_step = -self.settings.fragment_sync_delay
            elif self._outer.has_healed:
                self._local_step = 0  # all are resuming, and this group's checkpoint was behind
            self._follow_schedule()

    def __exit__(self, *raised: Any) -> Any:
        """Stop counting steps."""
        if self._hang_watch is not None:
            self._hang_watch.stop()
            self._hang_watch = None
        return super().__exit__(*raised)

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        with self._clock.blocking(), self.waiting_for_others():
            yield

    # ---- hangs ------------------------------------------------------------------------------

    def note_progress(self) -> None:
        """Say that something other than an inner step or a sync was completed.

        For example a batch of an evaluation, or the save of a checkpoint.
        """
        if self._hang_watch is not None:
            self._hang_watch.note_progress()

    def waiting_for_others(self) -> AbstractContextManager[None]:
        """A context in which this group waits for others, which is no hang of its own."""
        if self._hang_watch is None:
            return nullcontext()
        return self._hang_watch.waiting_for_others()

    def stand_by(self) -> None:
        """Take part in the others' next sync now, in mid-round: there are no samples to train on.

        Blocks until the others come to it. What has been trained since the last sync is in it; the
        next inner step begins a new round.
        """
        with self.waiting_for_others():
            self._outer.stand_by()
        self._local_step = -self.settings.fragment_sync_delay
        self._follow_schedule()

    def final_sync(self) -> None:
        """Synchronise what has been trained since the last syncs, and end on the global parameters.

        Call it when training ends, in every group: the model then holds the global parameters,
        whatever ``fragment_update_alpha`` is. Groups that end earlier stay until the last one has
        ended, without contributing, so that all end on the same.
        """
        with self.waiting_for_others():
            self._outer.finish()
        self._local_step = 0

    # ---- what others read -------------------------------------------------------------------

    def pop_finished_syncs(self) -> list[SyncReport]:
        """The syncs committed since the last call, oldest first."""
        reports, self._outer.reports = self._outer.reports, []
        return reports

    @property
    def outer_step(self) -> int:
        """Outer steps committed so far; equal in all groups."""
        return self._state.outer_step

    @property
    def inner_steps(self) -> int:
        """Inner steps of this group since the run began."""
        return self._outer.inner_steps

    @property
    def stream(self) -> int:
        """What this group reads from; 0 if nothing, or if steps of it were lost."""
        return self._state.ledger.stream

    @property
    def position(self) -> int:
        """Samples of the stream that the local parameters have been trained on."""
        return self._state.ledger.position

    def ledger(self) -> list[list[int]]:
        """Which samples are in the global parameters: rows of stream, position, in_part."""
        return self._state.ledger.rows()

    def streams_in_last_sync(self) -> list[int]:
        """The streams of the groups that took part in it."""
        return [claim.stream for claim in self._outer.claims if claim.stream]

    def global_parameters(self) -> dict[str, Tensor]:
        """The global parameters by name: fp32, on ``backup_device``, not to be written to.

        With ``sync_buffers``, the global buffers too.

        The names are the model's own when one module was given, else ``<fragment>.<name>``. Under
        FSDP2 a tensor is this rank's shard.
        """
        return self._state.parameters()

    def global_digest(self) -> str:
        """SHA-256, in hex, over the bytes of the global parameters in the order of their names.

        Under FSDP2 it is one over the digests of all ranks' shards, and every rank of the group
        has to call it.
        """
        return self._state.digest()

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """All that a resume needs beside the model and the inner optimizer.

        Tensors and plain containers only. Of a sync in flight it has what was sent: after a resume
        that is sent again, when its outer step is due.

        Args:
            copies: Whether it has copies of the tensors. Without, it has to be written before the
                next inner step, which saves twice the model in host memory.
        """
        return saved_state(self._state, self._fragments, copies=copies) | {
            "inner_steps": self.inner_steps,
            "local_step": self._local_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` gave. The model's parameters are loaded elsewhere.

        Settings may have changed, but for those that say what a fragment is; what has is logged.

        Raises:
            SettingsMismatch: It was saved for another model, other fragments or another kind of
                outer optimizer.
        """
        load_saved_state(state_dict, self._state, self._fragments)
        self._outer.tell_torchft_the_step()
        self._outer.inner_steps = state_dict["inner_steps"]
        self._local_step, in_flight = state_dict["local_step"], state_dict["in_flight"]
        before_prepare = self._sync_every - self.settings.fragment_sync_delay - 1
        if in_flight and before_prepare < self._local_step < self._sync_every:
            self._fragments[in_flight["fragment"]].load_in_flight_state(in_flight)
        else:  # under a new sync_every or delay, what was in flight is formed anew
            self._local_step = min(self._local_step, before_prepare)

    def _register_state_dict_fn(self) -> None:
        """torchft's own heal state is not used; the outer loop registers ours."""


def _check_use(
    settings: DiLoCoSettings, outer_optimizer: OuterOptimizer | None, named: Collection[str]
) -> None:
    unused = [name for name in named if name.startswith("outer_") and name != "outer_optimizer"]
    if outer_optimizer is not None and unused:
        raise ValueError(
            f"{', '.join(unused)} and an outer_optimizer of your own: give either of them, since "
            "these are of the SGD that DiLoCo makes without one"
        )
    if settings.discards_overlapped_steps:
        delay = settings.fragment_sync_delay
        warnings.warn(
            f"fragment_sync_delay={delay} with fragment_update_alpha=0 throws away the {delay} "
            "inner steps taken during every sync: use fragment_update_alpha=0.5, as arXiv "
            "2501.18512 does",
            stacklevel=4,
        )
