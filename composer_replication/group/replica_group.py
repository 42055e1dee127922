"""A trainer as one replica group, from its first fit to its last."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from composer_replication.arguments import pick
from composer_replication.coordinator.client import RunInfo
from composer_replication.coordinator.membership import Membership, ask_for_run
from composer_replication.data.group_data import GroupData, group_data_of
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.fence import fence
from composer_replication.diloco.fragments import listed, persistent_buffers, synced_tensors
from composer_replication.diloco.global_state import digest_of
from composer_replication.diloco.shards import local_tensor
from composer_replication.group.checkpoint import pack, template, unpack
from composer_replication.group.checkpoint_layout import (
    BadStateError,
    CheckpointLayout,
    checksums,
    replaced,
)
from composer_replication.group.global_weights import Generators, GlobalWeights
from composer_replication.group.host import Host
from composer_replication.group.reports import Reports
from composer_replication.group.run_folder import (
    ERROR,
    EVALUATION,
    WARNING,
    ReplicaFolder,
    last_outer_step,
)
from composer_replication.options import (
    DiLoCoOptions,
    ManagerOptions,
    ReplicaOptions,
    replica_id_of,
)
from composer_replication.replica.factory import backend_for, make_manager
from composer_replication.replica.ranks import broadcast, rank, world_size
from composer_replication.settings import DiLoCoSettings, SettingsMismatch

log = logging.getLogger(__name__)
package_log = logging.getLogger("composer_replication")


class ReplicaGroup:
    """One replica group of a DiLoCo run, for a trainer that calls these methods.

    A fit is ``join``, then for each step ``begin_step``, ``count`` and ``end_step``, and at last
    ``end``; or ``leave`` if it fails. Between two fits the group keeps its state, and the next one
    continues from there. Every rank of the group makes each call.

    Args:
        host: The trainer.
        arguments: Those that were given: of ``DiLoCoSettings`` and of ``ReplicaOptions``.

    Attributes:
        settings: The run's.
        options: This group's.
        diloco: During a fit.
        data: The samples that the group trains on, during a fit, if the loader is one of ours.
        weights: Shows the global weights, from the first fit on.
        manager: Connects with the other groups, until this one leaves.
        is_resumed: Whether this fit continues from a checkpoint.
        result: Of the last fit; empty before its end.

    Raises:
        ValueError: A setting or an option is out of range.
    """

    def __init__(self, host: Host, arguments: Mapping[str, Any]) -> None:
        self.host = host
        self.settings = pick(DiLoCoSettings, arguments)
        self.options = pick(ReplicaOptions, arguments).with_environment()
        self._arguments = arguments  # a coordinator's settings are compared with what was given
        if package_log.level == logging.NOTSET:
            package_log.setLevel(logging.INFO)  # a trainer may set a level for its own package only
        self.diloco: DiLoCo | None = None
        self.data: GroupData | None = None
        self.weights: GlobalWeights | None = None
        self.manager: Any = None
        self.is_resumed = False
        self.result: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        """Of the last evaluation, by name; they become a part of the result."""
        self._run: RunInfo | None = None
        self._membership: Membership | None = None
        self._folder: ReplicaFolder | None = None
        self._reports: Reports | None = None
        self._loaded: dict[str, Any] | None = None
        self._path: str | None = None
        self._ended: dict[str, Any] | None = None
        """DiLoCo's state at the end of the fit before this one."""
        self._left: dict[str, int] | None = None
        """Checksums of what that fit has left in the model; None if nobody knows."""
        self._layout: CheckpointLayout | None = None
        self._generators = Generators()
        self._parent = os.getppid()
        self._leaving = threading.RLock()  # when a fit has failed, another thread leaves

    # ---- before a fit -----------------------------------------------------------------------

    def ask_coordinator(self) -> None:
        """Take the coordinator's settings, if there is one."""
        if self.options.coordinator_addr is not None:
            self._run = ask_for_run(self.options)
            self.settings = self._run.settings
            self.options = self._run.adopt(self.options, self._arguments)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep what ``state_dict`` has returned until ``join``.

        A checkpoint is checked before this group contacts any other, so that none waits for a group
        that cannot start.
        """
        self._loaded = saved or None

    def check_loaded(self, path: str | None) -> None:
        """The trainer has loaded its checkpoint, if there is one: refuse it if it is not a group's.

        Args:
            path: Of the checkpoint, for errors.

        Raises:
            BadStateError: It has training state, but no DiLoCo state.
        """
        self._path = path
        if self._loaded is None and self.host.steps > 0:
            raise self._rejection(
                f"it is of batch {self.host.steps} and has no DiLoCo state: no global parameters, "
                "no outer momentum",
                f"Load {self.host.load_weights_only}",
            )

    def reject(self, error: ValueError) -> None:
        """Say in the run's folder that this group would be refused again."""
        with fence("in the run's folder why this group is rejected"):
            if self.options.replica_id is not None and not rank():
                folder = ReplicaFolder(self.options.run_dir, self.options.replica_id)
                folder.write_rejection(str(error))

    # ---- a fit begins -----------------------------------------------------------------------

    def join(self, manager: Any = None) -> None:
        """Begin a fit: connect with the other groups, and wait for them.

        Args:
            manager: The one to use, which is good for one fit. None: make one.

        Raises:
            BadStateError: The checkpoint is damaged, or is one of another model.
            SettingsMismatch: It was saved with other fragments, or the other groups' settings
                differ.
            ValueError: A setting does not fit the model, or the fit before trained other
                parameters, or left other values of them.
        """
        if self.diloco is not None:
            self.leave()
            self._keep(has_failed=True)
            self._drop()
            log.info("Continuing from the state of the fit that failed")
        if manager is not None and self._ended is not None:
            raise ValueError(
                "manager= can be used for one fit only, since it leaves the other groups after it: "
                "give the next fit a new DiLoCoCallback with a new manager"
            )
        resumed, also_synced = self._read()
        self._folder = ReplicaFolder(
            None if rank() else self.options.run_dir, replica_id_of(self.options)
        )
        self._reports = Reports(self._folder, self.settings, self.host)
        try:
            diloco = self._connect(manager, also_synced)
            self._continue(diloco, resumed)
            diloco.counts_steps = False
            self._reports.position("joining", diloco)
            diloco.__enter__()
            self._reports.started(diloco)
            name = replica_id_of(self.options)
            self._reports.joined(diloco, self.manager, name, self.is_resumed)
            if self.data is not None:
                self.data.start()
            if self.is_resumed:
                self._reports.resumed(diloco)
            self._report("training")
        except BaseException:
            self.leave()  # the others would wait for this group while it sends heartbeats
            self._drop()
            raise

    def _read(self) -> tuple[tuple[dict[str, Any], Mapping[str, Any]] | None, set[str]]:
        """What this fit continues from, if anything, and the tensors that are synced besides."""
        # What belonged to the global state before; some of it may be frozen by now.
        before = self._ended["fragments"] if self._ended is not None else ()
        loaded, self._loaded = self._loaded, None
        names = () if loaded is None else loaded.get("local", {})
        also_synced = {*names, *(name for f in before for name in f["theta"])}
        resumed = None if loaded is None else self._unpack(loaded)
        self.is_resumed = resumed is not None
        self.host.begin(self.is_resumed)
        self._layout = self._layout_of(also_synced)
        if self._ended is not None and not self.is_resumed:
            self._check_unchanged(self._layout, before)
        return resumed, also_synced

    def _layout_of(self, also_synced: Sequence[str] | set[str] = ()) -> CheckpointLayout:
        fragments = synced_tensors(self.host.model, self.settings, also_synced)
        return CheckpointLayout(fragments, self.host.is_sharded, self.host.has_averages)

    def _unpack(self, loaded: dict[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
        try:
            layout = self._layout_of([*loaded.get("local", {})])
            return unpack(loaded, self.settings, layout)
        except SettingsMismatch as error:
            raise self._rejection(str(error), "Use the settings that it was saved with") from error
        except (BadStateError, KeyError, TypeError, ValueError, RuntimeError) as error:
            problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            fix = f"Load another one, or {self.host.load_weights_only}"
            raise self._rejection(problem, fix) from error

    def _rejection(self, problem: str, fix: str) -> BadStateError:
        path = self._path or "the checkpoint"
        return BadStateError(f"cannot continue from {path}: {problem}. {fix}")

    def _check_unchanged(self, layout: CheckpointLayout, before: Sequence[Any]) -> None:
        known = {name for fragment in before for name in fragment["theta"]}
        changed = [] if self._left is None else replaced(self._left, layout.live)
        kinds = {
            "were not trained in the fit before": [n for n in layout.live if n not in known],
            "were replaced since the fit before": [name for name in changed if name in known],
        }
        if found := [f"{listed(names)} {what}" for what, names in kinds.items() if names]:
            raise ValueError(
                f"{', and '.join(found)}: this fit cannot continue with its outer momentum. Give a "
                "new Trainer of this model a new DiLoCoCallback, in all replica groups"
            )

    def _connect(self, manager: Any, also_synced: set[str]) -> DiLoCo:
        host, options = self.host, self.options
        self._say_settings()
        refusal = None
        if not self.is_resumed and self._ended is None:
            refusal = broadcast(None if rank() else self._start_refusal())
        if self._run is not None:
            synced = synced_tensors(host.model, self.settings, also_synced)
            self._membership = Membership(options, self._run, synced, world_size())
        backend = self._backend()
        if manager is None:
            own = pick(ManagerOptions, vars(options) | {"backend": backend})
            manager = make_manager(**vars(own))
        self.manager = manager
        manager.register_state_dict_fn(host.name, host.load_state_dict, host.state_dict)
        diloco = DiLoCo(
            manager,
            host.model,
            host.optimizer,
            **vars(self.settings),
            **vars(pick(DiLoCoOptions, vars(options))),
            start_refusal=refusal,
            ranks=dist.group.WORLD if world_size() > 1 else None,
            message_device="cpu" if backend == "gloo" else None,
            also_synced=also_synced,
        )
        self.data = group_data_of(
            host.loader, options, diloco, self._membership, self.sync_idle, host.epochs
        )
        return diloco

    def _say_settings(self) -> None:
        assert self._folder is not None, "join has made it"
        momentum = self.settings.momentum_warning(self.host.last_step(is_bound=True))
        if not rank():
            source = "Settings"
            if self._run is not None:
                source = f"The coordinator's settings ({self._run.settings_source})"
            log.info("%s: %s", source, self.settings)
            if momentum:
                log.warning("%s", momentum)
        for text in filter(None, (momentum, self.settings.overlap_warning)):  # DiLoCo warns of it
            self._folder.append(WARNING, {"warning": text})

    def _start_refusal(self) -> str | None:
        """Why a group without a checkpoint must not begin this run; None if it may.

        If the run has made outer steps already, a group with fresh parameters would become the
        donor of every group that comes back, and the run's training would be lost.
        """
        step, source = last_outer_step(self.options.run_dir), self.options.run_dir
        if self._run is not None and self._run.outer_step > step:
            step, source = self._run.outer_step, "the coordinator"
        if not step:
            return None
        fix = "load a checkpoint (load_path, or autoresume: true with a save_folder)"
        latest = self.host.latest_checkpoint
        if latest is not None and latest.exists():
            fix = f"continue from this group's last checkpoint (load_path={latest})"
        return (
            f"{source} says that this run has made {step} outer steps, and this group starts "
            f"without a checkpoint: it can join other groups, but it cannot begin the run. If no "
            f"other group is left, {fix}, or begin another run: use another run_dir, and another "
            "state folder for its coordinator"
        )

    def _backend(self) -> str:
        device = next(self.host.model.parameters()).device
        if self.options.backend == "nccl" and device.type != "cuda":
            raise ValueError(f"backend='nccl', but the model is on {device}: use 'gloo'")
        return self.options.backend or backend_for(device)

    def _continue(
        self, diloco: DiLoCo, resumed: tuple[dict[str, Any], Mapping[str, Any]] | None
    ) -> None:
        """Give a new DiLoCo what a checkpoint or the fit before has left, if there is either."""
        assert self._layout is not None, "it has been read"
        self.diloco = diloco
        if self.weights is not None:
            self.weights.remove()
        before, local = resumed or (self._ended, {})
        if before is not None:
            diloco.load_state_dict(before)
            if self.data is not None:
                self.data.load_state_dict(before["reading"])
        with torch.no_grad():
            for name, tensor in local.items():
                local_tensor(self._layout.live[name]).copy_(tensor)
        self.weights = GlobalWeights(
            self.host.model,
            diloco.global_parameters(),
            lambda: self.host.saves_as_is or self._replaces_global,
        )

    # ---- steps ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """From now on a step of the optimizer is an inner step, until ``end_step``.

        Only those count: torch's get_optimizer_state_dict and set_optimizer_state_dict call
        ``step``, at a load and, for SGD, at every save.
        """
        if self.diloco is None:
            return
        if self.data is not None:
            self.diloco.ledger.position = self.data.position.samples
        self.diloco.counts_steps = True
        if self.host.last_step() == self.host.steps + 1:
            self.diloco.expect_last_step()

    def count(self, batch: Any) -> None:
        """Count a batch of this rank for the step that has begun.

        Raises:
            ValueError: On all ranks, if the batch of one has no tokens and these are counted.
        """
        if self.diloco is None:
            return
        self.diloco.note_batch(batch)
        if self.settings.weight_by == "samples":
            self.diloco.count_samples(self.size_of_all(batch, "samples"))
        elif self.settings.weight_by == "tokens":
            self.diloco.count_tokens(self.size_of_all(batch, "tokens"))

    def size_of_all(self, batch: Any, what: str) -> int:
        """The number of samples or tokens in a batch, over all ranks of the group.

        Args:
            batch: Of this rank.
            what: ``samples`` or ``tokens``.

        Raises:
            ValueError: On all ranks, if the batch of one has no tokens.
        """
        own = self.host.size_of(batch, what)
        device = next(self.host.model.parameters()).device
        counts = torch.tensor([own, int(own == 0)], device=device)
        if dist.is_initialized():
            dist.all_reduce(counts)
        total, num_without = counts.tolist()
        if num_without and what == "tokens":
            raise ValueError(
                f"weight_by='tokens', and {num_without} of the group's {world_size()} ranks have a "
                f"batch of 0 tokens: {self.host.tokens_fix}, or use weight_by='samples'"
            )
        return total

    def end_step(self, loss: float | None = None) -> bool:
        """The step is over, also if the optimizer was not called because of an overflow.

        Args:
            loss: Of the step, a mean over the group's ranks, if the trainer knows it.

        Returns:
            Whether to end training, since the run's folder says so.

        Raises:
            RuntimeError: The launcher has died.
        """
        if self.diloco is None or self._reports is None or self._folder is None:
            return False
        self.diloco.counts_steps = False
        self.diloco.forget_counted()
        if self.data is not None:
            self.data.after_batch()
        self._check_launcher()
        if loss is not None:
            self._reports.note_loss(loss)
        if not self._report("training") or not broadcast(self._folder.asks_to_stop):
            return False
        log.info(
            "Ending after outer step %d: the run's folder contains STOP", self.diloco.outer_step
        )
        return True

    def _check_launcher(self) -> None:
        # A rank that outlives its launcher would vote beside the group that is started again.
        if world_size() > 1 and os.getppid() != self._parent:
            raise RuntimeError(
                "the launcher of this group's ranks has died, so this rank ends. Start the group "
                "again: it takes over the other groups' state"
            )

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun that has not ended."""
        return self.diloco is not None and self.diloco.counts_steps

    def sync_idle(self) -> None:
        """Take part in the others' next sync: there are no samples to train on at the moment."""
        assert self.diloco is not None, "it is asked while training"
        with self.host.without_averages():
            self.diloco.sync_idle()
        if not self._report("training") and self.data is not None:
            self.data.after_sync()

    def _report(self, phase: str) -> bool:
        """Report syncs and the position in training. Returns whether there was a sync."""
        assert self.diloco is not None and self._reports is not None, "join has made them"
        reports = self.diloco.pop_finished_syncs()
        self.host.after_heal()
        if reports and self._membership is not None:
            self._membership.check()
        self._reports.synced(reports)
        self._reports.note_members(reports, self.manager)
        done = 0.0 if self.data is None else self.data.done(self.host.epochs)
        position = self._reports.position(phase, self.diloco, done)
        if self._membership is not None:
            self._membership.report_progress(position)
        if reports and self.data is not None:
            self.data.after_sync()
        return bool(reports)

    # ---- weights ----------------------------------------------------------------------------

    def show_global(self) -> None:
        """Put the global weights into the model, for evaluators. It may be repeated.

        Iterating over a loader draws from torch's generator: without saving the generators, an
        evaluation would change the dropout of the steps after it.
        """
        if self.weights is None:
            return
        self._generators.save()
        if self.options.eval_weights == "global":
            if not self.host.evaluates_as_is and not self._replaces_global:
                self.weights.show()

    def show_local(self) -> None:
        """Put the local weights and the random generators back. It may be repeated."""
        if self.weights is not None:
            self.weights.hide()
            self._generators.restore()

    def note_evaluation(self, metrics: dict[str, float]) -> None:
        """Keep the metrics of an evaluation for the run's folder and the result."""
        self._metrics = metrics
        if self._folder is None:
            return
        self._folder.append(EVALUATION, {"batch": self.host.steps, "eval": metrics})
        if self.result and self.diloco is None:
            # A trainer's last evaluation may come after the end of the fit.
            self.result["eval"] = metrics
            self._folder.write_end(self.result)

    @property
    def _replaces_global(self) -> bool:
        """Whether an average is in the model that is not yet in the global weights."""
        if self.diloco is not None:
            return self.diloco.replaces_global
        return self._ended is not None and any(self._ended["replaces_global"])

    # ---- what is saved ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint: empty before training. Under FSDP a collective.

        It has to be written before the next inner step. The checkpoint's model is the global one:
        its ``state_dict`` returns the global weights.
        """
        if self.diloco is not None:
            return self._packed(self._diloco_state())
        return (self._loaded or {}) if self._ended is None else self._packed(self._ended)

    def template(self) -> dict[str, Any]:
        """An empty state, to load a sharded checkpoint into."""
        return template(self.settings, self._layout_of())

    def _diloco_state(self) -> dict[str, Any]:
        """DiLoCo's state with its own tensors, valid until the next inner step."""
        assert self.diloco is not None, "while there is one"
        diloco_state = self.diloco.state_dict(copies=False)
        if self.data is not None:
            diloco_state["reading"] |= self.data.state_dict()
        return diloco_state

    def _packed(self, diloco_state: dict[str, Any]) -> dict[str, Any]:
        assert self.weights is not None and self._layout is not None, "join has made them"
        local = self.host.local(self.weights.local())
        return pack(diloco_state, local, self.weights.saved, self._layout)

    # ---- a fit ends -------------------------------------------------------------------------

    def end(self) -> None:
        """The fit has ended well: sync what has not been synced, and leave the others."""
        if self.diloco is None or self._folder is None or self._reports is None:
            return
        assert self._layout is not None, "join has made it"
        with self.host.without_averages():
            if self.options.final_sync:
                self.diloco.final_sync()
            self._left = checksums(self._layout.live)
        self._report("evaluating")
        self.result = {
            "replica_id": replica_id_of(self.options),
            "inner_steps": self.diloco.inner_steps,
            "outer_steps": self.diloco.outer_step,
            "global_digest": self.diloco.global_digest(),
            "final_loss": self._reports.final_loss,
            "own_buffers": self._own_buffers(),
            "eval": self._metrics,
        }
        if self.data is not None:
            self.data.end()
        self._keep()
        self.leave()
        self._drop()
        self._folder.write_end(self.result)
        log.info(
            "Ended after %d outer steps: global parameters %s",
            self.result["outer_steps"],
            self.result["global_digest"][:8],
        )

    def _own_buffers(self) -> dict[str, str]:
        """A digest of each buffer of the model that the groups do not synchronise."""
        if self.settings.sync_buffers != "none":
            return {}
        buffers = persistent_buffers(self.host.model)
        return {name: digest_of({name: buffer})[:8] for name, buffer in buffers.items()}

    def _keep(self, *, has_failed: bool = False) -> None:
        """Keep what the fit has left, for the next one; without copies, as no step follows."""
        self._ended = self._diloco_state()
        if has_failed:
            self._left = None
        if self.weights is not None:
            # Under DDP these have been gathered, so that rank 0 alone may save the model from now.
            fragments = self._ended["fragments"]
            self.weights.read_from({name: t for f in fragments for name, t in f["theta"].items()})

    def leave(self) -> None:
        """Count no more steps and send no more heartbeats, else the others would wait.

        The DiLoCo and the data stay: a later fit may continue from them.
        """
        if sys.is_finalizing():
            return  # the threads have ended: no heartbeats are sent, and a wait would not return
        with self._leaving:
            self.host.leave()
            if self.diloco is not None:
                self.diloco.__exit__(None, None, None)
            if self.data is not None:
                self.data.close()
            if self.manager is not None:
                self.manager.shutdown()
                self.manager = None
            if self._membership is not None:
                self._membership.leave()
                self._membership = None

    def leave_after_error(self, manager: Any) -> None:
        """Leave if the fit that has this manager is over and has not left. On any thread."""
        with self._leaving:
            if self.manager is manager is not None:
                self.leave()
                log.warning(
                    "This replica group has left: its fit ended with an error. The others "
                    "continue, and it joins them again if fit is called again"
                )

    def _drop(self) -> None:
        self.diloco = self.data = None

    def close(self, error: BaseException | None = None) -> None:
        """The trainer closes: leave for good. It may be repeated.

        Args:
            error: That ends the training, if one does.
        """
        if self._folder is not None and error is not None:
            self._folder.append(ERROR, {"error": f"{type(error).__name__}: {error}"})
        self.leave()
        self._drop()
        if self.weights is not None:
            self.weights.remove()
