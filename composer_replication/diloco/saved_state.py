"""What a checkpoint has of a DiLoCo, beside the model and the inner optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from composer_replication.diloco.fragment_sync import FragmentSync, Packed
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
    in_flight = map(_in_flight_state, fragments)
    return state.whole_state_dict(copies=copies) | {
        "since_sync": [[fragment.inner_steps, fragment.samples] for fragment in fragments],
        "replaces_global": [fragment.replaces_global for fragment in fragments],
        "reading": state.ledger.local_state(),
        "in_flight": next(filter(None, in_flight), None),
        "residual": {
            name: tensor.clone() if copies else tensor
            for fragment in fragments
            for name, tensor in _residual(fragment).items()
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
            fragment.mean.load_residual(
                [saved["residual"][name].reshape(-1) for name in fragment.globals.theta]
            )
    replaces = saved.get("replaces_global", [False] * len(fragments))
    for fragment, replaces_global in zip(fragments, replaces, strict=True):
        fragment.replaces_global = replaces_global
    state.ledger.load_local_state(saved["reading"])


def send_again(fragment: FragmentSync, in_flight: dict[str, Any]) -> None:
    """Have a fragment's next sync send what was in flight in a checkpoint."""
    values = {key: value for key, value in in_flight.items() if key not in ("fragment", "local")}
    local = [in_flight["local"][name] for name in fragment.globals.theta]
    fragment.unsent = Packed(**values, local=local)


def _in_flight_state(fragment: FragmentSync) -> dict[str, Any] | None:
    """What a resumed group has to send again; None if no sync is in flight.

    Without a delay a sync is in flight only if it was interrupted. It is then computed anew.
    """
    packed = fragment.in_flight
    if packed is None or packed.local is None:
        return None
    local = dict(zip(fragment.globals.theta, packed.local, strict=True))
    return {"fragment": fragment.fragment_id, **vars(packed), "local": local}


def _residual(fragment: FragmentSync) -> dict[str, Tensor]:
    """The error-feedback residual by name, in the shapes of the parameters; empty without one."""
    residual = fragment.mean.gather_residual()
    if residual is None:
        return {}
    parts = residual.split(fragment.globals.share.whole_sizes)
    shapes = fragment.globals.shapes.items()
    return {name: part.view(s) for (name, s), part in zip(shapes, parts, strict=True)}
