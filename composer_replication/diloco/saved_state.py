"""What a checkpoint has of a DiLoCo, beside the model and the inner optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.unsynced import Packed


def saved_state(
    state: GlobalState,
    fragments: Sequence[FragmentSync],
    in_flight: dict[str, Any] | None,
    *,
    copies: bool,
) -> dict[str, Any]:
    """The global state, and what each fragment has trained and sent since its last sync.

    Every rank of the group has to call it.

    Args:
        state: The global state.
        fragments: In the order of their syncs.
        in_flight: What ``in_flight_state`` returned.
        copies: Whether to copy the tensors.
    """
    return state.whole_state_dict(copies=copies) | {
        "since_sync": [[each.unsynced.inner_steps, each.unsynced.samples] for each in fragments],
        "replaces_global": [fragment.unsynced.replaces_global for fragment in fragments],
        "reading": state.ledger.local_state(),
        "in_flight": in_flight,
        "residual": {
            name: tensor.clone() if copies else tensor
            for fragment in fragments
            for name, tensor in _residual(fragment).items()
        },
    }


def load_saved_state(
    saved: dict[str, Any], state: GlobalState, fragments: Sequence[FragmentSync]
) -> None:
    """Put it back, but for the syncs in flight, which depend on the schedule.

    Raises:
        SettingsMismatch: It was saved for another model, other fragments or another kind of outer
            optimizer.
    """
    state.resume(saved)
    replaces = saved.get("replaces_global", [False] * len(fragments))
    each = zip(fragments, saved["since_sync"], replaces, strict=True)
    for fragment, counted, replaces_global in each:
        unsynced = fragment.unsynced
        unsynced.inner_steps, unsynced.samples = counted
        unsynced.replaces_global = replaces_global
        if saved["residual"]:
            fragment.mean.load_residual(
                [saved["residual"][name].reshape(-1) for name in fragment.globals.theta]
            )
    state.ledger.load_local_state(saved["reading"])


def in_flight_state(fragment: FragmentSync | None) -> dict[str, Any] | None:
    """What a resumed group has to send again; None if nothing is in flight.

    Without a delay a sync is in flight only if it was interrupted. It is then computed anew.

    Args:
        fragment: The one in flight.
    """
    packed = None if fragment is None else fragment.in_flight
    if fragment is None or packed is None or packed.local is None:
        return None
    local = dict(zip(fragment.globals.tensors, packed.local, strict=True))
    return {"fragment": fragment.fragment_id, **vars(packed), "local": local}


def load_in_flight(
    saved: dict[str, Any] | None, fragments: Sequence[FragmentSync]
) -> FragmentSync | None:
    """Have a fragment's next sync send what ``in_flight_state`` returned.

    Args:
        saved: What it returned; or what earlier versions did: one of them with several packs, and
            all with ``is_dropped``.
        fragments: All, in the order of their syncs.

    Returns:
        The fragment; None if nothing was in flight.
    """
    if saved is not None and "packs" in saved:
        packs = saved["packs"]
        saved = packs[0] | {"local": saved["local"]} if len(packs) == 1 else None
    if not saved:
        return None
    saved = dict(saved)
    saved.pop("is_dropped", None)
    fragment, local = fragments[saved.pop("fragment")], saved.pop("local")
    fragment.unsynced.unsent = Packed(
        **saved, local=[local[name] for name in fragment.globals.tensors]
    )
    return fragment


def _residual(fragment: FragmentSync) -> dict[str, Tensor]:
    """The error-feedback residual by name, in the shapes of the parameters; empty without one."""
    residual = fragment.mean.gather_residual()
    if residual is None:
        return {}
    views = fragment.globals.whole_views(residual)
    return dict(zip(fragment.globals.theta, views, strict=True))
