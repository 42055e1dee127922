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
    }
    if copies and not state.fragments[0].is_shared:  # what was gathered is a copy
        return tree_map_only(Tensor, Tensor.clone, saved)
    return saved


def load_saved_state(saved: dict[str, Any], loop: OuterLoop) -> None:
    """Load what ``saved_state`` returned, except the sync in flight, which depends on the schedule.

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
        if residual:
            names = fragment.globals.theta
            parts = [residual[name].reshape(-1) for name in names]
            fragment.mean.load_residual(parts)
    state.ledger.load_local_state(saved["reading"])


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


def load_in_flight(saved: dict[str, Any] | None, loop: OuterLoop) -> bool:
    """Continue with the sync in flight of a checkpoint: it is sent again in the next quorum.

    Args:
        saved: What ``saved_state`` has as ``in_flight``.
        loop: The outer loop of this group.

    Returns:
        Whether there is one.
    """
    if loop.in_flight is not None:
        loop.in_flight.end()
    if saved is not None:
        packed = dict(saved)
        fragment = loop.fragments[packed.pop("fragment")]
        local = saved["local"]
        packed["local"] = [local[name] for name in fragment.globals.tensors]
        fragment.restore(Packed(**packed))
    loop.set_torchft_step()
    return saved is not None
