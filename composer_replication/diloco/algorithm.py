"""DiLoCo with fp32 global parameters and retries, on torchft's quorums and commit votes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
import torchft.local_sgd
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchft.manager import Manager

from composer_replication.diloco.averaging.quantized_mean import check_can_quantize
from composer_replication.diloco.construction import give_settings, log_sizes, own_fragments
from composer_replication.diloco.division import held_tensor
from composer_replication.diloco.fragments import (
    ModelFragments,
    WatchedModel,
    check_trained_by,
    model_fingerprint,
    synced_tensors,
)
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.hang_watch import HANG_TIMEOUT_S, HangWatch
from composer_replication.diloco.joining import join
from composer_replication.diloco.outer_loop import OuterLoop, Role
from composer_replication.diloco.outer_optimizer import OuterOptimizer, describe
from composer_replication.diloco.peer_table import DivergenceError
from composer_replication.diloco.retry import SyncError
from composer_replication.diloco.sample_ledger import Ledger, check_keeps_all_steps
from composer_replication.diloco.saved_state import load_saved_state, saved_state
from composer_replication.diloco.sync_report import SyncReport
from composer_replication.diloco.torchft_api import DiLoCoManager
from composer_replication.diloco.wrapped import own_model, own_optimizers
from composer_replication.options import ReplicaOptions
from composer_replication.settings import DiLoCoSettings

__all__ = ["DiLoCo", "DivergenceError", "SyncError", "SyncReport"]

BACKWARDS = 64
"""After so many backward passes without an inner step, and again after as many, some weights are
compared: another optimizer may change them. That waits for the device, and few people accumulate
gradients over so many passes."""


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
    turns within a round and steps 4 and 5 come ``fragment_sync_delay`` inner steps after steps 2
    and 3. Steps 2 to 5 are in ``FragmentSync``, and ``OuterLoop`` repeats them until they commit.

    It passes ``isinstance(..., torchft.local_sgd.DiLoCo)``, has that class's schedule
    (``torchft/local_sgd.py``, ``_step_post_hook``), and uses none of its code. It adds what that
    lacks: global parameters in fp32 that the outer optimizer owns, weights in the mean, a join
    before training, a retry that loses no inner step (ADR-005, ADR-006, ADR-008).

    Use it as a context manager around training. Entering it joins the other groups, and blocks
    until they are connected. Leaving it removes the hooks from the inner optimizer.

    Args:
        manager: A torchft Manager with ``use_async_quorum=False``, see ``make_manager``.
        model_fragments: The model, or a sequence of modules with one per fragment. DDP, Fabric and
            ``torch.compile`` may have wrapped it.
        inner_optimizer: Trains the local parameters. Each of its steps is an inner step. Several
            train a part each, and the steps of the first one are counted: put another one first to
            count its steps. What the others do after it is in the next sync.
        outer_optimizer: Takes a fragment's global parameters (fp32) and returns the
            ``torch.optim.Optimizer`` that moves them. None: SGD with ``outer_lr``,
            ``outer_momentum`` and ``outer_nesterov``.
        start_refusal: The reason why this group must not begin the run, for example because the run
            has made outer steps already. The group then waits for one that has the run's state.
            None: it may begin the run.
        ranks: All ranks of this group. Under DDP all hold the same model, and each sends a share of
            the pseudo-gradient. With an outer SGD, each holds and steps only that share of the
            global parameters; any other outer optimizer gets whole tensors on every rank. Under
            FSDP2 each sends the shard that it holds, and they decide together whether the group's
            pseudo-gradient is finite. None: this rank alone, or with FSDP2 all ranks of the
            default process group, or under DDP those of the model's wrapper.
        also_synced: Names of parameters that are frozen now and belong to the global state, since
            they were trained when the run began.

    Raises:
        ValueError: An argument is out of range, the fragments and the inner optimizer hold
            different parameters, or the outer optimizer ascends. Before any network is touched.
        SettingsMismatch: On entering, if this group's settings differ from the others'.
        TimeoutError: On entering, if too few groups were connected in time, or the start has failed
            too often.
        NothingToContinueFromError: On entering, if all are connected and none may begin the run
            (``start_refusal``).
        SyncError: On entering, and from the inner optimizer's ``step``, ``sync_idle`` and
            ``final_sync``, after ``max_sync_retries`` retries in a row that no group is known to
            have caused (``SyncRetries``), or for another cause that ``SyncError`` names.
        DivergenceError: From there too, if this group's global parameters are not the others'.
        ValueError: On entering, if all start from this group's parameters and these are not finite.
            In training, if the weights change and ``inner_optimizer`` does not step: from the
            backward pass, ``forget_counted``, ``sync_idle`` or ``final_sync``.
    """

    # Settings and options arrive as two objects. The DiLoCo of plain_loop.py, which scripts import,
    # takes them by name.
    def __init__(
        self,
        manager: DiLoCoManager,
        model_fragments: ModelFragments,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        outer_optimizer: OuterOptimizer | None = None,
        *,
        settings: DiLoCoSettings,
        options: ReplicaOptions,
        start_refusal: str | None = None,
        ranks: ProcessGroup | None = None,
        also_synced: Collection[str] = (),
    ) -> None:
        if settings.overlap_warning:
            warnings.warn(settings.overlap_warning, stacklevel=3)
        if manager._use_async_quorum:
            raise ValueError(
                "the manager has use_async_quorum=True, and a sync needs the quorum's answer before"
                " it sends: make it with use_async_quorum=False, or with make_manager"
            )
        check_can_quantize(manager, settings.wire_format)
        if isinstance(model_fragments, nn.Module):
            model_fragments, ranks_of_ddp = own_model(model_fragments)
            ranks = ranks or ranks_of_ddp
        self._inner_optimizers = own_optimizers(inner_optimizer)
        fragments = synced_tensors(model_fragments, settings, also_synced)
        check_trained_by(fragments, *self._inner_optimizers)
        log_sizes(fragments)
        owned = own_fragments(fragments, outer_optimizer, settings, options.backup_device, ranks)
        self.settings = settings
        self.options = options
        self._start_refusal = start_refusal
        # Without ``super().__init__``: what torchft's would build, the outer loop has.
        self._manager = cast(Manager, manager)
        self._local_optimizer = self._inner_optimizers[0]
        self._registered = ExitStack()
        self._watched = WatchedModel(model_fragments, fragments)
        fingerprint = settings.fingerprint() | {
            "outer_optimizer": describe(owned[0].optimizer),
            "model": model_fingerprint(fragments),
        }
        give_settings(manager, fragments, fingerprint)
        self._state = GlobalState(owned, fingerprint, settings)
        self.hang_watch = HangWatch(options.hang_timeout_s or HANG_TIMEOUT_S)
        self._outer = OuterLoop(
            manager, self._state, options, self._inner_optimizers, self.hang_watch
        )
        self.counts_steps = True
        self.has_joined_others = False
        self._samples = 0
        self._others_have_stepped = False
        """Whether one whose steps are not counted has stepped since the last inner step."""
        self._backwards: float = 0
        """Backward passes since the last inner step."""
        self._seen = Tensor()
        """Some of the weights, as they were at the last of these comparisons."""

    # ---- the schedule -----------------------------------------------------------------------

    # Unlike torchft's hooks these do not lock the state for a step: it is read in ``start_quorum``,
    # which this thread waits for. After a step that raises, as without memory, the lock would stay.

    def _step_pre_hook(self, *step: Any) -> None:
        if self.counts_steps:
            self._backwards = -math.inf  # those of LBFGS and SAM within a step do not count

    def _step_post_hook(self, *step: Any) -> None:
        if not self.counts_steps:
            return
        samples = self._samples
        self._samples = 0
        self._backwards = 0
        found_inf = getattr(self._local_optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():
            # torch's GradScaler lets a fused optimizer's step run, and do nothing.
            return
        self._others_have_stepped = False
        self._watched.check_none_thawed(*self._inner_optimizers)
        self._watched.put_buffers_back()
        self._outer.count_inner_step(samples)
        with self._outer.clock.blocking():
            if self._outer.steps_left == self.settings.fragment_sync_delay:
                self._outer.send()
            if self._outer.steps_left == 0:
                self._outer.end_sync()

    def _note_other_step(self, *step: Any) -> None:
        if self.counts_steps:
            self._others_have_stepped = True
            self._backwards = 0

    # ---- weights that change without inner steps --------------------------------------------

    def _note_backward(self, parameter: Tensor) -> None:
        self._backwards += 1
        if self._backwards % BACKWARDS == 0:
            before = self._seen
            self._seen = held_tensor(parameter).flatten()[:1024].clone()
            if self._backwards > BACKWARDS and not torch.equal(before, self._seen):
                raise self._uncounted()

    def _check_counted(self) -> None:
        """Check that nothing was trained without an inner step: the next sync would undo it.

        Fragments without an inner step since their last sync have to be the global ones. Once there
        was a step that holds only after a backward pass, since a user may put other weights into
        the model, such as an average to evaluate; and not with ``fragment_update_alpha``, which
        keeps a part of the local weights.

        Raises:
            ValueError: They are not.
        """
        has_trained = self._backwards > 0 and not self.settings.fragment_update_alpha
        if self._others_have_stepped or (self.inner_steps and not has_trained):
            return
        for each in self._outer.fragments:
            if not each.unsynced.inner_steps and each.globals.has_moved():
                raise self._uncounted()

    def _uncounted(self) -> ValueError:
        return ValueError(
            f"the weights change, and the {type(self._local_optimizer).__name__} that DiLoCo was "
            f"given does not step (inner step {self.inner_steps}): no sync has what is trained. "
            "Give it the optimizer that steps, after the backward pass and not in it (as LOMO and "
            "layerwise GaLore do). The model keeps its weights"
        )

    # ---- joining and ending -----------------------------------------------------------------

    def __enter__(self) -> DiLoCo:
        """Join the other groups, then count the inner optimizer's steps."""
        self.hang_watch.start()
        try:
            with self._outer.clock.blocking():
                self.has_joined_others = join(self._outer, self._start_refusal)
        except BaseException as error:  # Ctrl-C too: peers would wait until their timeout
            self._outer.manager.report_error(error)
            self.hang_watch.stop()
            raise
        finally:
            self._state.forget_staged()  # does nothing if a heal has used it
        first, *others = self._inner_optimizers
        register = self._registered.enter_context
        register(first.register_step_pre_hook(self._step_pre_hook))
        register(first.register_step_post_hook(self._step_post_hook))
        for other in others:
            register(other.register_step_post_hook(self._note_other_step))
        trained: list[Tensor] = []
        for fragment in self._outer.fragments:
            averaged = fragment.globals.averaged.values()
            trained += [tensor for tensor in averaged if tensor.requires_grad]
        if trained:
            register(trained[-1].register_post_accumulate_grad_hook(self._note_backward))
        return self

    def __exit__(self, *raised: Any) -> Any:
        """Stop counting inner steps, and the watch for a hang."""
        del raised
        self.hang_watch.stop()
        self._registered.close()
        return False

    def sync_idle(self) -> None:
        """Take part in the others' next sync, while there are no samples to train on.

        It blocks until the others start that sync. This group contributes the inner steps since its
        last sync, and its next inner step begins a new round. Without it the others could end the
        run, or this group would fall behind and be healed.
        """
        self._send_all()
        self._outer.sync(Role.IDLES)

    def final_sync(self) -> None:
        """Synchronise the inner steps since the last syncs, and end on the global parameters.

        Call it when training ends, in every group. The model then holds the global parameters,
        whatever ``fragment_update_alpha`` is. Groups that end earlier stay until the last one has
        ended, without contributing, so that all end on the same parameters.

        Raises:
            SyncError: A sync did not commit, see the class.
            DivergenceError: This group's global parameters differ from the others'.
            ValueError: The weights were trained and no inner step was counted. They stay as they
                are.
        """
        self._send_all()
        self._outer.finish()

    def _send_all(self) -> None:
        """End the sync in flight, and have the next one send what was trained after it, by others
        than the first optimizer too."""
        self._check_counted()
        if self._others_have_stepped and not self.inner_steps:
            raise self._uncounted()
        self._outer.end_sync_early()
        if self._others_have_stepped:
            self._outer.count_other_steps()
            self._others_have_stepped = False

    # ---- what the training loop reports -----------------------------------------------------

    def count_samples(self, num_samples: int) -> None:
        """Add to the number of samples that the next inner step trains on.

        Args:
            num_samples: Over all ranks of the group.
        """
        if self.settings.weight_by == "samples":
            self._samples += num_samples

    def count_tokens(self, num_tokens: int) -> None:
        """Add to the number of tokens that the next inner step trains on.

        Args:
            num_tokens: Over all ranks of the group.
        """
        if self.settings.weight_by == "tokens":
            self._samples += num_tokens

    def forget_counted(self) -> None:
        """Forget the samples and tokens that were counted for an inner step that is not taken.

        Call it after a batch in which a gradient scaler has not called the inner optimizer.

        Raises:
            ValueError: The weights have changed nevertheless.
        """
        self._samples = 0
        self._check_counted()

    def note_batch(self, batch: Any) -> None:
        """Note the samples of the next inner step, to find groups that train on equal ones.

        The groups compare digests of their first batches at their first sync, and
        ``SyncReport.equal_samples`` of that sync has the result. Later calls do nothing.

        Args:
            batch: This rank's batch: tensors in any containers.
        """
        if not self.options.same_samples:
            self._outer.first_batches.note(batch)

    def expect_last_step(self) -> None:
        """Announce that the next inner step is the last one.

        If all groups announce it, their last sync ends the run. Otherwise they need one more sync
        to find out that no group has anything to send. With several inner optimizers it does
        nothing: the others may step after the first one's last step.
        """
        if len(self._inner_optimizers) == 1:
            self._outer.role = Role.ENDS

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

    # ---- what others read -------------------------------------------------------------------

    def pop_finished_syncs(self) -> list[SyncReport]:
        """The syncs committed since the last call, oldest first."""
        reports = self._outer.reports
        self._outer.reports = []
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
    def has_unsynced_steps(self) -> bool:
        """Whether a fragment has inner steps that are not in the global parameters yet."""
        return any(fragment.unsynced.inner_steps for fragment in self._outer.fragments)

    @property
    def ledger(self) -> Ledger:
        """Which samples the global parameters have been trained on, and what this group reads."""
        return self._state.ledger

    def streams_in_last_sync(self) -> list[int]:
        """The sample streams of the groups that took part in the last sync."""
        return [synced.stream for synced in self._outer.result.synced_samples if synced.stream]

    def global_parameters(self) -> Mapping[str, Tensor]:
        """The global parameters by name: fp32, on ``backup_device``, not to be written to.

        The global buffers too, unless ``sync_buffers`` is ``none``. Those that are not averaged are
        in host memory, in the model's dtypes.

        The names are the model's own when one module was given, else ``<fragment>.<name>``. Under
        FSDP2 a tensor is this rank's shard. Under DDP each rank holds a share: a tensor is gathered
        whenever it is looked up, and every rank of the group has to look it up.
        """
        return self._state.parameters()

    def global_digest(self) -> str:
        """SHA-256, in hex, over the bytes of ``global_parameters`` in the order of their names.

        Every rank of the group has to call it. Under FSDP2 it is the SHA-256 over the digests of
        all ranks' shards.
        """
        return self._state.digest()

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the state that a resume needs beside the model and the inner optimizer.

        It consists of tensors and plain containers. If a sync is in flight, it contains the local
        parameters that were sent: a resumed group sends them again when the outer step is due.

        Every rank of the group has to call it.

        Args:
            copies: Whether to copy the tensors. Without copies, write the state before the next
                inner step; that saves host memory of twice the model's size.
        """
        return saved_state(self._outer, copies=copies)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. The model's parameters are loaded elsewhere.

        Call it before ``with``, where the groups find out who has the newest state.

        Settings may have changed since it was saved, except those that define the fragments and the
        messages. Changes are logged.

        Raises:
            SettingsMismatch: It was saved for another model, other fragments or another kind of
                outer optimizer.
        """
        load_saved_state(state_dict, self._outer)
