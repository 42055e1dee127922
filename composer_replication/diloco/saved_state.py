"""What a checkpoint has of a DiLoCo, beside the model and the inner optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.global_state import GlobalState


def saved_state(
    state: GlobalState, fragments: Sequence[FragmentSync], *, copies: bool
) -> dict[str, Any]:
    """The global state, and what each fragment has trained and sent since its last sync.

    Every rank of the group has to call it.

    Args:
        state: The global state.
        fragments: In the order of their turns.
        copies: Whether to copy the tensors.
    """
    in_flight = (fragment.in_flight_state() for fragment in fragments)
    return state.whole_state_dict(copies=copies) | {
        "since_sync": [[fragment.inner_steps, fragment.samples] for fragment in fragments],
        "replaces_global": [fragment.replaces_global for fragment in fragments],
        "reading": state.ledger.local_state(),
        "in_flight": next(filter(None, in_flight), None),
        "residual": {
            name: tensor.clone() if copies else tensor
            for fragment in fragments
            for name, tensor in fragment.residual_state().items()
        },
    }


def load_saved_state(
    saved: dict[str, Any], state: GlobalState, fragments: Sequence[FragmentSync]
) -> None:
    """Put it back, but for a sync in flight, which depends on the schedule.

    Raises:
        SettingsMismatch: It was saved for another model, other fragments or another kind of outer
            optimizer.
    """
    state.resume(saved)
    for fragment, counted in zip(fragments, saved["since_sync"], strict=True):
        fragment.inner_steps, fragment.samples = counted
        if saved["residual"]:
            fragment.load_residual_state(saved["residual"])
    replaces = saved.get("replaces_global", [False] * len(fragments))
    for fragment, replaces_global in zip(fragments, replaces, strict=True):
        fragment.replaces_global = replaces_global
    state.ledger.load_local_state(saved["reading"])
