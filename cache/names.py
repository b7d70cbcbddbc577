"""What to say of a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAREST = 3


def one_of(name: object, known: Iterable[str]) -> str:
    """What would have been right in place of ``name``, for a message: all of a few known names, or of many their number
    and the nearest.
    """
    names = sorted(known)
    if len(names) <= NEAREST:
        return f"one of {names}"
    return f"one of {len(names)} names, such as {difflib.get_close_matches(str(name), names, NEAREST, 0.0)}"
