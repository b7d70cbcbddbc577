"""What happens to a captured graph, by event: the table that the store acts on and the documentation shows.

A *mutation* is noticed by a check and looked up here; the store then does what the row says. Rows whose capture is
kept are those that no check may notice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


class Event(enum.Enum):
    """Something that happens between two calls on one key, or in a call."""

    ROUTED = "other experts routed; hit, miss or eviction of a mapped slot"
    REBUILT = "equal step rebuilt as new Python objects"
    ADAPTERS_CHANGED = "adapter registry changed (load, unload, replace, none ↔ some)"
    ADAPTER_REASSIGNED = "row assigned to another loaded adapter"
    MANIFEST_REPLACED = "manifest replaced, even by an equal one"
    WEIGHTS_REWRITTEN = "weights or scales replaced in storage that stays"
    WEIGHTS_MOVED = "weights or scales replaced, storage moved"
    OWNER_CHANGED = "owner generation or namespace changed"
    ADMISSION_FAILED = "admission failed"
    PROMPT_BETWEEN = "decode → prompt → decode"
    ROWS_CHANGED = "row bucket or row semantics changed"
    PROPERTIES_CHANGED = "launch property changed, `decode_boundary_overlap` off"
    PROPERTIES_UPDATED = "launch property changed, `decode_boundary_overlap` on, fingerprint and owners equal"
    INCOMPATIBLE = "incompatible mutation (stride, dtype, consumer)"
    EXCEEDS_SLOTS = "min(rows × k, E) exceeds the slots, or a group is host-staged"
    REALLOCATED = "slot arrays or arenas reallocated (growth)"
    CUDA_FAILED = "error in begin, end, instantiate, update, upload or launch"

    # Each is one object. `Enum` hashes a name, in Python, and a step looks events up.
    __hash__ = object.__hash__


Fate = Literal["kept", "destroyed", "swept", "not bound", "retained", "other key", "updated", "never made"]
Kind = Literal["direct", "capture", "update", "replay"]
Required = Literal["same", "fails", "fails once"]


@dataclass(frozen=True)
class Effect:
    """A row of the table.

    Attributes:
        fate: of the capture that was there. ``"destroyed"``: a step only retires it, and it is destroyed when the host
            has time. ``"swept"``: the same, because the key's generation is over. ``"not bound"``: it stays under its
            own key until evicted, and this step does not find it.
        calls: what this call and the following ones on the key are.
        required: ``"same"`` as an ordinary step; ``"fails"``, closed, as long as the event lasts; ``"fails once"``,
            then goes on as an ordinary step.
        note: for readers.
    """

    fate: Fate
    calls: tuple[Kind, ...]
    required: Required
    note: str = ""


_WARM_UP: tuple[Kind, ...] = ("direct", "capture", "replay")

EFFECTS: dict[Event, Effect] = {
    Event.ROUTED: Effect("kept", ("replay",), "same", "device data"),
    Event.REBUILT: Effect("kept", ("replay",), "same", "keys are made of content"),
    Event.ADAPTERS_CHANGED: Effect("swept", _WARM_UP, "same", "the owner generation moves"),
    Event.ADAPTER_REASSIGNED: Effect("kept", ("replay",), "same", "device data"),
    Event.MANIFEST_REPLACED: Effect("swept", _WARM_UP, "same", "the candidate generation moves"),
    Event.WEIGHTS_REWRITTEN: Effect("kept", ("replay",), "same", "the write is ordered on the engine's stream"),
    Event.WEIGHTS_MOVED: Effect("destroyed", _WARM_UP, "same", "new values at once"),
    Event.OWNER_CHANGED: Effect("swept", _WARM_UP, "same", "a certificate of the old owner is not admitted"),
    Event.ADMISSION_FAILED: Effect("destroyed", ("direct", "direct"), "fails", "until admitted again; then as new"),
    Event.PROMPT_BETWEEN: Effect("retained", ("replay",), "same", "the prompt has a key of its own and runs direct"),
    Event.ROWS_CHANGED: Effect("other key", _WARM_UP, "same", "both captures live"),
    Event.PROPERTIES_CHANGED: Effect("destroyed", _WARM_UP, "same"),
    Event.PROPERTIES_UPDATED: Effect("updated", ("update", "replay"), "same", "instantiated anew where CUDA refuses"),
    Event.INCOMPATIBLE: Effect("not bound", ("direct", "direct"), "fails", "until a manifest declares the new layout"),
    Event.EXCEEDS_SLOTS: Effect("never made", ("direct", "direct"), "same", "both run host-staged"),
    Event.REALLOCATED: Effect("destroyed", _WARM_UP, "fails once", "growth waits for the work in flight first"),
    Event.CUDA_FAILED: Effect(
        "destroyed", ("direct", *_WARM_UP), "fails once", "an ordinary step goes on direct in the same call"
    ),
}


def markdown() -> str:
    """The table as the documentation shows it."""
    required = {"same": "same", "fails": "fails", "fails once": "fails that call, then recovers"}
    rows = ["| event | capture | this call and the next | required | |", "|---|---|---|---|---|"]
    for event, effect in EFFECTS.items():
        calls = ", ".join(effect.calls) + (", …" if len(set(effect.calls)) == 1 and len(effect.calls) > 1 else "")
        rows.append(f"| {event.value} | {effect.fate} | {calls} | {required[effect.required]} | {effect.note} |")
    return "\n".join(rows)
