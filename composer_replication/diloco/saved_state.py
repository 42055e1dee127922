"""What a checkpoint has of a DiLoCo, beside the model and the inner optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from composer_replication.diloco.fragment_sync import FragmentSync, Packed, Phase, Steps
from composer_replication.diloco.outer_loop import OuterLoop


def saved_state(loop: OuterLoop, *, copies: bool) -> dict[str, Any]:
    """The global state, and what each fragment has trained and sent since its last sync.

    Every rank of the group has to call it.

    Args:
        loop: The outer loop of this group.
        copies: Whether to copy the tensors.
    """
    state = loop.state
    since_sync = []
    residual: dict[str, Tensor] = {}
    for fragment in loop.fragments:
        counted = fragment.unsynced
        rates = float(counted.learning_rates)
        since_sync.append([counted.inner_steps, counted.samples, rates])
        of_group = fragment.mean.gather_residual()
        if of_group is not None:
            # By name, in the shapes of the parameters.
            views = fragment.globals.whole_views(of_group)
            residual |= zip(fragment.globals.theta, views, strict=True)
    saved = state.whole_state_dict() | {
        "since_sync": since_sync,
        "reading": state.ledger.local_state(),
        "in_flight": _in_flight(loop.in_flight),
        "inner_steps": loop.inner_steps,
        "round_length": loop.round_length.state_dict(),
        "usual_pace": loop.usual_pace.state_dict(),
        "residual": residual,
        "local_step": loop.steps_before_sync - loop.steps_left,
    }
    if not copies:
        return saved
    if not state.fragments[0].is_shared:
        return tree_map_only(Tensor, Tensor.clone, saved)
    # What was gathered is a copy. These buffers are whole on each rank.
    for fragment, whole in zip(state.fragments, saved["fragments"], strict=True):
        whole["theta"] |= tree_map_only(Tensor, Tensor.clone, fragment.copied.values)
    return saved


def load_saved_state(saved: dict[str, Any], loop: OuterLoop) -> None:
    """Load what ``saved_state`` returned: a sync in flight is sent again in the next quorum.

    Under other settings than the checkpoint's, the schedule may not be between a sync's quorum and
    its vote: the pseudo-gradient is then computed again.

    Raises:
        SettingsMismatch: It was saved for another model, other fragments or another kind of outer
            optimizer.
    """
    state = loop.state
    state.resume(saved)
    loop.inner_steps = saved["inner_steps"]
    loop.round_length.load_state_dict(saved["round_length"])
    loop.usual_pace.load_state_dict(saved["usual_pace"])
    residual = saved["residual"]
    pairs = zip(loop.fragments, saved["since_sync"], strict=True)
    for fragment, counted in pairs:
        fragment.unsynced = Steps(*counted)
        fragment.unsent = None
        fragment.end()
        if residual:
            names = fragment.globals.theta
            parts = [residual[name].reshape(-1) for name in names]
            fragment.mean.load_residual(parts)
    state.ledger.load_local_state(saved["reading"])
    steps_left = loop.steps_before_sync - saved["local_step"]
    delay = state.settings.fragment_sync_delay
    in_flight = saved["in_flight"]
    if in_flight is not None and 0 < steps_left <= delay:
        packed = dict(in_flight)
        fragment = loop.fragments[packed.pop("fragment")]
        local = packed["local"]
        packed["local"] = [local[name] for name in fragment.globals.tensors]
        fragment.unsent = Packed(**packed)
        fragment.end()
    else:
        steps_left = max(steps_left, delay + 1)
    loop.steps_left = steps_left
    loop.set_torchft_step()


def _in_flight(fragment: FragmentSync | None) -> dict[str, Any] | None:
    """What a resumed group has to send again; None if nothing is in flight.

    Without a delay a sync is in flight only if it was interrupted. A resume then computes it again.
    """
    if fragment is None:
        return None
    packed = fragment.unsent
    if fragment.phase is Phase.SENT:
        packed = fragment.packed
    if packed is None or packed.local is None:
        return None
    names = fragment.globals.tensors
    local = dict(zip(names, packed.local, strict=True))
    return {**vars(packed), "fragment": fragment.fragment_id, "local": local}
