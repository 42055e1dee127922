"""DiLoCo, exact where torchft's is not, on torchft's schedule, streams and commit votes."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torchft.local_sgd
from torch import Tensor, nn
from torchft.manager import Manager

from composer_replication.diloco.arguments import pick, takes
from composer_replication.diloco.averaging.quantized_mean import check_can_quantize
from composer_replication.diloco.averaging.rank_shares import HostRanks, RankShare
from composer_replication.diloco.averaging.weighted_mean import elements_of
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
    local_tensor,
    nesterov_sgd,
)
from composer_replication.diloco.peer_table import DivergenceError, PeerTable
from composer_replication.diloco.sample_ledger import check_keeps_all_steps
from composer_replication.diloco.saved_state import load_saved_state, saved_state
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.shards import Shards, count_shards
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

    Use it as a context manager around training. Entering it joins the other groups, and blocks
    until they are connected. Leaving it removes the hooks from the inner optimizer.

    Its arguments are those of :class:`DiLoCoArguments`: what to train, the run's settings
    (:class:`DiLoCoSettings`) and the group's options (:class:`DiLoCoOptions`).

    Raises:
        ValueError: An argument is out of range, the fragments and the inner optimizer hold
            different parameters, or the outer optimizer ascends. Before any network is touched.
        SettingsMismatch: On entering, if this group's settings differ from the others'.
        TimeoutError: On entering, if too few groups were connected in time.
        NothingToContinueFromError: On entering, if all are connected and none may begin the run
            (``start_refusal``).
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
        check_can_quantize(manager, settings.wire_format)
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
        share = partial(
            RankShare,
            bucket=elements_of(settings.bucket_cap_mb),
            ranks=ranks,
            device=local_tensor(next(iter(fragments[0].values()))).device,
            host_ranks=HostRanks(ranks) if ranks is not None else None,
        )
        owned = [
            GlobalParameters(
                parameters,
                outer_optimizer,
                backup,
                arguments.pin_memory,
                own_buffers,
                Shards([*parameters.values(), *own_buffers.values()], sharded_over),
                share,
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
        message_device = arguments.message_device
        self._fragments: list[FragmentSync] = []  # pyright: ignore[reportIncompatibleVariableOverride]
        peer_table = PeerTable(
            cast(DiLoCoManager, manager), self._state, self._fragments, arguments.digest_every
        )
        self._fragments += (
            FragmentSync(
                manager,
                index,
                globals_,
                inner_optimizer,
                settings,
                self._clock,
                self._state,
                peer_table,
                None if message_device is None else torch.device(message_device),
            )
            for index, globals_ in enumerate(owned)
        )
        self._outer = OuterLoop(
            cast(DiLoCoManager, manager),
            self._fragments,
            self._state,
            settings,
            self._clock,
            peer_table,
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
        """Add to the number of samples that the next inner step trains on.

        Args:
            num_samples: Over all ranks of the group.
        """
        self._samples += num_samples

    def expect_last_step(self) -> None:
        """Announce that the next inner step is the last one.

        If all groups announce it, their last sync ends the run. Otherwise one more sync is needed
        to find out that no group has anything to send.
        """
        self._outer.ends_with_next_step = True

    def read_from(self, stream: int) -> None:
        """Begin a sample stream: the samples of the next inner steps come from its start.

        The global state then records how much of the stream is in the model, see ``Ledger``.

        Args:
            stream: The stream's number, from 1 to 2^44 - 1. No two incarnations of replica groups
                read the same stream.

        Raises:
            ValueError: The settings throw inner steps away, so no record would be right.
        """
        check_keeps_all_steps(self.settings)
        self._state.ledger.read_from(stream)

    def expect_position(self, position: int) -> None:
        """Set how many samples of the stream have been read after the next inner step."""
        self._state.ledger.position = position

    def make_local_global(self) -> None:
        """Make the local parameters the global ones at the next sync of each fragment.

        Call it in all groups after an average has replaced the local parameters, for example when
        Composer's SWA loads its average into the model. The global parameters become the plain mean
        of the local ones (outer learning rate 1, no momentum), and the outer momentum is reset. One
        group of a sync that has called it is enough for all of them.
        """
        self._outer.make_local_global()

    @property
    def replaces_global(self) -> bool:
        """Whether ``make_local_global`` still has to take effect in a fragment."""
        return any(fragment.replaces_global for fragment in self._fragments)

    def offer_settings(self, versions: Mapping[int, DiLoCoSettings]) -> None:
        """Announce which versions of the settings this group knows.

        After each sync, all groups adopt the newest version that all of them know. Only
        ``sync_every``, ``outer_lr`` and ``outer_momentum`` can change that way.

        Args:
            versions: The settings by version, from 1. At the first call the newest version is the
                one that this object was built with.
        """
        if not versions:
            return
        self._outer.known_settings.update(versions)
        self._outer.offer(max(versions))
        if not self._state.settings_version:
            self._state.settings_version = max(versions)

    def _follow_schedule(self) -> None:
        """Set the length of a round to that of the settings in force."""
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
                # torchft's hook sends only at one inner step of a round, which has passed.
                self._manager.allow_state_dict_read()
                self._outer.send_again()
            super()._step_post_hook(*step)
            if self._local_step <= counted:  # back at 0: torchft has performed a sync
                self._outer.finish_sync()
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
                self._arguments, self._arguments.start_refusal
            )
            if self.has_joined_others:
                # The others apply this sync after the delay: this puts the next sync at the same
                # time in all groups.
                self._local_step = -self.settings.fragment_sync_delay
            elif self._outer.has_healed:
                self._local_step = 0  # all are resuming, and this group's checkpoint was older
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
        """Record that something other than an inner step or a sync was completed.

        For example a batch of an evaluation, or the save of a checkpoint. It restarts
        ``hang_timeout_s``.
        """
        if self._hang_watch is not None:
            self._hang_watch.note_progress()

    def waiting_for_others(self) -> AbstractContextManager[None]:
        """A context in which this group waits for others: ``hang_timeout_s`` does not count."""
        if self._hang_watch is None:
            return nullcontext()
        return self._hang_watch.waiting_for_others()

    def sync_idle(self) -> None:
        """Take part in the others' next sync, while there are no samples to train on.

        It blocks until the others start that sync. This group contributes the inner steps since its
        last sync, and its next inner step begins a new round.
        """
        with self.waiting_for_others():
            self._outer.sync_idle()
        self._local_step = -self.settings.fragment_sync_delay
        self._follow_schedule()

    def final_sync(self) -> None:
        """Synchronise the inner steps since the last syncs, and end on the global parameters.

        Call it when training ends, in every group. The model then holds the global parameters,
        whatever ``fragment_update_alpha`` is. Groups that end earlier stay until the last one has
        ended, without contributing, so that all end on the same parameters.

        Raises:
            SyncError: A sync failed more than ``max_sync_retries`` times.
            DivergenceError: This group's global parameters differ from the others'.
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
        """The number of this group's sample stream; 0 if it reads none, or has lost steps of it."""
        return self._state.ledger.stream

    @property
    def position(self) -> int:
        """How many samples of the stream the local parameters have been trained on."""
        return self._state.ledger.position

    def ledger(self) -> list[list[int]]:
        """The ``SyncedSamples`` of all streams, as rows of stream, position and in_part."""
        return self._state.ledger.rows()

    def streams_in_last_sync(self) -> list[int]:
        """The sample streams of the groups that took part in the last sync."""
        return [synced.stream for synced in self._outer.synced_samples if synced.stream]

    def global_parameters(self) -> Mapping[str, Tensor]:
        """The global parameters by name: fp32, on ``backup_device``, not to be written to.

        With ``sync_buffers``, the global buffers too.

        The names are the model's own when one module was given, else ``<fragment>.<name>``. Under
        FSDP2 a tensor is this rank's shard. Under DDP each rank holds a share: a tensor is gathered
        whenever it is looked up, and every rank of the group has to look it up.
        """
        return self._state.parameters()

    def global_digest(self) -> str:
        """SHA-256, in hex, over the bytes of the global parameters in the order of their names.

        Every rank of the group has to call it. Under FSDP2 it is one over the digests of all ranks'
        shards.
        """
        return self._state.digest()

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the state that a resume needs beside the model and the inner optimizer.

        It consists of tensors and plain containers. If a sync is in flight, it contains the local
        parameters that were sent: a resumed group sends them again when the outer step is due.

        Every rank of the group has to call it.

        Args:
            copies: Whether to copy the tensors. Without copies, the state has to be written before
                the next inner step; that saves host memory of twice the model's size.
        """
        return saved_state(self._state, self._fragments, copies=copies) | {
            "inner_steps": self.inner_steps,
            "local_step": self._local_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. The model's parameters are loaded elsewhere.

        Settings may have changed since it was saved, except those that define the fragments and the
        messages. Changes are logged.

        Raises:
            SettingsMismatch: It was saved for another model, other fragments or another kind of
                outer optimizer.
        """
        load_saved_state(state_dict, self._state, self._fragments)
        self._outer.set_torchft_step()
        self._outer.inner_steps = state_dict["inner_steps"]
        self._local_step, in_flight = state_dict["local_step"], state_dict["in_flight"]
        before_prepare = self._sync_every - self.settings.fragment_sync_delay - 1
        if in_flight and before_prepare < self._local_step < self._sync_every:
            self._fragments[in_flight["fragment"]].load_in_flight_state(in_flight)
        else:  # under a new sync_every or delay, the pseudo-gradient is computed anew
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
